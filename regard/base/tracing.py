"""Helpers for code that torch.compile or fake tensors trace. They do not import the compiler, which is slow."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
T = TypeVar("T")


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function so that torch.compile treats its result as a constant.

    Does the same as `torch.compiler.assume_constant_result`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant(number: int | None) -> int | None:
    """Return an integer unchanged. Under torch.compile it becomes a constant, so that it can be formatted as text."""
    return None if number is None else operator.index(number)


def is_exporting() -> bool:
    """Return whether torch.export traces this code."""
    # up to torch 2.11 torch.compiler.is_exporting() is always true in compiled code
    return torch.compiler._is_exporting_flag


def is_symbol(number: float) -> bool:
    """Return whether a number is symbolic (torch.SymInt or SymFloat), such as a dynamic length under torch.compile."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import; the compiler has it already

    return not has_static_value(number)


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no values: it is on the meta device, or a FakeTensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether Python code can read the values of a tensor.

    False while torch.compile traces, inside torch.func transforms, and for fake and meta tensors.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not (torch.compiler.is_compiling() or transformed or is_meta_or_fake(tensor))


def in_compiled_code() -> bool:
    """Return whether torch.compile traces this call.

    False under torch.export, because exported programs must not use custom operators.
    """
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context manager: leave inference mode, so that autograd can save the tensors created inside the `with` block.

    Gradients are disabled inside the block.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
