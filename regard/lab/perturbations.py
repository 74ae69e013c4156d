"""Small changes of what attention is given, and how far a prediction to first order is off what they do."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.seeds import make_generator
from regard.lab.claim import Numbers


@dataclass(frozen=True, kw_only=True)
class PerturbationSetup:
    """Sizes, standard deviations of the entries of eps from large to small, and how many inputs to take medians of."""

    queries: int = 5
    keys: int = 11
    width: int = 8
    value_width: int = 3
    sizes: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
    inputs: int = 201
    seed: int = 0

    def sample(self) -> "Inputs":
        draws = make_generator(self.seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(self.inputs, 1, *sizes, generator=draws, dtype=torch.float64)

        return Inputs(
            q=normal(self.queries, self.width),
            k=normal(self.keys, self.width),
            v=normal(self.keys, self.value_width),
            direction=normal(1, self.width),
            one_hot=torch.eye(self.keys, dtype=torch.float64).expand(self.inputs, 1, -1, -1),
        )


class Inputs(NamedTuple):
    """What attention is given, the direction of the nudge, and values of which the outputs are the weights."""

    q: Float[Tensor, "b 1 i c"]
    k: Float[Tensor, "b 1 j c"]
    v: Float[Tensor, "b 1 j e"]
    direction: Float[Tensor, "b 1 1 c"]
    one_hot: Float[Tensor, "b 1 j j"]


def change_norm(change: Float[Tensor, "b 1 i e"]) -> Float[Tensor, "b"]:
    """The length of each input's change."""
    return change.square().flatten(1).sum(1).sqrt()


def first_order_error(
    sizes: tuple[float, ...],
    moved: Callable[[float], Float[Tensor, "b 1 i e"]],
    slope: Float[Tensor, "b 1 i e"],
) -> Numbers:
    """How far size times slope is off the change that moved(size) makes, in medians, and how that grows with size."""
    errors = {size: change_norm(moved(size) - size * slope) for size in sizes}
    smaller, smallest = sizes[-2:]
    order = (errors[smaller] / errors[smallest]).log() / math.log(smaller / smallest)
    return {
        "sizes": list(sizes),
        "relative error": [(errors[size] / change_norm(size * slope)).median().item() for size in sizes],
        "order of the error": order.median().item(),
    }
