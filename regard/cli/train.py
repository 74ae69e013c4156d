"""`regard train` and `regard eval`: train a recipe, and evaluate a finished run."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.base.errors import CheckpointError, ConfigError
from regard.base.files import read_json
from regard.cli.help_panels import panel_option
from regard.cli.output import JsonOption, print_message, show, show_json
from regard.cli.settings import Setting, apply_settings, list_settings, parse_literal

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe
    from regard.train.loop import Progress

BAR_WIDTH = 12  # characters
LINE_INTERVAL = 15.0  # seconds between progress lines if stderr is not a terminal


Parallel = StrEnum("Parallel", ["ddp", "fsdp"])  # how several processes share a run
Data = Annotated[Path | None, typer.Option(help="Folder or file of real data [default: built-in data]")]
MovedData = Annotated[Path | None, typer.Option(help="New path of the data, if it has moved")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting: model.depth=4; may be repeated",
    ),
]
Variant = Annotated[str | None, typer.Option(help="Variants: finetune,cpu; see `regard train list`")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... [default: a GPU if there is one]")]

devices_option = panel_option("Several processes, logs")


def command(
    name: Annotated[str, typer.Argument(metavar="recipe", help="Name of a recipe, or `list`")],
    listed: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="With `list`: the recipe whose settings to show [default: all]"),
    ] = None,
    data: Data = None,
    variant: Variant = None,
    settings: Changes = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, log and model [default: runs/NAME]")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the run in the folder; --set steps=N extends it"),
    ] = False,
    parallel: Annotated[
        Parallel,
        devices_option(
            help="With torchrun --nproc-per-node 4 -m regard train NAME. ddp: a copy of the model each. fsdp: shards"
        ),
    ] = Parallel.ddp,
    device: Device = None,
    tensorboard: Annotated[bool, devices_option("--tensorboard", help="Write TensorBoard events too")] = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe. `regard train list [NAME]` shows recipes and settings.

    Example: regard train vision --set plan.steps=100 --folder runs/digits
    """
    if name == "list":
        return print_recipes(json) if listed is None else print_settings(listed, json)
    if listed is not None:
        raise ConfigError(f"train takes one recipe: {name} or {listed}; `regard train list NAME` shows one")
    from regard.base.config import to_json
    from regard.recipes.recipe import RunLocation, get_recipe
    from regard.recipes.run_folder import has_restarted
    from regard.train.distributed import join_process_group

    recipe = get_recipe(name)
    run_folder = folder or Path("runs") / name
    with_saved_settings = resume and variant is None
    complete = None if with_saved_settings else build_settings(recipe, data, variant, settings or [])
    last_step = "stopped before the first step was done"
    try:
        with join_process_group(parallel.value, device) as group, show_progress(group.is_main) as on_progress:
            message = print_message if group.is_main else ignore

            def record(phase: str, now: "Progress") -> None:
                nonlocal last_step
                later = " or a little later" if now.step < now.steps else ""  # progress is not reported at every step
                last_step = f"stopped at step {now.step:,} of {now.steps:,} of {phase}{later}"
                on_progress(phase, now)

            if resume:
                group.run_on_main(lambda: check_recipe(recipe, run_folder))
            if with_saved_settings:
                changes = settings or []
                complete, data = group.run_on_main(lambda: read_run(recipe, run_folder, data, changes, message))
            restarted = group.run_on_main(lambda: has_restarted(run_folder))
            location = RunLocation(
                data=data, folder=run_folder, resume=resume or restarted, group=group, tensorboard=tensorboard,
                on_message=message, on_progress=record,
            )  # fmt: skip
            outcome = recipe.run(complete, location)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            print_message(f"{last_step}; {describe_resume(run_folder)}")
        raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
    if not group.is_main:
        return None
    if json:
        about = {"recipe": name, "metrics": outcome.metrics, "parameters": outcome.parameters}
        show_json({**about, "folder": str(run_folder), "settings": to_json(complete)})
    else:
        print_metrics(outcome.metrics)
        print(f"parameters: {outcome.parameters:,}\nmodel: {run_folder / 'model'}")
        print(f"next: {recipe.next_command(complete, run_folder)}")
    return None


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run")],
    data: MovedData = None,
    show_count: Annotated[
        int, typer.Option("--show", min=0, help="birthplaces: print this many test questions with the model's answers")
    ] = 0,
    device: Device = None,
    json: JsonOption = False,
) -> None:
    """Compute the metrics of a finished run again.

    Example: regard eval runs/digits
    """
    from regard.recipes.recipe import RunLocation, load_finished_run
    from regard.recipes.run_folder import find_data
    from regard.train.distributed import join_process_group

    recipe, settings, model, tokenizer = load_finished_run(folder)
    if show_count and not hasattr(recipe.module, "evaluate_with_answers"):
        raise ConfigError(f"--show prints questions and answers of birthplaces; {folder} has a run of {recipe.name}")
    with join_process_group("ddp", device) as group:
        model.to(group.device)
        message = print_message if group.is_main else ignore
        location = RunLocation(data=find_data(folder, data), group=group, on_message=message)
        answered: list[Any] = []
        if show_count:
            evaluate_with_answers = recipe.module.evaluate_with_answers
            metrics, answered, baseline = evaluate_with_answers(settings, model, tokenizer, location, show_count)
        else:
            metrics = recipe.module.evaluate(settings, model, tokenizer, location)
    if not group.is_main:
        return
    if json:
        shown = {"answers": [asdict(each) for each in answered], "baseline": asdict(baseline)} if answered else {}
        show_json({"recipe": recipe.name, "metrics": metrics, "folder": str(folder), **shown})
        return
    print_metrics(metrics)
    if answered:
        print(f"accuracy of always answering {baseline.place!r}  {baseline.accuracy:.4g}")
        show(_answers_table(answered))


def _answers_table(answered: list[Any]) -> Table:
    """Return a table of questions with the model's answer, the correct answer, the confidence, and right or wrong."""
    table = Table("", "question", "answer", "truth", "confidence", box=box.SIMPLE_HEAD)
    for each in answered:
        verdict = "right" if each.correct else "wrong"
        confidence = f"{each.confidence:.0%}{'' if each.given else ', not given'}"
        table.add_row(verdict, Text(each.question), Text(each.answer), Text(each.truth), confidence)
    return table


def build_settings(
    recipe: "Recipe", data: Path | None, variant: str | None, changes: list[str], saved: Any = None
) -> Any:
    """Return the settings of a recipe for real or built-in data, with the changes of `--set`.

    variant  names of variants, separated by commas
    changes  `--set` texts such as "plan.steps=100"
    saved    settings of an earlier run, which are used in place of the settings of the recipe; None for a new run
    """
    from regard.recipes.recipe import set_steps

    start = recipe.settings(real=data is not None, variant=variant) if saved is None else saved
    for name in (text.partition("=")[0].strip() for text in changes):
        if name.split(".")[-2:-1] == ["model"] and name.split(".")[-1] in getattr(recipe.module, "FROM_DATA", ()):
            raise ConfigError(f"{name} follows from the data and cannot be set")
    steps = [text for text in changes if text.partition("=")[0].strip() == "steps"]
    try:
        complete = apply_settings(start, [text for text in changes if text not in steps])
        for text in steps:
            complete = set_steps(complete, parse_literal(text.partition("=")[2].strip()))
    except ConfigError as error:
        raise ConfigError(f"{error}; `regard train list {recipe.name}` shows its settings") from None
    check_data(data)
    return complete


def check_data(data: Path | None) -> None:
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data} does not exist")


def read_run(
    recipe: "Recipe", folder: Path, data: Path | None, changes: list[str], message: Callable[[str], None]
) -> tuple[Any, Path | None]:
    """Read the settings and the data path of the run in a folder, to resume it with the changes of `--set`.

    If the folder has no run, return the settings and the data path of a new run.

    changes  `--set` texts such as "plan.steps=100"
    message  function that prints a message
    """
    from regard.base.config import from_json
    from regard.recipes.run_folder import RUN_FILE, find_data

    check_data(data)
    if not (folder / RUN_FILE).is_file():
        message(f"{folder} has no run to resume; starting one")
        return build_settings(recipe, data, None, changes), data
    saved = read_json(folder / RUN_FILE, CheckpointError, "settings")["settings"]
    kept: Any = from_json(f"{folder / RUN_FILE}: settings", recipe.settings_type, saved)
    return build_settings(recipe, data, None, changes, kept), find_data(folder, data)


def check_recipe(recipe: "Recipe", folder: Path) -> None:
    """Raise ConfigError if the folder has a run of another recipe."""
    from regard.recipes.run_folder import RUN_FILE

    if (folder / RUN_FILE).is_file() and (
        saved := read_json(folder / RUN_FILE, CheckpointError, "recipe")["recipe"]
    ) != recipe.name:
        raise ConfigError(
            f"{folder} has a run of {saved}, not of {recipe.name}; resume it with `regard train {saved} --resume "
            f"--folder {folder}`, or choose another --folder"
        )


def describe_resume(folder: Path) -> str:
    """Return a sentence that names the checkpoint step from which `--resume` would continue."""
    from regard.train.checkpoint import CHECKPOINTS, CheckpointFolder

    found = [each for each in folder.glob(f"*/{CHECKPOINTS}") if CheckpointFolder(each).steps()]
    if not found:
        return "there is no checkpoint yet, so --resume starts from the beginning"
    latest = max(found, key=lambda each: each.stat().st_mtime)
    return f"--resume continues from step {CheckpointFolder(latest).steps()[-1]:,} of {latest.parent.name}"


def print_recipes(json: bool) -> None:
    from regard.recipes.recipe import RECIPES, get_recipe

    recipes = [get_recipe(name) for name in RECIPES]
    if json:
        show_json([_recipe_json(each) for each in recipes])
        return
    for each in recipes:
        show(_recipe_table(each))
    print("`regard train list NAME` shows its settings")


def print_settings(name: str, json: bool) -> None:
    from regard.recipes.recipe import get_recipe

    recipe = get_recipe(name)
    settings = list(list_settings(recipe.settings(real=False), recipe.settings(real=True)))
    if json:
        show_json({**_recipe_json(recipe), "settings": [asdict(each) for each in settings]})
    else:
        show(_recipe_table(recipe), _settings_table(settings))


def _recipe_json(recipe: "Recipe") -> dict[str, Any]:
    names = ("name", "title", "expected", "time", "memory")
    return {**{name: getattr(recipe, name) for name in names}, "variants": _variants(recipe)}


def _recipe_table(recipe: "Recipe") -> Table:
    table = Table(title=recipe.name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("", recipe.title)
    for name in ("expected", "time", "memory"):
        table.add_row(name, getattr(recipe, name))
    for name, text in _variants(recipe).items():
        table.add_row(f"--variant {name}", text)
    return table


def _settings_table(settings: list[Setting]) -> Table:
    """Return a table of settings with their descriptions; equal values for built-in and real data are shown once."""
    table = Table("--set", "built-in", "with --data", box=box.SIMPLE_HEAD)
    table.columns[0].min_width = max(len(each.name) for each in settings)
    for column in table.columns[1:]:
        column.max_width, column.overflow = 14, "fold"
    for each in settings:
        name = Text(each.name, style="bold")
        about = Padding(Text(each.about), (0, 0, 0, 2))
        values = [each.built_in, None] if each.built_in == each.real else [each.built_in or "-", each.real or "-"]
        table.add_row(Group(name, about) if each.about else name, *(Text(value or "") for value in values))
    return table


def _variants(recipe: "Recipe") -> dict[str, str]:
    return {name: " ".join((make.__doc__ or "").split()) for name, make in recipe.variants.items()}


def print_metrics(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:{width}}  {value:.4g}")


@contextmanager
def show_progress(is_main: bool) -> Iterator[Callable[[str, "Progress"], None]]:
    """Context manager: yield a callback that shows training progress on stderr.

    On a terminal the callback draws a progress bar, else it prints a line every few seconds.

    is_main  False for processes other than rank 0, which show nothing
    """
    if not is_main:
        yield ignore
    elif not sys.stderr.isatty():
        yield _ProgressLines()
    else:
        from rich.progress import BarColumn, Progress as Bars, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[status]}"))
        with Bars(*columns, console=Console(stderr=True), transient=False) as bars:
            rows: dict[str, Any] = {}

            def update(phase: str, now: "Progress") -> None:
                if phase not in rows:
                    rows[phase] = bars.add_task(phase, total=now.steps, status="")
                room = bars.console.width - len(phase) - BAR_WIDTH - 2
                bars.update(rows[phase], completed=now.step, status=wrap_fields(progress_fields(now), room))

            yield update


class _ProgressLines:
    """Prints a line of progress every few seconds."""

    def __init__(self) -> None:
        self._last = -LINE_INTERVAL

    def __call__(self, phase: str, now: "Progress") -> None:
        if time.monotonic() - self._last >= LINE_INTERVAL or now.step == now.steps:
            self._last = time.monotonic()
            print_message(f"{phase} {'  '.join(progress_fields(now))}")


def progress_fields(now: "Progress") -> list[str]:
    """Format the progress of a training run: step, loss, learning rate, speed, time left and validation metrics."""
    minutes, seconds = divmod(round(now.seconds_left), 60)
    speed = f"{now.samples_per_second:,.0f}" if now.samples_per_second >= 10 else f"{now.samples_per_second:.2g}"
    return [
        f"{now.step:,}/{now.steps:,} steps",
        f"loss {now.loss:.4f}",
        f"lr {now.lr:.2g}",
        f"{speed} samples/s",
        f"{minutes}:{seconds:02d} min left",
        *(f"{name} {value:.3g}" for name, value in now.metrics.items()),
    ]


def wrap_fields(fields: list[str], width: int) -> str:
    """Join texts by two blanks and break lines at `width` characters. No text is split over two lines."""
    lines = [""]
    for each in fields:
        if lines[-1] and len(lines[-1]) + 2 + len(each) > width:
            lines.append("")
        lines[-1] += f"  {each}" if lines[-1] else each
    return "\n".join(lines)


def ignore(*args: object) -> None:
    """Do nothing; used as callback in processes other than rank 0."""
