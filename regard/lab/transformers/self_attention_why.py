"""Why use self-attention, and for which lengths is it cheap?

Claim: One layer connects any two of n tokens directly, while a recurrent layer needs a step for every token in between.
    The scores and weighted means of attention cost 2 n^2 D multiply-adds, a recurrent layer 2 n D^2: without its
    projections attention costs less while n < D, as in table 1 of "Attention Is All You Need". The four projections of
    attention cost 4 n D^2, so a whole attention layer costs more than a recurrent one at every n; the scores and means
    cost more than the projections for n > 2 D. The advantage over recurrence is in sequential steps, not in operations.
Measures: Multiply-adds of the scores and weighted means ("attention"), of the projections and of a recurrent layer as
    torch counts them, at lengths around D, and where the curves cross. Seconds of all three are reported but do not
    decide, because they depend on the machine. Whether the first token changes the last output.
Finding: At width D={{ n.width }} and n={{ n.lengths[0] }} tokens the scores and weighted means of attention need {{
    n["multiply-adds"]["attention"][0]|comma }} multiply-adds, its projections {{
    n["multiply-adds"]["projections"][0]|comma }} and a recurrent layer {{ n["multiply-adds"]["recurrent"][0]|comma }}.
    Scores and means alone need more than the recurrent layer {{ shown["recurrent"] }}; with its projections attention
    needs more at every length. Scores and means need more than the projections {{ shown["projections"] }}. In time on
    one machine, at n={{ n.lengths[0] }} scores and means take {{ (n.seconds["attention"][0] * 1e3)|short(3) }} ms, the
    projections {{ (n.seconds["projections"][0] * 1e3)|short(3) }} ms and the recurrent layer {{
    (n.seconds["recurrent"][0] * 1e3)|short(3) }} ms, which computes one token after the other. {% if n["crossings in
    seconds"]["recurrent"] is none %}Scores and means were faster than the recurrent layer at every length up to n={{
    n.lengths[-1] }}.{% else %}Scores and means took longer than the recurrent layer {{ clock["recurrent"] }}.{% endif
    %} In one layer the first of {{ n.lengths[0] }} tokens changes the last output (by {{ n["change of the last output
    by the first token"]|short }}): they are connected in one step.
Budget: 20 seconds
Source: 000 1.4b, 002 1.4b
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import count_multiply_adds, measure_seconds
from regard.lab.settings import check_growing, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer, split_heads

MATHS = r"2 n^2 D = 2 n D^2 \mathrm{at} n = D, \quad 2 n^2 D = 4 n D^2 \mathrm{at} n = 2 D"
PARTS = ("attention", "projections", "recurrent")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the layers, and the number of timings.

    width    width D of the layers
    lengths  increasing numbers n of tokens, from below D to above 2 D, because the costs are predicted to cross at
             n = D and n = 2 D
    repeats  number of timings per length; the median is used
    """

    width: int = 256
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 1, "runs; the median counts")
        check_growing(self, "lengths")
        if not self.lengths or self.lengths[0] >= self.width or self.lengths[-1] <= 2 * self.width:
            text = "lengths must begin below the width and end above twice the width"
            raise setting_error(self, text, "lengths", "width")


SMOKE = Setup(width=96, lengths=(24, 72, 240), repeats=3)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    layer, cell = AttentionLayer(setup.width, 1), nn.RNNCell(setup.width, setup.width)
    counts: dict[str, list[int]] = {part: [] for part in PARTS}
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    draws = make_generator(setup.seed)
    with torch.no_grad():
        for n in setup.lengths:
            x = torch.randn(1, n, setup.width, generator=draws)
            for part, call in _calls(x, attention, layer, cell).items():
                counts[part].append(count_multiply_adds(call))
                seconds[part].append(measure_seconds(call, setup.repeats))
        x = torch.randn(1, 1, setup.lengths[0], setup.width, generator=draws, dtype=torch.float64)
        other = x.clone()
        other[:, :, 0] = -x[:, :, 0]
        moved = (attention(other, other, other) - attention(x, x, x))[:, :, -1].abs().max()
    others = ("recurrent", "projections")
    return {
        "width": setup.width,
        "lengths": list(setup.lengths),
        "multiply-adds": counts,
        "crossings": {part: _crossing_length(setup.lengths, counts["attention"], counts[part]) for part in others},
        "seconds": seconds,
        "crossings in seconds": {
            part: _crossing_length(setup.lengths, seconds["attention"], seconds[part]) for part in others
        },
        "change of the last output by the first token": float(moved),
    }


def _calls(x: Tensor, attention: Attention, layer: Any, cell: nn.RNNCell) -> dict[str, Callable[[], Any]]:
    q, k, v = (split_heads(part, 1) for part in layer.query_key_value(x).chunk(3, -1))

    def recurrent() -> None:
        state = torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = cell(token, state)

    return {
        "attention": lambda: attention(q, k, v),
        "projections": lambda: (layer.query_key_value(x), layer.out(x)),
        "recurrent": recurrent,
    }


def _crossing_length(lengths: tuple[int, ...], rising: list[Any], other: list[Any]) -> float | None:
    """Return the length from which on the cost `rising` exceeds the cost `other`, or None if it never does.

    The costs at the given lengths are interpolated on a log-log scale.
    """
    apart = [math.log(a / b) for a, b in zip(rising, other, strict=True)]
    for (n, below), (m, above) in pairwise(zip(lengths, apart, strict=True)):
        if below <= 0 < above:
            return float(n * (m / n) ** (below / (below - above)))
    return None


def verdict(numbers: Numbers) -> Decision:
    d, lengths, counts = numbers["width"], numbers["lengths"], numbers["multiply-adds"]
    exact = counts["attention"] == [2 * n * n * d for n in lengths]
    exact &= counts["recurrent"] == [2 * n * d * d for n in lengths]
    exact &= counts["projections"] == [4 * n * d * d for n in lengths]
    found, expected = numbers["crossings"], {"recurrent": d, "projections": 2 * d}
    met = all(found[part] is not None and abs(found[part] / at - 1) < 1e-6 for part, at in expected.items())
    clock, shown = (
        {part: "at no length" if at is None else f"above n={at:.0f}" for part, at in crossings.items()}
        for crossings in (numbers["crossings in seconds"], found)
    )
    changed = numbers["change of the last output by the first token"] > 1e-9
    return decide(exact and met and changed, clock=clock, shown=shown)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2)
    for axes, what in zip(panels, ("multiply-adds", "seconds"), strict=True):
        plot_lines(axes, numbers["lengths"], numbers[what])
        axes.axvline(numbers["width"], color="grey", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="tokens; dotted: D", ylabel=what, title=f"{what.capitalize()} by n")
        axes.set_xticks(numbers["lengths"], [str(n) for n in numbers["lengths"]])
        axes.minorticks_off()
    return figure
