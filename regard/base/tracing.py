"""Helpers for code that torch.compile or fake tensors trace. They do not import the compiler, which is slow."""

import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
T = TypeVar("T")


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Let the compiler treat the result as a constant, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant(number: int | None) -> int | None:
    """Return the number itself, as a constant for torch.compile, which cannot format symbolic numbers as text."""
    return None if number is None else operator.index(number)


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values: it is on the meta device, or a FakeTensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def can_read_values(tensor: Tensor) -> bool:
    """Whether Python may read tensor values here: not while tracing, in torch.func, or for fake and meta tensors."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not (torch.compiler.is_compiling() or transformed or is_meta_or_fake(tensor))
