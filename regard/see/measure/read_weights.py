"""Read the attention weights of a function by calling it with v = identity: its output is then the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.see.measure.probes.probe import Probe

READINGS = 64  # with dropout, the largest of 64 readings is a weight that was kept


def read_with_identity(
    call: Callable[[Float[Tensor, "j e"]], Tensor], j: int, width: int, dtype: torch.dtype
) -> Float[Tensor, "b h i j"]:
    """Read the attention weights of a function: for v = identity, the output is the weights.

    call   function that computes the output for a given v
    j      number of keys
    width  number of columns of v in each call
    """
    columns = torch.eye(-(-j // width) * width, dtype=dtype)[:j]
    return torch.cat([call(part) for part in columns.split(width, 1)], -1)[..., :j]


@dataclass(frozen=True)
class WeightReader:
    """Reads the attention weights of a probe for any q and k of fixed sizes."""

    probe: Probe
    b: int
    h: int
    g: int
    i: int
    j: int
    c: int
    e: int | None  # None if values may have any width
    extra: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    readings: int = 1
    affine: bool = False  # v = 0 gives a nonzero output, which is subtracted
    kept_factor: float = 1.0  # dropout multiplies the weights that it keeps by this factor
    coarse: float = 0.0  # relative difference between f(3 v) and 3 f(v)
    same_for_columns: bool = True  # all columns of v are treated alike; False if a gate or a projection acts on them

    @classmethod
    def with_random_inputs(
        cls,
        probe: Probe,
        sizes: tuple[int, ...],
        e: int | None,
        extra: Mapping[str, Any],
        dtype: torch.dtype,
        seed: int,
    ) -> tuple["WeightReader", list[Tensor], list[str]]:
        """Create a reader in the first dtype that works, with random q, k and v.

        Returns the reader, the tensors q, k and v, and a list of remarks for the user.

        sizes  b, h, g, i, j and c
        e      width of v; None if any width works
        dtype  the dtype to try first; then float32 and the dtype of the probe are tried
        """
        b, h, g, i, j, c = sizes
        source, shapes = make_generator(seed), ((b, h, i, c), (b, g, j, c), (b, g, j, e or 5))
        tensors = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
        refused: Exception | None = None
        for kind in dict.fromkeys((dtype, torch.float32, probe.dtype)):
            reader = cls(probe, b, h, g, i, j, c, e, extra, kind)
            try:
                reader.output(*tensors)
            except Exception as error:  # the function of the user may raise any exception
                refused = refused or error
                continue
            notes = [] if kind == dtype else [f"measured in {kind}, since {dtype} raises {first_line(refused)}"]
            return reader, [x.to(kind).double() for x in tensors], notes
        raise ConfigError(
            f"{probe.name} raises for q {shapes[0]}, k {shapes[1]}, v {shapes[2]} in {dtype} and float32: "
            f"{first_line(refused)}; pass queries=, heads=, kv_heads= or width= if it needs certain sizes"
        )

    def __str__(self) -> str:
        lengths = f"b={self.b} h={self.h} g={self.g} i={self.i} j={self.j} c={self.c}"
        return f"{lengths} in {str(self.dtype).removeprefix('torch.')} as ({self.probe.layout})"

    @property
    def rounding(self) -> float:
        """The largest relative error of a measurement that counts as rounding error.

        This limit is at least 1e-5, because many layers compute in float32 for any dtype.
        """
        return max({torch.float64: 1e-5, torch.float32: 1e-4}.get(self.dtype, 0.05), 10 * self.coarse)

    def raw_output(self, q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Float[Tensor, "b h i e"]:
        """Call the attention under measurement and return its output in float64 on the CPU."""
        tensors = (x.to(self.probe.device, self.dtype, copy=True) for x in (q, k, v))
        return self.probe.call(*tensors, **{**self.extra, **keywords}).detach().double().cpu()

    def output(self, q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Float[Tensor, "b h i e"]:
        """Call the attention under measurement and return its output without an output bias.

        If the attention has an output bias (`affine`), its output for v = 0 is subtracted.
        """
        out = self.raw_output(q, k, v, **keywords)
        return out - self.raw_output(q, k, 0 * v, **keywords) if self.affine else out

    def value_width(self, j: int) -> int:
        """Return the number of columns of v to use for `j` keys.

        Unless the attention needs a fixed width, it is j + 3. If it were j, a scale of q . k that depends on j could
        not be distinguished from a scale that depends on the width of v.
        """
        return self.e or j + 3

    def weights_once(self, q: Tensor, k: Tensor, **keywords: object) -> Float[Tensor, "b h i j"]:
        """Read the attention weights once, with dropout if the function has it.

        If the function treats the columns of v differently, each weight is the mean over columns.
        """
        j, b = k.shape[2], len(k)
        width = self.value_width(j)
        if self.same_for_columns:
            return read_with_identity(
                lambda part: self.output(q, k, part.repeat(b, self.g, 1, 1), **keywords), j, width, torch.float64
            )
        ones = torch.eye(j, dtype=torch.float64)[..., None].expand(j, j, width)
        return torch.stack([self.output(q, k, one.repeat(b, self.g, 1, 1), **keywords).mean(-1) for one in ones], -1)

    def weights(self, q: Tensor, k: Tensor, **keywords: object) -> Float[Tensor, "b h i j"]:
        """Read the attention weights without dropout: the largest of several readings, divided by `kept_factor`.

        Dropout sets some weights of each reading to zero and multiplies the kept weights by `kept_factor`, so the
        largest reading of a weight is one in which it was kept.
        """
        read = self.weights_once(q, k, **keywords)
        for _ in range(self.readings - 1):
            read = torch.maximum(read, self.weights_once(q, k, **keywords))
        return read / self.kept_factor


@contextmanager
def training_mode(module: nn.Module | None, *, training: bool) -> Iterator[None]:
    """Context manager: set a module to training or eval mode, and restore the mode of every submodule on exit."""
    modes = {} if module is None else {part: part.training for part in module.modules()}
    if module is not None:
        module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def first_line(error: BaseException | None) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
