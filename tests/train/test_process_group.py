"""A group of one process."""

import pytest
import torch

from regard.train.process_group import SINGLE_PROCESS, local_shard, single_process
from tests.train.tiny import Tiny


def test_a_single_process_is_main_and_its_collectives_return_its_own_values() -> None:
    model = Tiny()
    assert SINGLE_PROCESS.is_main
    assert not SINGLE_PROCESS.is_sharded
    assert SINGLE_PROCESS.prepare(model) is model
    assert SINGLE_PROCESS.wrap(model) is model
    assert SINGLE_PROCESS.run_on_main(lambda: 7) == 7
    assert SINGLE_PROCESS.all_gather(lambda: 7) == [7]
    assert SINGLE_PROCESS.all_reduce(torch.tensor(3)) == 3
    assert local_shard(model.embed.weight) is model.embed.weight


def test_the_device_is_used() -> None:
    assert single_process("cpu").device == torch.device("cpu")
    assert single_process().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_errors_are_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    for call in (SINGLE_PROCESS.run_on_main, SINGLE_PROCESS.all_gather):
        with pytest.raises(ValueError, match="no"):
            call(fail)
