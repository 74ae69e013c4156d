"""What the compiler is told, without loading it: that takes as long as torch itself."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """A function that the compiler calls once and takes the answer for given.

    This is what `torch.compiler.assume_constant_result` does, but for its import of the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
