"""When is self-attention a linear layer applied to each token?

Claim: When every token attends only to itself, A = I. Then H = W_v C, the same linear map at every position, which is a
    convolution with kernel 1. Adding the same number to all scores does not do this; it changes nothing.
Measures: Attention with one-hot positions as queries and keys and hard weights, in whole numbers so that nothing is
    rounded, against conv1d with kernel 1. The weights before and after adding 1 to every score.
Finding: With A = I attention and conv1d of kernel 1 differ by {{ n.error|short }}, for outputs up to {{ n["largest
    output"]|fixed(0) }}. A bias of 1 on every score changes the weights by at most {{ n["change of weights by a bias of
    1"]|at_most }}. An output of the convolution reads {{ n["positions read"] }} position: its own.
Budget: 2 seconds
Source: 000 1.3d
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, bar_figure
from regard.lab.measure import largest_difference
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"A = I, \quad H = W_v C A = W_v C"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of the layer.

    width   number of input channels
    out     number of output channels
    length  number of tokens
    """

    width: int = 16
    out: int = 12
    length: int = 29
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, length=2)


SMOKE = Setup(width=5, out=3, length=7)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n = setup.length
    c = torch.randint(-9, 10, (1, setup.width, n), generator=draws).double()  # e x n, as in the sheet
    w_v = torch.randint(-9, 10, (setup.out, setup.width), generator=draws).double()
    values = (w_v @ c).mT[:, None]
    places = torch.eye(n, dtype=torch.float64)[None, None]
    attended = attention(places, places, values, beta=math.inf)[:, 0].mT
    convolved = functional.conv1d(c, w_v[:, :, None])
    scores = torch.randn(1, 1, n, n, generator=draws, dtype=torch.float64)
    zeros = torch.zeros_like(places)
    plain, shifted = (attention(zeros, zeros, places, scores=extra, beta=1.0) for extra in (scores, scores + 1))
    biased = attention(zeros, zeros, values, scores=torch.ones_like(scores), beta=1.0)[:, 0].mT
    return {
        "length": n,
        "error": largest_difference(attended, convolved),
        "largest output": float(convolved.abs().max()),
        "change of weights by a bias of 1": largest_difference(shifted, plain),
        "difference with biases of 1": largest_difference(biased, convolved),
        "positions read": _positions_read(c, w_v),
    }


def _positions_read(c: Tensor, w_v: Tensor) -> int:
    """Count the input positions at which the middle output of a convolution has a nonzero gradient.

    c    the input of the convolution
    w_v  its weights of kernel size 1
    """
    start = c.clone().requires_grad_()
    functional.conv1d(start, w_v[:, :, None])[0, :, c.shape[2] // 2].square().sum().backward()
    return 0 if start.grad is None else int((start.grad[0].abs().amax(0) > 0).sum())


def verdict(numbers: Numbers) -> Decision:
    exact = numbers["error"] == 0 and numbers["change of weights by a bias of 1"] < 1e-12
    read = numbers["positions read"]
    return decide(
        exact and numbers["largest output"] > 0 and read == 1,
        missing="" if read else "an output of the convolution has only weights of 0",
    )


def draw(numbers: Numbers) -> Figure:
    differences = {"A = I": numbers["error"], "all scores 1": numbers["difference with biases of 1"]}
    labels = {"xlabel": "weights", "ylabel": "largest difference from conv1d", "title": "A convolution of kernel 1"}
    return bar_figure(differences, **labels)
