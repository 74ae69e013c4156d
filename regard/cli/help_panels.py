"""Help texts whose options are listed in groups, as plain text."""

from typing import Any

from typer.core import TyperCommand


class PanelCommand(TyperCommand):
    """A command whose help lists options by their `rich_help_panel`; those without one come first, as "Options"."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for option in self.get_params(ctx):
            default = "Arguments" if option.param_type_name == "argument" else "Options"
            if (record := option.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(option, "rich_help_panel", None) or default, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
