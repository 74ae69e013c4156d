"""Every generator is seeded, and goes on where its state was kept."""

import json
import random

import numpy
import torch

from regard.train import rng_state

CPU = torch.device("cpu")


def drawn() -> tuple[list[float], list[float], list[float], float]:
    return torch.rand(3).tolist(), numpy.random.rand(2).tolist(), numpy.random.randn(1).tolist(), random.gauss(0, 1)


def test_a_seed_decides_all_and_further_numbers_give_others() -> None:
    found = []
    for seeds in ((3,), (3,), (3, 0), (4,), (3, 1), (3, 0, 1), (3, 1, 0)):
        rng_state.seed_generators(*seeds)
        found.append(drawn())
    assert found[0] == found[1] == found[2]
    assert len({str(each) for each in found}) == 5


def test_states_go_through_json_and_drawing_goes_on() -> None:
    rng_state.seed_generators(5)
    drawn()  # a second half of a normal pair is kept by both numpy and Python
    tensors, facts = rng_state.save_rng_state(CPU)
    expected = [drawn() for _ in range(3)]
    drawn()
    rng_state.restore_rng_state({name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(facts)), CPU)
    assert [drawn() for _ in range(3)] == expected


def test_draws_inside_are_not_felt_outside() -> None:
    rng_state.seed_generators(5)
    expected = drawn()
    rng_state.seed_generators(5)
    with rng_state.preserve_rng_state(CPU):
        drawn()
    assert drawn() == expected
