"""What does multi-head attention compute?

Claim: Queries, keys and values are projected and split into h heads of width d/h; the heads attend side by side, each
    blind to the others; their outputs are put together again and W_o mixes them. W_o is what lets one head reach
    every channel of the output.
Measures: The layer against its parts done one by one in float64; how many other heads move when one head's values
    change, and how many channels, before W_o and after it.
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
    """The layer, and how many tokens go through it."""

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
        # only the first head gets other values; whatever else moves has looked at it
        other = torch.cat([-v[:, :1], v[:, 1:]], 1)
        moved = attention(q, k, other)
        moved_out: Tensor = layer.out(merge_heads(moved))
        return {
            "width": setup.width,
            "heads": setup.heads,
            "error": (layer.out(joined) - whole).abs().max().item(),
            "error of heads one by one": (together - alone).abs().max().item(),
            "difference without W_o": (joined - whole).abs().max().item(),
            "other heads moved": _moved(together, moved, 1) - 1,
            "channels moved before W_o": _moved(joined, merge_heads(moved), 2),
            "channels moved after W_o": _moved(whole, moved_out, 2),
        }


def _moved(old: Tensor, new: Tensor, axis: int) -> int:
    """Along how many places of an axis anything changed by more than rounding."""
    others = [other for other in range(old.ndim) if other != axis]
    return int(((new - old).abs().amax(others) > 1e-9).sum())


def verdict(numbers: Numbers) -> Verdict:
    width, heads = numbers["width"], numbers["heads"]
    exact = max(numbers["error"], numbers["error of heads one by one"]) < 1e-12
    parallel = numbers["other heads moved"] == 0 and numbers["channels moved before W_o"] == width // heads
    return decide(
        exact and parallel and numbers["channels moved after W_o"] == width,
        f"Done part by part the layer comes out to {numbers['error']:.0g}, head by head to "
        f"{numbers['error of heads one by one']:.0g}. Other values in one head move {numbers['other heads moved']} "
        f"other heads; they move {numbers['channels moved before W_o']} of {width} channels before W_o and "
        f"{numbers['channels moved after W_o']} after it.",
    )


@wrong_answer(
    "000 1.2a",
    says="The heads put on top of each other are the output.",
    right="One more projection, W_o, takes the heads put together to the output; it alone mixes them.",
)
def _no_projection(numbers: Numbers) -> Verdict:
    off = numbers["difference without W_o"]
    return decide(off < 1e-9, f"Without W_o the output is off by {off:.2f}, with it by {numbers['error']:.0g}.")


@wrong_answer(
    "001",
    says="Heads are layers stacked one on the other.",
    right="Heads are parallel: each reads the same input and none reads another head.",
)
def _stacked(numbers: Numbers) -> Verdict:
    moved, later = numbers["other heads moved"], numbers["heads"] - 1
    return decide(moved == later, f"A change of the first head moves {moved} of the {later} others.")


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_bars(axes, {f"{when} W_o": float(numbers[f"channels moved {when} W_o"]) for when in ("before", "after")})
    axes.axhline(numbers["width"], color="#000000", linewidth=0.8, linestyle=":")
    axes.set(xlabel="where one looks", ylabel=f"channels moved, of {numbers['width']}", title="What one head reaches")
    return figure
