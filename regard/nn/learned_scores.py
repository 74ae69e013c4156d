"""Learned score terms: modules whose call returns the score term for the current parameters."""

import torch
from torch import nn

from regard.base.validation import check_integer
from regard.core.scores import ScoreTerm, shaw, sink, t5_buckets


class LearnedBuckets(nn.Module):
    """T5's learned relative position bias: see `regard.t5_buckets`."""

    def __init__(self, heads: int, *, buckets: int = 32, reach: int = 128, both_ways: bool = True) -> None:
        super().__init__()
        self.reach, self.both_ways = reach, both_ways
        self.weight = nn.Parameter(torch.zeros(check_integer("buckets", buckets, 2), check_integer("heads", heads, 1)))
        self()  # raises here, not at the first call, if the settings are wrong

    def forward(self) -> ScoreTerm:
        return t5_buckets(self.weight, reach=self.reach, both_ways=self.both_ways)


class LearnedDistances(nn.Module):
    """Learned relative position keys up to a distance of `reach`: see `regard.shaw`."""

    def __init__(self, head_width: int, reach: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(2 * check_integer("reach", reach, 0) + 1, check_integer("head_width", head_width, 1))
        )

    def forward(self) -> ScoreTerm:
        return shaw(self.weight)


class LearnedSinks(nn.Module):
    """Learned attention sinks, one logit per head: see `regard.sink`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(check_integer("heads", heads, 1)))

    def forward(self) -> ScoreTerm:
        return sink(self.weight)
