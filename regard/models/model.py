"""The base classes of all models and their configurations."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from torch import Tensor, nn

from regard.base.config import coerce
from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.nn.attention import check_probability
from regard.nn.init import Initializers, init_parameters

MAX_DEPTH = 2000  # the deepest published model has 1,202 blocks; a damaged config.json may state any number


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Base class of model configurations: frozen dataclasses that are checked when they are built."""

    def check(self, *, zero: tuple[str, ...] = ()) -> None:
        """Check that each setting has its annotated type and a value in range, else raise ConfigError.

        Integers must be at least 1, or at least 0 for the settings named in `zero`. Dropout rates must be
        probabilities.
        """
        for name, hint in get_type_hints(type(self)).items():
            coerce(f"{type(self).__name__}.{name}", getattr(self, name), hint)
        for name in get_type_hints(type(self)):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, int) and not isinstance(each, bool):
                    check_integer(name, each, 0 if name in zero else 1)
                    if "depth" in name and each > MAX_DEPTH:
                        raise ConfigError(f"{name} is {each}, but a model has at most {MAX_DEPTH} blocks")
            if name.endswith(("dropout", "drop_path")):
                check_probability(name, value)

    def check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """Check that the setting `name` has one of the values in `choices`, else raise ConfigError."""
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")


class Model(nn.Module, ABC):
    """Base class of models: an nn.Module that is built from a configuration only."""

    Config: ClassVar[type[Config]]
    # True saves only the inputs of blocks for the backward pass and recomputes the rest. Models with batch norm, whose
    # running statistics would be updated twice, ignore it
    gradient_checkpointing = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not isinstance(config, self.Config):
            raise ConfigError(f"{type(self).__name__} is built from a {self.Config.__name__}, not {config!r}")
        self.config = config

    @abstractmethod
    def initializers(self) -> Initializers:
        """Return a table for `init_parameters` that maps patterns of parameter names to initializers."""

    def init_weights(self, seed: int = 0) -> None:
        """Set all parameters and buffers to their initial values, drawn with this seed."""
        init_parameters(self, self.initializers(), seed)

    @abstractmethod
    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        """Return example inputs of a forward pass, all zero.

        length  number of tokens of a text, number of frames of a recording, or side of an image in pixels; None is the
                size in the configuration
        """

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        """Return the size of the KV cache in bytes after a forward pass on `example_inputs(batch, length)`.

        It is 0 for a model without a KV cache.
        """
        return 0

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Save the model in a folder: config.json, and the weights as safetensors."""
        from regard.models.saving import save  # it imports all models

        save(self, path)

    def export(self, path: "str | os.PathLike[str]", *, model_type: str | None = None) -> None:
        """Save the model as a folder that Hugging Face's transformers loads; see `regard.models.convert.export`."""
        from regard.models.convert import export

        export(self, path, model_type=model_type)
