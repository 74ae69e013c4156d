"""A world of one process does what it is asked and sends nothing."""

import pytest
import torch

from regard.train.world import ALONE, alone, piece
from tests.train.tiny import Tiny


def test_one_process_is_its_own_leader_and_hears_itself() -> None:
    model = Tiny()
    assert ALONE.leads
    assert not ALONE.sharded
    assert ALONE.trained(model) is model
    assert ALONE.called(model) is model
    assert ALONE.shared(lambda: 7) == 7
    assert ALONE.gathered(lambda: 7) == [7]
    assert ALONE.summed(torch.tensor(3)) == 3
    assert piece(model.embed.weight) is model.embed.weight


def test_the_device_asked_for_is_taken() -> None:
    with alone("cpu") as world:
        assert world.device == torch.device("cpu")
    with alone() as world:
        assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_error_is_its_own() -> None:
    def fail() -> None:
        raise ValueError("no")

    for ask in (ALONE.shared, ALONE.gathered):
        with pytest.raises(ValueError, match="no"):
            ask(fail)
