"""Worked solutions and exercises: attention by hand, a student's own steps and code looked over, a quiz."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.work.grading import grade as grade


def __getattr__(name: str) -> Any:
    if name != "grade":  # loaded on first use: a worked solution needs no exercises
        raise AttributeError(f"module 'regard.work' has no attribute {name!r}")
    from regard.work.grading import grade

    return grade
