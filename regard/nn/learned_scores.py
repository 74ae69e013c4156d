"""Score terms that are learned: each call makes the term of today's parameters."""

import torch
from torch import nn

from regard.base.validation import check_integer
from regard.core.scores import ScoreTerm, shaw, sink, t5_buckets


class LearnedBuckets(nn.Module):
    """One learned number for each head and bucket of distances, as in T5. Raffel et al. 2020, arXiv:1910.10683."""

    def __init__(self, heads: int, *, buckets: int = 32, reach: int = 128, both_ways: bool = True) -> None:
        super().__init__()
        self.reach, self.both_ways = reach, both_ways
        self.weight = nn.Parameter(torch.zeros(check_integer("buckets", buckets, 2), check_integer("heads", heads, 1)))
        self()  # what cannot be is refused here, not at the first call

    def forward(self) -> ScoreTerm:
        return t5_buckets(self.weight, reach=self.reach, both_ways=self.both_ways)


class LearnedDistances(nn.Module):
    """One learned key for each distance up to `reach`. Shaw et al. 2018, arXiv:1803.02155."""

    def __init__(self, head_width: int, reach: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(2 * check_integer("reach", reach, 0) + 1, check_integer("head_width", head_width, 1))
        )

    def forward(self) -> ScoreTerm:
        return shaw(self.weight)


class LearnedSinks(nn.Module):
    """One learned logit for each head that takes weight and gives no value. Xiao et al. 2023, arXiv:2309.17453."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(check_integer("heads", heads, 1)))

    def forward(self) -> ScoreTerm:
        return sink(self.weight)
