"""Audio augmentation: speed, gain, noise and SpecAugment masks."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.recipes.audio_augment import AudioAugmentation, augment_audio, change_speed, make_noise, spec_augment

RATE = 4000
AUGMENTATION = AudioAugmentation(speed=0.1, gain_db=6.0, snr_db=(5.0, 30.0), masks=2, time_mask=5, mel_mask=2)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_another_speed_changes_pitch_and_length():
    times = torch.arange(2000) / RATE
    wave = torch.sin(2 * math.pi * 250 * times)
    sounds = torch.stack([wave, wave, wave]) * (torch.arange(2000) < 1601)
    fast, samples = change_speed(sounds, torch.tensor([1601, 1601, 1601]), torch.tensor([1.0, 1.25, 0.9]))
    assert samples.tolist() == [1601, 1281, 1778]
    torch.testing.assert_close(fast[0], sounds[0], rtol=0, atol=1e-6)
    for row, pitch in ((1, 312.5), (2, 225.0)):
        wanted = torch.sin(2 * math.pi * pitch * times)
        inside = slice(0, int(samples[row]) - 1)
        torch.testing.assert_close(fast[row, inside], wanted[inside], rtol=0, atol=0.03)
        assert not fast[row, int(samples[row]) :].any()


def test_noise_has_the_signal_to_noise_ratio_and_depends_on_its_seed_only():
    sounds = 0.3 * random(3, 40_007) - 0.15
    samples = torch.tensor([40_007, 40_007, 20_000])
    sounds[2, 20_000:] = 0
    decibels, tilt, seeds = (
        torch.tensor([10.0, 20.0, 3.0]),
        torch.tensor([0.0, 0.9, -0.9]),
        torch.tensor([7, 8, 2**32 - 1]),
    )
    added = make_noise(sounds, samples, decibels, tilt, seeds)
    assert not added[2, 20_000:].any()
    power = sounds.square().sum(1) / added.square().sum(1)
    torch.testing.assert_close(10 * power.log10(), decibels, rtol=0, atol=0.2)
    neighbours = (added[:, 1:] * added[:, :-1]).sum(1) / added.square().sum(1)
    torch.testing.assert_close(neighbours, tilt / (1 + tilt**2), rtol=0, atol=0.02)
    alone = make_noise(sounds[1:2], samples[1:2], decibels[1:2], tilt[1:2], seeds[1:2])
    assert torch.equal(alone[0], added[1])
    other = make_noise(sounds[:1], samples[:1], decibels[:1], tilt[:1], seeds[:1] + 1)
    assert abs(float(torch.corrcoef(torch.stack([added[0, :-1], other[0, 1:]]))[0, 1])) < 0.02


def test_augmentation_stays_within_its_settings():
    sounds, samples = random(7, 501) - 0.5, torch.full((7,), 450)
    sounds[:, 450:] = 0
    draws, seeds = random(7, 4, seed=2), torch.arange(7)
    same, size = augment_audio(sounds, samples, draws, seeds, AudioAugmentation())
    assert torch.equal(same, sounds)
    assert torch.equal(size, samples)
    louder, _ = augment_audio(sounds, samples, draws, seeds, AudioAugmentation(gain_db=20.0))
    factor = (louder.norm(dim=1) / sounds.norm(dim=1)).log10()
    torch.testing.assert_close(factor, 2 * draws[:, 3] - 1)
    _, size = augment_audio(sounds, samples, draws, seeds, AudioAugmentation(speed=0.1))
    torch.testing.assert_close(size.float(), 450 / (0.9 + 0.2 * draws[:, 0]), rtol=0, atol=1.5)


def test_spec_augment_masks_time_spans_and_bands_inside_the_sound():
    frames, lengths = torch.ones(400, 23, 9), torch.arange(400) % 20 + 4
    draws = random(400, 4)
    hidden = spec_augment(frames, lengths, draws, AudioAugmentation(masks=1, time_mask=3, mel_mask=2)) == 0
    times, bands = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, times[:, :, None] | bands[:, None, :])
    assert sorted(set(times.sum(1).tolist())) == [0, 1, 2, 3]
    assert sorted(set(bands.sum(1).tolist())) == [0, 1, 2]
    assert not times[torch.arange(23) >= lengths[:, None]].any()
    for marks in (times, bands):
        assert (marks.int().diff(dim=1).abs().sum(1) <= 2).all()  # in one piece
        assert marks.any(0)[:9].all()
    assert torch.equal(spec_augment(frames, lengths, draws[:, :0], AudioAugmentation()), frames)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 1.0}, "speed must be at least 0 and below 1, not 1"),
        ({"gain_db": -1.0}, "gain_db must be at least 0, not -1"),
        ({"snr_db": (20.0, 10.0)}, r"snr_db=\(20.0, 10.0\) is the minimum and maximum in decibels"),
        ({"masks": -1}, "masks is -1, but must be at least 0"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        replace(AUGMENTATION, **changes)  # type: ignore[arg-type]
