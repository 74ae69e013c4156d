"""Which kinds of attention are there: self or cross, hard or soft?

Claim: Four, and one function computes all of them. Self or cross depends on whether queries and keys come from the same
    tokens or from two sets. Hard or soft depends on beta: at infinity each output is one of the values, at a finite
    beta a mixture of all. Soft attention becomes hard as beta grows.
Measures: For each kind: the number of keys, the number of nonzero weights in a row, the sums of rows, the difference of
    the weights from the formula, and the distance of outputs from the nearest value. The difference of soft from hard
    attention for growing betas.
Finding: {% for kind in n.kinds %}{% set far = n[kind]["distance to the nearest value"] %}{{ kind|capitalize if
    loop.first else kind }} attention gives {{ n[kind]["fewest nonzero weights"] }} of {{ n[kind]["keys"] }} keys a
    weight, and {% if far|max == 0 %}every output is a value{% else %}its outputs have a distance of {{ far|min|short }}
    to {{ far|max|short }} from the nearest value{% endif %}{{ "; " if not loop.last else ". " }} {%- endfor %}At
    beta={{ n.betas[-1]|short }} soft and hard differ by at most {{ n["difference of soft and hard"][-1]|at_most }}.
Budget: 1 second
Source: 000 1.1c-d, 002 1.1c-d
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.measure import normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"h_i = \sum_j a_{ij} v_j, \quad a_{ij} = \frac{\exp(\beta q_i \cdot k_j)}{\sum_l \exp(\beta q_i \cdot k_l)}"
KINDS = ("self soft", "self hard", "cross soft", "cross hard")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of two sets of tokens, and the betas between soft and hard attention.

    tokens  number of tokens of the first set, from which all queries are computed
    others  number of tokens of the second set, from which cross attention computes its keys and values
    width   width of the tokens
    betas   growing finite inverse temperatures; the last must be at least 1e6, where soft attention equals hard
            attention
    """

    tokens: int = 7
    others: int = 5
    width: int = 9
    betas: tuple[float, ...] = (1.0, 10.0, 100.0, 1e4, 1e8)
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, tokens=2, others=2, betas=2)
        if self.betas[-1] < 1e6:
            raise setting_error(self, "betas must end with at least 1e6, where soft is as hard", "betas")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    c = setup.width
    x, y, maps = normal_tensors(draws, (1, 1, setup.tokens, c), (1, 1, setup.others, c), (3, c, c))
    by_query, by_key, by_value = maps * c**-0.5
    numbers: Numbers = {"kinds": list(KINDS)}
    for kind in KINDS:
        source = x if kind.startswith("self") else y
        beta = math.inf if kind.endswith("hard") else setup.width**-0.5
        q, k, v = x @ by_query, source @ by_key, source @ by_value
        weights = attention(q, k, torch.eye(k.shape[2], dtype=torch.float64)[None, None], beta=beta)[0, 0]
        out = attention(q, k, v, beta=beta)[0, 0]
        counts = (weights > 0).sum(-1)
        numbers[kind] = {
            "keys": k.shape[2],
            "weights": weights.tolist(),
            "fewest nonzero weights": int(counts.min()),
            "most nonzero weights": int(counts.max()),
            "error of the row sums": (weights.sum(-1) - 1).abs().max().item(),
            "error of the formula": (weights - _formula(q @ k.mT, beta)[0, 0]).abs().max().item(),
            "distance to the nearest value": torch.cdist(out, v[0, 0]).amin(-1).tolist(),
        }
    q, k, v = x @ by_query, y @ by_key, y @ by_value
    hard = attention(q, k, v, beta=math.inf)
    numbers["betas"] = list(setup.betas)
    numbers["difference of soft and hard"] = [
        (attention(q, k, v, beta=beta) - hard).abs().max().item() for beta in setup.betas
    ]
    return numbers


def _formula(scores: Tensor, beta: float) -> Tensor:
    """Return the weights by the formula: softmax(beta * scores), or one-hot at the largest score if beta is inf."""
    if math.isinf(beta):
        return torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    return (beta * scores).softmax(-1)


def verdict(numbers: Numbers) -> Decision:
    holds = numbers["difference of soft and hard"][-1] < 1e-9 < numbers["difference of soft and hard"][0]
    for kind in numbers["kinds"]:
        seen, hard = numbers[kind], kind.endswith("hard")
        used = 1 if hard else seen["keys"]
        holds &= seen["fewest nonzero weights"] == seen["most nonzero weights"] == used
        holds &= seen["error of the row sums"] < 1e-14 and seen["error of the formula"] < 1e-12
        nearest = seen["distance to the nearest value"]
        holds &= max(nearest) < 1e-12 if hard else min(nearest) > 1e-6
    return decide(holds)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(columns=2, rows=2)
    for axes, kind in zip(panels, numbers["kinds"], strict=True):
        plot_heatmap(axes, numbers[kind]["weights"], high=1.0)
        axes.set(xlabel="key", ylabel="query", title=f"{kind.split()[0]}, {kind.split()[1]}")
    return figure
