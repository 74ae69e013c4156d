"""Spoken digits: recordings of single digits from WAV or .npz files, and strings concatenated from them."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from regard.base import media_files
from regard.base.array_files import read_arrays
from regard.base.errors import ConfigError, DataError
from regard.base.files import exists
from regard.base.validation import check_integer, check_number
from regard.data.digit_strings import DigitStrings
from regard.data.folders import check_all_read, list_files, walk_files
from regard.data.records import Records
from regard.data.resample import resample
from regard.data.sampler import random_index, sampler_generator
from regard.data.splits import random_split
from regard.data.tones import check_length

FILE_NAME = re.compile(r"(\d)_([^_]+)_(\d+)")
NPZ_FIELDS = ("samples", "offsets", "digit", "speaker", "speakers", "sample_rate")
PAUSE = (0.05, 0.2)  # seconds of silence between digits


@dataclass(frozen=True, eq=False)
class Recordings(Records):
    """A data set of recordings, each of one spoken digit.

    sounds    samples from -1 to 1
    labels    the digit of each recording
    speakers  the speaker of each recording

    >>> recordings = Recordings((torch.zeros(800),) * 2, torch.tensor([3, 7]), ("ann",) * 2, 8000)
    >>> recordings.labels
    tensor([3, 7])
    """

    PER_RECORD = ("sounds", "labels", "speakers")
    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: Int64[Tensor, "n"]
    speakers: tuple[str, ...]
    sample_rate: int

    def split(self, *held_out: int, seed: int = 0) -> tuple["Recordings", ...]:
        """Split the recordings at random into disjoint parts: all others, then one part for each size in `held_out`."""
        return tuple(self.select(part) for part in random_split(len(self), held_out, seed))


def read_spoken_digits(path: str | os.PathLike[str], sample_rate: int | None = None) -> Recordings:
    """Read recordings of spoken digits from an .npz file or from WAV files named digit_speaker_take.wav.

    path         the .npz file, a folder that contains one, or the folder of the WAV files
    sample_rate  rate to resample every sound to; None requires files of one sample rate

    >>> with wave.open("7_ann_0.wav", "wb") as file:
    ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
    ...     file.writeframes(bytes(4000))
    >>> read_spoken_digits(".").labels
    tensor([7])
    """
    place = Path(path)
    if not exists(place):
        raise DataError(f"{place} does not exist; expected an .npz file, or a folder of files such as 7_ann_0.wav")
    sets = _files_with_suffix(place, ".npz") if place.is_dir() else [place]
    if len(sets) > 1:
        raise DataError(f"{place} has several sets: {', '.join(file.name for file in sets)}; pass one of them")
    if place.is_dir():
        read = sets or _files_with_suffix(place, ".wav")
        check_all_read(read, walk_files(place), "one .npz file, or WAV files in one folder")
    found = _read_npz(sets[0]) if sets else _read_wav_folder(place, sample_rate)
    if sample_rate is None or found.sample_rate == sample_rate:
        return found
    sounds = tuple(resample(sound, found.sample_rate, sample_rate) for sound in found.sounds)
    return Recordings(sounds, found.labels, found.speakers, sample_rate)


def read_wav(file: str | os.PathLike[str]) -> tuple[Float32[Tensor, "_"], int]:
    """Read a WAV file with integer samples. Returns the samples, scaled to -1 to 1, and the sample rate.

    Several channels are averaged.
    """
    samples, rate = media_files.read_wav(Path(file))
    return torch.from_numpy(samples).mean(1).float(), rate


def make_digit_strings(
    recordings: Recordings,
    count: int,
    length: tuple[int, int] = (3, 7),
    *,
    seed: int = 0,
    pause: tuple[float, float] = PAUSE,
) -> DigitStrings:
    """Make `count` digit strings: random recordings of one speaker, concatenated with silences.

    The first strings are the same for every `count`.

    length  minimum and maximum number of digits
    pause   minimum and maximum seconds of silence before, between and after digits

    >>> recordings = Recordings((torch.zeros(800),) * 2, torch.tensor([3, 7]), ("ann",) * 2, 8000)
    >>> len(make_digit_strings(recordings, 3, length=(4, 4)).sounds)
    3
    """
    fewest, most = check_length(length)
    check_integer("make_digit_strings(count)", count, 1, "strings")
    check_pause(pause)
    if not len(recordings):
        raise DataError("digit strings need recordings, but there are none")
    by_speaker: dict[str, list[int]] = {}
    for number, speaker in enumerate(recordings.speakers):
        by_speaker.setdefault(speaker, []).append(number)
    own = [by_speaker[speaker] for speaker in sorted(by_speaker)]
    sounds, labels = [], []
    for number in range(count):
        draw = sampler_generator(seed, number, "strings")
        available = torch.tensor(own[random_index(len(own), draw)])
        digits = fewest + random_index(most - fewest + 1, draw)
        picked = available[torch.randint(len(available), (digits,), generator=draw)]
        seconds = pause[0] + (pause[1] - pause[0]) * torch.rand(digits + 1, generator=draw, dtype=torch.float64)
        silences = [torch.zeros(round(each * recordings.sample_rate)) for each in seconds.tolist()]
        parts = [silences[0]]
        for record, silence in zip(picked.tolist(), silences[1:], strict=True):
            parts += [recordings.sounds[record], silence]
        sounds.append(torch.cat(parts))
        labels.append(recordings.labels[picked])
    return DigitStrings(tuple(sounds), tuple(labels), recordings.sample_rate)


def check_pause(pause: tuple[float, float]) -> None:
    """Raise ConfigError unless `pause` is a minimum and a maximum number of seconds, in this order and not negative."""
    if not 0 <= check_number("pause (minimum)", pause[0]) <= check_number("pause (maximum)", pause[1]) < math.inf:
        raise ConfigError(f"pause={pause} is the minimum and maximum silence in seconds, 0 or more, in this order")


def _files_with_suffix(place: Path, suffix: str) -> list[Path]:
    return [file for file in list_files(place) if file.suffix.lower() == suffix]


def _read_wav_folder(place: Path, sample_rate: int | None) -> Recordings:
    files = _files_with_suffix(place, ".wav")
    if not files:
        raise DataError(f"{place} has no .wav and no .npz files; expected files such as 7_ann_0.wav")
    sounds, labels, speakers = [], [], []
    rates: list[int] = []
    known: dict[tuple[str, str, int], Path] = {}
    for file in files:
        name = FILE_NAME.fullmatch(file.stem)
        if name is None:
            raise DataError(f"{file} is not named digit_speaker_take.wav, such as 7_ann_0.wav")
        before = known.setdefault((name[1], name[2], int(name[3])), file)
        if before != file:
            raise DataError(f"{file} and {before.name} are both take {int(name[3])}; remove one of them")
        sound, rate = read_wav(file)
        if sample_rate is None and rates and rate != rates[0]:
            raise DataError(
                f"{file} has a sample rate of {rate}, but {files[0].name} of {rates[0]}; resample the files, or read "
                f"them with read_spoken_digits(path, sample_rate={rates[0]})"
            )
        sounds.append(sound if sample_rate is None else resample(sound, rate, sample_rate))
        rates.append(rate)
        labels.append(int(name[1]))
        speakers.append(name[2])
    return Recordings(tuple(sounds), torch.tensor(labels), tuple(speakers), sample_rate or rates[0])


def _read_npz(file: Path) -> Recordings:
    """Read recordings from an .npz file with all samples in one array and the offset of each recording."""
    arrays = read_arrays(file, names=NPZ_FIELDS)
    if not isinstance(arrays, dict):
        raise DataError(f"{file} is a single array; expected an .npz file with {', '.join(NPZ_FIELDS)}")
    samples, offsets, digits = arrays["samples"], arrays["offsets"], arrays["digit"]
    if samples.dtype != np.int16 or samples.ndim != 1:
        raise DataError(f"{file}: samples should be a one-dimensional int16 array, not {samples.dtype} {samples.shape}")
    count = len(offsets) - 1
    for name in ("offsets", "digit", "speaker"):
        if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
            raise DataError(f"{file}: {name} should be a one-dimensional array of integers, not {arrays[name].dtype}")
        if name != "offsets" and len(arrays[name]) != count:
            raise DataError(f"{file}: {name} has {len(arrays[name])} entries, but offsets has {count} recordings")
    starts = offsets.astype(np.int64)
    if count < 1 or starts[0] != 0 or starts[-1] != len(samples):
        raise DataError(f"{file}: offsets should run from 0 to the number of samples, {len(samples)}")
    _check_records(file, "has no samples: offsets should increase", np.flatnonzero(np.diff(starts) <= 0))
    _check_records(file, "has a label that is not a digit", np.flatnonzero((digits < 0) | (digits > 9)))
    names = [str(name) for name in arrays["speakers"].reshape(-1)]
    speaker = arrays["speaker"].astype(np.int64)
    unknown = np.flatnonzero((speaker < 0) | (speaker >= len(names)))
    _check_records(file, f"has a speaker that is not one of {len(names)}", unknown)
    rate = arrays["sample_rate"]
    if rate.size != 1 or rate.dtype.kind not in "iu" or not 0 < int(rate.reshape(())) < media_files.MAX_SAMPLE_RATE:
        most = media_files.MAX_SAMPLE_RATE - 1
        raise DataError(f"{file}: sample_rate should be one integer, from 1 to {most}, not {rate}")
    scaled = torch.from_numpy(samples.astype(np.float32)) / 2**15
    return Recordings(
        tuple(scaled.split(np.diff(starts).tolist())),
        torch.from_numpy(digits.astype(np.int64)),
        tuple(names[each] for each in speaker),
        int(rate.reshape(())),
    )


def _check_records(file: Path, problem: str, wrong: Any) -> None:
    if len(wrong):
        raise DataError(f"{file}: recording {wrong[0]} {problem}")
