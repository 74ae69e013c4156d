"""Do two heads get the mean of two values when the length of one key varies?

Claim: Yes, steadily: with q1 = s mu_a and q2 = s mu_b, the heads' mean is near (v_a + v_b) / 2 for most draws. Leaving
    out draws where k_a points away from q1, c1 is within 1 % of v_a in 89.5 % of them (s = 20, n = 10), and c2 is v_b
    in all. The reason is that each head asks for one key alone, which leads by s gamma, and not that two outputs are
    averaged: two heads that both ask for both keys jump as one does.
Measures: The weights of the two heads over many draws of keys, whose lengths are drawn evenly over their law, and the
    spread of the averaged output for this pair of queries, for one head that asks for both, and for two such heads
    averaged.
Budget: 5 seconds
Source: 001 1d
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure
from regard.lab.noisy_keys import NoisyKeysSetup, plot_histograms

MATHS = (
    r"q_1 = s \mu_a, \quad q_2 = s \mu_b, \quad c = \frac{1}{2} (c_1 + c_2), \quad "
    r"a_{1a} = \frac{\exp(s \gamma)}{\exp(s \gamma) + n - 1}"
)


@dataclass(frozen=True, kw_only=True)
class Setup(NoisyKeysSetup):
    """Keys, the scale s of the queries, and how many draws."""


SMOKE = Setup(draws=20_000)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    mu, one_hot = setup.means, setup.one_hot
    gamma = setup.lengths(draws)
    k = setup.varied(gamma, draws)

    def heads(*queries: Tensor) -> Tensor:
        """The weights of each head: both share the keys, as grouped heads do."""
        # twice the queries at half the beta: the same scores, unless beta is taken otherwise than it should be
        q = 2 * setup.size * torch.stack(queries)[:, None]
        return attention(q.expand(setup.draws, -1, -1, -1), k, one_hot, beta=0.5)[:, :, 0]

    apart = heads(mu[0], mu[1])
    alike = heads(mu[0] + mu[1], mu[0] + mu[1])
    towards = gamma > 0  # the sheet leaves the other draws out
    first, second = apart[towards, 0, 0], apart[towards, 1, 1]
    predicted = torch.sigmoid(setup.size * gamma - math.log(setup.keys - 1))
    mean = apart.mean(1)
    length = NormalDist(1, setup.variance**0.5)
    least = math.log(99 * (setup.keys - 1)) / setup.size  # the gamma at which a weighs 0.99
    middle = (mean[:, :2] - 0.5).abs().amax(1) < 0.01
    return {
        "size": setup.size,
        "keys": setup.keys,
        "draws": setup.draws,
        "draws kept": towards.double().mean().item(),
        "c1 near v_a": (first > 0.99).double().mean().item(),
        "by the normal law": (1 - length.cdf(least)) / (1 - length.cdf(0)),
        "c1 near v_a, all draws": (apart[:, 0, 0] > 0.99).double().mean().item(),
        "c2 off v_b": (second - 1).abs().max().item(),
        "c near the mean": middle[towards].double().mean().item(),
        "off the formula": (apart[:, 0, 0] - predicted).abs().max().item(),
        "spread of c, two heads": mean[towards, 0].std().item(),
        "spread of c1 alone": first.std().item(),
        "spread of c, one head": alike[towards, 0, 0].std().item(),
        "spread of c, two equal heads": alike.mean(1)[towards, 0].std().item(),
        "histogram": setup.histogram(mean[towards, 0]),
        "histogram of one head": setup.histogram(alike[towards, 0, 0]),
    }


def verdict(numbers: Numbers) -> Verdict:
    near, two, one = numbers["c1 near v_a"], numbers["spread of c, two heads"], numbers["spread of c, one head"]
    law = numbers["by the normal law"]
    margin = 5 / numbers["draws"]  # lengths are drawn evenly: a share is off by few of them
    steady = numbers["c2 off v_b"] < 1e-6 and two < one / 4
    alike = abs(numbers["spread of c, two equal heads"] - one) < 1e-9  # averaging by itself steadies nothing
    return decide(
        steady and alike and abs(near - law) < margin and numbers["off the formula"] < 1e-3,
        f"With s={numbers['size']:g} and {numbers['keys']} keys, c1 is within 1 % of v_a in {near:.1%} of the draws "
        f"where k_a points its way, {law:.1%} by the normal law ({numbers['c1 near v_a, all draws']:.1%} of all), and "
        f"c2 is never more than {numbers['c2 off v_b']:.0g} off v_b. The weight of a in their mean has a standard "
        f"deviation of {two:.3f}, in one head that asks for both {one:.3f}, and in "
        f"two such heads {numbers['spread of c, two equal heads']:.3f}.",
    )


@wrong_answer(
    "001 1d",
    says="The output is steady because averaging the two heads evens out the length of the key.",
    right="Each head is steady by itself: it asks for one key, which leads all others unless gamma is near 0.",
)
def _averaging_steadies(numbers: Numbers) -> Verdict:
    one, equal = numbers["spread of c, one head"], numbers["spread of c, two equal heads"]
    return decide(
        equal < 0.75 * one,
        f"Two heads that each ask for both keys, averaged, spread by {equal:.3f}, as much as one such head "
        f"({one:.3f}); and c1, averaged with nothing, spreads by {numbers['spread of c1 alone']:.3f} only.",
    )


def draw(numbers: Numbers) -> Figure:
    return plot_histograms(
        {"two heads, a key each": numbers["histogram"]},
        {"one head, both keys": numbers["histogram of one head"]},
        xlabel="weight of a in c",
        title=f"Two heads hold still, s = {numbers['size']:g}",
    )
