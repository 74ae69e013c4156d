"""Recipes: complete training runs, from data to metrics, started by a name and a few settings.

A module of this folder that is listed in `RECIPES` has

    a docstring   what is trained, then Expected:, Time: and Memory:, for the built-in data and for real data
    built_in      () -> settings for the built-in data set; a frozen dataclass with everything that affects the result
    real          () -> settings for real data, read from a path
    VARIANTS      optional: {name: (settings) -> settings}, other ways to run the recipe, each with a docstring
    CPU_SETTINGS  {name of a setting: value}: the changes that the variant `cpu` makes to the settings for real data
    FROM_DATA     optional: names of settings of the model that the data determine, so that `--set` refuses them
    NEXT_COMMAND  the command to try after training; {folder} is the folder of the run
    prepare       (settings, location) -> TrainingSetup: the untrained model, its tasks and its tokenizer
    run           optional: (settings, location) -> RecipeResult; `train_and_evaluate` by default
    evaluate      (settings, model, tokenizer, location) -> metrics of a trained model on test data
    PIXEL_SCALING  optional: how images are scaled, in the terms of Hugging Face's preprocessor_config.json
    evaluate_with_answers  optional: like `evaluate`, but also returns up to `count` answered test questions and a
                           baseline, for `regard eval --show`
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from safetensors import SafetensorError

from regard.base.atomic_write import write_atomically
from regard.base.config import from_json, override, to_json
from regard.base.errors import CheckpointError, ConfigError, TrainingError, UnknownNameError
from regard.base.files import exists, read_json
from regard.base.validation import check_integer, suggest
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.characters import CharacterTokenizer
from regard.data.tokenizers import tokenizer_from_json
from regard.models.model import Model
from regard.models.presets import find_pretrained, list_models
from regard.models.saving import load, save
from regard.recipes.run_folder import RUN_FILE, begin_run, check_can_begin
from regard.train.checkpoint import CHECKPOINTS, CheckpointFolder
from regard.train.loop import Progress, Timing, count_validations, fit, measure_step_seconds
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS, ProcessGroup
from regard.train.task import Task

RESULT_FILE = "result.json"
PREPROCESSOR = "preprocessor_config.json"  # Hugging Face's file for the scaling of pixels
LONG_RUN = 3600  # seconds, from which a run on a CPU is reported with smaller settings
RECIPES = ("birthplaces", "vision", "translation", "language", "speech")
RecipeTokenizer = CharacterTokenizer | BytePairTokenizer
T = TypeVar("T")


@dataclass(frozen=True)
class Splits(Generic[T]):
    """The data of a recipe for training, validation and test."""

    train: T
    validation: T
    test: T


@dataclass(frozen=True)
class TimeEstimate:
    """The estimated time of a training run.

    seconds           estimated seconds of the whole run
    before            True if the estimate was made before the first step
    with_evaluations  True if `seconds` includes validations and the final evaluation, False if only training steps
    """

    seconds: float
    before: bool = False
    with_evaluations: bool = False


@dataclass(frozen=True)
class RunLocation:
    """Where the data and the results of a run are, and the callbacks for its progress.

    data         path of real data; None uses the built-in set
    folder       where checkpoints, the log and the finished model are written; None writes nothing
    resume       continue the run in the folder from its last checkpoint
    group        the processes that train together, and the device of this process
    tensorboard  write events for TensorBoard to the folder
    on_message   called with messages to the user
    on_progress  called with the name of the phase and its progress
    on_start     called after all data are read and before the first step, in the main process only
    on_estimate  called with the estimated time of the run, after the first steps and again after the first validation.
                 On a CPU, it is also called before the first step of a run of one process that is not resumed
    """

    data: Path | None = None
    folder: Path | None = None
    resume: bool = False
    group: ProcessGroup = SINGLE_PROCESS
    tensorboard: bool = False
    on_message: Callable[[str], None] = lambda text: None
    on_progress: Callable[[str, Progress], None] = lambda phase, progress: None
    on_start: Callable[[], None] = lambda: None
    on_estimate: Callable[["TimeEstimate"], None] = lambda estimate: None

    def fit_arguments(self, phase: str) -> dict[str, Any]:
        """Return the keyword arguments of `fit` for one phase of the run, such as its folder and callbacks."""
        folder = None if self.folder is None else self.folder / phase
        return {
            "folder": folder, "resume": self.resume and folder is not None, "group": self.group,
            "tensorboard": self.tensorboard, "on_message": self.on_message,
            "on_progress": lambda progress: self.on_progress(phase, progress),
        }  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A phase of a training run, such as pretraining, with its own task and training plan.

    task       the training task. If `make_task` is given, `task` is used only to predict time and memory; its batches
               must have the same size as those of the task that `make_task` returns
    make_task  function that builds the training task when the phase begins, because the task needs the model of the
               phases before; None trains on `task`
    """

    name: str
    task: Task
    plan: TrainingPlan
    make_task: Callable[[], Task] | None = None


@dataclass(frozen=True)
class TrainingSetup:
    """The untrained model of a run, the phases of its training, and its tokenizer.

    final_validations  how many times as long as a validation the final evaluation takes, for estimates of the time
    """

    model: Model
    phases: tuple[Phase, ...]
    tokenizer: RecipeTokenizer | None = None
    final_validations: float = 2.0  # test data and validation data

    def train(self, location: RunLocation) -> float:
        """Train the model, one phase after another. Returns the seconds of training."""
        seconds, begin, reported = 0.0, time.perf_counter(), set[bool]()
        if location.group.device.type == "cpu" and location.group.world_size == 1 and not location.resume:
            plan = self.phases[0].plan
            step = measure_step_seconds(self.model, self.phases[0].task, plan)
            location.on_estimate(TimeEstimate(step * self._count_steps(plan), before=True))
        location.group.run_on_main(location.on_start)
        for number, phase in enumerate(self.phases):
            _check_extension(phase, self.phases[number + 1 :], location)

            def on_timing(timing: Timing, number: int = number, plan: TrainingPlan = phase.plan) -> None:
                steps = timing.steps_left + self._count_steps(plan, number + 1)
                with_evaluations = timing.validation is not None
                if not steps or with_evaluations in reported:
                    return
                reported.add(with_evaluations)
                later = sum(count_validations(each.plan) for each in self.phases[number + 1 :])
                evaluations = (timing.validation or 0.0) * (timing.validations_left + later + self.final_validations)
                done = time.perf_counter() - begin
                location.on_estimate(
                    TimeEstimate(done + timing.step * steps + evaluations, with_evaluations=with_evaluations)
                )

            started = time.perf_counter()
            task = phase.task if phase.make_task is None else phase.make_task()
            seconds += time.perf_counter() - started
            arguments = location.fit_arguments(phase.name)
            seconds += fit(self.model, task, phase.plan, on_timing=on_timing, **arguments).seconds
        return seconds

    def _count_steps(self, plan: TrainingPlan, first: int = 0) -> float:
        """Return the work of all phases from index `first` on, in steps of `plan`.

        A step with twice the batch size of `plan` counts as two steps.
        """
        return sum(each.plan.steps * each.plan.batch_size for each in self.phases[first:]) / plan.batch_size


@dataclass(frozen=True)
class RecipeResult:
    """The result of a recipe: the metrics by name, and the trained model with its tokenizer.

    more  further JSON values that are saved with the metrics
    """

    metrics: dict[str, float]
    model: Model
    tokenizer: RecipeTokenizer | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Recipe:
    """A training recipe: a module of `regard.recipes`, and the parts of the docstring of this module.

    name      name of the module
    title     first line of the docstring
    expected  section "Expected:" of the docstring: which metrics to expect
    time      section "Time:" of the docstring: how long the training takes
    memory    section "Memory:" of the docstring: how much memory the training takes
    """

    name: str
    title: str
    expected: str
    time: str
    memory: str
    module: ModuleType

    @property
    def variants(self) -> dict[str, Callable[[Any], Any]]:
        """The variants of the recipe by name: functions that take settings and return changed settings."""
        return {**getattr(self.module, "VARIANTS", {}), "cpu": self._fit_cpu}

    def _fit_cpu(self, settings: Any) -> Any:
        """Return settings for a CPU: a smaller model, smaller batches and fewer steps, in float32.

        Settings for built-in data are unchanged, because they suit a CPU anyway.
        """
        if not any(plan.compile for plan in find_plans(settings).values()):
            return settings
        changes = self.module.CPU_SETTINGS.items()
        return override(settings, {name: value for name, value in changes if getattr(settings, name.split(".")[0])})

    @property
    def settings_type(self) -> type:
        """The dataclass of the recipe's settings."""
        return type(self.module.built_in())

    def settings(self, *, real: bool, variant: str | None = None) -> Any:
        """Return the settings for real data or for the built-in data.

        variant  names of variants that change the settings, separated by commas
        """
        settings = self.module.real() if real else self.module.built_in()
        for name in variant.split(",") if variant else []:
            if name not in self.variants:
                raise UnknownNameError(f"{self.name} has no variant {name!r}; available: {', '.join(self.variants)}")
            settings = self.variants[name](settings)
        return settings

    def next_command(self, settings: Any, folder: Path) -> str:
        """Return the shell command that is suggested after training."""
        command = self.module.NEXT_COMMAND
        return (command if isinstance(command, str) else command[settings.architecture]).format(folder=folder)

    def describe_time(self, estimate: TimeEstimate, device: str) -> str | None:
        """Return a sentence with the estimated time of a run, or None.

        For an estimate made before the first step, the result is None if the run takes at most LONG_RUN seconds. If it
        takes longer, the sentence also suggests settings for a shorter run.
        """
        device = "CPU" if device == "cpu" else "GPU"
        duration = format_duration(estimate.seconds)
        if estimate.with_evaluations:
            return f"with validations and the final evaluation the run takes about {duration} on this {device}"
        if not estimate.before:
            return f"the training steps take about {duration} on this {device}, without validations"
        if estimate.seconds <= LONG_RUN:
            return None
        return (
            f"this run would take about {duration} on this {device}. Settings for a CPU: `regard train {self.name} "
            "--variant cpu`. Fewer steps: --set steps=N. Ctrl-C saves a checkpoint and stops"
        )

    def run(self, settings: Any, location: RunLocation) -> RecipeResult:
        """Train and evaluate the model, and save it in the folder if there is one."""
        folder = location.folder
        if folder is not None:
            as_json = to_json(settings)
            data, resume = location.data, location.resume
            location.group.run_on_main(lambda: check_can_begin(folder, self.name, as_json, resume=resume))
            location.group.run_on_main(lambda: _check_no_learned_facts(folder))
            location = replace(location, on_start=lambda: begin_run(folder, self.name, as_json, data, resume=resume))
        device, message, started = location.group.device.type, location.on_message, time.perf_counter()

        def on_estimate(estimate: TimeEstimate) -> None:
            if text := self.describe_time(estimate, device):
                message(text)

        location = replace(location, on_estimate=on_estimate)
        default = partial(train_and_evaluate, self.module.prepare, self.module.evaluate)
        outcome: RecipeResult = getattr(self.module, "run", default)(settings, location)
        if location.folder is not None and location.group.is_main:
            save_result(self.name, settings, outcome, location.folder)
        message(f"the run took {format_duration(time.perf_counter() - started)}")
        return outcome


def train_and_evaluate(
    prepare: Callable[..., TrainingSetup],
    evaluate: Callable[..., dict[str, float]],
    settings: Any,
    location: RunLocation,
) -> RecipeResult:
    """Build, train and evaluate a model with the functions `prepare` and `evaluate` of a recipe."""
    setup = prepare(settings, location)
    seconds = setup.train(location)
    metrics = evaluate(settings, setup.model, setup.tokenizer, location)
    return RecipeResult({**metrics, "seconds": seconds}, setup.model, setup.tokenizer)


def find_plans(settings: Any) -> dict[str, TrainingPlan]:
    """Return the training plans in the settings of a recipe: a dict from the name of the setting to the plan."""
    found = {name: value for name, value in vars(settings).items() if isinstance(value, TrainingPlan)}
    return found or {f"{settings.architecture}.plan": settings.chosen.plan}


def set_steps(settings: T, steps: int) -> T:
    """Return the settings with this number of optimizer steps in total.

    Each phase keeps its fraction of the total.
    """
    check_integer("steps", steps, 1)
    plans = find_plans(settings)
    total = sum(plan.steps for plan in plans.values())
    changes = {f"{name}.steps": max(1, round(steps * plan.steps / total)) for name, plan in plans.items()}
    return override(settings, changes)


@contextmanager
def name_setting(name: str) -> Iterator[None]:
    """Context manager: prefix the message of a ConfigError raised inside with the name of the setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def format_duration(seconds: float) -> str:
    """Format a duration in words, such as "40 seconds", "12 minutes" or "3.5 hours"."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:{'.2g' if seconds < 99 * size else ',.0f'}} {unit}"
    return f"{max(1, round(seconds))} seconds"


def _check_extension(phase: Phase, later: tuple[Phase, ...], location: RunLocation) -> None:
    """Raise ConfigError if a resumed run has more steps of this phase to do, but has begun a later phase."""
    if location.folder is None or not location.resume:
        return
    done = {each.name: CheckpointFolder(location.folder / each.name / CHECKPOINTS).steps() for each in (phase, *later)}
    begun = [each.name for each in later if done[each.name]]
    if begun and phase.plan.steps > max(done[phase.name], default=0):
        raise ConfigError(
            f"{phase.name}.steps cannot be increased, because {begun[-1]} has begun; extend that one with --set "
            f"{begun[-1]}.steps=N, or start again in another --folder"
        )


def _check_no_learned_facts(folder: Path) -> None:
    """Raise ConfigError if the model in the folder was trained further by `regard ask --learn`.

    A new run would overwrite what the model learned.
    """
    if not (folder / RESULT_FILE).is_file():
        return
    learned = read_json(folder / RESULT_FILE, CheckpointError, "settings")["settings"].get("learned", ())
    if learned:
        raise ConfigError(
            f"the model in {folder} has learned {len(learned)} answers since it was trained, which would be lost; "
            "train in another --folder"
        )


def find_run(folder: Path) -> Path:
    """Return the folder of a training run, or of the pretrained model of this name if the folder does not exist."""
    return folder if exists(folder, CheckpointError) else find_pretrained(str(folder)) or folder


def load_finished_run(folder: Path) -> tuple[Recipe, Any, Model, Any]:
    """Load a finished training run. Returns the recipe, the settings, the model and its tokenizer.

    folder  folder of the run, or the name of a pretrained model
    """
    folder = find_run(folder)
    file = folder / RESULT_FILE
    if not file.is_file():
        if not folder.exists() and (near := suggest(folder, list_models(pretrained=True), most=3)):
            raise CheckpointError(f"there is no folder {folder}{near}")
        fix = f"Train one with `regard train NAME --folder {folder}`."
        if (folder / RUN_FILE).is_file():
            started = read_json(folder / RUN_FILE, CheckpointError, "recipe")["recipe"]
            fix = f"Resume the unfinished one with `regard train {started} --resume --folder {folder}`."
        raise CheckpointError(f"{folder} has no finished run ({RESULT_FILE}). {fix}")
    about = read_json(file, CheckpointError, "recipe", "settings", "metrics")
    recipe = get_recipe(about["recipe"])
    settings: Any = from_json(f"{file}: settings", recipe.settings_type, about["settings"])
    tokens = folder / "model" / "tokenizer.json"
    if about.get("tokenizer", False) and not tokens.is_file():
        raise CheckpointError(f"{tokens} is missing, and the model cannot be used without it; train the run again")
    tokenizer = tokenizer_from_json(read_json(tokens, CheckpointError)) if tokens.is_file() else None
    return recipe, settings, load(folder / "model"), tokenizer


def read_metrics(folder: Path, *names: str) -> dict[str, float]:
    """Return the metrics of a finished run, from its result.json. Raises CheckpointError if the file is damaged.

    names  metrics that the run must have
    """
    file = find_run(folder) / RESULT_FILE
    metrics = read_json(file, CheckpointError, "metrics")["metrics"]
    if not isinstance(metrics, dict):
        raise CheckpointError(f"{file} is damaged: metrics is not a JSON object")
    for name, value in {**dict.fromkeys(names), **metrics}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{file} is damaged: the metric {name} is {value!r:.100}, not a number")
    return metrics


def get_recipe(name: str) -> Recipe:
    """Return the recipe with this name."""
    if name not in RECIPES:
        fix = suggest(name, RECIPES, most=3) or f"; available: {', '.join(RECIPES)}"
        raise UnknownNameError(f"there is no recipe {name!r}{fix}")
    module = import_module(f"regard.recipes.{name}")
    text = module.__doc__ or ""
    parts = dict(re.findall(r"^(Expected|Time|Memory): (.+?)(?=\n\n|\n\w+:|\Z)", text, re.MULTILINE | re.DOTALL))
    if len(parts) != 3:
        raise ConfigError(f"the docstring of {module.__name__} should have Expected:, Time: and Memory:")
    sections = {key.lower(): " ".join(value.split()) for key, value in parts.items()}
    return Recipe(name, text.splitlines()[0], **sections, module=module)


def save_result(name: str, settings: Any, outcome: RecipeResult, folder: Path) -> None:
    """Save the finished model, its tokenizer, and the settings and metrics of the run."""
    about = {
        "recipe": name, "settings": to_json(settings), "metrics": outcome.metrics,
        "tokenizer": outcome.tokenizer is not None, **outcome.more,
    }  # fmt: skip
    text = json.dumps(about, indent=1) + "\n"
    try:
        save(outcome.model, folder / "model")
        if outcome.tokenizer is not None:
            tokens = json.dumps(outcome.tokenizer.to_json()) + "\n"
            write_atomically(folder / "model" / "tokenizer.json", lambda path: path.write_text(tokens))
        if scaling := getattr(get_recipe(name).module, "PIXEL_SCALING", None):
            about_pixels = json.dumps(scaling) + "\n"
            write_atomically(folder / "model" / PREPROCESSOR, lambda path: path.write_text(about_pixels))
        write_atomically(folder / RESULT_FILE, lambda path: path.write_text(text))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the finished model could not be written to {folder}: {error}; free some space, then --resume continues "
            "from the last checkpoint"
        ) from None
