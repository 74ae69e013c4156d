"""A world of one process does what it is asked and sends nothing."""

import pytest
import torch

from regard.train.process_group import SINGLE_PROCESS, local_shard, single_process
from tests.train.tiny import Tiny


def test_one_process_is_its_own_leader_and_hears_itself() -> None:
    model = Tiny()
    assert SINGLE_PROCESS.leads
    assert not SINGLE_PROCESS.sharded
    assert SINGLE_PROCESS.trained(model) is model
    assert SINGLE_PROCESS.called(model) is model
    assert SINGLE_PROCESS.shared(lambda: 7) == 7
    assert SINGLE_PROCESS.gathered(lambda: 7) == [7]
    assert SINGLE_PROCESS.summed(torch.tensor(3)) == 3
    assert local_shard(model.embed.weight) is model.embed.weight


def test_the_device_asked_for_is_taken() -> None:
    with single_process("cpu") as world:
        assert world.device == torch.device("cpu")
    with single_process() as world:
        assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_error_is_its_own() -> None:
    def fail() -> None:
        raise ValueError("no")

    for ask in (SINGLE_PROCESS.shared, SINGLE_PROCESS.gathered):
        with pytest.raises(ValueError, match="no"):
            ask(fail)
