"""What does multi-head attention compute?

Claim: Queries, keys and values are projected and split into h heads of width d/h. The heads attend in parallel, and
    none depends on another. Their outputs are concatenated and W_o mixes them. Because of W_o one head can reach every
    channel of the output. Queries may come from other tokens than keys and values, in any number. All of this is what
    `torch.nn.MultiheadAttention` computes.
Measures: The layer against its parts computed one by one in float64, and against `torch.nn.MultiheadAttention` with the
    same weights: self-attention, with a causal mask, and n queries over m other tokens. The sizes of the four matrices.
    How many other heads change if the values of one head change, and how many channels, before and after W_o. What
    dropout does to the weights and to a residual sum. The scores of a batch whose keys were transposed with all axes
    reversed.
Finding: The formula, computed step by step, and the layer differ by at most {{ n.error|at_most }}; heads computed one
    by one and the heads of the layer differ by at most {{ n["error of heads one by one"]|at_most }}. The layer and
    `torch.nn.MultiheadAttention` with the same weights differ by at most {{ n["difference to
    torch"]["self-attention"]|at_most }} without a mask, {{ n["difference to torch"]["causal"]|at_most }} with a causal
    mask, and {{ n["difference to torch"]["cross attention"]|at_most }} for {{ n["queries and keys"][0] }} queries over
    {{ n["queries and keys"][1] }} other tokens. For {{ n.heads }} heads at width {{ n.width }}, W_q, W_k and W_v of all
    heads together and W_o have the size {{ n["sizes of W_q, W_k, W_v, W_o"]|map("join", " x ")|unique|join(", ") }}. If
    the values of one head change, {{ n["other heads changed"] }} other heads change; of the {{ n.width }} channels, {{
    n["channels changed before W_o"] }} change before W_o and {{ n["channels changed after W_o"] }} after it.
Budget: 1 second
Source: 000 1.2a, 000 1.3a, 001 review 3, 001 review 7, 001 review 8, 001 review 9, 001 review 10, 001 review 11,
    001 review 12, 002 1.2a, 002 1.3a, 003 12.2
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import causal
from regard.lab.drawing import Figure, draw_steps, make_figure, plot_bars
from regard.lab.measure import attention_weights, largest_difference, normal_tensors
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer, check_probability, merge_heads, split_heads
from regard.nn.blocks import Residual
from regard.nn.init import fan_in, init_parameters, normal

MATHS = (
    r"H = W_o [H^1; \dots; H^h] \in R^{d \times n}, \quad "
    r"H^i = V^i \mathrm{softargmax}_\beta((K^i)^\top Q^i) \in R^{d/h \times n}, \quad "
    r"Q^i = W_q^i Q, \quad K^i = W_k^i K, \quad V^i = W_v^i V"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the layer and its inputs, and the measurement of dropout.

    width   width of the layer
    heads   number of heads
    length  number of tokens
    others  number of other tokens, from which cross-attention computes keys and values
    share   dropout probability
    draws   number of random draws of dropout; at least 100, so that means over the draws are close to the expected
            ones
    """

    width: int = 60
    heads: int = 5
    length: int = 23
    others: int = 17
    share: float = 0.1
    draws: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, heads=2, draws=100)
        check_probability("share", self.share)


SMOKE = Setup(width=15, heads=3, length=7, others=5, draws=500)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    layer = AttentionLayer(setup.width, setup.heads).double()
    init_parameters(layer, {"*.weight": fan_in(), "*.bias": normal(0.5)}, setup.seed)
    draws = make_generator(setup.seed)
    x = torch.randn(1, setup.length, setup.width, generator=draws, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (split_heads(part, setup.heads) for part in layer.query_key_value(x).chunk(3, -1))
        together = attention(q, k, v)
        alone = torch.cat([attention(q[:, [h]], k[:, [h]], v[:, [h]]) for h in range(setup.heads)], 1)
        joined, whole = merge_heads(together), layer(x)
        # change the values of the first head only; another head that changes depends on it
        other = torch.cat([-v[:, :1], v[:, 1:]], 1)
        moved = attention(q, k, other)
        moved_out: Tensor = layer.out(merge_heads(moved))
        return {
            "width": setup.width,
            "heads": setup.heads,
            "queries and keys": [setup.length, setup.others],
            "sizes of W_q, W_k, W_v, W_o": [
                list(part.shape) for part in (*layer.query_key_value.weight.chunk(3), layer.out.weight)
            ],
            "error": largest_difference(layer.out(joined), whole),
            "error of heads one by one": largest_difference(together, alone),
            "difference to torch": _difference_to_torch(layer, setup, x, attention),
            "difference without W_o": largest_difference(joined, whole),
            "other heads changed": _count_changed(together, moved, 1) - 1,
            "channels changed before W_o": _count_changed(joined, merge_heads(moved), 2),
            "channels changed after W_o": _count_changed(whole, moved_out, 2),
            "dropout": _measure_dropout(setup, q, k, attention),
            "error of reversed axes": _error_of_reversed_axes(setup),
        }


def _measure_dropout(setup: Setup, q: Tensor, k: Tensor, attention: Attention) -> dict[str, float]:
    """Measure the effect of dropout on the attention weights of the first head, and on a residual connection."""
    one = torch.ones(1, setup.draws, setup.width, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        q, k = (part[:, :1].expand(setup.draws, -1, -1, -1) for part in (q, k))
        weights = attention_weights(attention, q[:1], k[:1])
        dropped = attention_weights(attention, q, k, dropout=setup.share)
        # a sum of ones and ones: 1 where the branch was dropped
        sums = one + Residual(setup.share).train()(one)
        evaluated = one + Residual(setup.share).eval()(one)
    return {
        "share": setup.share,
        "draws": setup.draws,
        "weights set to zero": (dropped == 0).double().mean().item(),
        "smallest sum of a row": dropped.sum(-1).min().item(),
        "largest sum of a row": dropped.sum(-1).max().item(),
        "distance of the mean": largest_difference(dropped.mean(0), weights[0]),
        "entries of the sum without the branch": (sums == 1).double().mean().item(),
        "mean of the sum": sums.mean().item(),
        "change in evaluation": largest_difference(evaluated, 2 * one),
    }


def _error_of_reversed_axes(setup: Setup) -> float:
    """Return the largest error of the scores of a batch if all axes of the keys are reversed, not only the last two.

    Batch size, length and width are equal here, because otherwise the wrong product is not defined.
    """
    q, k = normal_tensors(make_generator(setup.seed), *[(setup.length,) * 3] * 2)
    return largest_difference(q @ k.permute(2, 1, 0), q @ k.transpose(1, 2))


def _count_changed(old: Tensor, new: Tensor, axis: int) -> int:
    """Count the indices of an axis at which two tensors differ by more than 1e-9."""
    others = [other for other in range(old.ndim) if other != axis]
    return int(((new - old).abs().amax(others) > 1e-9).sum())


def _difference_to_torch(layer: AttentionLayer, setup: Setup, x: Tensor, attention: Attention) -> dict[str, float]:
    """Return the largest differences between the layer and `nn.MultiheadAttention` with the same weights.

    There is one difference for each of "self-attention", "causal" and "cross attention".
    """
    torch_layer = nn.MultiheadAttention(setup.width, setup.heads, batch_first=True, dtype=torch.float64)
    torch_layer.in_proj_weight.copy_(layer.query_key_value.weight)
    torch_layer.in_proj_bias.copy_(layer.query_key_value.bias)
    torch_layer.out_proj.weight.copy_(layer.out.weight)
    torch_layer.out_proj.bias.copy_(layer.out.bias)
    (y,) = normal_tensors(make_generator(setup.seed + 1), (1, setup.others, setup.width))

    def attend_to(tokens: Tensor, mask: Any = None) -> Tensor:
        q, k, v = (
            split_heads(functional.linear(part, weight, bias), setup.heads)
            for part, weight, bias in zip(
                (x, tokens, tokens),
                layer.query_key_value.weight.chunk(3),
                layer.query_key_value.bias.chunk(3),
                strict=True,
            )
        )
        out: Tensor = layer.out(merge_heads(attention(q, k, v, mask=mask)))
        return out

    hidden = torch.ones(setup.length, setup.length, dtype=torch.bool).triu(1)
    return {
        "self-attention": largest_difference(attend_to(x), torch_layer(x, x, x)[0]),
        "causal": largest_difference(attend_to(x, causal()), torch_layer(x, x, x, attn_mask=hidden)[0]),
        "cross attention": largest_difference(attend_to(y), torch_layer(x, y, y)[0]),
    }


def verdict(numbers: Numbers) -> Decision:
    width, heads = numbers["width"], numbers["heads"]
    exact = (
        max(numbers["error"], numbers["error of heads one by one"], *numbers["difference to torch"].values()) < 1e-12
    )
    parallel = numbers["other heads changed"] == 0 and numbers["channels changed before W_o"] == width // heads
    sizes = numbers["sizes of W_q, W_k, W_v, W_o"] == [[width, width]] * 4
    dropout = numbers["dropout"]
    margin = 5 / math.sqrt(dropout["draws"])
    dropped = all(
        abs(dropout[name] - dropout["share"]) < margin
        for name in ("weights set to zero", "entries of the sum without the branch")
    )
    dropped &= max(dropout["distance of the mean"], abs(dropout["mean of the sum"] - 2)) < margin
    dropped &= dropout["change in evaluation"] == 0
    return decide(exact and parallel and sizes and dropped and numbers["channels changed after W_o"] == width)


def draw(numbers: Numbers) -> Figure:
    """Draw diagrams of dot-product and multi-head attention, and the number of channels that one head reaches."""
    figure, (single, several, right) = make_figure(3)
    d, h, (n, m) = numbers["width"], numbers["heads"], numbers["queries and keys"]
    c = d // h
    weights = [
        f"{name} ({' x '.join(map(str, size))})"
        for name, size in zip(("W_q", "W_k", "W_v", "W_o"), numbers["sizes of W_q, W_k, W_v, W_o"], strict=True)
    ]
    draw_steps(
        single,
        [
            f"Q ({n} x {c}), K ({m} x {c}), V ({m} x {c})",
            f"scores S = Q K' ({n} x {m})",
            f"scale: divide by sqrt({c})",
            "mask (optional)",
            f"softmax over keys: A ({n} x {m})",
            f"H = A V ({n} x {c})",
        ],
    )
    draw_steps(
        several,
        [
            f"queries ({n} x {d}), keys and values ({m} x {d})",
            ", ".join(weights[:3]),
            f"split into {h} heads of {c}",
            f"scaled dot-product attention, {h} in parallel",
            f"concatenate ({n} x {d})",
            weights[3],
            f"H ({n} x {d})",
        ],
    )
    single.set(title="Scaled dot-product attention", ylabel="order of the steps", xlabel=f"{n} queries, {m} keys")
    several.set(title="Multi-head attention", ylabel="order of the steps", xlabel=f"{h} heads of width {c}")
    plot_bars(right, {f"{when} W_o": float(numbers[f"channels changed {when} W_o"]) for when in ("before", "after")})
    right.set(ylabel=f"channels that change, of {d}", title="Channels that one head reaches")
    return figure
