"""Registers operators of regard with torch, for compiled code."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

Register = Callable[[Library], None]


def register_once(name: str) -> Callable[[Register], Register]:
    """Call the decorated function with a library of operators, unless an earlier import of its module has done so.

    name  name of the library, which is kept as an attribute of `torch.ops.regard`: operators live as long as it
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
    compute  computes its results
    fake     makes tensors of the shapes and dtypes of its results
    key      dispatch key of `compute`
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, compute, key)
    torch.library.register_fake(f"regard::{name}", fake, lib=library)
