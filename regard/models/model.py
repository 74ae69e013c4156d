"""What every model has: a configuration, a table of initial values, and a way to its parameters' names."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from torch import Tensor, nn

from regard.base.config import coerce
from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.nn.attention import check_probability
from regard.nn.init import Initializer, init_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The settings of a model. Its class says of which."""

    def check_types(self) -> None:
        """Raise where a setting is not of the kind that its annotation says."""
        for name, hint in get_type_hints(type(self)).items():
            coerce(f"{type(self).__name__}.{name}", getattr(self, name), hint)

    def check_counts(self, *names: str) -> None:
        """Raise where one of these settings is not a whole number of at least 1; None passes."""
        for name in names:
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)

    def check_shares(self, *names: str) -> None:
        for name in names:
            check_probability(name, getattr(self, name))

    def check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")


class Model(nn.Module, ABC):
    """A network made from a configuration alone."""

    Config: ClassVar[type[Config]]
    recompute = False  # if set, only the inputs of blocks are kept for the backward pass, and the rest is made again

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not isinstance(config, self.Config):
            raise ConfigError(f"{type(self).__name__} is made from a {self.Config.__name__}, not {config!r}")
        self.config = config

    def export(
        self, path: "str | os.PathLike[str]", *, model_type: str | None = None, shard: int | None = None
    ) -> None:
        """Write the model as a folder of Hugging Face's transformers; see `regard.models.convert.export`."""
        from regard.models.convert import export

        export(self, path, model_type=model_type, shard=shard)

    @abstractmethod
    def initial(self) -> Mapping[str, Initializer]:
        """The table of initial values."""

    def initialise(self, seed: int = 0) -> None:
        """Fill all parameters by the table."""
        init_parameters(self, self.initial(), seed)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the model into a folder: its configuration and its weights."""
        from regard.models.saving import save  # it knows all kinds of models

        save(self, path)

    @abstractmethod
    def example(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        """Inputs of the usual kind and size, all zero: what a forward pass takes.

        length  positions, frames or pixels a side; None is the model's own
        """

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        """What the model keeps between calls after such an input; nothing for a model that takes it whole."""
        return 0

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
