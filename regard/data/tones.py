"""The built-in sounds: strings of digits dialled on a telephone.

Each digit is two tones at once, one for its row of the keys and one for its column (ITU-T Q.23); their length, their
loudness and the pauses between them vary, and noise is added. Some strings, the quiet ones, have long silences too.
"""

import math

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number
from regard.data.digit_strings import DigitStrings
from regard.data.sampler import sampler_generator

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # hertz
KEYS = ("123", "456", "789", " 0 ")
PITCHES = {
    int(key): (ROWS[row], COLUMNS[column])
    for row, keys in enumerate(KEYS)
    for column, key in enumerate(keys)
    if key != " "
}
TONE, PAUSE = (0.06, 0.16), (0.04, 0.12)  # seconds: shortest and longest
LOUDNESS = (0.1, 0.4)  # of each tone
FAINTEST = 1e-3  # of the noise there is, in a quiet string


def tones(
    count: int,
    length: tuple[int, int] = (3, 7),
    *,
    seed: int = 0,
    rate: int = 8000,
    noise: float = 0.05,
    quiet: float = 0.0,
    seconds: float = 2.2,
) -> DigitStrings:
    """Strings of `length` (fewest, most) digits, both drawn evenly. String i is the same however many are made.

    noise    how far the noise spreads, beside tones of 0.1 to 0.4
    quiet    share of the strings that have long silences before, between or after digits, and less noise or none
    seconds  how long silences may make these strings; one that is longer without them gets none
    """
    fewest, most = check_length(length)
    check_integer("tones(count)", count, 1, "strings")
    if check_integer("tones(rate)", rate, 1) < 2 * max(COLUMNS):
        raise ConfigError(f"rate={rate} is too low for tones of {max(COLUMNS)} hertz; use at least {2 * max(COLUMNS)}")
    if not 0 <= check_number("tones(noise)", noise) < math.inf:
        raise ConfigError(f"noise={noise} must be 0 or more")
    check_silence(quiet)
    if not 0 < check_number("tones(seconds)", seconds) < math.inf:
        raise ConfigError(f"seconds={seconds} must be more than 0")
    room = round(seconds * rate)
    sounds, labels = [], []
    for number in range(count):
        draw = sampler_generator(seed, number, "tones")
        string = torch.randint(10, (int(torch.randint(fewest, most + 1, (), generator=draw)),), generator=draw)
        parts = [_silence(rate, draw)]
        for digit in string.tolist():
            parts += [_tone(digit, rate, draw), _silence(rate, draw)]
        still = sampler_generator(seed, number, "quiet")  # its own, so that the other strings do not depend on it
        stilled = _between((0, 1), still) < quiet
        own = _faint(noise, still) if stilled else noise
        spread = [own] * len(parts)
        if stilled:
            for gap, samples in long_silences(len(string) + 1, room - sum(map(len, parts)), still):
                parts.insert(2 * gap, torch.zeros(samples))
                spread.insert(2 * gap, own if _between((0, 1), still) < 0.5 else _faint(noise, still))
        clean = torch.cat(parts)
        levels = torch.cat([torch.full((len(part),), level) for part, level in zip(parts, spread, strict=True)])
        sounds.append((clean + levels * torch.randn(len(clean), generator=draw)).clamp(-1, 1))
        labels.append(string)
    return DigitStrings(tuple(sounds), tuple(labels), rate)


def check_length(length: tuple[int, int]) -> tuple[int, int]:
    """The fewest and most digits of a string."""
    fewest, most = length
    if check_integer("length (most)", most, 1, "digits") < check_integer("length (fewest)", fewest, 1, "digits"):
        raise ConfigError(f"length=({fewest}, {most}) has the fewest and the most digits; most must not be smaller")
    return fewest, most


def check_silence(quiet: float) -> float:
    """The share of strings that have long silences."""
    if not 0 <= check_number("quiet", quiet) <= 1:
        raise ConfigError(f"quiet is a share of the strings, from 0 to 1, not {quiet}")
    return quiet


def long_silences(gaps: int, spare: int, draw: torch.Generator) -> list[tuple[int, int]]:
    """One or two of the gaps before, between and after digits, the last first, and the samples of silence for each.

    Together they take half to all of the samples to spare, if there are any.
    """
    chosen = sorted(torch.randperm(gaps, generator=draw)[: 1 + int(_between((0, 2), draw))].tolist(), reverse=True)
    samples = int(_between((0.5, 1), draw) * max(spare, 0))
    first = samples if len(chosen) == 1 else int(_between((0, 1), draw) * samples)
    return list(zip(chosen, (first, samples - first), strict=False))


def _faint(noise: float, draw: torch.Generator) -> float:
    """None one time in three; else between the faintest noise and all of it, evenly in decibels."""
    share = _between((-0.5, 1), draw)
    return 0.0 if share < 0 else noise * FAINTEST**share


def _tone(digit: int, rate: int, draw: torch.Generator) -> Tensor:
    times = torch.arange(_samples(TONE, rate, draw), dtype=torch.float64) / rate
    waves = [
        _between(LOUDNESS, draw) * torch.sin(2 * math.pi * (pitch * times + _between((0, 1), draw)))
        for pitch in PITCHES[digit]
    ]
    return torch.stack(waves).sum(0).float()


def _silence(rate: int, draw: torch.Generator) -> Tensor:
    return torch.zeros(_samples(PAUSE, rate, draw))


def _samples(seconds: tuple[float, float], rate: int, draw: torch.Generator) -> int:
    return round(_between(seconds, draw) * rate)


def _between(ends: tuple[float, float], draw: torch.Generator) -> float:
    return ends[0] + (ends[1] - ends[0]) * float(torch.rand((), generator=draw, dtype=torch.float64))
