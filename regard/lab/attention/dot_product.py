"""What is the output H of dot-product attention, and what is its size?

Claim: With queries Q (d x n), keys K (d x m) and values V (t x m) as columns, A = softargmax(K' Q) over each column is
    m x n and H = V A is t x n. With rows instead of columns, as in `attend`, both are transposed and nothing else
    changes.
Measures: The weights and the output of `attend` on rows against the formula on columns, their sizes, and the sums of
    the weights over the keys.
Budget: 1 second
Source: 000 1.1a, 002 1.1a
"""

from dataclasses import dataclass

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.softargmax import softargmax
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_heatmap

MATHS = r"H = V A \in R^{t \times n}, \quad A = \mathrm{softargmax}_\beta(K^\top Q) \in R^{m \times n}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes of the question: d, n queries, m keys, t."""

    width: int = 6
    queries: int = 4
    keys: int = 5
    value_width: int = 3
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    Q = torch.randn(setup.width, setup.queries, generator=draws, dtype=torch.float64)
    K = torch.randn(setup.width, setup.keys, generator=draws, dtype=torch.float64)
    V = torch.randn(setup.value_width, setup.keys, generator=draws, dtype=torch.float64)
    A = softargmax(K.mT @ Q, setup.width**-0.5, axis=0)
    H = V @ A
    one_hot = torch.eye(setup.keys, dtype=torch.float64)  # one-hot values return the weights
    rows = attention(Q.mT[None, None], K.mT[None, None], V.mT[None, None])[0, 0]
    weights = attention(Q.mT[None, None], K.mT[None, None], one_hot[None, None])[0, 0]
    return {
        "size of Q, K, V": [list(Q.shape), list(K.shape), list(V.shape)],
        "size of A": list(weights.mT.shape),
        "size of H": list(rows.mT.shape),
        "A": weights.mT.tolist(),
        "H": rows.mT.tolist(),
        "difference of A": (weights.mT - A).abs().max().item(),
        "difference of H": (rows.mT - H).abs().max().item(),
        "column sums off one by": (weights.sum(1) - 1).abs().max().item(),
    }


def verdict(numbers: Numbers) -> Verdict:
    (_, n), (_, m), (t, _) = numbers["size of Q, K, V"]
    sizes = numbers["size of A"] == [m, n] and numbers["size of H"] == [t, n]
    exact = all(numbers[name] < 1e-12 for name in ("difference of A", "difference of H", "column sums off one by"))
    return decide(
        sizes and exact,
        f"With {n} queries, {m} keys and values of width {t}, A is {' x '.join(map(str, numbers['size of A']))} and "
        f"H is {' x '.join(map(str, numbers['size of H']))}. The output of `attend` differs from the transposed "
        f"formula by {numbers['difference of H']:.0g}, and the columns of A sum to 1 up to "
        f"{numbers['column sums off one by']:.0g}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(columns=2)
    plot_heatmap(left, numbers["A"], high=1.0)
    left.set(xlabel="query", ylabel="key", title=f"A, {' x '.join(map(str, numbers['size of A']))}: columns sum to 1")
    plot_heatmap(right, numbers["H"], low=min(map(min, numbers["H"])))
    right.set(yticks=range(len(numbers["H"])))
    right.set(xlabel="query", ylabel="entry", title=f"H = VA, {' x '.join(map(str, numbers['size of H']))}")
    return figure
