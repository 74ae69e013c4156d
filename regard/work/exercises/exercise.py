"""What an exercise is: a prompt, a reference solution, a check, and mistakes that students often make.

A planted mistake is the reference solution with some of its text replaced. A student's answer is run on the same inputs
as the solution. If the results differ, the mistake that gives the same wrong results tells which hint to show.
"""

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry

_TODO_BODY = re.compile(r"((?:^( +)# TODO.*\n)+)(?:^\2.*\n|^\n(?=\2))+", re.MULTILINE)


@dataclass(frozen=True)
class PlantedMistake:
    """A typical wrong solution and the hint for whoever wrote it.

    wrong  edits of the solution's module, {text: replacement}, or the wrong function itself
    """

    name: str
    hint: str
    wrong: Mapping[str, str] | Callable[..., Any]


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with an answer: the mistake it looks like, if one is known, and the feedback."""

    mistake: str | None
    feedback: str


Check = Callable[["Exercise", Any], CheckResult | None]


@dataclass(frozen=True)
class Exercise:
    """A function or class that students write; it has the same name as its solution."""

    name: str
    title: str
    prompt: str
    solution: Callable[..., Any]
    check: Check
    mistakes: tuple[PlantedMistake, ...]

    @property
    def function_name(self) -> str:
        """The name of the function or class to write."""
        return self.solution.__name__

    @property
    def source(self) -> str:
        """The source of the reference solution."""
        return solution_source(self.solution)

    @property
    def starter(self) -> str:
        """The solution's source with `raise NotImplementedError` in place of the code below each `# TODO`."""
        return _TODO_BODY.sub(r"\1\2raise NotImplementedError\n", inspect.getsource(self.solution))

    def find_mistake(self, answer: Any) -> CheckResult | None:
        """Check a student's function or class; None if it is correct."""
        return self.check(self, answer)

    def wrong_solution(self, mistake: PlantedMistake) -> Any:
        """The function or class that makes this mistake."""
        if callable(mistake.wrong):
            return mistake.wrong
        return getattr(_edited_module(self.solution.__module__, tuple(mistake.wrong.items())), self.function_name)


def solution_source(solution: Callable[..., Any]) -> str:
    """The source of a reference solution without its `# TODO` comments."""
    return re.sub(r"(?m)^ +# TODO.*\n", "", inspect.getsource(solution))


@functools.cache
def _edited_module(name: str, edits: tuple[tuple[str, str], ...]) -> types.ModuleType:
    """A copy of a module in which every occurrence of some texts is replaced."""
    original = importlib.import_module(name)
    source = inspect.getsource(original)
    for old, new in edits:
        if old not in source:
            raise ValueError(f"a planted mistake replaces {old!r}, which is not in {name}")
        source = source.replace(old, new)
    module = types.ModuleType(name)
    exec(compile(source, str(original.__file__), "exec"), vars(module))
    return module


@dataclass(frozen=True)
class ExerciseSet:
    """Exercises that build on each other, and the code that comes before the first."""

    name: str
    title: str
    about: str
    setup_code: str
    exercises: tuple[Exercise, ...]

    def __getitem__(self, name: str) -> Exercise:
        known: Registry[Exercise] = Registry(f"exercise of {self.name}")
        for exercise in self.exercises:
            known.add(exercise.name)(exercise)
        return known[name]
