"""Log-mel frames: how loud each band of pitches is, over and over.

Frame i comes from samples i * hop up to i * hop + length and no others, so that a sound that is still coming in gives
the same frames as the whole. Nothing is normalised over a recording, and nothing is padded.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_number


@dataclass(frozen=True)
class LogMel:
    """How frames are taken: milliseconds each covers and lies after the one before, bands, and pitches in hertz."""

    rate: int = 8000
    length_ms: float = 25.0
    hop_ms: float = 10.0
    bands: int = 40
    lowest: float = 20.0
    highest: float | None = None  # None is half the rate
    floor: float = 1e-6  # power added to every band, so that silence has a logarithm

    def __post_init__(self) -> None:
        check_integer("LogMel(rate)", self.rate, 1, "samples a second")
        check_integer("LogMel(bands)", self.bands, 1)
        for name, value in (("length_ms", self.length), ("hop_ms", self.hop)):
            if value < 1:
                raise ConfigError(f"LogMel({name}) is {getattr(self, name)}, less than one sample at {self.rate} hertz")
        if not 0 < check_number("LogMel(floor)", self.floor) < math.inf:
            raise ConfigError(f"LogMel(floor) is {self.floor}, but must be more than 0")
        top = self.top
        if not 0 <= check_number("LogMel(lowest)", self.lowest) < top <= self.rate / 2:
            raise ConfigError(
                f"pitches run from lowest={self.lowest} to highest={top} hertz; expected 0 <= lowest < highest <= "
                f"{self.rate / 2} (half the rate)"
            )
        empty = (self.filters.sum(0) == 0).nonzero().flatten()
        if len(empty):
            raise ConfigError(
                f"bands={self.bands} are too many for frames of {self.length_ms} ms: no frequency falls into band "
                f"{int(empty[0])}; use fewer bands or longer frames"
            )

    @property
    def length(self) -> int:
        """Samples of a frame, to the nearest whole number."""
        return round(check_number("LogMel(length_ms)", self.length_ms) * self.rate / 1000)

    @property
    def hop(self) -> int:
        """Samples from the start of a frame to that of the next, to the nearest whole number."""
        return round(check_number("LogMel(hop_ms)", self.hop_ms) * self.rate / 1000)

    @property
    def top(self) -> float:
        return self.rate / 2 if self.highest is None else check_number("LogMel(highest)", self.highest)

    def frames(self, samples: int) -> int:
        """How many whole frames so many samples have."""
        return max(0, (samples - self.length) // self.hop + 1)

    @cached_property
    def window(self) -> Float[Tensor, "length"]:
        """A raised cosine, by which a frame fades in and out."""
        places = torch.arange(self.length, dtype=torch.float64)
        return torch.sin(math.pi * (places + 0.5) / self.length).square().float()

    @cached_property
    def filters(self) -> Float[Tensor, "frequencies bands"]:
        """A triangle for each band, evenly spaced on the mel scale, 2595 log10(1 + hertz / 700)."""
        edges = torch.linspace(_mel(self.lowest), _mel(self.top), self.bands + 2, dtype=torch.float64)
        hertz = 700 * (torch.pow(10.0, edges / 2595) - 1)
        low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
        pitch = torch.arange(self.fourier // 2 + 1, dtype=torch.float64)[:, None] * self.rate / self.fourier
        rising, falling = (pitch - low) / (middle - low), (high - pitch) / (high - middle)
        return torch.minimum(rising, falling).clamp(min=0).float()

    @property
    def fourier(self) -> int:
        """Points of the Fourier transform: the power of two at or above the length."""
        return 1 << (self.length - 1).bit_length()


def log_mel(sound: Float[Tensor, "*b n"], settings: LogMel) -> Float[Tensor, "*b frames bands"]:
    """The frames of a sound, from -1 to 1; a sound shorter than a frame has none."""
    if settings.frames(sound.shape[-1]) == 0:
        return sound.new_zeros(*sound.shape[:-1], 0, settings.bands)
    frames = sound.unfold(-1, settings.length, settings.hop) * settings.window.to(sound)
    power: Tensor = torch.fft.rfft(frames, n=settings.fourier).abs().square()
    return (power @ settings.filters.to(sound) + settings.floor).log()


class LogMelStream:
    """Frames of a sound that comes in chunks: each as soon as its last sample is there."""

    def __init__(self, settings: LogMel) -> None:
        self.settings = settings
        self._waiting: Tensor | None = None  # samples that a later frame needs
        self._skip = 0  # samples between frames, still to come, that no frame needs

    def push(self, chunk: Float[Tensor, "*b n"]) -> Float[Tensor, "*b frames bands"]:
        """The frames that this chunk completes."""
        waiting = chunk[..., :0] if self._waiting is None else self._waiting
        if waiting.shape[:-1] != chunk.shape[:-1]:
            raise ShapeError(
                f"a chunk has the leading axes {tuple(chunk.shape[:-1])}, but the stream began with "
                f"{tuple(waiting.shape[:-1])}"
            )
        skipped = min(self._skip, chunk.shape[-1])
        sound = torch.cat([waiting, chunk[..., skipped:]], -1)
        done = self.settings.frames(sound.shape[-1])
        used = done * self.settings.hop  # where the next frame starts, perhaps beyond what is there
        self._skip += max(0, used - sound.shape[-1]) - skipped
        self._waiting = sound[..., used:].clone()  # a copy, so that the whole sound need not stay
        return log_mel(sound, self.settings)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)
