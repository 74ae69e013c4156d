"""When is self-attention a linear layer applied to each token?

Claim: When every token attends only to itself, A = I. Then H = W_v C, the same linear map at every position, which is a
    convolution with kernel 1. Adding the same number to all scores does not do this; it changes nothing.
Measures: Attention with one-hot positions as queries and keys and hard weights, in whole numbers so that nothing is
    rounded, against conv1d with kernel 1. The weights before and after adding 1 to every score.
Budget: 2 seconds
Source: 000 1.3d
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_bars

MATHS = r"A = I, \quad H = W_v C A = W_v C"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of tokens, their width, and the output width."""

    width: int = 16
    out: int = 12
    length: int = 29
    seed: int = 0


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
        "error": float((attended - convolved).abs().max()),
        "largest output": float(convolved.abs().max()),
        "change of weights by a bias of 1": float((shifted - plain).abs().max()),
        "difference with biases of 1": float((biased - convolved).abs().max()),
    }


def verdict(numbers: Numbers) -> Verdict:
    return decide(
        numbers["error"] == 0 and numbers["largest output"] > 0 and numbers["change of weights by a bias of 1"] < 1e-12,
        f"With A = I attention and conv1d of kernel 1 differ by {numbers['error']:g}, for outputs up to "
        f"{numbers['largest output']:g}. A bias of 1 on every score changes the weights by "
        f"{numbers['change of weights by a bias of 1']:.0g}.",
    )


@wrong_answer(
    "000 1.3d",
    says="When the biases of attention are all 1.",
    right="Equal biases cancel in the softmax. Each token must attend only to itself, A = I.",
)
def _equal_biases(numbers: Numbers) -> Verdict:
    off = numbers["difference with biases of 1"]
    return decide(off < 1e-9, f"If every score is 1, the outputs differ by up to {off:.0f}: they are all the mean.")


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_bars(axes, {"A = I": numbers["error"], "all scores 1": numbers["difference with biases of 1"]})
    axes.set(xlabel="weights", ylabel="largest difference from conv1d", title="A convolution of kernel 1")
    return figure
