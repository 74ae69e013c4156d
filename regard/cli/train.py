"""`regard train` and `regard eval`: a recipe from data to figures, and the figures of a finished run."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell
from regard.cli.settings import Setting, applied, listed

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe
    from regard.train.loop import Progress

QUIET = 15.0  # seconds between lines where there is no terminal to draw a bar on


class Parallel(StrEnum):
    """How several processes share a run."""

    data = "data"
    sharded = "sharded"


Data = Annotated[Path | None, typer.Option(help="A folder or file with real data; the built-in set unless given")]
Moved = Annotated[Path | None, typer.Option(help="The data, where the run does not find them any more")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting, as in --set model.depth=4; give it again for more. `regard train list NAME` shows them all",
    ),
]
Form = Annotated[str | None, typer.Option(help="Another way to run it; `regard train list` says which there are")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... [a GPU where there is one]")]


def command(
    name: Annotated[str, typer.Argument(help="A recipe, or `list`")],
    one: Annotated[
        str | None, typer.Argument(metavar="NAME", help="list: the recipe whose settings to show [all, without these]")
    ] = None,
    data: Data = None,
    form: Form = None,
    settings: Changes = None,
    folder: Annotated[Path | None, typer.Option(help="Where states, log and model are kept [runs/NAME]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that the folder holds, by its settings and data")
    ] = False,
    parallel: Annotated[Parallel, typer.Option(help="Under torchrun: every process has all weights, or a piece")] = (
        Parallel.data
    ),
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too")] = False,
    json: Json = False,
) -> None:
    """Train by a recipe. `regard train list` says which there are and what to expect of them.

    `regard train list NAME` shows its settings, as --set takes them.

    torchrun --nproc-per-node 4 -m regard train NAME trains on several devices.
    """
    if name == "list":
        return list_recipes(json) if one is None else list_settings(one, json)
    if one is not None:
        raise ConfigError(f"one recipe at a time: {name} or {one}; `regard train list NAME` shows one")
    from regard.base.config import to_json
    from regard.recipes.recipe import RunLocation, get_recipe
    from regard.recipes.run_folder import has_restarted
    from regard.train.distributed import join_process_group

    chosen = get_recipe(name)
    kept = folder or Path("runs") / name
    as_begun = resume and not settings and form is None
    complete = None if as_begun else completed(chosen, data, form, settings or [])
    steps = Steps()
    try:
        with join_process_group(parallel.value, device) as world, progress(world.leads) as showing:
            say = tell if world.leads else unheard
            if resume:
                world.shared(lambda: check_recipe(chosen, kept))
            if as_begun:
                complete, data = world.shared(lambda: begun_with(chosen, kept, data, say))
            again = world.shared(lambda: has_restarted(kept))
            place = RunLocation(
                data=data, folder=kept, resume=resume or again, world=world, tensorboard=tensorboard, tell=say,
                show=steps.counted(showing),
            )  # fmt: skip
            outcome = chosen.run(complete, place)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            tell(f"{steps.last}; {going_on(kept)}")
        raise typer.Exit(130) from None
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
    data: Moved = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """The figures of a finished run, worked out again."""
    from regard.recipes.recipe import RunLocation, load_finished_run
    from regard.recipes.run_folder import find_data
    from regard.train.distributed import join_process_group

    chosen, settings, model, tokenizer = load_finished_run(folder)
    with join_process_group("data", device) as world:
        model.to(world.device)
        place = RunLocation(data=find_data(folder, data), world=world, tell=tell if world.leads else unheard)
        figures = chosen.module.judged(settings, model, tokenizer, place)
    if not world.leads:
        return
    if json:
        show_json({"recipe": chosen.name, "figures": figures, "folder": str(folder)})
    else:
        show_figures(figures)


def completed(chosen: "Recipe", data: Path | None, form: str | None, changes: list[str]) -> Any:
    """The settings of a recipe for these data, in one of its forms, with what `--set` changes."""
    try:
        complete = applied(chosen.settings(real=data is not None, form=form), changes)
    except ConfigError as error:
        raise ConfigError(f"{error}; `regard train list {chosen.name}` shows its settings") from None
    check_data(data)
    return complete


def check_data(data: Path | None) -> None:
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data} is not there")


def begun_with(
    chosen: "Recipe", folder: Path, data: Path | None, say: Callable[[str], None]
) -> tuple[Any, Path | None]:
    """The settings and the data of the run that a folder holds; those of a new one where it holds none yet."""
    from regard.base.config import from_json
    from regard.recipes.run_folder import RUN, find_data, read_json_fields

    check_data(data)
    if not (folder / RUN).is_file():
        say(f"{folder} holds no run to go on with: one begins")
        return completed(chosen, data, None, []), data
    kept = read_json_fields(folder / RUN, "settings")["settings"]
    return from_json(f"{folder / RUN}: settings", chosen.module.Settings, kept), find_data(folder, data)


def check_recipe(chosen: "Recipe", folder: Path) -> None:
    """Raise where a folder holds a run of another recipe."""
    from regard.recipes.run_folder import RUN, read_json_fields

    if (folder / RUN).is_file() and (kept := read_json_fields(folder / RUN, "recipe")["recipe"]) != chosen.name:
        raise ConfigError(
            f"{folder} holds a run of {kept}, not of {chosen.name}; go on with it by `regard train {kept} --resume "
            f"--folder {folder}`, or choose another --folder"
        )


class Steps:
    """How far a run has come, in words for whoever stops it."""

    def __init__(self) -> None:
        self.last = "stopped before any step was done"

    def counted(self, showing: Callable[[str, "Progress"], None]) -> Callable[[str, "Progress"], None]:
        """What shows progress, listened to."""

        def heard(phase: str, now: "Progress") -> None:
            # not every step is told
            later = " or a little later" if now.step < now.steps else ""
            self.last = f"stopped at step {now.step:,} of {now.steps:,} of {phase}{later}"
            showing(phase, now)

        return heard


def going_on(folder: Path) -> str:
    """Where a run that was stopped would go on."""
    from regard.train.checkpoint import CheckpointFolder
    from regard.train.loop import STATES

    kept = {states: steps[-1] for states in folder.glob(f"*/{STATES}") if (steps := CheckpointFolder(states).steps())}
    if not kept:
        return "no state was kept yet, so --resume begins anew"
    latest = max(kept, key=lambda states: states.stat().st_mtime)
    return f"--resume goes on from step {kept[latest]:,} of {latest.parent.name}"


def list_recipes(json: bool) -> None:
    from regard.recipes.recipe import RECIPES, get_recipe

    found = [get_recipe(name) for name in RECIPES]
    if json:
        show_json([_as_json(each) for each in found])
        return
    for each in found:
        show(_told(each))
    print("`regard train list NAME` shows its settings")


def list_settings(name: str, json: bool) -> None:
    from regard.recipes.recipe import get_recipe

    found = get_recipe(name)
    settings = list(listed(found.settings(real=False), found.settings(real=True)))
    if json:
        show_json({**_as_json(found), "settings": [asdict(each) for each in settings]})
    else:
        show(_told(found), _table(settings))


def _as_json(recipe: "Recipe") -> dict[str, Any]:
    names = ("name", "title", "expected", "time", "memory")
    return {**{name: getattr(recipe, name) for name in names}, "forms": _forms(recipe)}


def _table(settings: list[Setting]) -> Any:
    """Settings with what is said about them; what is not another for real data is shown once."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table("--set", "built-in", "with --data", box=box.SIMPLE_HEAD)
    table.columns[0].min_width = max(len(each.name) for each in settings)
    for column in table.columns[1:]:
        column.max_width, column.overflow = 14, "fold"
    for each in settings:
        name = Text(each.name, style="bold")
        about = Padding(Text(each.about), (0, 0, 0, 2))
        shown = [each.built_in, None] if each.built_in == each.real else [each.built_in or "-", each.real or "-"]
        table.add_row(Group(name, about) if each.about else name, *(Text(value or "") for value in shown))
    return table


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
        yield unheard
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


def unheard(*told: object) -> None:
    """What the processes say that do not lead."""
