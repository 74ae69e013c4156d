"""Do two heads return the mean of two values if the keys are random?

Claim: With a tiny isotropic noise they do: with the queries q1 = s mu_a and q2 = s mu_b, where mu_a and mu_b are the
    means of the two keys, the mean of the heads is (v_a + v_b) / 2 in every draw. If the length gamma of k_a is random,
    gamma ~ N(1, 1/2), the mean of the heads is near (v_a + v_b) / 2 in most draws. Among the draws with gamma > 0, the
    output c1 of the first head is within 1 % of v_a in 89.5 % (s = 20, n = 10), and the output c2 of the second head is
    v_b in all. The reason is that each head selects one key, which has a lead of s gamma. Averaging two outputs is not
    the reason: two heads that both select both keys vary as much as one.
Measures: The weights of the two heads over many random draws of keys, with tiny noise and with a random length of k_a
    (stratified over its distribution). The standard deviation of the averaged output for this pair of queries, for one
    head that selects both keys, and for the average of two such heads.
Finding: With s={{ n.size|short }}, {{ n["keys"] }} keys and tiny noise, the mean of the two heads has weights on a and
    b that differ from one half by at most {{ n["distance from one half, tiny noise"]|at_most }} in {{ n.draws|comma }}
    draws. With a random length gamma of k_a, head 1 returns v_a within 1 % in {{ n["share of c1 near v_a"]|percent(1)
    }} of the draws with gamma > 0 ({{ n["expected share"]|percent(1) }} expected from the normal distribution; {{
    n["share of c1 near v_a, all draws"]|percent(1) }} of all draws), and head 2 returns v_b: its weight on b differs
    from 1 by at most {{ n["distance of c2 from v_b"]|at_most }}. In the mean of both heads, the weight on a has a
    standard deviation of {{ n["standard deviation of c, two heads"]|fixed(3) }} over the draws with gamma > 0. In one
    head that selects both keys it is {{ n["standard deviation of c, one head"]|fixed(3) }}, and in the mean of two such
    heads {{ n["standard deviation of c, two equal heads"]|fixed(3) }}.
Budget: 5 seconds
Source: 000 1.4c, 001 1d-i, 001 1d-ii, 002 1.4c
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure
from regard.lab.noisy_keys import NoisyKeysSetup, plot_histograms
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"q_1 = s \mu_a, \quad q_2 = s \mu_b, \quad c = \frac{1}{2} (c_1 + c_2), \quad "
    r"a_{1a} = \frac{\exp(s \gamma)}{\exp(s \gamma) + n - 1}"
)


@dataclass(frozen=True, kw_only=True)
class Setup(NoisyKeysSetup):
    """The settings of `NoisyKeysSetup`: the keys, the scale s of the queries, and the number of draws."""


SMOKE = Setup(draws=20_000)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    mu, one_hot = setup.means, setup.one_hot
    gamma = setup.sample_lengths(draws)
    k = setup.scale_first_key(gamma, draws)
    steady = setup.sample_keys(draws)

    def heads(k: Tensor, *queries: Tensor) -> Tensor:
        """Return the attention weights of heads with one query each; all heads have the same keys `k`."""
        # twice the queries at half the beta give the same scores, unless beta is used wrongly
        q = 2 * setup.size * torch.stack(queries)[:, None]
        return attention(q.expand(setup.draws, -1, -1, -1), k, one_hot, beta=0.5)[:, :, 0]

    tiny_noise = heads(steady, mu[0], mu[1]).mean(1)
    apart = heads(k, mu[0], mu[1])
    alike = heads(k, mu[0] + mu[1], mu[0] + mu[1])
    towards = gamma > 0  # the sheet excludes the other draws
    first, second = apart[towards, 0, 0], apart[towards, 1, 1]
    predicted = torch.sigmoid(setup.size * gamma - math.log(setup.keys - 1))
    mean = apart.mean(1)
    length = NormalDist(1, setup.variance**0.5)
    least = math.log(99 * (setup.keys - 1)) / setup.size  # the gamma at which the weight of a is 0.99
    middle = (mean[:, :2] - 0.5).abs().amax(1) < 0.01
    return {
        "size": setup.size,
        "keys": setup.keys,
        "draws": setup.draws,
        "distance from one half, tiny noise": (tiny_noise[:, :2] - 0.5).abs().max().item(),
        "share of draws with gamma > 0": towards.double().mean().item(),
        "share of c1 near v_a": (first > 0.99).double().mean().item(),
        "expected share": (1 - length.cdf(least)) / (1 - length.cdf(0)),
        "share of c1 near v_a, all draws": (apart[:, 0, 0] > 0.99).double().mean().item(),
        "distance of c2 from v_b": (second - 1).abs().max().item(),
        "share of c near the mean": middle[towards].double().mean().item(),
        "error of the formula": (apart[:, 0, 0] - predicted).abs().max().item(),
        "standard deviation of c, two heads": mean[towards, 0].std().item(),
        "standard deviation of c1": first.std().item(),
        "standard deviation of c, one head": alike[towards, 0, 0].std().item(),
        "standard deviation of c, two equal heads": alike.mean(1)[towards, 0].std().item(),
        "histogram": setup.histogram(mean[towards, 0]),
        "histogram of one head": setup.histogram(alike[towards, 0, 0]),
    }


def verdict(numbers: Numbers) -> Decision:
    two, one, equal = (
        numbers[f"standard deviation of c, {kind}"] for kind in ("two heads", "one head", "two equal heads")
    )
    margin = 5 / numbers["draws"]  # lengths are stratified, so a share is wrong by a few draws at most
    exact = abs(numbers["share of c1 near v_a"] - numbers["expected share"]) < margin
    exact &= abs(equal - one) < 1e-9  # averaging alone does not reduce the variance of equal heads
    large = numbers["size"] >= 20
    steady = numbers["distance of c2 from v_b"] < 1e-6 and two < one / 4
    steady &= numbers["distance from one half, tiny noise"] < 1e-6
    return decide(
        exact and numbers["error of the formula"] < 1e-3 and steady,
        missing="" if large else "s must be at least 20",
    )


def draw(numbers: Numbers) -> Figure:
    histograms = {
        "two heads, one key each": numbers["histogram"],
        "one head, both keys": numbers["histogram of one head"],
    }
    return plot_histograms(histograms, xlabel="weight of a in c", title=f"Two heads, s = {numbers['size']:g}")
