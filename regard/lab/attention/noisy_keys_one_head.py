"""Does one head still return the mean of two values if the keys are random?

Claim: With a tiny isotropic noise it does: the query s (mu_a + mu_b), where mu_a and mu_b are the means of the two
    keys, returns the mean of their values. If the length gamma of k_a is random, gamma ~ N(1, 1/2), it does not: the
    weight of k_a is 1 / (1 + exp(-s (gamma - 1))). For s = 20 the output is near v_a in about 37 % of draws, near v_b
    in about 37 %, and in between for the rest.
Measures: The weights that `attend` gives to many random draws of keys (stratified over the distribution of the length),
    against that formula. The fractions of draws whose weight is within 1 % of v_a and of v_b.
Finding: With tiny noise the weights of a and b differ from one half by at most {{ n["distance from one half, tiny
    noise"]|at_most }}. With a random length gamma of k_a and s={{ n.size|short }} the output is within 1 % of v_a in {{
    n["share near v_a"]|percent(1) }} and of v_b in {{ n["share near v_b"]|percent(1) }} of {{ n.draws|comma }} draws,
    expected {{ n["expected share"]|percent(1) }} each from the normal distribution. The weight of a differs from 1 / (1
    + exp(-s (gamma - 1))) by at most {{ n["error of the formula"]|at_most }}.
Budget: 5 seconds
Source: 001 1c-i, 001 1c-ii
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure
from regard.lab.noisy_keys import NoisyKeysSetup, plot_histograms
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"k_a = \gamma \mu_a, \quad \gamma \sim N(1, \frac{1}{2}): a_a = \frac{1}{1 + \exp(-s (\gamma - 1))}"


@dataclass(frozen=True, kw_only=True)
class Setup(NoisyKeysSetup):
    """The settings of `NoisyKeysSetup`: the keys, the scale s of the query, and the number of draws."""


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
        "distance from one half, tiny noise": (steady[:, :2] - 0.5).abs().max().item(),
        "error of the formula": (weights[:, 0] - predicted).abs().max().item(),
        "expected share": 1 - NormalDist(0, setup.variance**0.5).cdf(math.log(99) / setup.size),
        "share near v_a": near_a.double().mean().item(),
        "share near v_b": near_b.double().mean().item(),
        "share in between": (~near_a & ~near_b).double().mean().item(),
        "standard deviation of the weight": weights[:, 0].std().item(),
        "histogram": setup.histogram(weights[:, 0]),
        "histogram, tiny noise": setup.histogram(steady[:, 0]),
    }


def verdict(numbers: Numbers) -> Decision:
    law = numbers["expected share"]
    margin = 5 / numbers["draws"]  # lengths are stratified, so a share is wrong by a few draws at most
    shares = all(abs(numbers[near] - law) < margin for near in ("share near v_a", "share near v_b"))
    exact = numbers["distance from one half, tiny noise"] < 1e-3 and numbers["error of the formula"] < 1e-3
    missing = "" if law > 0.3 else "s must be larger for the output to jump"
    return decide(exact and shares, missing=missing)


def draw(numbers: Numbers) -> Figure:
    histograms = {"random length of k_a": numbers["histogram"], "tiny noise": numbers["histogram, tiny noise"]}
    return plot_histograms(histograms, xlabel="weight of a", title=f"One head, s = {numbers['size']:g}")
