"""Initialisation of parameters from a table.

A table maps patterns such as `*.out.weight` to initializers; the first pattern that matches a name is used. A parameter
that matches no pattern is an error, so that no parameter keeps a default value of torch.
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
    """Initialises a parameter with a constant `value`, or with a normal or uniform distribution around it.

    std    standard deviation of a normal distribution; 0 for none
    cut    draws from the normal distribution stay within this number of standard deviations
    bound  a uniform distribution goes from value - bound to value + bound; 0 for none
    """

    value: float = 0.0
    std: float = 0.0  # standard deviation of a normal distribution
    cut: float = math.inf  # draws stay within this many standard deviations
    bound: float = 0.0  # half-width of a uniform distribution

    def fill(self, tensor: Tensor, draws: torch.Generator) -> None:
        """Fill the tensor in place. Values are drawn in float32 on the CPU, then copied to its dtype and device."""
        exact = torch.full(tensor.shape, self.value, dtype=torch.float32, device="cpu")
        if self.bound:
            exact.uniform_(self.value - self.bound, self.value + self.bound, generator=draws)
        elif self.std and math.isfinite(self.cut):
            reach = self.cut * self.std
            nn.init.trunc_normal_(exact, self.value, self.std, self.value - reach, self.value + reach, draws)
        elif self.std:
            exact.normal_(self.value, self.std, generator=draws)
        tensor.copy_(exact)


Initializers = Mapping[str, "Initializer"]  # initializers by patterns of parameter names


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
    """Return the initializer that sets all entries to `value`."""
    return Initializer(value=value)


def normal(std: float, *, cut: float = math.inf) -> Initializer:
    """Return the initializer for a normal distribution with mean 0, truncated at `cut` standard deviations."""
    return Initializer(std=std, cut=cut)


def uniform(bound: float) -> Initializer:
    """Return the initializer for a uniform distribution from -bound to bound."""
    return Initializer(bound=bound)


def xavier() -> Initializer:
    """Return the Xavier initializer: a uniform distribution with variance 2 / (fan_in + fan_out).

    fan_in and fan_out are the numbers of inputs and outputs. Glorot and Bengio 2010.
    """
    return _Xavier()


def fan_in(gain: float = 1.0) -> Initializer:
    """Return the Kaiming (He) or LeCun initializer: a normal distribution with variance gain^2 / fan_in.

    fan_in is the number of inputs. LeCun et al. 1998 use gain 1; He et al. 2015 use gain sqrt(2) before a ReLU.
    """
    return _FanIn(gain=gain)


def init_parameters(module: nn.Module, table: Initializers, seed: int = 0) -> None:
    """Initialise every parameter and buffer of a module in place. On the meta device, only the names are checked.

    table  maps patterns of parameter names, such as `*.out.weight`, to initializers; the first match is used

    Each tensor has its own generator, seeded by `seed` and the tensor's name. So adding a layer does not change the
    values of other layers.
    """
    if check_integer("seed", seed, 0) >= 1 << 32:
        raise ConfigError(f"seed is a whole number below 2^32, not {seed}")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rules = {name: _find_initializer(name, tensor, table) for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not is_meta_or_fake(tensor):
                # torch's generator uses 32 bits of its seed; for one name, different seeds have different checksums
                rules[name].fill(tensor, make_generator(zlib.crc32(name.encode(), seed)))


def _find_initializer(name: str, tensor: Tensor, table: Initializers) -> Initializer:
    for pattern, rule in table.items():
        if fnmatchcase(name, pattern):
            return rule
    raise ConfigError(
        f"{name} {tuple(tensor.shape)} has no initial value; add a pattern that fits its name to the table "
        f"(it has: {', '.join(table)})"
    )


def _fans(tensor: Tensor) -> tuple[int, int]:
    """Return (fan_out, fan_in) of a weight: the numbers of outputs and inputs.

    For a convolution, both are multiplied by the number of entries of its kernel.
    """
    if tensor.ndim < 2:
        raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} has no inputs and outputs; use normal or constant")
    taps = math.prod(tensor.shape[2:])
    return tensor.shape[0] * taps, tensor.shape[1] * taps
