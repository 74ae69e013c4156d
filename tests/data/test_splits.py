"""Parts of a split share no record and lose none."""

import pytest
import torch

from regard.base.errors import ConfigError
from regard.data.splits import random_split


def test_parts_share_nothing_and_lose_nothing() -> None:
    parts = random_split(101, [13, 7], seed=3)
    assert [len(part) for part in parts] == [81, 13, 7]
    assert torch.cat(parts).sort().values.tolist() == list(range(101))
    assert all(torch.equal(part, part.sort().values) for part in parts)


def test_a_split_is_random_and_belongs_to_its_seed() -> None:
    assert torch.equal(random_split(101, [13], seed=3)[1], random_split(101, [13], seed=3)[1])
    assert not torch.equal(random_split(101, [13], seed=3)[1], random_split(101, [13], seed=4)[1])
    assert random_split(101, [13], seed=3)[1].tolist() not in (list(range(13)), list(range(88, 101)))


def test_more_than_all_cannot_be_held_out() -> None:
    with pytest.raises(ConfigError, match=r"7 \+ 5 records cannot be held out of 11"):
        random_split(11, [7, 5])
    with pytest.raises(ConfigError, match=r"random_split\(held_out\) is -1"):
        random_split(11, [-1])
