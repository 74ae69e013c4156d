"""Arguments of the wrong kind: every public function answers with its own error, which names the argument."""

from collections.abc import Callable

import pytest
import torch

from regard import (
    DynamicCache,
    Positions,
    Stream,
    attend,
    causal,
    channel_attend,
    dilated,
    grid_positions,
    linear_attend,
    rotary,
    sinusoidal,
    softargmax,
)
from regard.base.errors import RegardError
from regard.core.linear import performer
from regard.core.positions import NTK

x = torch.zeros(1, 1, 3, 4)

ODD: dict[str, tuple[Callable[[], object], str]] = {
    "sinusoidal by halves": (lambda: sinusoidal(2.5, 4), r"positions takes a whole number, not 2\.5"),
    "sinusoidal backwards": (lambda: sinusoidal(-1, 4), "positions is -1, but must be at least 0: it counts tokens"),
    "sinusoidal half wide": (lambda: sinusoidal(2, 4.0), r"width takes a whole number, not 4\.0"),
    "sinusoidal no base": (lambda: sinusoidal(2, 4, base="a"), "base is 'a', but takes one real number"),
    "rotary no base": (lambda: rotary(base="a"), "base is 'a', but takes one real number"),
    "rotary half wide": (lambda: rotary(width=4.0), r"width takes a whole number, not 4\.0"),
    "rotary without axes": (lambda: rotary(axes=0), "axes is 0, but must be at least 1: it counts the coordinates"),
    "rotary from nowhere": (lambda: rotary()(x, "a"), "positions is 'a', but rotary takes None, a whole number or"),
    "stretched by a word": (lambda: NTK("a"), r"NTK\(factor\) is 'a', but takes one real number"),
    "a grid of -1 rows": (lambda: grid_positions(-1, 2), "rows is -1, but must be at least 0: it counts patches"),
    "a grid of half columns": (lambda: grid_positions(1, 0.5), r"columns takes a whole number, not 0\.5"),
    "performer half wide": (lambda: performer(4.5, 3), r"performer\(width\) takes a whole number, not 4\.5"),
    "performer of nothing": (lambda: performer(4, 0), r"performer\(count\) is 0, but must be at least 1"),
    "performer by a word": (lambda: performer(4, 3, beta="a"), r"performer\(beta\) is 'a', but takes one real"),
    "count of a word": (lambda: causal().count("5"), "queries takes a whole number, not '5'"),
    "count of halves": (lambda: causal().count(5, 2.5), r"keys takes a whole number, not 2\.5"),
    "dense of halves": (lambda: causal().dense(4.0), r"queries takes a whole number, not 4\.0"),
    "a negative length": (lambda: causal().dense(-1), "queries is -1, but must be at least 0"),
    "half blocks": (lambda: causal().block_table(8, size=2.5), r"block_table\(size\) takes a whole number, not 2\.5"),
    "empty blocks": (lambda: causal().block_table(8, size=0), r"block_table\(size\) is 0, but must be at least 1"),
    "positions of another length": (
        lambda: causal().count(2, 3, positions=Positions(0, torch.arange(4))),
        r"positions.keys is \(4,\), but k has j=3 \(key positions\); give one position per key",
    ),
    "positions that are none": (
        lambda: causal().dense(2, positions=3),
        r"positions must be regard.Positions\(queries, keys\)",
    ),
    "softargmax of a list": (lambda: softargmax([1.0, 2.0]), "scores must be a tensor, not list"),
    "channels of a list": (lambda: channel_attend([1], x, x), r"q must be a tensor read as \(b h n c\), not list"),
    "channels without heads": (
        lambda: channel_attend(*[torch.zeros(3, 4)] * 3),
        r"q has 2 axes, \(3, 4\), but",
    ),
    "no channels": (lambda: channel_attend(*[torch.zeros(1, 1, 3, 0)] * 3), "there must be at least one channel"),
    "softargmax over no axis": (lambda: softargmax(x, axis=5), "axis is 5, but scores have 4 axes"),
    "softargmax over a word": (lambda: softargmax(x, axis="j"), "axis is 'j', but scores have 4 axes"),
    "a cache of lists": (lambda: DynamicCache().extend([1], [2]), r"k must be a tensor read as \(b g n c\), not list"),
    "a stream of lists": (lambda: Stream(causal()).push([1], [2], [3]), r"k must be a tensor read as \(b g n c\)"),
    "rotary of a list": (lambda: rotary()([1]), "x must be a tensor of heads"),
    "eight bits": (lambda: attend(*[x.to(torch.float8_e4m3fn)] * 3), "q is torch.float8_e4m3fn, but attention takes"),
    "sparse": (lambda: attend(*[x.to_sparse()] * 3), r"q is torch.sparse_coo.*call q.to_dense\(\) first"),
    "beyond counting": (lambda: dilated(2**64), r"dilated\(step\) is 18446744073709551616, which no tensor can count"),
    "linear from a number": (lambda: linear_attend(x, x, x, state=3), "state takes the .state of an earlier"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_argument_is_named(name: str) -> None:
    call, message = ODD[name]
    with pytest.raises(RegardError, match=message):
        call()
