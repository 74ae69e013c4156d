"""Averaged weights compared with their definitions."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.train.averaging import Averager, ExponentialAverage, LastKAverage


class Counted(nn.Module):
    """One weight, tied under two names, a buffer that is averaged and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))
        self.tied = self.weight
        self.register_buffer("running", torch.zeros(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def move(self, step: int) -> Tensor:
        for tensor in (self.weight, self.running, self.calls):
            tensor.fill_(step**2)
        return torch.tensor(float(step**2))


def test_the_last_snapshots_are_averaged() -> None:
    model = Counted()
    averager = Averager(LastKAverage(count=3, every=2), model)
    for step in range(1, 12):
        model.move(step)
        averager.update(step)
    mean = (6**2 + 8**2 + 10**2) / 3
    with averager.applied():
        assert model.weight[0, 0].item() == pytest.approx(mean)
        assert model.running[0].item() == pytest.approx(mean)
        assert model.calls == 121, "integer buffers are not averaged"
    assert (model.weight == 121).all()
    averager.apply()
    assert model.tied[1, 2].item() == pytest.approx(mean)


def test_the_exponential_average_follows_its_recurrence() -> None:
    model, mean = Counted(), torch.zeros(())
    averager = Averager(ExponentialAverage(decay=0.6), model)
    for step in range(1, 30):
        now = model.move(step)
        decay = min(0.6, step / (step + 9)) if step > 1 else 0.0
        mean = decay * mean + (1 - decay) * now
        averager.update(step)
    averager.apply()
    torch.testing.assert_close(model.weight.detach(), mean.expand(3, 5))


def test_before_the_first_snapshot_the_weights_are_unchanged() -> None:
    model = Counted()
    averager = Averager(LastKAverage(count=2, every=50), model)
    model.move(3)
    averager.update(3)
    with averager.applied():
        assert (model.weight == 9).all()
    averager.apply()
    assert (model.weight == 9).all()


def test_the_weights_are_restored_after_an_error() -> None:
    model = Counted()
    averager = Averager(ExponentialAverage(), model)
    model.move(1)
    averager.update(1)
    model.move(4)
    with suppress(KeyboardInterrupt), averager.applied():
        assert (model.weight == 1).all()
        raise KeyboardInterrupt
    assert (model.weight == 16).all()


@pytest.mark.parametrize(
    "config", [LastKAverage(count=12, every=1), ExponentialAverage(decay=0.9)], ids=["last", "exponential"]
)
def test_the_state_dict_restores_the_average(config: LastKAverage | ExponentialAverage) -> None:
    model, other = Counted(), Counted()
    averager, again = Averager(config, model), Averager(config, other)
    for step in range(1, 13):
        model.move(step)
        averager.update(step)
    again.load_state_dict({name: tensor.clone() for name, tensor in averager.state_dict().items()})
    for each, owner in ((averager, model), (again, other)):
        owner.move(13)
        each.update(13)
        each.apply()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.running, other.running)


def test_invalid_settings_raise_an_error() -> None:
    with pytest.raises(ConfigError, match=r"ExponentialAverage\(decay\) must be at least 0 and below 1, not 1"):
        ExponentialAverage(decay=1)
    with pytest.raises(ConfigError, match=r"LastKAverage\(count\) is 0, but must be at least 1: it counts snapshots"):
        LastKAverage(count=0)
