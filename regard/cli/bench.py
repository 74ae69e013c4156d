"""`regard bench`: run the speed benchmark of a repository checkout."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import regard
from regard.base.errors import ConfigError
from regard.cli.output import JsonOption


def command(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and rounds")] = False,
    json: JsonOption = False,
) -> None:
    """Compare speed and memory with other libraries. Checks correctness first.

    Example: regard bench --quick
    """
    root = find_checkout(Path(regard.__file__).parent.parent)
    sys.path.insert(0, str(root))
    argv = [flag for flag, is_set in (("--quick", quick), ("--json", json)) if is_set]
    raise typer.Exit(int(import_module("bench").main(argv)))


def find_checkout(root: Path) -> Path:
    """Return the repository of this package. Raises ConfigError if it has no benchmark."""
    if not all((root / name).is_file() for name in ("pyproject.toml", "bench/__init__.py")):
        raise ConfigError(
            "the benchmark is part of the repository, not of the installed package; "
            "run `regard bench` or `make bench` in a checkout"
        )
    return root
