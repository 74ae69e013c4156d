"""Does one head still return the mean of two values if the keys are random?

Claim: With a tiny isotropic noise it does: the query s (mu_a + mu_b) returns the mean. If the length gamma of k_a is
    random, gamma ~ N(1, 1/2), it does not: the weight of a is sigma(s (gamma - 1)). For s = 20 the output is near v_a
    in about 37 % of draws, near v_b in about 37 %, and in between for the rest.
Measures: The weights that `attend` gives to many random draws of keys (stratified over the distribution of the length),
    against that formula. The shares of draws whose weight is within 1 % of v_a and of v_b.
Budget: 5 seconds
Source: 001 1c
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure
from regard.lab.noisy_keys import NoisyKeysSetup, plot_histograms

MATHS = r"k_a = \gamma \mu_a, \quad \gamma \sim N(1, \frac{1}{2}): a_a = \frac{1}{1 + \exp(-s (\gamma - 1))}"


@dataclass(frozen=True, kw_only=True)
class Setup(NoisyKeysSetup):
    """The keys, the scale s of the query, and the number of draws."""


SMOKE = Setup(draws=20_000)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    mu, one_hot = setup.means, setup.one_hot
    # twice the query at half the beta gives the same scores, unless beta is used wrongly
    q = (2 * setup.size * (mu[0] + mu[1])).expand(setup.draws, 1, 1, -1)
    steady = attention(q, setup.sample_keys(draws), one_hot, beta=0.5)[:, 0, 0]
    gamma = setup.sample_lengths(draws)
    weights = attention(q, setup.scale_first_key(gamma, draws), one_hot, beta=0.5)[:, 0, 0]
    predicted = torch.sigmoid(setup.size * (gamma - 1))
    near_a, near_b = (weights[:, at] > 0.99 for at in (0, 1))
    return {
        "size": setup.size,
        "draws": setup.draws,
        "steady: off one half": (steady[:, :2] - 0.5).abs().max().item(),
        "off the formula": (weights[:, 0] - predicted).abs().max().item(),
        "by the normal law": 1 - NormalDist(0, setup.variance**0.5).cdf(math.log(99) / setup.size),
        "near a": near_a.double().mean().item(),
        "near b": near_b.double().mean().item(),
        "between": (~near_a & ~near_b).double().mean().item(),
        "spread of the weight": weights[:, 0].std().item(),
        "histogram": setup.histogram(weights[:, 0]),
        "steady histogram": setup.histogram(steady[:, 0]),
    }


def verdict(numbers: Numbers) -> Verdict:
    steady = numbers["steady: off one half"] < 1e-3
    law = numbers["by the normal law"]
    margin = 5 / numbers["draws"]  # lengths are stratified, so a share is wrong by a few draws at most
    jumps = law > 0.25 and all(abs(numbers[near] - law) < margin for near in ("near a", "near b"))
    return decide(
        steady and jumps and numbers["off the formula"] < 1e-3,
        f"With tiny noise both weights differ from one half by at most {numbers['steady: off one half']:.0g}. With a "
        f"random length and s={numbers['size']:g} the output is within 1 % of v_a in {numbers['near a']:.1%} and of "
        f"v_b in {numbers['near b']:.1%} of {numbers['draws']} draws, expected {law:.1%} from the normal "
        f"distribution. The error of sigma(s (gamma - 1)) is at most {numbers['off the formula']:.0g}.",
    )


def draw(numbers: Numbers) -> Figure:
    return plot_histograms(
        {"random length of k_a": numbers["histogram"]},
        {"tiny noise": numbers["steady histogram"]},
        xlabel="weight of a",
        title=f"One head, s = {numbers['size']:g}",
    )
