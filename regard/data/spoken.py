"""Spoken digits: recordings of single ones, and strings joined from them."""

import io
import math
import os
import re
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_number
from regard.data.digit_strings import DigitStrings
from regard.data.folders import files, files_below
from regard.data.plain_text import read_bytes
from regard.data.resample import resample
from regard.data.sampler import sampler_generator
from regard.data.splits import split
from regard.data.tones import check_length

NAME = re.compile(r"(\d)_([^_]+)_(\d+)")
FASTEST = 1_000_000  # samples a second
BITS = (8, 16, 24, 32)  # of a sample in a WAV file
ARRAYS = ("samples", "offsets", "digit", "speaker", "index", "speakers", "sample_rate")
ZIPPED, SINGLE = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"  # how .npz and .npy files begin
# names by which recordings are known, so that none is passed over without a word
SOUNDS = {
    *(".wav", ".wave", ".w64", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".mp4", ".aac", ".wma", ".webm"),
    *(".aif", ".aiff", ".aifc", ".au", ".snd", ".sph", ".amr", ".caf", ".mka", ".wv", ".ape", ".raw", ".pcm"),
}
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".part"}
PAUSE = (0.05, 0.2)  # seconds of silence between digits


@dataclass(frozen=True, eq=False)
class Recordings:
    """Single digits: the sound of each from -1 to 1, which digit it is, who says it, and how often they have before."""

    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: Int64[Tensor, "n"]
    speakers: tuple[str, ...]
    rate: int
    takes: Int64[Tensor, "n"] | None = None

    def __post_init__(self) -> None:
        sizes = {"sounds": len(self.sounds), "labels": len(self.labels), "speakers": len(self.speakers)}
        if self.takes is not None:
            sizes["takes"] = len(self.takes)
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{size} {name}" for name, size in sizes.items())
            raise DataError(f"each recording has one of each, but there are {listed}")

    def __len__(self) -> int:
        return len(self.sounds)

    def chosen(self, records: Int64[Tensor, "_"]) -> "Recordings":
        """Some of the recordings, in the order of their numbers given."""
        places = records.tolist()
        return Recordings(
            tuple(self.sounds[each] for each in places),
            self.labels[records],
            tuple(self.speakers[each] for each in places),
            self.rate,
            None if self.takes is None else self.takes[records],
        )

    def split(self, *held: int, seed: int = 0) -> tuple["Recordings", ...]:
        """Recordings to train on, then one part for each number held out; no recording is in two parts."""
        return tuple(self.chosen(part) for part in split(len(self), held, seed))


def read_spoken(path: str | os.PathLike[str], rate: int | None = None) -> Recordings:
    """Recordings from an .npz file, a folder with one, or a folder of WAV files named digit_speaker_take.wav.

    rate  samples a second to bring every sound to; without it all files must have one rate, which stays
    """
    place = Path(path)
    if not place.exists():
        raise DataError(f"{place} is not there; expected an .npz file, or a folder of files such as 7_ann_0.wav")
    sets = _of_kind(place, ".npz") if place.is_dir() else [place]
    if len(sets) > 1:
        raise DataError(f"{place} has several sets: {', '.join(file.name for file in sets)}; give one of them")
    if place.is_dir():
        _check_others(place, sets or _of_kind(place, ".wav"))
    found = _read_arrays(sets[0]) if sets else _read_folder(place, rate)
    if rate is None or found.rate == rate:
        return found
    sounds = tuple(resample(sound, found.rate, rate) for sound in found.sounds)
    return Recordings(sounds, found.labels, found.speakers, rate, found.takes)


def read_wav(file: str | os.PathLike[str]) -> tuple[Float32[Tensor, "_"], int]:
    """The sound of a WAV file from -1 to 1, several channels as their mean, and its rate."""
    try:
        whole_file = Path(file).read_bytes()
        with wave.open(io.BytesIO(whole_file), "rb") as opened:
            channels, width, rate, frames = opened.getparams()[:4]
            if not 0 < rate < FASTEST:
                raise DataError(f"{file} says that it has {rate} samples a second, which no sound has")
            data = opened.readframes(frames)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    except (wave.Error, EOFError, RuntimeError) as error:  # the last for a part that is longer than the file
        raise DataError(
            f"{file} is no WAV file of whole numbers: {str(error) or 'it ends inside its header'}"
        ) from None
    _check_format(file, whole_file, channels)
    if len(data) != frames * channels * width:
        raise DataError(
            f"{file} is cut off: its header promises {frames} samples, but sample {len(data) // (channels * width)} "
            "is not there"
        )
    if not frames:
        raise DataError(f"{file} has no samples")
    _check_end(file, whole_file, channels * width)
    sound = torch.from_numpy(_whole_numbers(data, width)).reshape(frames, channels).double().mean(1)
    return (sound / 2.0 ** (8 * width - 1)).float(), rate


def _chunks(whole_file: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The parts of a WAV file: what each is called, the byte where its content begins, and its size as it is told."""
    place = 12
    while place < len(whole_file):
        size = int.from_bytes(whole_file[place + 4 : place + 8], "little")
        yield whole_file[place : place + 4], place + 8, size
        place += 8 + size + size % 2  # to an even byte


def _check_format(file: str | os.PathLike[str], whole_file: bytes, channels: int) -> None:
    """Raise where samples have a size that is not read, or not the size of which the file is built."""
    start = next(start for name, start, _ in _chunks(whole_file) if name == b"fmt ")
    built, bits = (int.from_bytes(whole_file[start + place :][:2], "little") for place in (12, 14))
    if bits not in BITS:
        raise DataError(f"{file} has {bits} bits a sample; expected {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}")
    if built != channels * bits // 8:
        raise DataError(
            f"{file} says that it is built of {built} bytes for all channels of a sample, but also that it has "
            f"{channels} x {bits} bits; expected {channels * bits // 8} bytes"
        )


def _check_end(file: str | os.PathLike[str], whole_file: bytes, frame: int) -> None:
    """Raise where a header tells of fewer bytes of sound than there are."""
    chunks = _chunks(whole_file)
    start, told = next((start, size) for name, start, size in chunks if name == b"data")
    if told % frame:
        raise DataError(
            f"{file} says that it has {told} bytes of sound; expected a multiple of {frame}, those a sample"
        )
    for name, place, size in chunks:
        if not (len(name) == 4 and name.isascii() and name.decode().isprintable() and place + size <= len(whole_file)):
            raise DataError(
                f"{file} says that it has {told} bytes of sound, from byte {start} on, but {len(whole_file) - start} "
                f"follow, and what stands at byte {place - 8} is no other part of a WAV file"
            )


def strings(
    recordings: Recordings,
    count: int,
    length: tuple[int, int] = (3, 7),
    *,
    seed: int = 0,
    pause: tuple[float, float] = PAUSE,
) -> DigitStrings:
    """Strings of `length` (fewest, most) digits, each said by one speaker, with silences before, between and after.

    pause  shortest and longest silence in seconds. String i is the same however many are made.
    """
    fewest, most = check_length(length)
    check_integer("strings(count)", count, 1, "strings")
    if not 0 <= check_number("pause (shortest)", pause[0]) <= check_number("pause (longest)", pause[1]) < math.inf:
        raise ConfigError(f"pause={pause} has the shortest and the longest silence in seconds, 0 or more")
    if not len(recordings):
        raise DataError("strings are joined from recordings, but there are none")
    by_speaker: dict[str, list[int]] = {}
    for number, speaker in enumerate(recordings.speakers):
        by_speaker.setdefault(speaker, []).append(number)
    own = [by_speaker[speaker] for speaker in sorted(by_speaker)]
    sounds, labels = [], []
    for number in range(count):
        draw = sampler_generator(seed, number, "strings")
        available = torch.tensor(own[_below(len(own), draw)])
        digits = fewest + _below(most - fewest + 1, draw)
        picked = available[torch.randint(len(available), (digits,), generator=draw)]
        seconds = pause[0] + (pause[1] - pause[0]) * torch.rand(digits + 1, generator=draw, dtype=torch.float64)
        silences = [torch.zeros(round(each * recordings.rate)) for each in seconds.tolist()]
        parts = [silences[0]]
        for record, silence in zip(picked.tolist(), silences[1:], strict=True):
            parts += [recordings.sounds[record], silence]
        sounds.append(torch.cat(parts))
        labels.append(recordings.labels[picked])
    return DigitStrings(tuple(sounds), tuple(labels), recordings.rate)


def _below(limit: int, draw: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=draw))


def _whole_numbers(data: bytes, width: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Samples of so many bytes, the lowest first; single bytes are written with 128 for silence."""
    if width == 1:
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32) - 128
    if width == 3:
        padded = np.zeros((len(data) // 3, 4), dtype=np.uint8)
        padded[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
        return padded.reshape(-1).view("<i4").astype(np.int32) >> 8
    return np.frombuffer(data, dtype=f"<i{width}").astype(np.int32)


def _of_kind(place: Path, suffix: str) -> list[Path]:
    """The files of a folder whose names end so, in small letters or capitals."""
    return [file for file in files(place) if file.suffix.lower() == suffix]


def _check_others(place: Path, read: list[Path]) -> None:
    """Raise where a folder has a recording that is not among those read."""
    for file in files_below(place):
        if file in read or not _is_recording(file):
            continue
        if file.parent != place:
            raise DataError(
                f"{file} lies in a folder of its own, and only {place} itself is read; give the folder {file.parent}, "
                "or put all recordings into one folder"
            )
        if file.suffix.lower() == ".wav":
            raise DataError(
                f"{place} has {read[0].name} and also {file.name}; give {read[0]}, or move one of them away"
            )
        raise DataError(
            f"{file} is no WAV file, and no other sound is read; convert it to {file.name.partition('.')[0]}.wav"
        )


def _is_recording(file: Path) -> bool:
    *before, last = [suffix.lower() for suffix in file.suffixes] or [""]
    if last in PACKED:
        return not SOUNDS.isdisjoint(before)
    return last in SOUNDS or NAME.fullmatch(file.name) is not None


def _read_folder(place: Path, rate: int | None) -> Recordings:
    recordings = _of_kind(place, ".wav")
    if not recordings:
        raise DataError(f"{place} has no .wav and no .npz files; expected files such as 7_ann_0.wav")
    sounds, labels, speakers, takes = [], [], [], []
    rates: list[int] = []
    known: dict[tuple[str, str, int], Path] = {}
    for file in recordings:
        named = NAME.fullmatch(file.stem)
        if named is None:
            raise DataError(f"{file} is not named digit_speaker_take.wav, such as 7_ann_0.wav")
        before = known.setdefault((named[1], named[2], int(named[3])), file)
        if before != file:
            raise DataError(f"{file} is take {int(named[3])}, as {before.name} is; leave one of them there")
        sound, own_rate = read_wav(file)
        if rate is None and rates and own_rate != rates[0]:
            raise DataError(
                f"{file} has {own_rate} samples a second, but {recordings[0].name} has {rates[0]}; bring the files to "
                f"one rate, or read them with read_spoken(path, rate={rates[0]})"
            )
        sounds.append(sound if rate is None else resample(sound, own_rate, rate))
        rates.append(own_rate)
        labels.append(int(named[1]))
        speakers.append(named[2])
        takes.append(int(named[3]))
    return Recordings(tuple(sounds), torch.tensor(labels), tuple(speakers), rate or rates[0], torch.tensor(takes))


def _read_arrays(file: Path) -> Recordings:
    """The form of one file: all samples in a row, and where each recording begins."""
    data = read_bytes(file)
    try:
        if not data.startswith(ZIPPED):  # numpy would take it for a pickle
            raise ValueError("it is a single array" if data.startswith(SINGLE) else "it is no .npz file")
        opened = np.load(io.BytesIO(data), allow_pickle=False)
        missing = [name for name in ARRAYS if name not in opened.files]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        arrays = {name: opened[name] for name in ARRAYS}
        plain = [name for name in ARRAYS if not isinstance(arrays[name], np.ndarray)]
        if plain:
            raise ValueError(f"{plain[0]} is no array")
    except Exception as error:  # every way of packing raises errors of its own
        raise DataError(f"{file} is no set of recordings: {error}; expected arrays {', '.join(ARRAYS)}") from None
    samples, offsets, digits = arrays["samples"], arrays["offsets"], arrays["digit"]
    if samples.dtype != np.int16 or samples.ndim != 1:
        raise DataError(f"{file}: samples should be int16 in a row, not {samples.dtype} {samples.shape}")
    for name in ("offsets", "digit", "speaker", "index"):
        if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
            raise DataError(f"{file}: {name} should be whole numbers in a row, not {arrays[name].dtype}")
    count = len(offsets) - 1
    for name in ("digit", "speaker", "index"):
        if len(arrays[name]) != count:
            raise DataError(f"{file}: {name} has {len(arrays[name])} entries, but offsets tell of {count} recordings")
    starts = offsets.astype(np.int64)
    if count < 1 or starts[0] != 0 or starts[-1] != len(samples):
        raise DataError(f"{file}: offsets should run from 0 to the {len(samples)} samples there are")
    _check(file, "has no samples: offsets should rise", np.flatnonzero(np.diff(starts) <= 0))
    _check(file, "has no digit from 0 to 9", np.flatnonzero((digits < 0) | (digits > 9)))
    names = [str(name) for name in arrays["speakers"].reshape(-1)]
    speaker = arrays["speaker"].astype(np.int64)
    _check(file, f"has none of the {len(names)} speakers", np.flatnonzero((speaker < 0) | (speaker >= len(names))))
    rate = arrays["sample_rate"]
    if rate.size != 1 or rate.dtype.kind not in "iu" or not 0 < int(rate.reshape(())) < FASTEST:
        raise DataError(
            f"{file}: sample_rate should be one whole number of samples a second, from 1 to {FASTEST - 1}, not {rate}"
        )
    scaled = torch.from_numpy(samples.astype(np.float32)) / 2**15
    return Recordings(
        tuple(scaled.split(np.diff(starts).tolist())),
        torch.from_numpy(digits.astype(np.int64)),
        tuple(names[each] for each in speaker),
        int(rate.reshape(())),
        torch.from_numpy(arrays["index"].astype(np.int64)),
    )


def _check(file: Path, trouble: str, wrong: Any) -> None:
    if len(wrong):
        raise DataError(f"{file}: recording {wrong[0]} {trouble}")
