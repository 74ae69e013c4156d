"""Small changes eps of a key or a query of attention, and the error of predicting the output to first order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.seeds import make_generator
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Numbers


@dataclass(frozen=True, kw_only=True)
class PerturbationSetup:
    """Settings of claims about a small change eps of one key or query of random attention inputs.

    queries      number of queries
    keys         number of keys
    width        width of queries and keys
    value_width  width of values
    sizes        standard deviations of eps, from large to small; at least two, because the order of the error is
                 measured between the two smallest
    inputs       number of random inputs
    """

    queries: int = 5
    keys: int = 11
    width: int = 8
    value_width: int = 3
    sizes: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
    inputs: int = 201
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, keys=2, sizes=2)
        if list(self.sizes) != sorted(set(self.sizes), reverse=True) or self.sizes[-1] <= 0:
            raise setting_error(self, "sizes must fall from large to small and be above 0", "sizes")

    def sample(self) -> "Inputs":
        """Sample queries, keys, values and a direction in which a key or a query is changed."""
        i, j, c, e = self.queries, self.keys, self.width, self.value_width
        shapes = [(self.inputs, 1, *shape) for shape in ((i, c), (j, c), (j, e), (1, c))]
        one_hot = torch.eye(j, dtype=torch.float64).expand(self.inputs, 1, -1, -1)
        q, k, v, direction = normal_tensors(make_generator(self.seed), *shapes)
        return Inputs(q, k, v, direction, one_hot)


class Inputs(NamedTuple):
    """Random attention inputs, and a direction in which a key or a query is changed.

    direction  standard normal vector; a key or a query is changed by a multiple of it
    one_hot    one-hot values, for which the outputs of attention are the attention weights
    """

    q: Float[Tensor, "b 1 i c"]
    k: Float[Tensor, "b 1 j c"]
    v: Float[Tensor, "b 1 j e"]
    direction: Float[Tensor, "b 1 1 c"]
    one_hot: Float[Tensor, "b 1 j j"]


def change_norm(change: Float[Tensor, "b 1 i e"]) -> Float[Tensor, "b"]:
    """Return the norm of the change of the output, for each input of the batch."""
    return change.square().flatten(1).sum(1).sqrt()


def first_order_error(
    sizes: tuple[float, ...],
    moved: Callable[[float], Float[Tensor, "b 1 i e"]],
    slope: Float[Tensor, "b 1 i e"],
) -> Numbers:
    """Measure how well the first-order prediction size * slope matches the change of the output, moved(size).

    Returns the median relative error for each size, and the order p in error ~ size^p at the two smallest
    sizes.

    sizes  sizes of eps, the change of a key or a query
    moved  function that returns the change of the output for a size of eps
    slope  derivative of the output with respect to the size of eps
    """
    errors = {size: change_norm(moved(size) - size * slope) for size in sizes}
    smaller, smallest = sizes[-2:]
    order = (errors[smaller] / errors[smallest]).log() / math.log(smaller / smallest)
    return {
        "sizes": list(sizes),
        "relative error": [(errors[size] / change_norm(size * slope)).median().item() for size in sizes],
        "order of the error": order.median().item(),
    }


def draw_first_order_error(numbers: Numbers, title: str, columns: int = 1) -> Figure:
    """Draw the relative error of the first-order prediction over the size of eps.

    columns  number of panels of the figure; the first is drawn, the others are left empty
    """
    figure, (axes, *_) = make_figure(columns=columns)
    plot_lines(axes, numbers["sizes"], {"error of the prediction": numbers["relative error"]})
    axes.set(xscale="log", yscale="log", xlabel="size of eps", ylabel="error / change", title=title)
    return figure
