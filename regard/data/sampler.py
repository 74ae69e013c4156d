"""The order of records: which ones a step sees is a function of the seed and the step alone.

So a run's position in its data is its step number, and nothing else has to be saved to go on where it stopped.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base import seeds
from regard.base.errors import ConfigError
from regard.base.validation import check_integer


def sampler_generator(seed: int, step: int, *names: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one use in one step: `generator(seed, step, "crop")` draws the same whatever was drawn before."""
    key = hashlib.blake2b(repr((int(seed), int(step), names)).encode(), digest_size=8).digest()
    return seeds.make_generator(int.from_bytes(key, "little") >> 1, device)  # torch takes 63 bits without a sign


@dataclass(frozen=True)
class ShuffledOrder:
    """Batches of record numbers without end: each pass is a fresh permutation, and batches run on across passes.

    Every record comes exactly once in a pass, also where the batch does not divide the number of records.
    """

    size: int
    batch: int
    seed: int = 0
    _passes: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer("ShuffledOrder(size)", self.size, 1, "records")
        check_integer("ShuffledOrder(batch)", self.batch, 1, "records")

    def at(self, step: int) -> Int64[Tensor, "batch"]:
        """The records of one step; steps count from 0."""
        step = check_integer("ShuffledOrder.at(step)", step, 0)
        place, stop = step * self.batch, (step + 1) * self.batch
        parts = []
        while place < stop:
            turn, start = divmod(place, self.size)
            parts.append(self._pass(turn)[start : start + stop - place])
            place += len(parts[-1])
        return torch.cat(parts)

    def part(self, rank: int, of: int) -> "Part":
        """The share of one of several processes; all shares, in the order of ranks, are the batch of one process."""
        of = check_integer("ShuffledOrder.part(of)", of, 1, "processes")
        if not check_integer("ShuffledOrder.part(rank)", rank, 0) < of:
            raise ConfigError(f"rank {rank} is none of {of} processes, which count from 0")
        if self.batch % of:
            raise ConfigError(
                f"a batch of {self.batch} has no {of} equal shares, and the mean of unequal shares is not that of the "
                f"batch; use a multiple of {of}, such as {self.batch + -self.batch % of}"
            )
        return Part(self, rank, of)

    def _pass(self, turn: int) -> Int64[Tensor, "size"]:
        """The permutation of one pass. Only the last one asked for is kept."""
        if turn not in self._passes:
            self._passes.clear()
            self._passes[turn] = torch.randperm(self.size, generator=sampler_generator(self.seed, turn, "order"))
        return self._passes[turn]


@dataclass(frozen=True)
class LengthBuckets(ShuffledOrder):
    """Batches of records of like length, so that little of them is filled up.

    The records of `pool` batches of an Order are sorted together and cut into batches, which come in any order. No more
    are taken than a pass has: else the same records would meet in a batch.

    lengths  of all the records
    """

    lengths: Int64[Tensor, "size"] = field(kw_only=True, repr=False, compare=False)
    pool: int = field(kw_only=True)
    _pools: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("LengthBuckets(pool)", self.pool, 1, "batches")
        if self.lengths.shape != (self.size,):
            raise ConfigError(f"lengths is {tuple(self.lengths.shape)}, but there are {self.size} records")

    def at(self, step: int) -> Int64[Tensor, "batch"]:
        """The records of one step; steps count from 0."""
        size = min(self.pool, self.size // self.batch)
        if size <= 1:
            return super().at(step)
        pool, number = divmod(check_integer("LengthBuckets.at(step)", step, 0), size)
        if pool not in self._pools:
            self._pools.clear()
            records = torch.cat([super(LengthBuckets, self).at(each) for each in range(pool * size, (pool + 1) * size)])
            # stable, so that the same records come in the same order everywhere
            batches = records[self.lengths[records].argsort(stable=True)].view(size, self.batch)
            self._pools[pool] = batches[torch.randperm(size, generator=sampler_generator(self.seed, pool, "alike"))]
        return self._pools[pool][number]


@dataclass(frozen=True)
class Part:
    """One process's share of each batch."""

    order: ShuffledOrder
    rank: int
    of: int

    @property
    def batch(self) -> int:
        return self.order.batch // self.of

    def at(self, step: int) -> Int64[Tensor, "batch"]:
        """The records of one step that are this process's."""
        return self.order.at(step)[self.rank * self.batch : (self.rank + 1) * self.batch]
