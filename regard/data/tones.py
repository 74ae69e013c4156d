"""The built-in sounds: strings of digits as telephone tones (DTMF).

Each digit is a pair of tones: one for the row of its key on a telephone, one for the column (ITU-T Q.23). The length
and loudness of the tones and the pauses between them vary, and noise is added. Some strings have long silences.
"""

import math

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_range
from regard.data.digit_strings import DigitStrings
from regard.data.sampler import sampler_generator

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # hertz
KEYS = ("123", "456", "789", " 0 ")
DTMF_FREQUENCIES = {
    int(key): (ROWS[row], COLUMNS[column])
    for row, keys in enumerate(KEYS)
    for column, key in enumerate(keys)
    if key != " "
}
TONE, PAUSE = (0.06, 0.16), (0.04, 0.12)  # seconds: shortest and longest
LOUDNESS = (0.1, 0.4)  # minimum and maximum amplitude of a tone
MIN_NOISE_SHARE = 1e-3  # smallest noise in a string with long silences, as a share of the usual


def tones(
    count: int,
    length: tuple[int, int] = (3, 7),
    *,
    seed: int = 0,
    sample_rate: int = 8000,
    noise: float = 0.05,
    silence_share: float = 0.0,
    max_seconds: float = 2.2,
) -> DigitStrings:
    """Generate `count` sounds of random digit strings, each digit as a telephone (DTMF) tone.

    The first strings are the same for every `count`.

    length         minimum and maximum number of digits
    noise          standard deviation of the noise; tones have amplitudes of 0.1 to 0.4
    silence_share  fraction of the strings that get long silences before, between or after digits, and less noise
                   or none
    max_seconds    maximum seconds of a string after long silences are inserted; a string that is longer without them
                   gets none

    >>> tones(3).labels[0].tolist()
    [4, 8, 3, 9, 1, 2]
    """
    fewest, most = check_length(length)
    check_integer("tones(count)", count, 1, "strings")
    if check_integer("tones(sample_rate)", sample_rate, 1) < 2 * max(COLUMNS):
        raise ConfigError(
            f"sample_rate={sample_rate} is too low for tones of {max(COLUMNS)} hertz; use at least {2 * max(COLUMNS)}"
        )
    check_range("noise", noise, 0)
    check_range("silence_share", silence_share, 0, 1)
    check_range("max_seconds", max_seconds, 0, above=True)
    room = round(max_seconds * sample_rate)
    sounds, labels = [], []
    for number in range(count):
        draw = sampler_generator(seed, number, "tones")
        string = torch.randint(10, (int(torch.randint(fewest, most + 1, (), generator=draw)),), generator=draw)
        parts = [_make_silence(sample_rate, draw)]
        for digit in string.tolist():
            parts += [_make_tone(digit, sample_rate, draw), _make_silence(sample_rate, draw)]
        # a separate generator, so that other strings do not change
        silence_draw = sampler_generator(seed, number, "quiet")
        silent = _uniform((0, 1), silence_draw) < silence_share
        level = _sample_noise_level(noise, silence_draw) if silent else noise
        levels = [level] * len(parts)
        if silent:
            for gap, samples in sample_long_silences(len(string) + 1, room - sum(map(len, parts)), silence_draw):
                parts.insert(2 * gap, torch.zeros(samples))
                same = _uniform((0, 1), silence_draw) < 0.5
                levels.insert(2 * gap, level if same else _sample_noise_level(noise, silence_draw))
        clean = torch.cat(parts)
        spread = torch.cat([torch.full((len(part),), each) for part, each in zip(parts, levels, strict=True)])
        sounds.append((clean + spread * torch.randn(len(clean), generator=draw)).clamp(-1, 1))
        labels.append(string)
    return DigitStrings(tuple(sounds), tuple(labels), sample_rate)


def check_length(length: tuple[int, int]) -> tuple[int, int]:
    """Return the minimum and maximum number of digits; raise ConfigError if they are below 1 or in the wrong order."""
    fewest, most = length
    if check_integer("length (maximum)", most, 1, "digits") < check_integer("length (minimum)", fewest, 1, "digits"):
        raise ConfigError(f"length=({fewest}, {most}) is the minimum and maximum number of digits, in this order")
    return fewest, most


def sample_long_silences(gaps: int, spare: int, draw: torch.Generator) -> list[tuple[int, int]]:
    """Choose one or two gaps of a digit string at random, and the number of silent samples to insert in each.

    Returns pairs (gap index, samples), the last gap first. In total, between half of `spare` and `spare` samples are
    inserted.

    gaps   number of gaps in the string: before the first digit, between digits, and after the last digit
    spare  maximum number of samples to insert in total
    """
    chosen = sorted(torch.randperm(gaps, generator=draw)[: 1 + int(_uniform((0, 2), draw))].tolist(), reverse=True)
    samples = int(_uniform((0.5, 1), draw) * max(spare, 0))
    first = samples if len(chosen) == 1 else int(_uniform((0, 1), draw) * samples)
    return list(zip(chosen, (first, samples - first), strict=False))


def _sample_noise_level(noise: float, draw: torch.Generator) -> float:
    """Return a random standard deviation for the noise of a sound.

    The result is 0 with probability 1/3. Otherwise its logarithm is uniform, and the result is between
    MIN_NOISE_SHARE * noise and `noise`.
    """
    share = _uniform((-0.5, 1), draw)
    return 0.0 if share < 0 else noise * MIN_NOISE_SHARE**share


def _make_tone(digit: int, sample_rate: int, draw: torch.Generator) -> Tensor:
    times = torch.arange(_samples(TONE, sample_rate, draw), dtype=torch.float64) / sample_rate
    waves = [
        _uniform(LOUDNESS, draw) * torch.sin(2 * math.pi * (frequency * times + _uniform((0, 1), draw)))
        for frequency in DTMF_FREQUENCIES[digit]
    ]
    return torch.stack(waves).sum(0).float()


def _make_silence(sample_rate: int, draw: torch.Generator) -> Tensor:
    return torch.zeros(_samples(PAUSE, sample_rate, draw))


def _samples(seconds: tuple[float, float], sample_rate: int, draw: torch.Generator) -> int:
    return round(_uniform(seconds, draw) * sample_rate)


def _uniform(bounds: tuple[float, float], draw: torch.Generator) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * float(torch.rand((), generator=draw, dtype=torch.float64))
