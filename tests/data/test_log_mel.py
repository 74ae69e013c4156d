"""Frames of sound: each from its own samples alone, so that a stream gives those of the whole."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.data.log_mel import LogMel, LogMelStream, log_mel

SETTINGS = {
    "overlapping": LogMel(sample_rate=1000, window_ms=5, hop_ms=2, mels=2),
    "touching": LogMel(sample_rate=1000, window_ms=4, hop_ms=4, mels=2),
    "apart": LogMel(sample_rate=1000, window_ms=3, hop_ms=5, mels=1),
    "far apart": LogMel(sample_rate=1000, window_ms=2, hop_ms=7, mels=1),
}


def sine(hertz: float, rate: int, seconds: float) -> Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(round(rate * seconds), dtype=torch.float64) / rate).float()


def chunkings(samples: int) -> list[tuple[int, ...]]:
    """Every way to cut so many samples into chunks of one or more."""
    cuts = itertools.product([False, True], repeat=samples - 1)
    return [tuple(len(list(group)) for group in _runs(cut)) for cut in cuts]


def _runs(cut: tuple[bool, ...]) -> list[list[int]]:
    runs = [[0]]
    for place, apart in enumerate(cut, 1):
        if apart:
            runs.append([place])
        else:
            runs[-1].append(place)
    return runs


@pytest.mark.parametrize("name", SETTINGS)
def test_every_chunking_of_a_stream_gives_the_frames_of_the_whole_sound(name: str) -> None:
    settings = SETTINGS[name]
    sound = torch.randn(9)
    whole = log_mel(sound, settings)
    assert len(whole) == settings.num_frames(9) > 0
    for sizes in chunkings(9):
        stream = LogMelStream(settings)
        parts, heard = [], 0
        for chunk in sound.split(list(sizes)):
            parts.append(stream.push(chunk))
            heard += len(chunk)
            # each frame comes with its last sample, not later
            assert sum(map(len, parts)) == settings.num_frames(heard)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-6)


def test_a_long_stream_of_several_sounds_with_empty_chunks_agrees() -> None:
    settings = LogMel()
    sound = torch.randn(2, 3, 4007)
    stream = LogMelStream(settings)
    parts = [stream.push(chunk) for chunk in sound.split([0, 1, 199, 0, 80, 3001, 726, 0], -1)]
    whole = log_mel(sound, settings)
    assert whole.shape == (2, 3, settings.num_frames(4007), 40)
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-6, atol=2e-6)


def test_a_frame_depends_on_its_own_samples_only() -> None:
    settings = LogMel(sample_rate=8000, window_ms=25, hop_ms=10, mels=13)
    sound = torch.randn(1003)
    frames = log_mel(sound, settings)
    for frame in (0, 4, len(frames) - 1):
        start, stop = frame * 80, frame * 80 + 200
        changed = torch.randn(1003)
        changed[start:stop] = sound[start:stop]
        torch.testing.assert_close(log_mel(changed, settings)[frame], frames[frame], rtol=0, atol=2e-6)
        for place in (start, stop - 1):
            louder = sound.clone()
            louder[place] += 1e6  # the window is small at the ends
            assert not torch.allclose(log_mel(louder, settings)[frame], frames[frame])


def test_frames_count_whole_ones_only() -> None:
    settings = LogMel(sample_rate=8000)
    assert [settings.num_frames(samples) for samples in (0, 199, 200, 279, 280, 8000)] == [0, 0, 1, 1, 2, 98]
    for samples in (0, 199, 200, 280):
        assert log_mel(torch.randn(3, samples), settings).shape == (3, settings.num_frames(samples), 40)


@pytest.mark.parametrize("hertz", [150, 440, 1000, 2500, 3700])
def test_a_tone_is_loudest_in_its_own_band(hertz: float) -> None:
    settings = LogMel(sample_rate=8000, mels=20)
    frames = log_mel(sine(hertz, 8000, 0.2), settings)
    mel = 2595 * math.log10(1 + hertz / 700)
    low, high = (2595 * math.log10(1 + edge / 700) for edge in (20, 4000))
    band = (mel - low) / (high - low) * 21 - 1  # bands have their middles at whole numbers
    assert (frames.argmax(-1) - band).abs().max() <= 0.6


def test_a_tenfold_amplitude_adds_the_logarithm_of_a_hundred() -> None:
    sound = torch.randn(900)
    difference = log_mel(10 * sound, LogMel()) - log_mel(sound, LogMel())
    torch.testing.assert_close(difference, torch.full_like(difference, math.log(100)), rtol=0, atol=1e-3)


def test_silence_is_the_floor() -> None:
    assert torch.equal(log_mel(torch.zeros(300), LogMel()), torch.full((2, 40), math.log(1e-6)))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mels=128 are too many for frames of 25.0 ms: no frequency is in band 4"):
        LogMel(mels=128)
    with pytest.raises(ConfigError, match=r"LogMel\(hop_ms\) is 0.01, less than one sample at 8000 hertz"):
        LogMel(hop_ms=0.01)
    with pytest.raises(ConfigError, match=r"from f_min=20.0 to f_max=5000.0 hertz; expected .* <= 4000.0 \(half the"):
        LogMel(f_max=5000.0)
    with pytest.raises(ConfigError, match=r"LogMel\(floor\) must be above 0, not 0"):
        LogMel(floor=0.0)


def test_a_stream_keeps_the_axes_it_began_with() -> None:
    stream = LogMelStream(LogMel())
    stream.push(torch.randn(2, 300))
    with pytest.raises(ShapeError, match=r"a chunk has the leading axes \(3,\), but the stream began with \(2,\)"):
        stream.push(torch.randn(3, 300))
