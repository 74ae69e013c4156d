"""Registers operators of regard with torch, for compiled code."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

Register = Callable[[Library], None]


def register_once(name: str) -> Callable[[Register], Register]:
    """Return a decorator that calls a function once with a new torch.library.Library, to register operators.

    If the module is imported again, the function is not called, because operators cannot be registered twice.

    name  the attribute of `torch.ops.regard` in which the library is stored, because torch removes the operators of
          a library that is freed
    """

    def decorate(register: Register) -> Register:
        if getattr(torch.ops.regard, name, None) is None:  # a module may be imported again, operators may not
            library = Library("regard", "FRAGMENT")
            setattr(torch.ops.regard, name, library)
            register(library)
        return register

    return decorate


def define_operator(
    library: Library,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    key: str = "CompositeExplicitAutograd",
    tags: Any = (),
) -> None:
    """Define the operator `regard::NAME`.

    schema   such as "NAME(Tensor x) -> Tensor"
    compute  function that computes the results of the operator
    fake     function that makes tensors with the shapes and dtypes of the results, for tracing
    key      dispatch key of `compute`
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, compute, key)
    torch.library.register_fake(f"regard::{name}", fake, lib=library)
