"""Log-mel spectrograms of whole sounds and of streams.

Frame i depends only on the samples from i * hop_length to i * hop_length + window_length - 1, so a stream gives the
same frames as the whole sound. There is no padding and no normalisation over a recording.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_number, check_range


@dataclass(frozen=True)
class LogMel:
    """Settings of a log-mel spectrogram.

    sample_rate  samples per second
    window_ms    milliseconds that a frame covers
    hop_ms       milliseconds between the starts of frames
    mels         number of mel bands
    f_min        lowest frequency in hertz
    f_max        highest frequency in hertz; None is half the sample rate
    floor        power that is added to every mel band before the logarithm, so that the result is finite in silence

    One second of sound has 98 complete frames of 25 ms that begin every 10 ms:

    >>> log_mel(torch.randn(8000), LogMel(mels=20)).shape
    torch.Size([98, 20])
    """

    sample_rate: int = 8000
    window_ms: float = 25.0
    hop_ms: float = 10.0
    mels: int = 40
    f_min: float = 20.0
    f_max: float | None = None
    floor: float = 1e-6

    def __post_init__(self) -> None:
        check_integer("LogMel(sample_rate)", self.sample_rate, 1, "samples per second")
        check_integer("LogMel(mels)", self.mels, 1)
        for name, value in (("window_ms", self.window_length), ("hop_ms", self.hop_length)):
            if value < 1:
                raise ConfigError(
                    f"LogMel({name}) is {getattr(self, name)}, less than one sample at {self.sample_rate} hertz"
                )
        check_range("LogMel(floor)", self.floor, 0, above=True)
        if not 0 <= check_number("LogMel(f_min)", self.f_min) < self.top <= self.sample_rate / 2:
            raise ConfigError(
                f"frequencies run from f_min={self.f_min} to f_max={self.top} hertz; expected 0 <= f_min < f_max <= "
                f"{self.sample_rate / 2} (half the sample rate)"
            )
        empty = (self.filters.sum(0) == 0).nonzero().flatten()
        if len(empty):
            raise ConfigError(
                f"mels={self.mels} are too many for frames of {self.window_ms} ms: no frequency is in band "
                f"{int(empty[0])}; use fewer bands or longer frames"
            )

    @property
    def window_length(self) -> int:
        """The number of samples in a frame."""
        return round(check_number("LogMel(window_ms)", self.window_ms) * self.sample_rate / 1000)

    @property
    def hop_length(self) -> int:
        """The number of samples between the starts of consecutive frames."""
        return round(check_number("LogMel(hop_ms)", self.hop_ms) * self.sample_rate / 1000)

    @property
    def top(self) -> float:
        """The highest frequency of the mel bands in hertz."""
        return self.sample_rate / 2 if self.f_max is None else check_number("LogMel(f_max)", self.f_max)

    @property
    def n_fft(self) -> int:
        """The number of points of the Fourier transform: the window length rounded up to a power of two."""
        return 1 << (self.window_length - 1).bit_length()

    def num_frames(self, samples: int) -> int:
        """Return the number of complete frames in `samples` samples."""
        return max(0, (samples - self.window_length) // self.hop_length + 1)

    @cached_property
    def window(self) -> Float[Tensor, "window"]:
        """The Hann window of a frame."""
        positions = torch.arange(self.window_length, dtype=torch.float64)
        return torch.sin(math.pi * (positions + 0.5) / self.window_length).square().float()

    @cached_property
    def filters(self) -> Float[Tensor, "frequencies mels"]:
        """The mel filterbank: triangular filters, evenly spaced on the mel scale 2595 log10(1 + hertz / 700)."""
        edges = torch.linspace(_hertz_to_mel(self.f_min), _hertz_to_mel(self.top), self.mels + 2, dtype=torch.float64)
        hertz = 700 * (torch.pow(10.0, edges / 2595) - 1)
        low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
        frequency = torch.arange(self.n_fft // 2 + 1, dtype=torch.float64)[:, None] * self.sample_rate / self.n_fft
        rising, falling = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
        return torch.minimum(rising, falling).clamp(min=0).float()


def log_mel(sound: Float[Tensor, "*b n"], settings: LogMel) -> Float[Tensor, "*b frames mels"]:
    """Return the log-mel spectrogram of a sound with samples from -1 to 1.

    A sound that is shorter than a frame has no frames. One second at 8000 Hz has 98 frames:

    >>> log_mel(torch.zeros(8000), LogMel()).shape
    torch.Size([98, 40])
    """
    if settings.num_frames(sound.shape[-1]) == 0:
        return sound.new_zeros(*sound.shape[:-1], 0, settings.mels)
    frames = sound.unfold(-1, settings.window_length, settings.hop_length) * settings.window.to(sound)
    power: Tensor = torch.fft.rfft(frames, n=settings.n_fft).abs().square()
    return (power @ settings.filters.to(sound) + settings.floor).log()


class LogMelStream:
    """Streaming log-mel spectrogram: `push` takes the next samples of a sound and returns the newly complete frames.

    Here 1000 samples (125 ms) complete 11 frames of 25 ms that begin every 10 ms:

    >>> stream = LogMelStream(LogMel())
    >>> stream.push(torch.zeros(1000)).shape
    torch.Size([11, 40])
    """

    def __init__(self, settings: LogMel) -> None:
        self.settings = settings
        self._buffer: Tensor | None = None  # samples that a later frame needs
        self._skip = 0  # samples between frames, still to come, that no frame needs

    def push(self, chunk: Float[Tensor, "*b n"]) -> Float[Tensor, "*b frames mels"]:
        """Add samples of the sound and return the frames that are now complete."""
        buffer = chunk[..., :0] if self._buffer is None else self._buffer
        if buffer.shape[:-1] != chunk.shape[:-1]:
            raise ShapeError(
                f"a chunk has the leading axes {tuple(chunk.shape[:-1])}, but the stream began with "
                f"{tuple(buffer.shape[:-1])}"
            )
        skipped = min(self._skip, chunk.shape[-1])
        sound = torch.cat([buffer, chunk[..., skipped:]], -1)
        frames = self.settings.num_frames(sound.shape[-1])
        used = frames * self.settings.hop_length  # start of the next frame, possibly after the buffered samples
        self._skip += max(0, used - sound.shape[-1]) - skipped
        self._buffer = sound[..., used:].clone()  # a copy, so that the whole sound can be freed
        return log_mel(sound, self.settings)


def _hertz_to_mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)
