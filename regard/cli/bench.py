"""`regard bench`: run the speed benchmark of a repository checkout."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import regard
from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, PictureOption, check_picture


def command(
    what: Annotated[
        str | None, typer.Argument(metavar="[growth]", help="growth: time and memory of every mechanism against length")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and rounds")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="cpu|cuda", help="Device [default: cpu for growth, else a GPU if there is one]"
        ),
    ] = None,
    picture: PictureOption = None,
    json: JsonOption = False,
) -> None:
    """Compare speed and memory with other libraries. Outputs are compared first. `growth`: time and memory by length.

    Example: regard bench growth --picture growth.png
    """
    if what not in (None, "growth"):
        raise ConfigError(f"regard bench takes growth, or nothing to compare with other libraries, not {what!r}")
    if picture is not None and what is None:
        raise ConfigError("--picture draws growth; run regard bench growth --picture PATH")
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device is cpu or cuda, not {device!r}")
    check_picture(picture)
    root = find_checkout(Path(regard.__file__).parent.parent)
    sys.path.insert(0, str(root))
    argv = [*([what] if what else []), *(flag for flag, is_set in (("--quick", quick), ("--json", json)) if is_set)]
    argv += [] if picture is None else ["--picture", str(picture)]
    argv += [] if device is None else ["--device", device]
    raise typer.Exit(int(import_module("bench").main(argv)))


def find_checkout(root: Path) -> Path:
    """Return the root folder of the repository, if it contains the benchmark; else raise ConfigError."""
    if not all((root / name).is_file() for name in ("pyproject.toml", "bench/__init__.py")):
        raise ConfigError(
            "the benchmark is part of the repository, not of the installed package; "
            "run `regard bench` or `make bench` in a checkout"
        )
    return root
