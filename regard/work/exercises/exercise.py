"""What an exercise is: a prompt, a reference solution, a check, mistakes that students often make, and variants.

The texts of a set are in `texts/NAME.toml`, its solutions in `solutions/NAME.py`. A planted mistake is the reference
solution with some of its text replaced. A student's answer is run on the same inputs as the solution. If the results
differ, the mistake that gives the same wrong results decides which hint is shown. A variant is a change of the task:
an edit of the solution, and a sentence in the prompt.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import re
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.work.exercises.run_answer import perform

_TODO_BODY = re.compile(r"((?:^( +)# TODO.*\n)+)((?:^\2.*\n|^\n(?=\2))+)", re.MULTILINE)
CHECK_SEED = 0  # seed of the inputs with which students check answers; grading a class uses others

Edits = tuple[tuple[str, str], ...]  # pairs of a text of the solution's module and its replacement
Answer = Callable[[tuple[Any, ...]], Any]  # performs requests on a student's function or class; see `perform`


@dataclass(frozen=True)
class PlantedMistake:
    """A typical wrong solution of an exercise, and a hint for students who wrote it.

    edits  replacements in the source of the solution that create the mistake, as pairs of old and new text
    """

    name: str
    hint: str
    edits: Edits


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with a student's answer.

    mistake   name of the known mistake that the answer looks like; None if none is recognised
    feedback  text for the student
    """

    mistake: str | None
    feedback: str


Check = Callable[["Exercise", Answer, np.random.Generator], CheckResult | None]


@dataclass(frozen=True)
class Exercise:
    """An exercise: a function or class that students write, with its solution, check and known mistakes.

    function_name  name of the function or class, in the answer and in the solution
    prompt         the exercise text
    module         module of the reference solution
    check          checks an answer
    mistakes       typical wrong solutions
    example        the end of `prompt`, which shows the solution's result for the inputs that the notebook defines
    edits          text replacements in the source of the solution; empty unless this is a variant of the exercise
    """

    name: str
    title: str
    function_name: str
    prompt: str
    module: str  # module of the reference solution
    check: Check
    mistakes: tuple[PlantedMistake, ...]
    example: str = ""  # shows the result of the solution for the inputs of the notebook
    edits: Edits = ()  # text replacements in the module, in a variant

    @property
    def solution(self) -> Any:
        """The reference solution, a function or class."""
        return getattr(edited_module(self.module, self.edits), self.function_name)

    @property
    def source(self) -> str:
        """The source code of the reference solution without its `# TODO` comments."""
        return re.sub(r"(?m)^ +# TODO.*\n", "", self._source_with_todos)

    @property
    def starter(self) -> str:
        """The solution's source with `raise NotImplementedError` in place of the code below each `# TODO`."""
        return _TODO_BODY.sub(r"\1\2raise NotImplementedError\n", self._source_with_todos)

    def marked_source(self, begin: str, end: str) -> str:
        """Return the solution's source with marker lines around the code below each `# TODO`, for grading tools.

        begin, end  the marker lines
        """
        return _TODO_BODY.sub(rf"\1\2{begin}\n\3\2{end}\n", self._source_with_todos)

    @property
    def _source_with_todos(self) -> str:
        source = edited_source(self.module, self.edits)
        found = next(node for node in ast.parse(source).body if getattr(node, "name", "") == self.function_name)
        return "".join(source.splitlines(keepends=True)[found.lineno - 1 : found.end_lineno])

    def find_mistake(self, answer: Any) -> CheckResult | None:
        """Check a student's function or class in this process; return what is wrong, or None if it is correct."""
        return self.check(self, functools.partial(perform, answer), np.random.default_rng(CHECK_SEED))

    def wrong_solution(self, mistake: PlantedMistake) -> Any:
        """Return the solution's function or class after adding this mistake to its source."""
        return getattr(edited_module(self.module, self.edits + mistake.edits), self.function_name)


@functools.cache
def edited_source(name: str, edits: Edits) -> str:
    """Return the source code of a module after text replacements.

    name   name of the module
    edits  pairs of old and new text; every occurrence is replaced, and ValueError is raised if there is none
    """
    source = inspect.getsource(importlib.import_module(name))
    for old, new in edits:
        if old not in source:
            raise ValueError(f"a planted mistake or variant replaces {old!r}, which is not in {name}")
        source = source.replace(old, new)
    return source


@functools.cache
def edited_module(name: str, edits: Edits) -> types.ModuleType:
    """Create a module from another module's source with text replacements; without edits return that module.

    name   name of the module
    edits  pairs of old and new text
    """
    if not edits:
        return importlib.import_module(name)
    module = types.ModuleType(name)
    # code of this package
    exec(compile(edited_source(name, edits), f"{name} (edited)", "exec"), vars(module))  # nosec B102
    return module


@dataclass(frozen=True)
class Variant:
    """A variant of some exercises, so that students get different tasks.

    exercises     names of the exercises whose prompts get `text` at the end
    text          sentence that describes the variant
    edits         text replacements in the solutions
    prompt_edits  text replacements in the prompts
    """

    exercises: tuple[str, ...]
    text: str
    edits: Edits
    prompt_edits: Edits = ()


@dataclass(frozen=True)
class ExerciseSet:
    """A set of exercises that build on each other.

    about         introduction
    setup_code    code before the first exercise
    exercises     the exercises in order
    variants      groups of variants; at most one variant of each group is applied to the original tasks
    closing_code  code after the last exercise, if any
    variant       one digit for each group of variants, such as "0201": the number of the variant that is applied, or 0
                  for none; empty if no variants were chosen
    """

    name: str
    title: str
    about: str
    setup_code: str
    exercises: tuple[Exercise, ...]
    variants: tuple[tuple[Variant, ...], ...] = ()  # groups of alternatives to the tasks
    closing_code: str = ""
    variant: str = ""  # the alternative of each group, such as "0201"; empty for the original tasks

    def __getitem__(self, name: str) -> Exercise:
        known: Registry[Exercise] = Registry(f"exercise of {self.name}")
        for exercise in self.exercises:
            known.add(exercise.name)(exercise)
        return known[name]

    def for_student(self, student: str, class_seed: str) -> "ExerciseSet":
        """Return the set with random variants for one student, which depend on a secret seed of the class."""
        random = Random(f"{student_seed(student, class_seed)}\n{self.name}")
        return self.with_variant("".join(str(random.randint(0, len(options))) for options in self.variants))

    def with_variant(self, variant: str) -> "ExerciseSet":
        """Return the set with the given variants.

        variant  one digit for each group of variants: the number of the variant, or 0 for the original task
        """
        if len(variant) != len(self.variants) or not all(
            digit.isdigit() and int(digit) <= len(options)
            for digit, options in zip(variant, self.variants, strict=True)
        ):
            raise ConfigError(f"{self.name} has no variant {variant!r}; use the one in the notebook")
        chosen = [options[int(n) - 1] for n, options in zip(variant, self.variants, strict=True) if n != "0"]
        edits = tuple(edit for each in chosen for edit in each.edits)
        return replace(self, variant=variant, exercises=tuple(_vary(each, chosen, edits) for each in self.exercises))


def student_seed(student: str, class_seed: str) -> int:
    """Return the random seed of one student: a SHA-256 hash of the secret seed of the class and the name.

    The secret seed cannot be computed from this hash.
    """
    return int(hashlib.sha256(f"{class_seed}\n{student}".encode()).hexdigest()[:12], 16)


def _vary(exercise: Exercise, chosen: list[Variant], edits: Edits) -> Exercise:
    """Return an exercise with the chosen variants applied to its prompt and its solution.

    Planted mistakes whose text replacements no longer fit the edited solution are removed.

    edits  the text replacements in the solution, of all chosen variants
    """
    # the numbers of the example are those of the original task
    prompt = exercise.prompt.removesuffix(exercise.example) if chosen else exercise.prompt
    for variant in chosen:
        for old, new in variant.prompt_edits:
            prompt = prompt.replace(old, new)
        if exercise.name in variant.exercises:
            prompt += f"\n**Your variant:** {variant.text}\n"
    source = edited_source(exercise.module, edits)
    mistakes = tuple(each for each in exercise.mistakes if all(old in source for old, _ in each.edits))
    return replace(exercise, prompt=prompt, edits=edits, mistakes=mistakes)


def load_set(name: str, checks: Mapping[str, Check]) -> ExerciseSet:
    """Load the texts of an exercise set from its TOML file and combine them with the checks.

    name    name of the set
    checks  the check of each exercise, by name
    """
    stem = name.replace("-", "_")
    texts = tomllib.loads((Path(__file__).parent / "texts" / f"{stem}.toml").read_text(encoding="utf-8"))
    module = f"{__package__}.solutions.{stem}"

    def mistakes(entries: list[dict[str, Any]]) -> list[PlantedMistake]:
        return [PlantedMistake(each["name"], each["hint"], _edits(each["edits"])) for each in entries]

    exercises = []
    for entry in texts["exercises"]:
        shared = [each for each in texts.get("mistakes", []) if entry["name"] in each["exercises"]]
        exercises.append(
            Exercise(
                entry["name"],
                entry["title"],
                entry["function"],
                entry["prompt"] + entry.get("example", ""),
                module,
                checks[entry["name"]],
                tuple(mistakes(entry["mistakes"]) + mistakes(shared)),
                entry.get("example", ""),
            )
        )
    variants = tuple(
        tuple(
            Variant(tuple(each["exercises"]), each["text"], _edits(each["edits"]), _edits(each.get("prompt_edits", [])))
            for each in entry["options"]
        )
        for entry in texts.get("variants", [])
    )
    return ExerciseSet(
        name, texts["title"], texts["about"], texts["setup_code"], tuple(exercises), variants,
        texts.get("closing_code", ""),
    )  # fmt: skip


def _edits(pairs: list[list[str]]) -> Edits:
    return tuple((old, new) for old, new in pairs)
