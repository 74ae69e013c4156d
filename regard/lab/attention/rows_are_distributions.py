"""Is Q K' the attention matrix, and how is it read?

Claim: Q K' holds scores of any sign and sum. Only after the softmax is every row a probability distribution: no
    negative entry, a sum of one, and the order of the scores. Row i shows where token i looks. Columns are not
    distributions.
Measures: Signs and sums of the scores and of the weights that `attend` gives; whether rows keep the order of the
    scores; whether tokens that are made to look at chosen tokens show it along their rows; which rows change if one
    query changes.
Budget: 1 second
Source: 004 2a-b
"""

from dataclasses import dataclass

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, join_numbers
from regard.lab.drawing import Figure, make_figure, plot_heatmap

MATHS = (
    r"A_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d_k})}{\sum_l \exp(q_i \cdot k_l / \sqrt{d_k})}, \quad "
    r"\sum_j A_{ij} = 1"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes, where each token is made to look and how strongly, and which query changes."""

    looks_at: tuple[int, ...] = (3, 3, 0, 6, 3, 1, 0)
    strength: float = 6.0
    width: int = 9
    changed: int = 4
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n = len(setup.looks_at)
    q, k = torch.randn(2, n, setup.width, generator=draws, dtype=torch.float64)
    one_hot = torch.eye(n, dtype=torch.float64)[None, None]
    scores = q @ k.mT
    weights = attention(q[None, None], k[None, None], one_hot)[0, 0]

    targets = torch.tensor(setup.looks_at)
    directions = k / k.norm(dim=-1, keepdim=True)
    sent = setup.strength * setup.width**0.5 * directions[targets]
    looking = attention(sent[None, None], directions[None, None], one_hot)[0, 0]

    other = q.clone()
    other[setup.changed] += 1
    change = (attention(other[None, None], k[None, None], one_hot)[0, 0] - weights).abs().amax(-1)
    return {
        "tokens": n,
        "scores": scores.tolist(),
        "weights": weights.tolist(),
        "negative scores": int((scores < 0).sum()),
        "score rows sum to": [scores.sum(-1).min().item(), scores.sum(-1).max().item()],
        "negative weights": int((weights < 0).sum()),
        "rows off one by": (weights.sum(-1) - 1).abs().max().item(),
        "columns sum to": [weights.sum(0).min().item(), weights.sum(0).max().item()],
        "rows in the order of scores": int((weights.argsort(-1) == scores.argsort(-1)).all(-1).sum()),
        "looks at": list(setup.looks_at),
        "seen along rows": looking.argmax(1).tolist(),
        "seen along columns": looking.argmax(0).tolist(),
        "looking": looking.tolist(),
        "rows changed by a query": [row for row in range(n) if change[row] > 1e-12],
        "changed": setup.changed,
    }


def verdict(numbers: Numbers) -> Verdict:
    n, (low, high) = numbers["tokens"], numbers["columns sum to"]
    raw = numbers["negative scores"] > 0 and max(abs(total - 1) for total in numbers["score rows sum to"]) > 0.1
    rows = numbers["negative weights"] == 0 and numbers["rows off one by"] < 1e-14 and high - low > 0.1
    read = numbers["seen along rows"] == numbers["looks at"] != numbers["seen along columns"]
    alone = numbers["rows changed by a query"] == [numbers["changed"]] and numbers["rows in the order of scores"] == n
    lowest, highest = numbers["score rows sum to"]
    found = sum(seen == at for seen, at in zip(numbers["seen along rows"], numbers["looks at"], strict=True))
    return decide(
        raw and rows and read and alone,
        f"Rows of scores sum to between {lowest:.1f} and {highest:.1f}, with {numbers['negative scores']} negative "
        f"entries. Rows of weights sum to 1 up to {numbers['rows off one by']:.0g}, with "
        f"{numbers['negative weights']} negative entries. Columns of weights sum to between {low:.2f} and "
        f"{high:.2f}. {found} of {n} tokens look along their row where they were made to look, and changing query "
        f"{numbers['changed']} changes {_format_rows(numbers['rows changed by a query'])}.",
    )


def _format_rows(changed: list[int]) -> str:
    return "no row" if not changed else f"row{'s' * (len(changed) > 1)} {join_numbers(changed)}"


def draw(numbers: Numbers) -> Figure:
    figure, (left, middle, right) = make_figure(columns=3)
    plot_heatmap(left, numbers["scores"], low=min(map(min, numbers["scores"])))
    left.set(xlabel="key token j", ylabel="query token i", title="Scores: any sign, any sum")
    plot_heatmap(middle, numbers["weights"])
    middle.set(xlabel="key token j", ylabel="query token i", title="Weights: each row sums to 1")
    plot_heatmap(right, numbers["looking"], high=1.0)
    right.set(
        xlabel="key token j", ylabel="query token i", title=f"Made to look at {join_numbers(numbers['looks at'])}"
    )
    return figure
