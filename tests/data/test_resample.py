"""Sound at another rate is the same sound: a sine stays that sine."""

import math

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.data.resample import resample


def sine(hertz: float, rate: int, samples: int) -> Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(samples, dtype=torch.float64) / rate + 0.7)


@pytest.mark.parametrize(
    ("rate", "to"), [(8000, 16_000), (16_000, 8000), (44_100, 8000), (8000, 11_025), (48_000, 44_100), (7, 5)]
)
@pytest.mark.parametrize("share", [0.05, 0.31, 0.8])
def test_a_sine_stays_a_sine(rate: int, to: int, share: float) -> None:
    hertz = share * min(rate, to) / 2
    samples = 3 * rate if rate < 100 else rate // 4 + 3
    samples = max(samples, 1501)
    found = resample(sine(hertz, rate, samples), rate, to)
    assert len(found) == math.ceil(samples * to / rate)
    wanted = sine(hertz, to, len(found))
    edge = math.ceil(30 * max(1.0, to / rate))  # before the start and after the end there is silence
    torch.testing.assert_close(found[edge:-edge], wanted[edge:-edge], rtol=0, atol=2e-3)


@pytest.mark.parametrize("hertz", [4400, 5000, 7900])
def test_frequencies_above_half_the_lower_rate_are_removed_without_aliasing(hertz: float) -> None:
    found = resample(sine(hertz, 16_000, 4001), 16_000, 8000)
    assert found[50:-50].abs().max() < 3e-3


def test_a_constant_stays() -> None:
    found = resample(torch.full((2, 901), 0.5), 44_100, 8000)
    torch.testing.assert_close(found[:, 30:-30], torch.full_like(found[:, 30:-30], 0.5), rtol=0, atol=1e-3)


def test_the_same_rate_changes_nothing() -> None:
    sound = torch.randn(3, 17)
    assert torch.equal(resample(sound, 8000, 8000), sound)


def test_leading_axes_and_precision_are_kept() -> None:
    sound = torch.randn(2, 3, 101)
    found = resample(sound, 5, 7)
    assert found.shape == (2, 3, 142)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[1, 2], resample(sound[1, 2], 5, 7))


def test_rates_are_whole() -> None:
    with pytest.raises(ConfigError, match=r"resample\(to\) is 0"):
        resample(torch.randn(5), 8000, 0)
