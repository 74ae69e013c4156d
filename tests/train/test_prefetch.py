"""Batches come in order, one ahead, from a thread that ends."""

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard.train.prefetch import Prefetcher, move_to_device


def running() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("batches")]


def test_batches_are_loaded_in_order_and_none_after_the_last_step() -> None:
    made: list[int] = []
    with Prefetcher(lambda step: made.append(step) or step * 10, 3, 6) as ahead:
        assert [ahead.next() for _ in range(3)] == [30, 40, 50]
        assert running()
    assert made == [3, 4, 5]
    assert not running()


def test_the_next_batch_is_loaded_while_this_one_is_used() -> None:
    begun = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            begun.set()
        return step

    with Prefetcher(make, 0, 9) as ahead:
        assert ahead.next() == 0
        assert begun.wait(10), "nobody has asked for the second one"


def test_an_error_is_raised_at_its_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("line 7")
        return step

    with Prefetcher(make, 0, 9) as ahead:
        assert [ahead.next(), ahead.next()] == [0, 1]
        with pytest.raises(ValueError, match="line 7"):
            ahead.next()
    assert not running()


class Pair(NamedTuple):
    a: Tensor
    b: str


@dataclass(frozen=True)
class Held:
    x: Tensor
    more: dict[str, Any]


def test_tensors_are_moved_inside_all_containers() -> None:
    x = torch.arange(3)
    batch = [x, (x, 7), Pair(x, "b"), {"k": [x, None]}, Held(x, {"y": (x,)})]
    out = move_to_device(batch, torch.device("meta"))
    assert [type(each) for each in out] == [Tensor, tuple, Pair, dict, Held]
    found = [out[0], out[1][0], out[2].a, out[3]["k"][0], out[4].x, out[4].more["y"][0]]
    assert all(each.device.type == "meta" for each in found)
    assert (out[1][1], out[2].b, out[3]["k"][1]) == (7, "b", None)
