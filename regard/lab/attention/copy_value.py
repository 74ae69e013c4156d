"""When does attention copy one value?

Claim: When one score is much larger than all others. Only differences of scores matter, so the other scores need not be
    negative: 60, 30, 30 copies up to 2e-13. For an error of eps among n keys a lead of ln((n - 1) / eps) is enough, and
    hardly less is enough if the other scores are equal. With a large beta, equal queries copy the same value, so the
    weights are not the identity matrix.
Measures: The weight lost to the other keys: for the three scores; for leads at the bound and slightly below it, over
    many n and eps, with equal and with different other scores; and after adding a constant to all scores. The weights
    of three equal queries and of three different queries at a large beta.
Budget: 2 seconds
Source: 000 1.1c, 001 1a
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import COLOURS, MARKERS, Figure, make_figure

MATHS = (
    r"1 - a_1 \le \sum_{j \ge 2} \exp(s_j - s_1) \le \epsilon, \quad "
    r"s_1 - s_j \ge \mathrm{ln} \frac{n - 1}{\epsilon}"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Scores that copy, scores opposed to the query without a lead, and where to test the bound."""

    scores: tuple[float, ...] = (60.0, 30.0, 30.0)
    opposed: tuple[float, ...] = (0.1, -0.1, -0.1)
    shifts: tuple[float, ...] = (-100.0, -60.0, -30.0, 40.0)
    keys: tuple[int, ...] = (2, 10, 100, 1000)
    errors: tuple[float, ...] = (1e-1, 1e-2, 1e-4, 1e-8)
    short: float = 0.2  # a lead this much below the bound must not be enough
    beta: float = 1000.0
    width: int = 5
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    def weights(scores: Tensor) -> Tensor:
        """Return the weights for these scores; the query and the keys are parallel to the first axis."""
        keys = torch.nn.functional.pad(scores[:, None], (0, setup.width - 1))
        query = torch.eye(setup.width, dtype=torch.float64)[:1]
        one_hot = torch.eye(len(scores), dtype=torch.float64)
        # twice the query at half the beta gives the same scores, unless beta is used wrongly
        return attention(2 * query[None, None], keys[None, None], one_hot[None, None], beta=0.5)[0, 0, 0]

    scores = torch.tensor(setup.scores, dtype=torch.float64)
    plain = weights(scores)
    moved = max((weights(scores + shift) - plain).abs().max().item() for shift in setup.shifts)
    draws = make_generator(setup.seed)

    def error(lead: float, n: int, uneven: bool = False) -> float:
        """Return the weight lost when one score leads; the others are equal or random below it."""
        led = -torch.rand(n, generator=draws, dtype=torch.float64) * uneven
        led[0] = lead
        return weights(led)[1:].sum().item()

    bounds = [[math.log((n - 1) / eps) for eps in setup.errors] for n in setup.keys]
    enough = [[error(lead, n) for lead in row] for n, row in zip(setup.keys, bounds, strict=True)]
    short = [[error(lead - setup.short, n) for lead in row] for n, row in zip(setup.keys, bounds, strict=True)]
    uneven = [[error(lead, n, uneven=True) for lead in row] for n, row in zip(setup.keys, bounds, strict=True)]

    axes = torch.eye(3, dtype=torch.float64)

    def at_large_beta(queries: Tensor) -> Tensor:
        return attention(queries[None, None], axes[None, None], axes[None, None], beta=setup.beta)[0, 0]

    alike, different = at_large_beta(axes[:1].expand(3, 3)), at_large_beta(axes)
    return {
        "scores": list(setup.scores),
        "copied": plain[0].item(),
        "lost": plain[1:].sum().item(),
        "moved by shifts": moved,
        "opposed scores": list(setup.opposed),
        "copied when opposed": weights(torch.tensor(setup.opposed, dtype=torch.float64))[0].item(),
        "keys": list(setup.keys),
        "errors": list(setup.errors),
        "bounds": bounds,
        "lost at the bound": enough,
        "lost below the bound": short,
        "lost when others differ": uneven,
        "short": setup.short,
        "beta": setup.beta,
        "weights of equal queries": alike.tolist(),
        "equal queries off the identity": (alike - axes).abs().max().item(),
        "different queries off the identity": (different - axes).abs().max().item(),
    }


def verdict(numbers: Numbers) -> Verdict:
    eps = numbers["errors"]
    ratios = [got / want for row in numbers["lost at the bound"] for got, want in zip(row, eps, strict=True)]
    missed = [got / want for row in numbers["lost below the bound"] for got, want in zip(row, eps, strict=True)]
    others = [got / want for row in numbers["lost when others differ"] for got, want in zip(row, eps, strict=True)]
    bounded = (
        0 < min(others) <= max(others) <= 1 and 0.85 < min(ratios) <= max(ratios) <= 1 + 1e-9 and min(missed) > 1.05
    )
    copies = numbers["lost"] < 1e-12 and numbers["moved by shifts"] < 1e-15
    equal = numbers["weights of equal queries"]
    same = equal[0] == equal[1] == equal[2] and max(equal[0]) > 0.999
    same &= numbers["equal queries off the identity"] > 0.9
    identity = numbers["different queries off the identity"] < 1e-9
    shown = ", ".join(f"{score:g}" for score in numbers["scores"])
    return decide(
        bounded and copies and same and identity,
        f"Scores {shown} copy up to {numbers['lost']:.1e}, also with any constant added. At a lead of ln((n - 1) / "
        f"eps) the error is {min(ratios):.2f} to {max(ratios):.2f} eps; {numbers['short']:g} below it, at least "
        f"{min(missed):.2f} eps. At beta={numbers['beta']:g} three different queries give the identity matrix up to "
        f"{numbers['different queries off the identity']:.0g}, three equal queries differ from it by "
        f"{numbers['equal queries off the identity']:.0f}.",
    )


@wrong_answer(
    "001 1a",
    says="All keys but one must oppose the query.",
    right="One score must be larger than the others by about ln((n - 1) / eps); their signs do not matter.",
)
def _others_must_oppose(numbers: Numbers) -> Verdict:
    least, copied, opposed = min(numbers["scores"]), numbers["copied"], numbers["copied when opposed"]
    needed = least < 0 or copied < 0.99
    return decide(
        needed and opposed > 0.99,
        f"With every score at least {least:g} the first value is copied with a weight of {copied:.6f}; with all "
        f"other keys opposed but no lead its weight is only {opposed:.3f}.",
    )


@wrong_answer(
    "000 1.1c",
    says="Weights that are one-hot make A the identity matrix.",
    right="Each column is one-hot at the key with the highest score of its query; equal queries select the same key.",
)
def _large_beta_is_identity(numbers: Numbers) -> Verdict:
    off = numbers["equal queries off the identity"]
    return decide(
        off < 0.01,
        f"At beta={numbers['beta']:g} the weights of three equal queries differ from the identity matrix by {off:.2f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    lost = numbers["lost at the bound"]
    for at, (n, leads) in enumerate(zip(numbers["keys"], numbers["bounds"], strict=True)):
        axes.plot(leads, lost[at], label=f"{n} keys", color=COLOURS[at % 7], marker=MARKERS[at % 7])
    axes.legend(frameon=False)
    axes.set(
        yscale="log", xlabel="lead of the largest score", ylabel="weight lost", title="A large lead copies a value"
    )
    return figure
