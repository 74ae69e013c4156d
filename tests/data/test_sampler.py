"""Which records a step sees is a function of the seed and the step alone, and no record is lost or doubled."""

import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.data.sampler import LengthBuckets, ShuffledOrder, sampler_generator


def drawn(order: ShuffledOrder, steps: int) -> Tensor:
    return torch.cat([order.at(step) for step in range(steps)])


@pytest.mark.parametrize(("size", "batch"), [(11, 3), (7, 7), (5, 13), (1, 4), (12, 5), (9, 1)])
def test_every_record_comes_once_in_an_epoch_and_batches_cross_epochs(size: int, batch: int) -> None:
    rows = drawn(ShuffledOrder(size, batch, seed=3), size)  # `batch` passes of `size` records
    assert rows.shape == (size * batch,)
    for turn in rows.reshape(batch, size):
        assert turn.sort().values.tolist() == list(range(size))


def test_every_epoch_is_another_permutation() -> None:
    first, second, third = drawn(ShuffledOrder(101, 101), 3).reshape(3, 101)
    assert not torch.equal(first, torch.arange(101))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_step_does_not_depend_on_earlier_calls() -> None:
    whole = [ShuffledOrder(17, 5, seed=2).at(step) for step in range(23)]
    order = ShuffledOrder(17, 5, seed=2)
    for step in (22, 0, 9, 9, 3, 22, 4, 1):
        assert torch.equal(order.at(step), whole[step])


def test_the_seed_decides() -> None:
    assert torch.equal(drawn(ShuffledOrder(53, 7, seed=4), 8), drawn(ShuffledOrder(53, 7, seed=4), 8))
    assert not torch.equal(drawn(ShuffledOrder(53, 7, seed=4), 8), drawn(ShuffledOrder(53, 7, seed=5), 8))


def test_the_global_generator_has_no_effect() -> None:
    before = ShuffledOrder(31, 4).at(3)
    torch.manual_seed(77)
    torch.rand(9)
    state = torch.random.get_rng_state()
    assert torch.equal(ShuffledOrder(31, 4).at(3), before)
    assert torch.equal(torch.random.get_rng_state(), state)


LENGTHS = torch.randint(1, 30, (53,), generator=torch.Generator().manual_seed(0))


def alike(pool: int, seed: int = 4) -> LengthBuckets:
    return LengthBuckets(53, 6, seed, lengths=LENGTHS, pool=pool)


@pytest.mark.parametrize("pool", [5, 8])
def test_length_buckets_group_similar_lengths_and_lose_no_record(pool: int) -> None:
    rising = 0
    for first in range(0, 80, pool):
        batches = [alike(pool).at(step) for step in range(first, first + pool)]
        plain = drawn(ShuffledOrder(53, 6, 4), first + pool)[6 * first :]
        assert torch.cat(batches).sort().values.equal(plain.sort().values)
        spans = [(int(LENGTHS[batch].min()), int(LENGTHS[batch].max())) for batch in batches]
        in_order = sorted(spans)
        assert all(one[1] <= other[0] for one, other in pairwise(in_order)), "batches cut a sorted row"
        rising += spans == in_order
    assert rising <= 2, "the batches of a pool come in any order, not from short to long"


@pytest.mark.parametrize("batch", [6, 17, 40])
def test_a_bucket_has_at_most_one_epoch(batch: int) -> None:
    order = LengthBuckets(53, batch, 4, lengths=LENGTHS, pool=16)
    for step in range(53 // batch):  # of the first pass
        assert len(set(order.at(step).tolist())) == batch
    if batch == 40:
        assert torch.equal(drawn(order, 9), drawn(ShuffledOrder(53, 40, 4), 9))


def test_length_buckets_do_not_depend_on_earlier_calls_or_the_number_of_processes() -> None:
    whole, order = [alike(4).at(step) for step in range(23)], alike(4)
    for step in (22, 0, 9, 9, 3, 22, 4, 1):
        assert torch.equal(order.at(step), whole[step])
        assert torch.equal(torch.cat([order.at(step, rank, 3) for rank in range(3)]), whole[step])
    assert not torch.equal(drawn(alike(4, seed=5), 23), torch.cat(whole))


def test_the_number_of_lengths_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"lengths is \(53,\), but there are 54 records"):
        LengthBuckets(54, 6, lengths=LENGTHS, pool=2)
    with pytest.raises(ConfigError, match=r"LengthBuckets\(pool\) is 0, but must be at least 1"):
        alike(0)


@pytest.mark.parametrize("of", [1, 2, 3, 6])
def test_the_shards_of_all_processes_concatenate_to_the_batch(of: int) -> None:
    order = ShuffledOrder(13, 6, seed=1)
    for step in range(15):
        shares = [ShuffledOrder(13, 6, seed=1).at(step, rank, of) for rank in range(of)]
        assert all(share.shape == (6 // of,) for share in shares)
        assert torch.equal(torch.cat(shares), order.at(step))


def test_only_the_permutation_of_the_current_epoch_is_cached() -> None:
    order = ShuffledOrder(19, 19)
    drawn(order, 5)
    assert list(order._cached) == [4]


def test_cached_permutations_do_not_affect_equality_and_repr() -> None:
    used, fresh = ShuffledOrder(19, 4), ShuffledOrder(19, 4)
    used.at(30)
    assert used == fresh
    assert repr(used) == "ShuffledOrder(size=19, batch=4, seed=0)"
    assert torch.equal(pickle.loads(pickle.dumps(used)).at(6), fresh.at(6))


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Order\(size\) is 0, but must be at least 1: it counts records"):
        ShuffledOrder(0, 3)
    with pytest.raises(ConfigError, match=r"Order\(batch\) is 0"):
        ShuffledOrder(3, 0)
    with pytest.raises(ConfigError, match=r"Order.at\(step\) is -1"):
        ShuffledOrder(3, 2).at(-1)
    with pytest.raises(ConfigError, match=r"share 2 is not one of 2, which count from 0"):
        ShuffledOrder(30, 4).at(0, 2, 2)
    with pytest.raises(
        ConfigError, match=r"a batch of 7 cannot be split into 3 equal shares.*use a multiple of 3, such as 9"
    ):
        ShuffledOrder(30, 7).at(0, 0, 3)


def test_a_generator_belongs_to_a_seed_a_step_and_a_use() -> None:
    first = torch.rand(5, generator=sampler_generator(3, 8, "crop"))
    assert torch.equal(first, torch.rand(5, generator=sampler_generator(3, 8, "crop")))
    others = [
        sampler_generator(4, 8, "crop"),
        sampler_generator(3, 9, "crop"),
        sampler_generator(3, 8, "flip"),
        sampler_generator(3, 8),
    ]
    others += [
        sampler_generator(3, 8, "crop", "x"),
        sampler_generator(38, 0, "crop"),
        sampler_generator(3, 8, "cro", "p"),
    ]
    draws = [first, *(torch.rand(5, generator=each) for each in others)]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
