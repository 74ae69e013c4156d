"""What does multi-head attention compute?

Claim: Queries, keys and values are projected and split into h heads of width d/h. The heads attend in parallel, and
    none depends on another. Their outputs are concatenated and W_o mixes them. Because of W_o one head can reach every
    channel of the output.
Measures: The layer against its parts computed one by one in float64. How many other heads change if the values of one
    head change, and how many channels, before and after W_o.
Budget: 1 second
Source: 000 1.2a, 001, 003 12.2
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_bars
from regard.nn.attention import Attention as AttentionLayer, merge_heads, split_heads
from regard.nn.init import fan_in, init_parameters, normal

MATHS = (
    r"H = W_o [H^1; H^2; H^3], \quad \mathrm{head} h: "
    r"H^h = V^h \mathrm{softargmax}_\beta((K^h)^\top Q^h), \quad Q^h = W_q^h C, \quad "
    r"K^h = W_k^h C, \quad V^h = W_v^h C"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Width and heads of the layer, and the number of tokens."""

    width: int = 60
    heads: int = 5
    length: int = 23
    seed: int = 0


SMOKE = Setup(width=15, heads=3, length=7)


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
            "error": (layer.out(joined) - whole).abs().max().item(),
            "error of heads one by one": (together - alone).abs().max().item(),
            "difference without W_o": (joined - whole).abs().max().item(),
            "other heads moved": _count_changed(together, moved, 1) - 1,
            "channels moved before W_o": _count_changed(joined, merge_heads(moved), 2),
            "channels moved after W_o": _count_changed(whole, moved_out, 2),
        }


def _count_changed(old: Tensor, new: Tensor, axis: int) -> int:
    """Count the positions of an axis where something changed by more than rounding."""
    others = [other for other in range(old.ndim) if other != axis]
    return int(((new - old).abs().amax(others) > 1e-9).sum())


def verdict(numbers: Numbers) -> Verdict:
    width, heads = numbers["width"], numbers["heads"]
    exact = max(numbers["error"], numbers["error of heads one by one"]) < 1e-12
    parallel = numbers["other heads moved"] == 0 and numbers["channels moved before W_o"] == width // heads
    return decide(
        exact and parallel and numbers["channels moved after W_o"] == width,
        f"Computed part by part, the layer differs by {numbers['error']:.0g}; head by head by "
        f"{numbers['error of heads one by one']:.0g}. Other values in one head change {numbers['other heads moved']} "
        f"other heads. They change {numbers['channels moved before W_o']} of {width} channels before W_o and "
        f"{numbers['channels moved after W_o']} after it.",
    )


@wrong_answer(
    "000 1.2a",
    says="The concatenated heads are the output.",
    right="One more projection, W_o, maps the concatenated heads to the output; only it mixes them.",
)
def _no_projection(numbers: Numbers) -> Verdict:
    off = numbers["difference without W_o"]
    return decide(off < 1e-9, f"Without W_o the output differs by {off:.2f}, with it by {numbers['error']:.0g}.")


@wrong_answer(
    "001",
    says="Heads are layers stacked on top of each other.",
    right="Heads are parallel: all read the same input and none reads another head.",
)
def _heads_are_stacked(numbers: Numbers) -> Verdict:
    moved, later = numbers["other heads moved"], numbers["heads"] - 1
    return decide(moved == later, f"A change of the first head changes {moved} of the {later} others.")


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_bars(axes, {f"{when} W_o": float(numbers[f"channels moved {when} W_o"]) for when in ("before", "after")})
    axes.axhline(numbers["width"], color="#000000", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="before and after W_o",
        ylabel=f"channels that change, of {numbers['width']}",
        title="Channels that one head reaches",
    )
    return figure
