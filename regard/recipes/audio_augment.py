"""Audio augmentation of a batch, on the device of the batch: speed, gain, noise and SpecAugment masks.

Random numbers are passed as tensors, so the augmentation of a sound does not depend on how a batch is divided among
processes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import hash_integers
from regard.base.validation import check_integer, check_number, check_range

DRAWS = 4  # random numbers for each sound, before those of its masks


@dataclass(frozen=True, kw_only=True)
class AudioAugmentation:
    """Settings of audio augmentation in training: speed, gain, noise and masks.

    speed      maximum relative change of speed, which changes the pitch too (Ko et al. 2015): 0.1 gives factors from
               0.9 to 1.1
    gain_db    maximum change of loudness in decibels, up or down
    snr_db     minimum and maximum signal-to-noise ratio of added noise in decibels; None adds no noise
    masks      number of time masks for each sound, and also number of mel masks (SpecAugment)
    time_mask  maximum number of frames of a time mask
    mel_mask   maximum number of bands of a mel mask
    """

    speed: float = 0.0
    gain_db: float = 0.0
    snr_db: tuple[float, float] | None = None
    masks: int = 0
    time_mask: int = 10
    mel_mask: int = 6

    def __post_init__(self) -> None:
        check_range("speed", self.speed, 0, 1, below=True)
        check_range("gain_db", self.gain_db, 0)
        if self.snr_db is not None:
            least, most = (check_number("snr_db", each) for each in self.snr_db)
            if least > most:
                raise ConfigError(f"snr_db={self.snr_db} is the minimum and maximum in decibels, in this order")
        check_integer("masks", self.masks, 0)
        check_integer("time_mask", self.time_mask, 1, "frames")
        check_integer("mel_mask", self.mel_mask, 1, "bands")


def augment_audio(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    seeds: Int[Tensor, "b"],
    augmentation: AudioAugmentation,
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Change the speed and loudness of sounds and add noise. Returns the sounds and their new lengths.

    samples  number of samples of each sound, without padding
    draws    uniform random numbers from 0 to 1; the first four of each sound are used
    seeds    seed of the noise of each sound
    """
    signed = 2 * draws - 1
    if augmentation.speed:
        sounds, samples = change_speed(sounds, samples, 1 + augmentation.speed * signed[:, 0])
    if augmentation.snr_db is not None:
        least, most = augmentation.snr_db
        snr = least + (most - least) * draws[:, 1]
        sounds = sounds + make_noise(sounds, samples, snr, 0.9 * signed[:, 2], seeds)
    return sounds * 10 ** (augmentation.gain_db / 20 * signed[:, 3:4]), samples


def change_speed(
    sounds: Float[Tensor, "b n"], samples: Int[Tensor, "b"], speed: Float[Tensor, "b"]
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Change the speed of each sound by linear interpolation. Returns the sounds and their new lengths.

    samples  number of samples of each sound, without padding
    speed    speed factor of each sound: 2 makes it half as long
    """
    positions = torch.arange(sounds.shape[1], device=sounds.device) * speed.double()[:, None]
    before = positions.long().clamp(max=sounds.shape[1] - 2)
    share = (positions - before).to(sounds.dtype)
    samples = ((samples - 1) / speed.double()).long() + 1  # the last one is at or before the old last one
    between = torch.lerp(sounds.gather(1, before), sounds.gather(1, before + 1), share)
    return between * _sample_mask(samples, sounds.shape[1]), samples


def make_noise(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    snr: Float[Tensor, "b"],
    tilt: Float[Tensor, "b"],
    seeds: Int[Tensor, "b"],
) -> Float[Tensor, "b n"]:
    """Return random noise for each sound, at a given signal-to-noise ratio.

    Equal seeds give equal noise on every device.

    samples  number of samples of each sound, without padding
    snr      signal-to-noise ratio of each sound in decibels
    tilt     spectral tilt from -1 to 1: 0 is white noise, negative has more high frequencies, positive more low
             ones
    seeds    seed of the noise of each sound
    """
    positions = torch.arange(sounds.shape[1] + 1, device=sounds.device)
    # sums stay below 2^33, and `hash_integers` keeps 32 bits of them
    white = hash_integers(seeds[:, None] + positions, 1).to(sounds.dtype) / 2**32 - 0.5
    coloured = (white[:, 1:] + tilt[:, None] * white[:, :-1]) * (12 / (1 + tilt**2)).sqrt()[:, None]  # noise of power 1
    power = sounds.square().sum(1) / samples
    return coloured * (power * 10 ** (-snr / 10)).sqrt()[:, None] * _sample_mask(samples, sounds.shape[1])


def spec_augment(
    frames: Float[Tensor, "b n mels"],
    lengths: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    augmentation: AudioAugmentation,
) -> Float[Tensor, "b n mels"]:
    """Set random time spans and mel bands of spectrograms to 0 (SpecAugment; Park et al. 2019, arXiv:1904.08779).

    lengths  number of frames of each spectrogram, without padding
    draws    uniform random numbers from 0 to 1, four for each pair of a time mask and a mel mask
    """
    for first in range(0, draws.shape[1], 4):
        size, begin, width, low = draws[:, first : first + 4].T
        times = _span_mask(frames.shape[1], (size * (augmentation.time_mask + 1)).long(), begin, lengths)
        bands = (width * (augmentation.mel_mask + 1)).long()
        mels = _span_mask(frames.shape[2], bands, low, lengths * 0 + frames.shape[2])
        frames = frames.masked_fill(times[:, :, None] | mels[:, None, :], 0.0)
    return frames


def max_augmented_length(samples: int, speed: float) -> int:
    """Return the maximum length after `change_speed` of a sound with `samples` samples.

    speed  maximum relative change of speed, as in `AudioAugmentation`
    """
    return int(samples / (1 - speed)) + 1


def _span_mask(size: int, width: Tensor, share: Tensor, within: Tensor) -> Tensor:
    """Return a Boolean mask that is True in one span of each row. Its shape is (b, size).

    width   number of entries in the span of each row
    share   start of the span in each row, from 0 (the first possible start) to 1 (the last one)
    within  number of entries at the start of each row that may be in the span
    """
    begin = (share * (within - width + 1).clamp(min=1)).long()[:, None]
    positions = torch.arange(size, device=share.device)
    return (positions >= begin) & (positions < begin + width[:, None])


def _sample_mask(samples: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=samples.device) < samples[:, None]
