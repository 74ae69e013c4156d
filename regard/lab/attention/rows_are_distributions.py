"""Is Q K' the attention matrix, and how is it read?

Claim: Q K' holds scores of any sign and sum. Only after the softmax is every row a probability distribution: no
    negative entry, a sum of one, and the order of the scores. Row i shows where token i looks. Columns are not
    distributions.
Measures: Signs and sums of the scores and of the weights that `attend` gives; whether rows keep the order of the
    scores; whether tokens that are made to look at chosen tokens show it along their rows; which rows change if one
    query changes. The three tokens of exercise sheet 004: scores (not scaled, as on the sheet), weights and outputs,
    and what a permutation of the tokens changes.
Finding: For {{ n.tokens }} random queries and keys the rows of scores Q K' sum to between {{ n["row sums of the
    scores"][0]|fixed(1) }} and {{ n["row sums of the scores"][1]|fixed(1) }}, with {{ n["negative scores"] }} negative
    entries. The rows of weights sum to 1 up to {{ n["error of the row sums"]|at_most }}, with {{ n["negative weights"]
    }} negative entries; the columns of weights sum to between {{ n["column sums of the weights"][0]|fixed }} and {{
    n["column sums of the weights"][1]|fixed }}. If each query is made parallel to the key of a chosen token, {{ found
    }} of {{ n.tokens }} rows have their largest weight at that token. A change of query {{ n.changed }} changes row {{
    n["rows changed by a query"]|join_numbers or "none" }} only.
Budget: 1 second
Source: 001 review 1, 001 review 2, 001 review 3, 001 review 5, 004 2a-ii, 004 2b, 004 3a, 004 3b, 004 3c, 004 3d
"""

from dataclasses import dataclass

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.measure import attend_matrices, attention_weights, largest_difference, normal_tensors
from regard.lab.settings import check_at_least, check_indices
from regard.lab.verdict import Attention, Decision, Numbers, decide, join_numbers

MATHS = (
    r"A_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d_k})}{\sum_l \exp(q_i \cdot k_l / \sqrt{d_k})}, \quad "
    r"\sum_j A_{ij} = 1"
)


# the input and the matrices W_Q, W_K, W_V of the worked example of sheet 004
THREE_TOKENS = (
    [[1, -1, 0, 2], [0, -1, 2, 1], [-2, 2, -1, 0]],
    [[0, 1], [1, 0], [-0.5, 0], [1, 1]],
    [[1, -0.5], [0, 1], [0.5, -0.5], [1, 0.5]],
    [[1, 0.5], [-0.5, 0], [-1, 2], [0.5, -1]],
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: random queries and keys, queries that are built to attend to chosen keys, and a change.

    looks_at  one index per token: the built query of token i is parallel to the key of token looks_at[i]. Not for every
              i may looks_at[looks_at[i]] be i, because then rows and columns of the weights would look alike
    strength  norm of the built queries, as a multiple of sqrt(width)
    width     width of queries and keys
    changed   index of the random query that is changed, to find the rows that depend on it
    """

    looks_at: tuple[int, ...] = (3, 3, 0, 6, 3, 1, 0)
    strength: float = 6.0
    width: int = 9
    changed: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, width=2, strength=1, looks_at=2)
        check_indices("looks_at", self.looks_at, len(self.looks_at), "tokens")
        check_indices("changed", (self.changed,), len(self.looks_at), "tokens")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n = len(setup.looks_at)
    q, k = normal_tensors(draws, (n, setup.width), (n, setup.width))
    scores, weights = q @ k.mT, attention_weights(attention, q, k)

    targets = torch.tensor(setup.looks_at)
    directions = k / k.norm(dim=-1, keepdim=True)
    sent = setup.strength * setup.width**0.5 * directions[targets]
    looking = attention_weights(attention, sent, directions)

    other = q.clone()
    other[setup.changed] += 1
    change = (attention_weights(attention, other, k) - weights).abs().amax(-1)
    tokens, *maps = (torch.tensor(rows, dtype=torch.float64) for rows in THREE_TOKENS)
    three_q, three_k, three_v = (tokens @ matrix for matrix in maps)
    three = attention_weights(attention, three_q, three_k, beta=1.0)
    order = [2, 0, 1]
    permuted = attend_matrices(attention, *((tokens[order] @ matrix) for matrix in maps), beta=1.0)
    return {
        "tokens": n,
        "scores": scores.tolist(),
        "weights": weights.tolist(),
        "negative scores": int((scores < 0).sum()),
        "row sums of the scores": [scores.sum(-1).min().item(), scores.sum(-1).max().item()],
        "negative weights": int((weights < 0).sum()),
        "error of the row sums": (weights.sum(-1) - 1).abs().max().item(),
        "column sums of the weights": [weights.sum(0).min().item(), weights.sum(0).max().item()],
        "smallest sum of the other weights in a row": (1 - weights.diagonal()).min().item(),
        "rows in the order of scores": int((weights.argsort(-1) == scores.argsort(-1)).all(-1).sum()),
        "chosen keys": list(setup.looks_at),
        "largest weight per row": looking.argmax(1).tolist(),
        "largest weight per column": looking.argmax(0).tolist(),
        "weights on the chosen keys": looking.tolist(),
        "rows changed by a query": [row for row in range(n) if change[row] > 1e-12],
        "changed": setup.changed,
        "scores of three tokens": (three_q @ three_k.mT).tolist(),
        "weights of three tokens": three.tolist(),
        "outputs of three tokens": (three @ three_v).tolist(),
        "first output with the score 2.5": (torch.tensor([1.5, 2.5, 8.0]).double().softmax(-1) @ three_v).tolist(),
        "third output of three tokens": (three @ three_v)[2].tolist(),
        "third output, rounded weights": (three.round(decimals=2) @ three_v)[2].tolist(),
        "permuted example differs by": largest_difference(permuted, (three @ three_v)[order]),
    }


def verdict(numbers: Numbers) -> Decision:
    low, high = numbers["column sums of the weights"]
    raw = numbers["negative scores"] > 0 and max(abs(total - 1) for total in numbers["row sums of the scores"]) > 0.1
    rows = numbers["negative weights"] == 0 and numbers["error of the row sums"] < 1e-14 and high - low > 0.1
    read = numbers["largest weight per row"] == numbers["chosen keys"] != numbers["largest weight per column"]
    alone = numbers["rows changed by a query"] == [numbers["changed"]]
    chosen = numbers["chosen keys"]
    own_inverse = all(chosen[key] == query for query, key in enumerate(chosen))  # then rows and columns agree
    return decide(
        raw and rows and read and alone and numbers["rows in the order of scores"] == numbers["tokens"],
        missing="looks_at must not be its own inverse, for then rows look like columns" if own_inverse else "",
        found=sum(map(int.__eq__, numbers["largest weight per row"], numbers["chosen keys"])),
    )


def draw(numbers: Numbers) -> Figure:
    figure, (*panels, example) = make_figure(columns=4, width=3.8)
    chosen = f"Made to look at {join_numbers(numbers['chosen keys'])}"
    titles = {"scores": "Scores: any sign, any sum", "weights": "Weights: each row sums to 1"}
    for axes, (name, title) in zip(panels, (titles | {"weights on the chosen keys": chosen}).items(), strict=True):
        plot_heatmap(axes, numbers[name], low=min(0.0, *map(min, numbers[name])))
        axes.set(xlabel="key token j", ylabel="query token i", title=title)
    plot_heatmap(example, numbers["weights of three tokens"], high=1.0)
    for i, row in enumerate(numbers["weights of three tokens"]):
        for j, weight in enumerate(row):
            example.text(j, i, f"{weight:.2f}", ha="center", va="center", color="black" if weight > 0.5 else "white")
    example.set(xticks=range(3), xticklabels=range(1, 4), yticks=range(3), yticklabels=range(1, 4))
    example.set(xlabel="key token", ylabel="query token", title="Attention map of the three tokens")
    return figure
