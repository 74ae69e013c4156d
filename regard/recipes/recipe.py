"""What a recipe is: a complete run, from data to figures, that a name and a few settings start.

A file of this folder that is named in `RECIPES` has

    a docstring   what is trained, then Expected:, Time: and Memory:, for the built-in data and for real ones
    Settings      a frozen dataclass: everything that decides how the run goes
    built_in      () -> Settings for the data set that needs no files
    real          () -> Settings for real data, read from a path
    FORMS         may be left out: {name: (settings) -> settings}, other ways to run it, each with a docstring
    start         (settings, place) -> Start: the model before training, and what it will be trained on
    run           (settings, place) -> Outcome: trains, and ends with what `judged` says
    judged        (settings, model, tokenizer, place) -> figures of a finished model on data it was not chosen by
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError

from regard.base.atomic_write import write_atomically
from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError, ConfigError, TrainingError, UnknownNameError
from regard.data.byte_pairs import BytePairs
from regard.data.characters import Characters
from regard.data.tokenizers import tokenizer_from_json
from regard.models.model import Model
from regard.models.saving import load, save
from regard.recipes.run_folder import RUN, begin_run, check_can_begin, read_json_fields
from regard.train.loop import Progress, fit
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS, ProcessGroup
from regard.train.task import Task

RESULT = "result.json"
RECIPES = ("birthplaces", "vision", "translation", "language", "speech")


@dataclass(frozen=True)
class RunLocation:
    """Where a run takes place.

    data    a folder with real data; None is the built-in set
    folder  where states, the log and the finished model are kept; None keeps nothing
    begins  called once all data are read, before the first step
    """

    data: Path | None = None
    folder: Path | None = None
    resume: bool = False
    group: ProcessGroup = SINGLE_PROCESS
    tensorboard: bool = False
    on_message: Callable[[str], None] = lambda text: None
    on_progress: Callable[[str, Progress], None] = lambda phase, progress: None
    begins: Callable[[], None] = lambda: None

    def under(self, phase: str) -> dict[str, Any]:
        """What `fit` has to know about one phase of the run."""
        folder = None if self.folder is None else self.folder / phase
        return {
            "folder": folder, "resume": self.resume and folder is not None, "group": self.group,
            "tensorboard": self.tensorboard, "on_message": self.on_message,
            "on_progress": lambda progress: self.on_progress(phase, progress),
        }  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A part of a run that has its own task and plan.

    prepared  makes the task anew when the phase begins, where it takes what the model has learned by then. Its batches
              are as large as those of `task`
    """

    name: str
    task: Task
    plan: TrainingPlan
    prepared: Callable[[], Task] | None = None


@dataclass(frozen=True)
class Start:
    """What a run begins with: a model that has learned nothing, and the phases in which it will."""

    model: Model
    phases: tuple[Phase, ...]
    tokenizer: Characters | BytePairs | None = None

    def trained(self, place: RunLocation) -> float:
        """Train the model, phase after phase; how many seconds that took."""
        seconds = 0.0
        place.group.run_on_main(place.begins)
        for each in self.phases:
            started = time.perf_counter()
            task = each.task if each.prepared is None else each.prepared()
            seconds += time.perf_counter() - started
            seconds += fit(self.model, task, each.plan, **place.under(each.name)).seconds
        return seconds


@dataclass(frozen=True)
class RecipeResult:
    """What a run came to: figures by name, and the model."""

    figures: dict[str, float]
    model: Model
    tokenizer: Characters | BytePairs | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Recipe:
    """One file of recipes, read."""

    name: str
    title: str
    expected: str
    time: str
    memory: str
    module: ModuleType

    @property
    def forms(self) -> dict[str, Callable[[Any], Any]]:
        """Other ways to run it."""
        return getattr(self.module, "FORMS", {})

    def settings(self, *, real: bool, form: str | None = None) -> Any:
        settings = self.module.real() if real else self.module.built_in()
        if form is None:
            return settings
        if form not in self.forms:
            there = f"there are {', '.join(self.forms)}" if self.forms else "it has one form alone"
            raise UnknownNameError(f"{self.name} has no form {form!r}; {there}")
        return self.forms[form](settings)

    def run(self, settings: Any, place: RunLocation) -> RecipeResult:
        """Train, evaluate, and leave the model in the folder."""
        folder = place.folder
        if folder is not None:
            told = to_json(settings)
            data, resume = place.data, place.resume
            place.group.run_on_main(lambda: check_can_begin(folder, self.name, told, resume=resume))
            place.group.run_on_main(lambda: _see_that_nothing_was_learned_since(folder))
            place = replace(place, begins=lambda: begin_run(folder, self.name, told, data, resume=resume))
        outcome: RecipeResult = self.module.run(settings, place)
        if place.folder is not None and place.group.is_main:
            save_result(self.name, settings, outcome, place.folder)
        return outcome


def _see_that_nothing_was_learned_since(folder: Path) -> None:
    if not (folder / RESULT).is_file():
        return
    learned = read_json_fields(folder / RESULT, "settings")["settings"].get("told", ())
    if learned:
        raise ConfigError(
            f"the model in {folder} has learned {len(learned)} answers since it was trained, which would be lost; "
            "train in another --folder"
        )


def load_finished_run(folder: Path) -> tuple[Recipe, Any, Model, Any]:
    """The recipe, the settings, the model and its tokenizer that a run left in a folder."""
    file = folder / RESULT
    if not file.is_file():
        begun_as = read_json_fields(folder / RUN, "recipe")["recipe"] if (folder / RUN).is_file() else None
        more = f"; `regard train {begun_as} --resume --folder {folder}` goes on with the one begun there"
        raise CheckpointError(
            f"{folder} holds no finished run: there is no {RESULT} in it{'' if begun_as is None else more}"
        )
    about = read_json_fields(file, "recipe", "settings", "figures")
    found = get_recipe(about["recipe"])
    settings = from_json(f"{file}: settings", found.module.Settings, about["settings"])
    tokens = folder / "model" / "tokenizer.json"
    if about.get("tokenizer", False) and not tokens.is_file():
        raise CheckpointError(f"{tokens} is gone, without which the model cannot read; the run has to be made again")
    tokenizer = tokenizer_from_json(read_json_fields(tokens)) if tokens.is_file() else None
    return found, settings, load(folder / "model"), tokenizer


def get_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise UnknownNameError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    module = import_module(f"regard.recipes.{name}")
    text = module.__doc__ or ""
    parts = dict(re.findall(r"^(Expected|Time|Memory): (.+?)(?=\n\n|\n\w+:|\Z)", text, re.MULTILINE | re.DOTALL))
    if len(parts) != 3:
        raise ConfigError(f"the docstring of {module.__name__} should have Expected:, Time: and Memory:")
    said = {key.lower(): " ".join(value.split()) for key, value in parts.items()}
    return Recipe(name, text.splitlines()[0], **said, module=module)


def save_result(name: str, settings: Any, outcome: RecipeResult, folder: Path) -> None:
    """Leave the finished model, its tokenizer and what the run was and came to."""
    about = {
        "recipe": name, "settings": to_json(settings), "figures": outcome.figures,
        "tokenizer": outcome.tokenizer is not None, **outcome.more,
    }  # fmt: skip
    told = json.dumps(about, indent=1) + "\n"
    try:
        save(outcome.model, folder / "model")
        if outcome.tokenizer is not None:
            text = json.dumps(outcome.tokenizer.to_json()) + "\n"
            write_atomically(folder / "model" / "tokenizer.json", lambda path: path.write_text(text))
        write_atomically(folder / RESULT, lambda path: path.write_text(told))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the finished model could not be written into {folder}: {error}; make room there, and --resume goes on "
            "from the last state"
        ) from None
