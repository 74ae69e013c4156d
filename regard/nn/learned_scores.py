"""Learned score terms: modules that return the score term for their current parameters when they are called."""

import torch
from torch import nn

from regard.base.validation import check_integer
from regard.core.scores import ScoreTerm, shaw, sink, t5_buckets


class LearnedBuckets(nn.Module):
    """T5's relative position bias, a learned number for each head and bucket of distances: see `regard.t5_buckets`.

    heads          number of query heads
    buckets        number of buckets, which are ranges of distances between query and key
    max_distance   all distances of at least this number of positions are in the last bucket
    bidirectional  whether keys after the query have their own buckets; False for causal attention

    >>> bias = regard.nn.LearnedBuckets(heads=4, buckets=16)
    >>> regard.nn.Attention(32, heads=4, scores=bias)(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(check_integer("buckets", buckets, 2), check_integer("heads", heads, 1)))
        self()  # raises here, not at the first call, if the settings are wrong

    def forward(self) -> ScoreTerm:
        return t5_buckets(self.weight, max_distance=self.max_distance, bidirectional=self.bidirectional)


class LearnedDistances(nn.Module):
    """Learned relative position keys of Shaw et al., one vector for each distance: see `regard.shaw`.

    head_width    width of one head of q and k
    max_distance  largest distance, in positions, with its own key; larger distances use the key of this distance

    >>> positions = regard.nn.LearnedDistances(head_width=8, max_distance=16)
    >>> regard.nn.Attention(32, heads=4, scores=positions)(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, head_width: int, max_distance: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(
                2 * check_integer("max_distance", max_distance, 0) + 1, check_integer("head_width", head_width, 1)
            )
        )

    def forward(self) -> ScoreTerm:
        return shaw(self.weight)


class LearnedSinks(nn.Module):
    """Learned attention sinks, one logit per head that takes part in the softmax: see `regard.sink`.

    heads  number of query heads

    >>> sinks = regard.nn.LearnedSinks(heads=4)
    >>> regard.nn.Attention(32, heads=4, scores=sinks)(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(check_integer("heads", heads, 1)))

    def forward(self) -> ScoreTerm:
        return sink(self.weight)
