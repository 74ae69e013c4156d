"""Seeds and RNG states of torch, numpy and Python."""

import json
import random

import numpy
import torch

from regard.train import rng_state

CPU = torch.device("cpu")


def draw() -> tuple[list[float], list[float], list[float], float]:
    return torch.rand(3).tolist(), numpy.random.rand(2).tolist(), numpy.random.randn(1).tolist(), random.gauss(0, 1)


def test_equal_seeds_give_equal_numbers_and_further_numbers_give_others() -> None:
    found = []
    for seeds in ((3,), (3,), (3, 0), (4,), (3, 1), (3, 0, 1), (3, 1, 0)):
        rng_state.seed_generators(*seeds)
        found.append(draw())
    assert found[0] == found[1] == found[2]
    assert len({str(each) for each in found}) == 5


def test_a_saved_state_can_be_restored_from_json() -> None:
    rng_state.seed_generators(5)
    draw()  # numpy and Python keep the second number of a normal pair
    tensors, values = rng_state.save_rng_state(CPU)
    expected = [draw() for _ in range(3)]
    draw()
    rng_state.restore_rng_state({name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(values)), CPU)
    assert [draw() for _ in range(3)] == expected


def test_preserve_rng_state_restores_the_state_on_exit() -> None:
    rng_state.seed_generators(5)
    expected = draw()
    rng_state.seed_generators(5)
    with rng_state.preserve_rng_state(CPU):
        draw()
    assert draw() == expected
