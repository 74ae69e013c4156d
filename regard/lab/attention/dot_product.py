"""What is the output H of dot-product attention, and what is its size?

Claim: With queries Q (d x n), keys K (d x m) and values V (t x m) as columns, A = softargmax(K' Q) over each column is
    m x n and H = V A is t x n. With rows instead of columns, as in `attend`, both are transposed and nothing else
    changes.
Measures: The weights and the output of `attend` on rows against the formula on columns, their sizes, and the sums of
    the weights over the keys.
Finding: With {{ n["size of Q, K, V"][0][1] }} queries, {{ n["size of Q, K, V"][1][1] }} keys and values of width {{
    n["size of Q, K, V"][2][0] }}, A is {{ n["size of A"]|join(" x ") }} and H is {{ n["size of H"]|join(" x ") }}. The
    output of `attend` differs from the transposed formula by at most {{ n["difference of H"]|at_most }}, and the
    columns of A sum to 1 up to {{ n["error of the column sums"]|at_most }}.
Budget: 1 second
Source: 000 1.1a, 001 review 5, 002 1.1a
"""

from dataclasses import dataclass

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.softargmax import softargmax
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.measure import attend_matrices, attention_weights, largest_difference, normal_tensors
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"H = V A \in R^{t \times n}, \quad A = \mathrm{softargmax}_\beta(K^\top Q) \in R^{m \times n}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the sizes of Q (d x n), K (d x m) and V (t x m).

    width        d, the width of queries and keys
    queries      n, the number of queries
    keys         m, the number of keys and values
    value_width  t, the width of values
    """

    width: int = 6
    queries: int = 4
    keys: int = 5
    value_width: int = 3
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    d, n, m, t = setup.width, setup.queries, setup.keys, setup.value_width
    Q, K, V = normal_tensors(draws, (d, n), (d, m), (t, m))
    A = softargmax(K.mT @ Q, setup.width**-0.5, axis=0)
    H = V @ A
    rows = attend_matrices(attention, Q.mT, K.mT, V.mT)
    weights = attention_weights(attention, Q.mT, K.mT)
    return {
        "size of Q, K, V": [list(Q.shape), list(K.shape), list(V.shape)],
        "size of A": list(weights.mT.shape),
        "size of H": list(rows.mT.shape),
        "A": weights.mT.tolist(),
        "H": rows.mT.tolist(),
        "difference of A": largest_difference(weights.mT, A),
        "difference of H": largest_difference(rows.mT, H),
        "error of the column sums": float((weights.sum(1) - 1).abs().max()),
    }


def verdict(numbers: Numbers) -> Decision:
    (_, n), (_, m), (t, _) = numbers["size of Q, K, V"]
    exact = all(numbers[name] < 1e-12 for name in ("difference of A", "difference of H", "error of the column sums"))
    return decide(exact and numbers["size of A"] == [m, n] and numbers["size of H"] == [t, n])


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(columns=2)
    plot_heatmap(left, numbers["A"], high=1.0)
    left.set(xlabel="query", ylabel="key", title=f"A, {' x '.join(map(str, numbers['size of A']))}: columns sum to 1")
    plot_heatmap(right, numbers["H"], low=min(map(min, numbers["H"])))
    right.set(yticks=range(len(numbers["H"])))
    right.set(xlabel="query", ylabel="entry", title=f"H = VA, {' x '.join(map(str, numbers['size of H']))}")
    return figure
