"""Initial values: a table from names to what parameters start as, and the one function that reads it.

A table maps patterns such as `*.out.weight` to rules; the first pattern that fits a name counts. A parameter without an
entry is an error, so no value is ever left to a library's default.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.tracing import is_meta_or_fake
from regard.base.validation import check_integer


@dataclass(frozen=True)
class Initializer:
    """How a tensor is filled: with one value, or with draws around it."""

    value: float = 0.0
    std: float = 0.0  # of a normal distribution
    cut: float = math.inf  # draws stay within this many standard deviations
    bound: float = 0.0  # of a uniform distribution

    def fill(self, tensor: Tensor, draws: torch.Generator) -> None:
        exact = torch.empty(tensor.shape, dtype=torch.float32).fill_(self.value)
        if self.bound:
            exact.uniform_(self.value - self.bound, self.value + self.bound, generator=draws)
        elif self.std and math.isfinite(self.cut):
            reach = self.cut * self.std
            nn.init.trunc_normal_(exact, self.value, self.std, self.value - reach, self.value + reach, draws)
        elif self.std:
            exact.normal_(self.value, self.std, generator=draws)
        tensor.copy_(exact)


@dataclass(frozen=True)
class _Xavier(Initializer):
    def fill(self, tensor: Tensor, draws: torch.Generator) -> None:
        fan_out, fan_in = _fans(tensor)
        uniform(math.sqrt(6.0 / (fan_in + fan_out))).fill(tensor, draws)


@dataclass(frozen=True)
class _FanIn(Initializer):
    gain: float = 1.0

    def fill(self, tensor: Tensor, draws: torch.Generator) -> None:
        normal(self.gain / math.sqrt(_fans(tensor)[1])).fill(tensor, draws)


def constant(value: float) -> Initializer:
    """The same number everywhere."""
    return Initializer(value=value)


def normal(std: float, *, cut: float = math.inf) -> Initializer:
    """Normal draws around zero, cut off at `cut` standard deviations."""
    return Initializer(std=std, cut=cut)


def uniform(bound: float) -> Initializer:
    """Uniform draws between -bound and bound."""
    return Initializer(bound=bound)


def xavier() -> Initializer:
    """Uniform draws of variance 2 / (inputs + outputs). Glorot and Bengio 2010."""
    return _Xavier()


def fan_in(gain: float = 1.0) -> Initializer:
    """Normal draws of variance gain^2 / inputs: gain 1 after LeCun 1998, sqrt(2) before a relu after He et al. 2015."""
    return _FanIn(gain=gain)


def init_parameters(module: nn.Module, table: Mapping[str, Initializer], seed: int = 0) -> None:
    """Fill every parameter and buffer by the table. On the meta device nothing is filled, but all names are checked.

    Every tensor draws from a generator of its own, made of the seed and its name: adding a layer changes no other.
    """
    if check_integer("seed", seed, 0) >= 1 << 32:
        raise ConfigError(f"seed is a whole number below 2^32, not {seed}")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rules = {name: _rule(name, tensor, table) for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not is_meta_or_fake(tensor):
                # torch's generator reads 32 bits of its seed: for one name, different seeds give different ones
                rules[name].fill(tensor, make_generator(zlib.crc32(name.encode(), seed)))


def _rule(name: str, tensor: Tensor, table: Mapping[str, Initializer]) -> Initializer:
    for pattern, rule in table.items():
        if fnmatchcase(name, pattern):
            return rule
    raise ConfigError(
        f"{name} {tuple(tensor.shape)} has no initial value; add a pattern that fits its name to the table "
        f"(it has: {', '.join(table)})"
    )


def _fans(tensor: Tensor) -> tuple[int, int]:
    """How many numbers one input number reaches, and how many reach one output number."""
    if tensor.ndim < 2:
        raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} has no inputs and outputs; use normal or constant")
    taps = math.prod(tensor.shape[2:])
    return tensor.shape[0] * taps, tensor.shape[1] * taps
