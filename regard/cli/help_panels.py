"""Short help texts: `--help` lists the usual options of a command, `--help-all` also the groups of rare ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

ALL = "regard.cli.help_panels.all"  # the key of `Context.meta` that --help-all sets


def panel_option(panel: str) -> Callable[..., Any]:
    """Return `typer.Option` for a group of rare options, which only --help-all lists.

    panel  name of the group
    """
    return partial(typer.Option, rich_help_panel=panel)


class PanelCommand(TyperCommand):
    """A command whose help is short: options with a `rich_help_panel` are listed in their group by --help-all only."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        return [*params, _help_all_option()] if any(map(_panel, self.params)) else params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for option in self.get_params(ctx):
            default = "Arguments" if option.param_type_name == "argument" else "Options"
            if (record := option.get_help_record(ctx)) is not None and (ALL in ctx.meta or not _panel(option)):
                panels.setdefault(_panel(option) or default, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _panel(option: Any) -> str | None:
    """Return the name of the group in which --help-all lists an option; None for a usual option or an argument."""
    return getattr(option, "rich_help_panel", None)


def _help_all_option() -> TyperOption:
    """Return the option --help-all, which prints the whole help and exits."""

    def show(ctx: Any, option: Any, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[ALL] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return TyperOption(
        param_decls=["--help-all"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show all options",
    )
