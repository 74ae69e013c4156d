"""Dialled digits can be told from their tones, and are the same for the same seed."""

import math

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, DataError
from regard.data.digit_strings import DigitStrings
from regard.data.tones import COLUMNS, PITCHES, ROWS, tones


def strength(sound: Tensor, hertz: float, rate: int) -> float:
    phases = 2 * math.pi * hertz * torch.arange(len(sound)) / rate
    return float((sound * torch.exp(1j * phases)).sum().abs())


def heard(sound: Tensor, rate: int) -> list[int]:
    """Digits by hand: what is loud for a while, and its strongest row and column."""
    loud = (sound.unfold(0, 40, 20).abs().amax(-1) > 0.02).tolist()
    edges = [place for place in range(1, len(loud)) if loud[place] != loud[place - 1]]
    digits = []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        part = sound[20 * start + 40 : 20 * stop]
        row, column = (max(tones, key=lambda hertz: strength(part, hertz, rate)) for tones in (ROWS, COLUMNS))
        digits.append(next(digit for digit, pitches in PITCHES.items() if pitches == (row, column)))
    return digits


def test_what_is_dialled_can_be_heard() -> None:
    found = tones(30, (1, 9), seed=2, noise=0.0)
    assert {len(labels) for labels in found.labels} > {1, 5, 9}
    assert set(torch.cat(found.labels).tolist()) == set(range(10))
    for sound, labels in zip(found.sounds, found.labels, strict=True):
        assert heard(sound, 8000) == labels.tolist()


def test_each_digit_has_two_tones_of_its_own() -> None:
    assert len(set(PITCHES.values())) == 10
    assert (PITCHES[1], PITCHES[6], PITCHES[0]) == ((697, 1209), (770, 1477), (941, 1336))


def test_noise_is_added_and_sounds_stay_in_range() -> None:
    clean, noisy = tones(3, seed=1, noise=0.0), tones(3, seed=1, noise=0.3)
    for before, after in zip(clean.sounds, noisy.sounds, strict=True):
        assert abs(float((after - before).std()) - 0.3) < 0.03
        assert after.abs().max() <= 1


def test_lengths_and_pauses_vary() -> None:
    found = tones(20, (4, 4))
    assert len({len(sound) for sound in found.sounds}) > 15
    assert all(4 * 0.06 + 5 * 0.04 <= len(sound) / 8000 <= 4 * 0.16 + 5 * 0.12 for sound in found.sounds)


def test_a_string_is_the_same_however_many_are_made() -> None:
    few, many = tones(2, seed=7), tones(5, seed=7)
    assert all(torch.equal(few.sounds[number], many.sounds[number]) for number in range(2))
    assert not torch.equal(tones(1, seed=8).sounds[0], few.sounds[0])
    assert len(few) == 2


def test_unfit_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="rate=2000 is too low for tones of 1477 hertz; use at least 2954"):
        tones(3, rate=2000)
    with pytest.raises(ConfigError, match=r"noise=-1 must be 0 or more"):
        tones(3, noise=-1)
    with pytest.raises(ConfigError, match=r"tones\(count\) is 0"):
        tones(0)
    with pytest.raises(ConfigError, match=r"length \(fewest\) is 0"):
        tones(3, (0, 2))
    with pytest.raises(DataError, match="1 sounds have 0 strings of digits; each needs one"):
        DigitStrings((torch.zeros(3),), (), 8000)
