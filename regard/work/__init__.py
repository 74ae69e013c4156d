"""Worked solutions of attention problems, checks of student answers, a quiz, and graded exercises."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.work.grading import grade as grade
else:

    def __getattr__(name: str) -> Any:
        if name != "grade":  # imported on first use: a worked solution does not need the exercises
            raise AttributeError(f"module 'regard.work' has no attribute {name!r}")
        from regard.work.grading import grade

        return grade
