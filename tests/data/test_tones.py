"""Dialled digits can be told from their tones, and are the same for the same seed."""

import math

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, DataError
from regard.data.digit_strings import DigitStrings
from regard.data.tones import COLUMNS, DTMF_FREQUENCIES, ROWS, tones


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
        digits.append(next(digit for digit, pitches in DTMF_FREQUENCIES.items() if pitches == (row, column)))
    return digits


def test_digits_can_be_read_from_their_frequencies() -> None:
    found = tones(30, (1, 9), seed=2, noise=0.0)
    assert {len(labels) for labels in found.labels} > {1, 5, 9}
    assert set(torch.cat(found.labels).tolist()) == set(range(10))
    for sound, labels in zip(found.sounds, found.labels, strict=True):
        assert heard(sound, 8000) == labels.tolist()


def test_each_digit_has_two_tones_of_its_own() -> None:
    assert len(set(DTMF_FREQUENCIES.values())) == 10
    assert (DTMF_FREQUENCIES[1], DTMF_FREQUENCIES[6], DTMF_FREQUENCIES[0]) == ((697, 1209), (770, 1477), (941, 1336))


def test_noise_is_added_and_sounds_stay_in_range() -> None:
    clean, noisy = tones(3, seed=1, noise=0.0), tones(3, seed=1, noise=0.3)
    for before, after in zip(clean.sounds, noisy.sounds, strict=True):
        assert abs(float((after - before).std()) - 0.3) < 0.03
        assert after.abs().max() <= 1


def test_lengths_and_pauses_vary() -> None:
    found = tones(20, (4, 4))
    assert len({len(sound) for sound in found.sounds}) > 15
    assert all(4 * 0.06 + 5 * 0.04 <= len(sound) / 8000 <= 4 * 0.16 + 5 * 0.12 for sound in found.sounds)


def pauses(sound: Tensor, rate: int = 8000) -> list[float]:
    """The seconds before, between and after what is loud."""
    loud = torch.nn.functional.max_pool1d(sound.abs()[None], 41, 1, 20)[0] > 0.02  # a tone crosses 0 now and then
    edges = torch.cat([torch.zeros(1), loud.float(), torch.zeros(1)]).diff().nonzero().flatten().tolist()
    places = [0, *edges, len(sound)]
    return [(end - begin) / rate for begin, end in zip(places[::2], places[1::2], strict=True)]


def test_strings_with_long_silences_leave_the_others_unchanged() -> None:
    plain, mixed = tones(160, noise=0.0), tones(160, noise=0.0, silence_share=0.25, max_seconds=2.5)
    longer, where = [], set()
    for number, (before, after) in enumerate(zip(plain.sounds, mixed.sounds, strict=True)):
        assert torch.equal(plain.labels[number], mixed.labels[number])
        if torch.equal(before, after):
            continue
        longer.append(len(after) / 8000)
        assert heard(after, 8000) == mixed.labels[number].tolist()
        gaps = pauses(after)
        long = [gap for gap, pause in enumerate(gaps) if pause > 0.2]
        assert 1 <= len(long) <= 2
        where |= {"before" if gap == 0 else "after" if gap == len(gaps) - 1 else "between" for gap in long}
    assert 0.15 < len(longer) / 160 < 0.35
    assert where == {"before", "between", "after"}
    assert 2.4 < max(longer) <= 2.5


def test_strings_with_silences_have_less_noise_or_none() -> None:
    sounds = tones(90, (3, 3), silence_share=1.0, max_seconds=4.0, seed=3).sounds
    edges = [sound[:80] for sound in sounds] + [sound[-80:] for sound in sounds]  # no tone is so near to an end
    levels = torch.stack(edges).std(-1)
    assert 0.2 < float((levels == 0).float().mean()) < 0.5
    faint = levels[levels > 0]
    assert faint.min() < 1e-4
    assert 0.03 < faint.max() < 0.07
    assert all(level > 0.03 for level in torch.stack([sound[:80] for sound in tones(9).sounds]).std(-1).tolist())


def test_a_string_without_room_gets_no_silence() -> None:
    plain, quiet = tones(5, noise=0.0), tones(5, noise=0.0, silence_share=1.0, max_seconds=0.1)
    assert all(torch.equal(one, other) for one, other in zip(plain.sounds, quiet.sounds, strict=True))


def test_a_string_does_not_depend_on_the_count() -> None:
    few, many = tones(2, seed=7), tones(5, seed=7)
    assert all(torch.equal(few.sounds[number], many.sounds[number]) for number in range(2))
    quiet, more = tones(2, seed=7, silence_share=1.0), tones(5, seed=7, silence_share=1.0)
    assert all(torch.equal(quiet.sounds[number], more.sounds[number]) for number in range(2))
    assert not torch.equal(tones(1, seed=8).sounds[0], few.sounds[0])
    assert len(few) == 2


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="sample_rate=2000 is too low for tones of 1477 hertz; use at least 2954"):
        tones(3, sample_rate=2000)
    with pytest.raises(ConfigError, match=r"noise must be at least 0, not -1"):
        tones(3, noise=-1)
    with pytest.raises(ConfigError, match=r"silence_share must be at least 0 and at most 1, not 1\.5"):
        tones(3, silence_share=1.5)
    with pytest.raises(ConfigError, match=r"max_seconds must be above 0, not 0"):
        tones(3, max_seconds=0.0)
    with pytest.raises(ConfigError, match=r"tones\(count\) is 0"):
        tones(0)
    with pytest.raises(ConfigError, match=r"length \(minimum\) is 0"):
        tones(3, (0, 2))
    with pytest.raises(DataError, match="has 1 sounds, 0 labels"):
        DigitStrings((torch.zeros(3),), (), 8000)
