"""Helpers for code that torch.compile or fake tensors trace. They do not import the compiler, which is slow."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
T = TypeVar("T")


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Let the compiler treat the result as a constant, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values: it is on the meta device, or a FakeTensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
