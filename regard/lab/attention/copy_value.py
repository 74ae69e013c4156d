"""When does attention copy one value?

Claim: When one score is much larger than all others: hard attention. Only differences of scores matter, so the other
    scores need not be negative: the scores 60, 30, 30 copy the first value up to 2e-13. For an error of eps among n
    keys a lead of ln((n - 1) / eps) is enough, and hardly less is enough if the other scores are equal. With a large
    beta, equal queries copy the same value, so the weights are not the identity matrix.
Measures: The weight lost to the other keys: for the three scores; for leads at the bound and slightly below it, over
    many n and eps, with equal and with different other scores; and after adding a constant to all scores. The weights
    of three equal queries and of three different queries at a large beta.
Finding: With the scores {{ n.scores|map("short", 3)|join(", ") }} the other keys have a weight of at most {{ n["weight
    of the other keys"]|at_most(2) }} together, also with a constant added to all scores. The other keys together may
    weigh eps at most. If one key leads each other key by exactly ln(number of other keys / eps), at beta = 1, they
    weigh {{ ratios|min|fixed(2) }} to {{ ratios|max|fixed(2) }} times eps, for {{ n["keys"]|min }} to {{
    n["keys"]|max|comma }} keys and eps from {{ n.errors|min|short }} to {{ n.errors|max|short }}. With a lead {{
    n.shortfall|short }} smaller they weigh more than is allowed, {{ missed|min|at_least(3) }} times eps or more. At
    beta={{ n.beta|short(4) }} the weights of three queries that match three different keys are the identity matrix up
    to {{ n["distance from the identity, different queries"]|at_most }}; those of three equal queries differ from it by
    {{ n["distance from the identity, equal queries"]|fixed(0) }}.
Budget: 2 seconds
Source: 000 1.1c, 001 1a, 002 1.1c
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import COLOURS, MARKERS, Figure, make_figure
from regard.lab.measure import attention_weights, largest_difference
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"1 - a_1 \le \sum_{j \ge 2} \exp(s_j - s_1) \le \epsilon, \quad "
    r"s_1 - s_j \ge \mathrm{ln} \frac{n - 1}{\epsilon}"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: scores that copy one value, and where the bound ln((n - 1) / eps) is tested.

    scores   scores whose first one leads by enough to copy its value
    opposed  scores of a counter-example: the first is positive and the others are negative, but the lead is at most
             2, which is too small to copy the first value
    shifts   constants that are added to all of `scores`, which must not change the weights
    keys     numbers n of keys for which the bound is tested
    errors   total weights eps of the other keys for which the bound is tested; at most 0.1, because for a larger
             eps a smaller lead is enough
    short    difference between the bound and a smaller lead, which must not be enough; at least 0.2
    beta     large inverse temperature for three equal and for three different queries
    width    width of the query and the keys that have the scores
    """

    scores: tuple[float, ...] = (60.0, 30.0, 30.0)
    opposed: tuple[float, ...] = (0.1, -0.1, -0.1)
    shifts: tuple[float, ...] = (-100.0, -60.0, -30.0, 40.0)
    keys: tuple[int, ...] = (2, 10, 100, 1000)
    errors: tuple[float, ...] = (1e-1, 1e-2, 1e-4, 1e-8)
    short: float = 0.2  # a lead this much below the bound must not be enough
    beta: float = 1000.0
    width: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, scores=2, opposed=2, short=0.2)
        if min(self.keys) < 2 or not all(0 < error <= 0.1 for error in self.errors):
            # for a larger error a smaller lead is enough
            raise setting_error(self, "keys must be at least 2, errors between 0 and 0.1", "keys", "errors")
        first, *others = self.opposed
        if not max(others) < 0 < first or first - max(others) > 2:
            text = "opposed must be a positive score and negative ones, with a lead of at most 2, which does not copy"
            raise setting_error(self, text, "opposed")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    def weights(scores: Tensor) -> Tensor:
        """Return the attention weights of a query and keys that have these scores."""
        keys = torch.nn.functional.pad(scores[:, None], (0, setup.width - 1))
        query = torch.eye(setup.width, dtype=torch.float64)[:1]
        # twice the query at half the beta gives the same scores, unless beta is used wrongly
        return attention_weights(attention, 2 * query, keys, beta=0.5)[0]

    scores = torch.tensor(setup.scores, dtype=torch.float64)
    plain = weights(scores)
    moved = max(largest_difference(weights(scores + shift), plain) for shift in setup.shifts)
    draws = make_generator(setup.seed)

    def error(lead: float, n: int, uneven: bool = False) -> float:
        """Return the total attention weight of all of `n` keys but the first, whose score is `lead`.

        uneven  whether the scores of the other keys are random between -1 and 0; otherwise they are 0
        """
        led = -torch.rand(n, generator=draws, dtype=torch.float64) * uneven
        led[0] = lead
        return weights(led)[1:].sum().item()

    def errors(less: float = 0.0, uneven: bool = False) -> list[list[float]]:
        return [[error(math.log((n - 1) / eps) - less, n, uneven) for eps in setup.errors] for n in setup.keys]

    axes = torch.eye(3, dtype=torch.float64)
    alike = attention_weights(attention, axes[:1].expand(3, 3), axes, beta=setup.beta)
    different = attention_weights(attention, axes, axes, beta=setup.beta)
    return {
        "scores": list(setup.scores),
        "weight of the first key": plain[0].item(),
        "weight of the other keys": plain[1:].sum().item(),
        "change by a constant": moved,
        "opposed scores": list(setup.opposed),
        "weight of the first key, others opposed": weights(torch.tensor(setup.opposed, dtype=torch.float64))[0].item(),
        "keys": list(setup.keys),
        "errors": list(setup.errors),
        "bounds": [[math.log((n - 1) / eps) for eps in setup.errors] for n in setup.keys],
        "error at the bound": errors(),
        "error below the bound": errors(setup.short),
        "error at the bound, other scores differ": errors(uneven=True),
        "shortfall": setup.short,
        "beta": setup.beta,
        "weights of equal queries": alike.tolist(),
        "distance from the identity, equal queries": largest_difference(alike, axes),
        "distance from the identity, different queries": largest_difference(different, axes),
    }


def verdict(numbers: Numbers) -> Decision:
    ratios, missed, others = (
        [got / eps for row in numbers[name] for got, eps in zip(row, numbers["errors"], strict=True)]
        for name in ("error at the bound", "error below the bound", "error at the bound, other scores differ")
    )
    bounded = 0 < min(others) <= max(others) <= 1 and 0.85 < min(ratios) <= max(ratios) <= 1 + 1e-9
    first, *rest = numbers["scores"]
    led = first - max(rest) >= math.log(len(rest) / 1e-12)
    equal = numbers["weights of equal queries"]
    same = equal[0] == equal[1] == equal[2] and max(equal[0]) > 0.999
    same &= numbers["distance from the identity, equal queries"] > 0.9
    same &= numbers["distance from the identity, different queries"] < 1e-9
    copied = numbers["weight of the other keys"] < 1e-12
    missing = [] if led else ["the first of the scores does not lead by enough to copy"]
    missing += [] if numbers["beta"] >= 50 else ["beta must be at least 50"]
    return decide(
        bounded and min(missed) > 1.05 and copied and same and numbers["change by a constant"] < 1e-15,
        missing="; ".join(missing),
        ratios=ratios,
        missed=missed,
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    lost = numbers["error at the bound"]
    for at, (n, leads) in enumerate(zip(numbers["keys"], numbers["bounds"], strict=True)):
        axes.plot(leads, lost[at], label=f"{n} keys", color=COLOURS[at % 7], marker=MARKERS[at % 7])
    axes.legend(frameon=False)
    axes.set(
        yscale="log", xlabel="lead of the largest score", ylabel="weight lost", title="A large lead copies a value"
    )
    return figure
