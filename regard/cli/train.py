"""`regard train` and `regard eval`: a recipe from data to figures, and the figures of a finished run."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell
from regard.cli.settings import read_settings

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe
    from regard.train.loop import Progress

QUIET = 15.0  # seconds between lines where there is no terminal to draw a bar on


class Parallel(StrEnum):
    """How several processes share a run."""

    data = "data"
    sharded = "sharded"


Data = Annotated[Path | None, typer.Option(help="A folder or file with real data; the built-in set unless given")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, as in --set model.depth=4; give it again for more")
]
Form = Annotated[str | None, typer.Option(help="Another way to run it; `regard train list` says which there are")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... [a GPU where there is one]")]


def command(
    name: Annotated[str, typer.Argument(help="A recipe, or `list`")],
    data: Data = None,
    form: Form = None,
    settings: Changes = None,
    folder: Annotated[Path | None, typer.Option(help="Where states, log and model are kept [runs/NAME]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that the folder holds")] = False,
    parallel: Annotated[Parallel, typer.Option(help="Under torchrun: every process has all weights, or a piece")] = (
        Parallel.data
    ),
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too")] = False,
    json: Json = False,
) -> None:
    """Train by a recipe. `regard train list` says which there are and what to expect of them.

    torchrun --nproc-per-node 4 -m regard train NAME trains on several devices.
    """
    if name == "list":
        return list_recipes(json)
    from regard.base.config import to_json
    from regard.recipes.recipe import Place, recipe
    from regard.train.distributed import joined

    # a worker that torchrun starts again goes on
    resume = resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    chosen = recipe(name)
    complete = completed(chosen, data, form, settings or [])
    kept = folder or Path("runs") / name
    with joined(parallel.value, device) as world, progress(world.leads) as showing:
        place = Place(
            data=data, folder=kept, resume=resume, world=world, tensorboard=tensorboard,
            tell=tell if world.leads else _nothing, show=showing,
        )  # fmt: skip
        outcome = chosen.run(complete, place)
    if not world.leads:
        return None
    if json:
        about = {"recipe": name, "figures": outcome.figures, "parameters": outcome.parameters}
        show_json({**about, "folder": str(kept), "settings": to_json(complete)})
    else:
        show_figures(outcome.figures)
        print(f"parameters: {outcome.parameters:,}\nmodel: {kept / 'model'}")
    return None


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run")],
    data: Data = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """The figures of a finished run, worked out again."""
    from regard.recipes.recipe import Place, finished
    from regard.recipes.runs import data_of
    from regard.train.distributed import joined

    chosen, settings, model, tokenizer = finished(folder)
    with joined("data", device) as world:
        model.to(world.device)
        place = Place(data=data_of(folder, data), world=world, tell=tell)
        figures = chosen.module.judged(settings, model, tokenizer, place)
    if json:
        show_json({"recipe": chosen.name, "figures": figures, "folder": str(folder)})
    else:
        show_figures(figures)


def completed(chosen: "Recipe", data: Path | None, form: str | None, changes: list[str]) -> Any:
    """The settings of a recipe for these data, in one of its forms, with what `--set` changes."""
    from regard.base.config import overridden

    complete = chosen.settings(real=data is not None, form=form)
    for text in changes:  # in turn: a later one may reach into what an earlier one has put there
        complete = overridden(complete, read_settings([text], complete))
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data} is not there")
    return complete


def list_recipes(json: bool) -> None:
    from regard.recipes.recipe import RECIPES, recipe

    found = [recipe(name) for name in RECIPES]
    if json:
        names = ("name", "title", "expected", "time", "memory")
        show_json([{**{name: getattr(each, name) for name in names}, "forms": _forms(each)} for each in found])
        return
    for each in found:
        show(_told(each))


def _told(recipe: "Recipe") -> Any:
    from rich.table import Table

    table = Table(title=recipe.name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in (("", recipe.title), ("expected", recipe.expected), ("time", recipe.time)):
        table.add_row(name, text)
    table.add_row("memory", recipe.memory)
    for name, text in _forms(recipe).items():
        table.add_row(f"--form {name}", text)
    return table


def _forms(recipe: "Recipe") -> dict[str, str]:
    return {name: " ".join((make.__doc__ or "").split()) for name, make in recipe.forms.items()}


def show_figures(figures: dict[str, float]) -> None:
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print(f"{name:{width}}  {value:.4g}")


@contextmanager
def progress(leads: bool) -> Iterator[Callable[[str, "Progress"], None]]:
    """A bar for each phase of a run on a terminal, a line now and then elsewhere, on stderr."""
    if not leads:
        yield _nothing
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as Bars, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
        with Bars(*columns, console=Console(stderr=True), transient=False) as bars:
            rows: dict[str, Any] = {}

            def showing(phase: str, now: "Progress") -> None:
                if phase not in rows:
                    rows[phase] = bars.add_task(phase, total=now.steps, told="")
                bars.update(rows[phase], completed=now.step, told=told(now))

            yield showing


class _Lines:
    """Lines of plain text, few enough to read."""

    def __init__(self) -> None:
        self._last = -QUIET

    def __call__(self, phase: str, now: "Progress") -> None:
        if time.monotonic() - self._last >= QUIET or now.step == now.steps:
            self._last = time.monotonic()
            tell(f"{phase} {told(now)}")


def told(now: "Progress") -> str:
    """Where a run stands, in a line."""
    minutes, seconds = divmod(round(now.seconds_left), 60)
    figures = "".join(f"  {name} {value:.3g}" for name, value in now.figures.items())
    speed = f"{now.records_per_second:,.0f}/s" if now.records_per_second >= 10 else f"{now.records_per_second:.2g}/s"
    left = f"{minutes}:{seconds:02d} left"
    return f"{now.step:,}/{now.steps:,}  loss {now.loss:.4f}  rate {now.rate:.2g}  {speed}  {left}{figures}"


def _nothing(*told: object) -> None:
    """What the processes say that do not lead."""
