"""`regard bench`: ratios against peers, from the benchmark folder of a checkout."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import regard
from regard.base.errors import ConfigError


def command(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions")] = False,
    json: Annotated[bool, typer.Option("--json", help="The results as JSON")] = False,
) -> None:
    """Measure ratios against peers, correctness first."""
    root = checkout(Path(regard.__file__).parent.parent)
    sys.path.insert(0, str(root))
    argv = [flag for flag, given in (("--quick", quick), ("--json", json)) if given]
    raise typer.Exit(int(import_module("bench").main(argv)))


def checkout(root: Path) -> Path:
    """The repository this package lies in, if it has the benchmark."""
    if not all((root / name).is_file() for name in ("pyproject.toml", "bench/__init__.py")):
        raise ConfigError(
            "the benchmark comes with the repository, not with the installed package; "
            "run `regard bench` or `make bench` in a checkout"
        )
    return root
