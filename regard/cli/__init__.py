"""The command line: parse, call, print. torch is imported only when a command runs."""

import io
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Annotated, ParamSpec

import typer

import regard
from regard.base.errors import RegardError
from regard.cli import lab, train, work
from regard.cli.help_panels import PanelCommand

P = ParamSpec("P")

# help and usage errors as plain text, without rich: three times as fast, and no line is wrapped in a box
app = typer.Typer(
    name="regard",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 120},  # as wide as the terminal: a third fewer lines than 80 columns
)


def print_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that a RegardError is printed as one line and the exit code is 2.

    An OSError that names a file, such as a folder without read permission, is printed in the same way. Any other error
    keeps its traceback.
    """

    @wraps(command)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except RegardError as error:
            message = str(error)
        except OSError as error:
            if error.filename is None:  # not about a file, such as a closed pipe
                raise
            message = f"{error.filename} cannot be used: {error.strerror}"
        else:
            return
        typer.echo(f"regard: {' '.join(message.split())}", err=True)
        raise typer.Exit(2)

    return shown


# each is a module of this package with a function `command`
COMMANDS = (
    "explore", "tour", "masks", "explain", "count", "generate", "look", "check", "train", "plan", "ask", "translate",
    "listen", "bench", "doctor",
)  # fmt: skip
for _name in COMMANDS:
    app.command(_name, cls=PanelCommand)(print_errors(import_module(f"regard.cli.{_name}").command))
app.command("eval", cls=PanelCommand)(print_errors(train.evaluate))
app.add_typer(lab.app, name="lab")
work.mount(app, print_errors)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Attention you can run, see and prove. New here? Begin with `regard tour`."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks the shades of a drawing shows ? instead
    app(prog_name="regard")
