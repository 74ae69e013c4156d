"""What does beta do to the weights?

Claim: The larger beta, the sharper the weights: near 0 all keys weigh alike, 1/m each; far above, the key with the
    largest score has it all. d ** -0.5 is convenient, because it keeps the variance of scores at 1 whatever the width.
Measures: The weights that `attend` gives to scores 1, 2, 3, 4 at several betas; the variance of q . k for random
    vectors of width d, with and without d ** -0.5.
Budget: 2 seconds
Source: 000 1.1b, 002 1.1b
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Sheet, Verdict, judged
from regard.lab.drawing import figure, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATHS = r"a_j = \frac{\exp(\beta s_j)}{\sum_l \exp(\beta s_l)}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Scores to weigh, betas to weigh them with, and how many random pairs of what width to take variances over."""

    scores: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    betas: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    width: int = 64
    pairs: int = 400_000
    seed: int = 0


SMOKE = Setup(pairs=20_000)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    k = torch.tensor(setup.scores, dtype=torch.float64)[None, None, :, None]  # one number wide, so q = 1 scores k
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.eye(k.shape[2], dtype=torch.float64)[None, None]
    weights = {beta: attention(q, k, v, beta=beta)[0, 0, 0].tolist() for beta in setup.betas}
    draws = torch.Generator().manual_seed(setup.seed)
    a, b = torch.randn(2, setup.pairs, setup.width, generator=draws, dtype=torch.float64)
    products = (a * b).sum(-1)
    return {
        "scores": list(setup.scores),
        "betas": list(setup.betas),
        "weights": list(weights.values()),
        "variance": products.var().item(),
        "scaled variance": (products * setup.width**-0.5).var().item(),
        "width": setup.width,
    }


def verdict(numbers: Numbers) -> Verdict:
    flat, sharp = numbers["weights"][0], numbers["weights"][-1]
    best = max(range(len(sharp)), key=numbers["scores"].__getitem__)
    even = max(abs(w - 1 / len(flat)) for w in flat) < 0.01
    holds = even and sharp[best] > 0.999 and abs(numbers["scaled variance"] - 1) < 0.05
    shown = ", ".join(f"{w:.3f}" for w in flat)
    return judged(
        holds,
        f"At beta={numbers['betas'][0]:g} the weights are {shown}; at beta={numbers['betas'][-1]:g} the largest score "
        f"has {sharp[best]:.3f}. The variance of scores of width {numbers['width']} is {numbers['variance']:.1f}, and "
        f"{numbers['scaled variance']:.2f} with d ** -0.5.",
    )


def _small_is_one_hot(numbers: Numbers) -> Verdict:
    largest = max(numbers["weights"][0])
    return judged(largest > 0.99, f"At beta={numbers['betas'][0]:g} the largest weight is {largest:.3f}, not 1.")


SHEET = (
    Sheet(
        source="000 1.1b",
        says="A small beta makes the weights one-hot.",
        verdict=_small_is_one_hot,
        right="A large beta makes them one-hot, at the largest score; a small one makes all of them 1/m.",
    ),
)


def draw(numbers: Numbers) -> "Figure":
    made, (axes,) = figure()
    columns = zip(numbers["scores"], zip(*numbers["weights"], strict=True), strict=True)
    lines(axes, numbers["betas"], {f"score {score:g}": weights for score, weights in columns})
    axes.set(xscale="log", xlabel="beta", ylabel="weight", title="Larger beta, sharper weights")
    return made
