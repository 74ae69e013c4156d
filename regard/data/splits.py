"""Random splits of a data set."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer


def random_split(size: int, held_out: Sequence[int], seed: int = 0) -> tuple[Int64[Tensor, "_"], ...]:
    """Split the indices 0 .. size - 1 at random into disjoint parts, each in ascending order.

    size      number of records
    held_out  sizes of all parts but the first; the first part has the remaining records

    >>> [len(part) for part in random_split(50_000, [5_000])]
    [45000, 5000]
    """
    check_integer("random_split(size)", size, 1, "records")
    parts = [check_integer("random_split(held_out)", count, 0, "records") for count in held_out]
    if sum(parts) > size:
        raise ConfigError(f"{' + '.join(map(str, parts))} records cannot be held out of {size}")
    shuffled = torch.randperm(size, generator=make_generator(seed))
    return tuple(part.sort().values for part in shuffled.split([size - sum(parts), *parts]))
