"""Integrations with other libraries: Hugging Face transformers, torch.nn, torchvision, notebooks."""

from importlib import import_module
from typing import Any

_MODULES = ("huggingface", "notebook", "torch", "torchvision")


def __getattr__(name: str) -> Any:
    """Import a module of this package at its first use, so that `regard.integrations.huggingface` needs no import."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_MODULES)}")
