"""Changes of sounds that leave what they say: functions on a whole batch, on the device it lies on.

What is drawn at random comes in as tensors, so that a change is a function of what it is given, and a sound is changed
alike in the whole batch and in a share of it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import hash_integers
from regard.base.validation import check_integer, check_number

DRAWS = 4  # numbers that decide how one string varies, before its masks


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How far a string may be changed each time it is heard in training.

    speed      slower or faster by up to this share, pitch and all (Ko et al. 2015)
    gain       louder or softer by up to so many decibels
    noise      least and most decibels that a string stands above noise; None adds none
    masks      stretches of time, and as many bands of pitch, that are hidden
    stretch    the longest stretch, in frames
    band       the widest band
    """

    speed: float = 0.0
    gain: float = 0.0
    noise: tuple[float, float] | None = None
    masks: int = 0
    stretch: int = 10
    band: int = 6

    def __post_init__(self) -> None:
        if not 0 <= check_number("speed", self.speed) < 1:
            raise ConfigError(f"speed is a share of the time, from 0 to below 1, not {self.speed}")
        if check_number("gain", self.gain) < 0:
            raise ConfigError(f"gain is a number of decibels, 0 or more, not {self.gain}")
        if self.noise is not None and check_number("noise (least)", self.noise[0]) > check_number(
            "noise", self.noise[1]
        ):
            raise ConfigError(f"noise={self.noise} has the least and the most decibels; most must not be smaller")
        check_integer("masks", self.masks, 0, "stretches and bands")
        check_integer("stretch", self.stretch, 1, "frames")
        check_integer("band", self.band, 1, "bands of pitch")


def varied(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    seeds: Int[Tensor, "b"],
    variation: Variation,
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Strings faster or slower, louder or softer, and with noise, as the draws of each say; and how long they are."""
    between = 2 * draws - 1
    if variation.speed:
        sounds, samples = sped(sounds, samples, 1 + variation.speed * between[:, 0])
    if variation.noise is not None:
        least, most = variation.noise
        decibels = least + (most - least) * draws[:, 1]
        sounds = sounds + noise(sounds, samples, decibels, 0.9 * between[:, 2], seeds)
    return sounds * 10 ** (variation.gain / 20 * between[:, 3:4]), samples


def sped(
    sounds: Float[Tensor, "b n"], samples: Int[Tensor, "b"], speed: Float[Tensor, "b"]
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Each sound at its own speed, between samples on the line from one to the next."""
    places = torch.arange(sounds.shape[1], device=sounds.device) * speed.double()[:, None]
    before = places.long().clamp(max=sounds.shape[1] - 2)
    share = (places - before).to(sounds.dtype)
    samples = ((samples - 1) / speed.double()).long() + 1  # the last one stands at or before the old last one
    between = torch.lerp(sounds.gather(1, before), sounds.gather(1, before + 1), share)
    return between * _inside(samples, sounds.shape[1]), samples


def noise(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    decibels: Float[Tensor, "b"],
    tilt: Float[Tensor, "b"],
    seeds: Int[Tensor, "b"],
) -> Float[Tensor, "b n"]:
    """Noise that each sound stands so many decibels above: a function of the seed of each, on every device.

    tilt  from -1, all high, to 1, all low; 0 is white
    """
    places = torch.arange(sounds.shape[1] + 1, device=sounds.device)
    # sums stay below 2^33, and `scramble` keeps 32 bits of them
    white = hash_integers(seeds[:, None] + places, 1).to(sounds.dtype) / 2**32 - 0.5
    coloured = (white[:, 1:] + tilt[:, None] * white[:, :-1]) * (12 / (1 + tilt**2)).sqrt()[:, None]  # of power 1
    power = sounds.square().sum(1) / samples
    return coloured * (power * 10 ** (-decibels / 10)).sqrt()[:, None] * _inside(samples, sounds.shape[1])


def masked(
    frames: Float[Tensor, "b n bands"],
    lengths: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    variation: Variation,
) -> Float[Tensor, "b n bands"]:
    """Frames with stretches of time and bands of pitch set to 0, where and how wide being as drawn."""
    for at in range(0, draws.shape[1], 4):
        size, begin, width, low = draws[:, at : at + 4].T
        times = _stretch(frames.shape[1], (size * (variation.stretch + 1)).long(), begin, lengths)
        bands = _stretch(frames.shape[2], (width * (variation.band + 1)).long(), low, lengths * 0 + frames.shape[2])
        frames = frames.masked_fill(times[:, :, None] | bands[:, None, :], 0.0)
    return frames


def slowest(samples: int, speed: float) -> int:
    """The most samples that so many can become."""
    return int(samples / (1 - speed)) + 1


def _stretch(size: int, wide: Tensor, share: Tensor, within: Tensor) -> Tensor:
    """Positions of a stretch that is so wide and begins at a share of the room that it leaves."""
    begin = (share * (within - wide + 1).clamp(min=1)).long()[:, None]
    places = torch.arange(size, device=share.device)
    return (places >= begin) & (places < begin + wide[:, None])


def _inside(samples: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=samples.device) < samples[:, None]
