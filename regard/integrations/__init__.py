"""Integrations with other libraries: Hugging Face transformers, torch.nn, torchvision, notebooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = ("huggingface", "notebook", "torch", "torchvision")

if TYPE_CHECKING:
    from regard.integrations import (
        huggingface as huggingface,
        notebook as notebook,
        torch as torch,
        torchvision as torchvision,
    )
else:

    def __getattr__(name: str) -> Any:
        """Import a submodule at its first use: `regard.integrations.huggingface` works without an import statement."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_MODULES)}")
