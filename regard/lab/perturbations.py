"""Small changes of the inputs of attention, and the error of a first-order prediction."""

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
    """Sizes of the inputs, standard deviations of eps from large to small, and the number of random inputs."""

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
    """Inputs of attention, the direction of the change, and one-hot values."""

    q: Float[Tensor, "b 1 i c"]
    k: Float[Tensor, "b 1 j c"]
    v: Float[Tensor, "b 1 j e"]
    direction: Float[Tensor, "b 1 1 c"]
    one_hot: Float[Tensor, "b 1 j j"]


def change_norm(change: Float[Tensor, "b 1 i e"]) -> Float[Tensor, "b"]:
    """Return the norm of the change for each input."""
    return change.square().flatten(1).sum(1).sqrt()


def first_order_error(
    sizes: tuple[float, ...],
    moved: Callable[[float], Float[Tensor, "b 1 i e"]],
    slope: Float[Tensor, "b 1 i e"],
) -> Numbers:
    """Return the median relative error of size * slope against moved(size), and how the error grows with size."""
    errors = {size: change_norm(moved(size) - size * slope) for size in sizes}
    smaller, smallest = sizes[-2:]
    order = (errors[smaller] / errors[smallest]).log() / math.log(smaller / smallest)
    return {
        "sizes": list(sizes),
        "relative error": [(errors[size] / change_norm(size * slope)).median().item() for size in sizes],
        "order of the error": order.median().item(),
    }
