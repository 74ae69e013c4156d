"""Splits: record numbers dealt out at random into parts that share none."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer


def split(size: int, held: Sequence[int], seed: int = 0) -> tuple[Int64[Tensor, "_"], ...]:
    """Numbers 0 .. size - 1 in parts, each in ascending order: first all that remain, then one part for each of `held`.

    `split(50_000, [5_000])` gives 45,000 records to train on and 5,000 to validate with.
    """
    check_integer("split(size)", size, 1, "records")
    parts = [check_integer("split(held)", count, 0, "records") for count in held]
    if sum(parts) > size:
        raise ConfigError(f"{' + '.join(map(str, parts))} records cannot be held out of {size}")
    shuffled = torch.randperm(size, generator=make_generator(seed))
    return tuple(part.sort().values for part in shuffled.split([size - sum(parts), *parts]))
