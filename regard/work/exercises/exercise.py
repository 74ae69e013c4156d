"""What an exercise is: a prompt, a start, a solution that runs, and slips that run too.

A slip is a wrong solution that students are known to write, with the hint that helps. Whatever a student hands in is
run on the same inputs as the solution; if it is not right, the slip that gives the same wrong answers is what it
looks like.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry


@dataclass(frozen=True)
class PlantedMistake:
    """A typical wrong solution, and what to tell whoever wrote it."""

    name: str
    hint: str
    wrong: Callable[..., Any]


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with what was written: the slip it looks like, if one is known, and the words to say."""

    slip: str | None
    words: str


Check = Callable[["Exercise", Any], CheckResult | None]


@dataclass(frozen=True)
class Exercise:
    """One thing to write: a function or a class with the name of its solution."""

    name: str
    title: str
    prompt: str
    starter: str
    solution: Callable[..., Any]
    check: Check
    slips: tuple[PlantedMistake, ...]

    @property
    def writes(self) -> str:
        """The name that the student's function or class has."""
        return self.solution.__name__

    @property
    def source(self) -> str:
        """The solution as text: the code that runs here."""
        return inspect.getsource(self.solution)

    def find(self, written: Any) -> CheckResult | None:
        """What is wrong with what a student wrote, or None."""
        return self.check(self, written)


@dataclass(frozen=True)
class Exercises:
    """A set of exercises that build on each other, with what is given to all of them."""

    name: str
    title: str
    about: str
    given: str  # code that stands before the first exercise
    tasks: tuple[Exercise, ...]

    def __getitem__(self, name: str) -> Exercise:
        known: Registry[Exercise] = Registry(f"exercise of {self.name}")
        for task in self.tasks:
            known.add(task.name)(task)
        return known[name]
