"""Samplers: which records are in a batch depends only on the seed and the step.

So a run can resume at any step without a saved sampler state.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base import seeds
from regard.base.errors import ConfigError
from regard.base.validation import check_integer


def sampler_generator(seed: int, step: int, *names: str) -> torch.Generator:
    """Return a torch.Generator on the CPU for one purpose in one step, such as random crops.

    Equal arguments always give the same random numbers.

    step   number of the training step, or of a record or epoch
    names  name of the purpose, such as "crop"; different names give independent random numbers

    >>> torch.rand(2, generator=sampler_generator(0, 7, "crop")).shape
    torch.Size([2])
    """
    key = hashlib.blake2b(repr((int(seed), int(step), names)).encode(), digest_size=8).digest()
    return seeds.make_generator(int.from_bytes(key, "little") >> 1)  # torch takes 63 bits without a sign


def random_index(size: int, generator: torch.Generator) -> int:
    """Return a random integer from 0 to size - 1."""
    return int(torch.randint(size, (), generator=generator))


@dataclass(frozen=True)
class ShuffledOrder:
    """Endless batches of record indices in random order: each epoch is a new permutation, and batches span epochs.

    Every record comes exactly once in an epoch, even if the batch size does not divide the number of records.

    size   number of records
    batch  number of records in a batch

    Here the third batch has the last record of the first epoch and the first record of the second:

    >>> order = ShuffledOrder(size=5, batch=2, seed=0)
    >>> [order.at(step).tolist() for step in range(5)]  # two epochs
    [[3, 0], [2, 1], [4, 0], [3, 2], [4, 1]]
    """

    size: int
    batch: int
    seed: int = 0
    _cached: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer("ShuffledOrder(size)", self.size, 1, "records")
        check_integer("ShuffledOrder(batch)", self.batch, 1, "records")

    def at(self, step: int, part: int = 0, of: int = 1) -> Int64[Tensor, "_"]:
        """Return the record indices of one micro-batch of a training step.

        step  number of the step, from 0
        part  index of the micro-batch, from 0
        of    number of equal micro-batches into which the batch is split; by default it is not split
        """
        of = check_integer("ShuffledOrder.at(of)", of, 1, "shares")
        if not check_integer("ShuffledOrder.at(part)", part, 0) < of:
            raise ConfigError(f"share {part} is not one of {of}, which count from 0")
        if self.batch % of:
            raise ConfigError(
                f"a batch of {self.batch} cannot be split into {of} equal shares; use a multiple of {of}, such as "
                f"{self.batch + -self.batch % of}"
            )
        size = self.batch // of
        return self._batch(check_integer("ShuffledOrder.at(step)", step, 0))[part * size : (part + 1) * size]

    def _batch(self, step: int) -> Int64[Tensor, "batch"]:
        """Return the record indices of the batch of one step."""
        position, stop = step * self.batch, (step + 1) * self.batch
        parts = []
        while position < stop:
            epoch, start = divmod(position, self.size)
            parts.append(self._permutation(epoch)[start : start + stop - position])
            position += len(parts[-1])
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> Int64[Tensor, "size"]:
        """Return the permutation of all records in one epoch. The most recently used permutation is cached."""
        if epoch not in self._cached:
            self._cached.clear()
            self._cached[epoch] = torch.randperm(self.size, generator=sampler_generator(self.seed, epoch, "order"))
        return self._cached[epoch]


@dataclass(frozen=True)
class LengthBuckets(ShuffledOrder):
    """Batches of records of similar length (bucketing), so that there is little padding.

    The records of `pool` shuffled batches (at most one epoch) are sorted by length and split into new batches. The new
    batches are returned in random order.

    lengths  lengths of all records
    pool     number of batches that are sorted together

    >>> order = LengthBuckets(100, 10, lengths=torch.arange(100), pool=4)
    >>> order.at(0).shape
    torch.Size([10])
    """

    lengths: Int64[Tensor, "size"] = field(kw_only=True, repr=False, compare=False)
    pool: int = field(kw_only=True)
    _pools: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("LengthBuckets(pool)", self.pool, 1, "batches")
        if self.lengths.shape != (self.size,):
            raise ConfigError(f"lengths is {tuple(self.lengths.shape)}, but there are {self.size} records")

    def _batch(self, step: int) -> Int64[Tensor, "batch"]:
        size = min(self.pool, self.size // self.batch)
        if size <= 1:
            return super()._batch(step)
        pool, number = divmod(step, size)
        if pool not in self._pools:
            self._pools.clear()
            steps = range(pool * size, (pool + 1) * size)
            records = torch.cat([super(LengthBuckets, self)._batch(each) for each in steps])
            # a stable sort gives the same order on every machine
            batches = records[self.lengths[records].argsort(stable=True)].view(size, self.batch)
            self._pools[pool] = batches[torch.randperm(size, generator=sampler_generator(self.seed, pool, "alike"))]
        return self._pools[pool][number]
