"""The eye: it asks an attention with q, k and v of its choice, and reads weights by v = identity."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.see.adapters import Probe

READINGS = 64  # of an attention that draws at random: the largest of so many are the weights it kept


@dataclass(frozen=True)
class Eye:
    """The attention, the sizes it is asked with, and how its weights are read."""

    probe: Probe
    b: int
    h: int
    g: int
    i: int
    j: int
    c: int
    e: int | None  # None where values may be as wide as wanted
    extra: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    readings: int = 1
    affine: bool = False  # v = 0 gives something of its own, which is taken off
    larger: float = 1.0  # what dropout keeps is larger by this factor
    coarse: float = 0.0  # how far the answer to three times v is from three times the answer
    alike: bool = True  # every coordinate of v goes the same way; else a gate or a map acts on them

    def settled(self, dtype: torch.dtype, seed: int) -> tuple["Eye", list[Tensor], list[str]]:
        """The eye in a dtype that is taken, with drawn q, k and v, and what there is to note."""
        b, h, g, i, j, c = self.b, self.h, self.g, self.i, self.j, self.c
        source, shapes = make_generator(seed), ((b, h, i, c), (b, g, j, c), (b, g, j, self.e or 5))
        drawn = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
        refused: Exception | None = None
        for kind in dict.fromkeys((dtype, torch.float32, self.probe.dtype)):
            eye = replace(self, dtype=kind)
            try:
                eye.ask(*drawn)
            except Exception as error:  # whatever a function of somebody else raises is its refusal
                refused = refused or error
                continue
            notes = [] if kind == dtype else [f"asked in {kind}, since {dtype} was refused: {first_line(refused)}"]
            return eye, [x.to(kind).double() for x in drawn], notes
        raise ConfigError(
            f"{self.probe.name} refused q {shapes[0]}, k {shapes[1]}, v {shapes[2]} in {dtype} and float32: "
            f"{first_line(refused)}; say queries=, heads=, kv_heads= or width= where it needs certain ones"
        )

    def __str__(self) -> str:
        lengths = f"b={self.b} h={self.h} g={self.g} i={self.i} j={self.j} c={self.c}"
        return f"{lengths} in {str(self.dtype).removeprefix('torch.')} as ({self.probe.layout})"

    @property
    def rounding(self) -> float:
        """What may be left of a fit and still be rounding; layers compute parts in float32 even where asked in more."""
        return max({torch.float64: 1e-5, torch.float32: 1e-4}.get(self.dtype, 0.05), 10 * self.coarse)

    def answer(self, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Float[Tensor, "b h i e"]:
        asked = (x.to(self.probe.device, self.dtype) for x in (q, k, v))
        return self.probe.call(*asked, **{**self.extra, **more}).double().cpu()

    def ask(self, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Float[Tensor, "b h i e"]:
        """The part of the answer that v makes."""
        out = self.answer(q, k, v, **more)
        return out - self.answer(q, k, 0 * v, **more) if self.affine else out

    def once(self, q: Tensor, k: Tensor, **more: object) -> Float[Tensor, "b h i j"]:
        """The weights by v = identity, a slice at a time where values cannot be as wide as there are keys.

        Where coordinates do not go alike, each key in turn is one in all of them, and their mean is its weight.
        """
        j = k.shape[2]
        if not self.alike:
            one = torch.eye(j, dtype=torch.float64)[..., None].expand(j, j, self.e or j)
            return torch.stack([self.ask(q, k, key.repeat(len(k), self.g, 1, 1), **more).mean(-1) for key in one], -1)
        e = self.e or j
        one = torch.eye(-(-j // e) * e, dtype=torch.float64)[:j]
        parts = [self.ask(q, k, part.repeat(len(k), self.g, 1, 1), **more) for part in one.split(e, -1)]
        return torch.cat(parts, -1)[..., :j]

    def weights(self, q: Tensor, k: Tensor, **more: object) -> Float[Tensor, "b h i j"]:
        """The weights; of several readings the largest, which is the weight wherever it was not dropped."""
        read = self.once(q, k, **more)
        for _ in range(self.readings - 1):
            read = torch.maximum(read, self.once(q, k, **more))
        return read / self.larger


@contextmanager
def training_mode(module: nn.Module | None, *, training: bool) -> Iterator[None]:
    """A module in training or in eval mode for a while; every part gets its own mode back."""
    modes = {} if module is None else {part: part.training for part in module.modules()}
    if module is not None:
        module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
