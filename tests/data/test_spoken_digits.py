"""Spoken digits from WAV and .npz files, errors that name the file, and concatenated strings."""

import math
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.base.errors import ConfigError, DataError
from regard.data.spoken_digits import Recordings, make_digit_strings, read_spoken_digits, read_wav


def write_wav(file: Path, frames: np.ndarray, rate: int = 8000, width: int = 2) -> None:
    """Whole numbers (samples, channels) as so many bytes each, by another way than they are read."""
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(frames.shape[1])
        opened.setsampwidth(width)
        opened.setframerate(rate)
        shift = 128 if width == 1 else 0
        values = [int(value) + shift for value in frames.reshape(-1)]
        opened.writeframes(b"".join(value.to_bytes(width, "little", signed=width > 1) for value in values))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files_of_every_width_are_read(width: int, channels: int, tmp_path: Path) -> None:
    full = 2 ** (8 * width - 1)
    frames = np.array([[-full, full - 1], [full - 1, 0], [0, -full], [1, 2], [-1, -3]], dtype=np.int64)[:, :channels]
    write_wav(tmp_path / "a.wav", frames, 11_025, width)
    sound, rate = read_wav(tmp_path / "a.wav")
    assert rate == 11_025
    assert sound.dtype == torch.float32
    torch.testing.assert_close(sound, torch.from_numpy((frames.mean(1) / full).astype(np.float32)))


def spoken(folder: Path, rate: int = 8000) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    made = {}
    for digit, speaker, take in [(7, "ann", 0), (7, "ann", 12), (0, "bob", 3), (9, "bob", 1), (3, "ann", 5)]:
        name = f"{digit}_{speaker}_{take}.wav"
        made[name] = draw.integers(-30_000, 30_000, size=(300 + 17 * take, 1))
        write_wav(folder / name, made[name], rate)
    return made


def test_a_sample_rate_of_0_is_refused_and_upper_case_suffixes_are_read(tmp_path: Path) -> None:
    write_wav(tmp_path / "7_ann_0.WAV", np.ones((50, 1)), 8_000)
    write_wav(tmp_path / "8_ann_0.wav", np.ones((50, 1)), 8_000)
    assert read_spoken_digits(tmp_path).labels.tolist() == [7, 8]
    data = bytearray((tmp_path / "7_ann_0.WAV").read_bytes())
    data[24:28] = bytes(4)
    (tmp_path / "7_ann_0.WAV").write_bytes(data)
    with pytest.raises(DataError, match=r"7_ann_0\.WAV has a sample rate of 0"):
        read_spoken_digits(tmp_path)


def test_wav_file_names_give_digit_and_speaker(tmp_path: Path) -> None:
    made = spoken(tmp_path)
    found = read_spoken_digits(tmp_path)
    assert found.labels.tolist() == [0, 3, 7, 7, 9]
    assert found.speakers == ("bob", "ann", "ann", "ann", "bob")
    assert found.sample_rate == 8000
    assert torch.equal(found.sounds[3], torch.from_numpy(made["7_ann_12.wav"][:, 0]).float() / 2**15)


def test_sounds_are_resampled_to_the_sample_rate(tmp_path: Path) -> None:
    spoken(tmp_path)
    times = np.arange(4410) / 44_100
    write_wav(tmp_path / "5_cid_0.wav", np.round(20_000 * np.sin(2 * math.pi * 600 * times))[:, None], 44_100)
    with pytest.raises(
        DataError,
        match=r"5_cid_0\.wav has a sample rate of 44100, but 0_bob_3\.wav of 8000; resample the files, or read them "
        r"with read_spoken_digits\(path, sample_rate=8000\)",
    ):
        read_spoken_digits(tmp_path)
    found = read_spoken_digits(tmp_path, sample_rate=8000)
    sound = found.sounds[found.speakers.index("cid")]
    wanted = 20_000 / 2**15 * torch.sin(2 * math.pi * 600 * torch.arange(800) / 8000)
    torch.testing.assert_close(sound[30:-30], wanted[30:-30], rtol=0, atol=2e-3)
    assert len(read_spoken_digits(tmp_path, sample_rate=4000).sounds[0]) == math.ceil(len(found.sounds[0]) / 2)


@pytest.mark.parametrize(
    ("name", "unread"),
    [
        *((name, name) for name in ("7_a_2.flac", "noise.MP3", "7_a_2.wav.gz", "7_a_2", "sub/deeper/7_a_1.wav")),
        ("set.npz", "7_a_0.wav"),
    ],
)
def test_a_file_that_is_not_read_is_named(name: str, unread: str, tmp_path: Path) -> None:
    write_wav(tmp_path / "7_a_0.wav", np.ones((50, 1)))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"some")
    with pytest.raises(DataError, match=rf"{unread} would not be read; expected one \.npz file, or WAV files in one"):
        read_spoken_digits(tmp_path)


def test_descriptions_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    write_wav(tmp_path / "7_a_0.wav", np.ones((50, 1)))
    (tmp_path / "__MACOSX").mkdir()
    for name in (
        *("README.md", "LICENSE", "notes.txt", "7_a_0.txt", "Thumbs.db"),
        *("._7_a_0.wav", ".7_a_1.flac", "__MACOSX/7_a_0.wav", "__MACOSX/._7_a_0.wav"),
    ):
        (tmp_path / name).write_bytes(b"some")
    assert read_spoken_digits(tmp_path).labels.tolist() == [7]


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def test_invalid_wav_files_are_named(tmp_path: Path) -> None:
    spoken(tmp_path)
    file = tmp_path / "7_ann_0.wav"
    cut(file, 44 + 2 * 250)
    with pytest.raises(DataError, match=r"7_ann_0\.wav is truncated: it has 250 of 300 samples"):
        read_spoken_digits(tmp_path)
    for length, words in [
        (20, r"7_ann_0\.wav is not a WAV file of integers: it ends inside its header"),
        (0, r"7_ann_0\.wav is not a WAV file of integers: it ends inside its header"),
    ]:
        cut(file, length)
        with pytest.raises(DataError, match=words):
            read_spoken_digits(tmp_path)
    file.write_bytes(b"ID3 this is no wave file at all ......................")
    with pytest.raises(DataError, match=r"7_ann_0\.wav is not a WAV file of integers: file does not start with RIFF"):
        read_spoken_digits(tmp_path)
    write_wav(file, np.zeros((0, 1)))
    with pytest.raises(DataError, match=r"7_ann_0\.wav has no samples"):
        read_spoken_digits(tmp_path)
    write_wav(file, np.zeros((9, 1)))
    data = bytearray(file.read_bytes())
    data[20] = 3  # floating samples
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"7_ann_0\.wav is not a WAV file of integers: unknown format: 3"):
        read_spoken_digits(tmp_path)
    file.rename(tmp_path / "seven.wav")
    with pytest.raises(DataError, match=r"seven\.wav is not named digit_speaker_take\.wav, such as 7_ann_0\.wav"):
        read_spoken_digits(tmp_path)
    with pytest.raises(DataError, match=r"absent\.wav cannot be read: No such file"):
        read_wav(tmp_path / "absent.wav")


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "little")


LIST = b"LIST" + number(4) + b"INFO"


def test_a_sample_width_above_32_bits_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "7_ann_0.wav"
    write_wav(file, 9 * np.arange(1, 101).reshape(50, 2))
    data = bytearray(file.read_bytes() + LIST)
    file.write_bytes(data)
    assert len(read_wav(file)[0]) == 50
    data[34:36] = number(40, 2)
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"7_ann_0\.wav has 40 bits per sample; expected 8, 16, 24 or 32"):
        read_wav(file)


def test_data_of_an_odd_size_may_have_a_padding_byte(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.arange(7).reshape(7, 1), width=3)
    whole = (tmp_path / "a.wav").read_bytes()
    for more in (b"", b"\0", b"\0" + LIST):
        (tmp_path / "a.wav").write_bytes(whole + more)
        assert (read_wav(tmp_path / "a.wav")[0] * 2**23).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("again", ["1_a_00.wav", "1_a_000.WAV"])
def test_a_repeated_take_is_named(again: str, tmp_path: Path) -> None:
    for name in ("1_a_0.wav", "1_a_10.wav", "1_b_0.wav", "2_a_0.wav"):
        write_wav(tmp_path / name, np.ones((50, 1)))
    assert len(read_spoken_digits(tmp_path)) == 4
    write_wav(tmp_path / again, np.ones((50, 1)))
    with pytest.raises(DataError, match=r"1_a_0.* and 1_a_0.* are both take 0; remove one of them"):
        read_spoken_digits(tmp_path)


ARRAYS: dict[str, Any] = {
    "samples": np.arange(-10, 13, dtype=np.int16) * 1000,
    "offsets": np.array([0, 5, 12, 23]),
    "digit": np.array([4, 0, 9], dtype=np.uint8),
    "speaker": np.array([1, 0, 1], dtype=np.uint8),
    "speakers": np.array(["ann", "bob"]),
    "sample_rate": np.array(8000),
}


def test_an_npz_file_is_read_directly_and_from_its_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **ARRAYS)
    for path in (tmp_path, tmp_path / "set.npz"):
        found = read_spoken_digits(path)
        assert [len(sound) for sound in found.sounds] == [5, 7, 11]
        assert torch.equal(torch.cat(found.sounds), torch.from_numpy(ARRAYS["samples"]).float() / 2**15)
        assert found.labels.tolist() == [4, 0, 9]
        assert (found.speakers, found.sample_rate) == (("bob", "ann", "bob"), 8000)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("samples", np.zeros(23), r"samples should be a one-dimensional int16 array, not float64"),
        ("offsets", np.array([0, 5, 12, 22]), r"offsets should run from 0 to the number of samples, 23"),
        ("offsets", np.array([1, 5, 12, 23]), r"offsets should run from 0 to the number of samples, 23"),
        ("offsets", np.array([0, 12, 5, 23]), r"recording 1 has no samples: offsets should increase"),
        ("offsets", np.array([0, 5, 23]), r"digit has 3 entries, but offsets has 2 recordings"),
        ("offsets", np.array([0.0, 5, 12, 23]), r"offsets should be a one-dimensional array of integers, not float64"),
        ("digit", np.array([4, 10, 9]), r"recording 1 has a label that is not a digit"),
        ("digit", np.array([4, 0]), r"digit has 2 entries, but offsets has 3 recordings"),
        ("speaker", np.array([0, 1, 2]), r"recording 2 has a speaker that is not one of 2"),
        *(
            ("sample_rate", np.array(rate), rf"sample_rate should be one integer, from 1 to 999999, not {rate}")
            for rate in (0, 1_000_000, 4_000_000_000, 0.5)
        ),
        ("speakers", None, r"cannot be read as arrays: speakers is missing"),
        ("speakers", np.array([None, "a"]), r"cannot be read as arrays: .*allow_pickle=False"),
    ],
)
def test_invalid_npz_fields_are_named(name: str, value: Any, words: str, tmp_path: Path) -> None:
    arrays = {key: item for key, item in (ARRAYS | {name: value}).items() if item is not None}
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError, match=rf"set\.npz:? {words}"):
        read_spoken_digits(tmp_path)


def test_damaged_missing_and_repeated_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"absent does not exist; expected an \.npz file, or a folder of files such as 7_an"
    ):
        read_spoken_digits(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has no \.wav and no \.npz files"):
        read_spoken_digits(tmp_path)
    np.savez(tmp_path / "set.npz", **ARRAYS)
    data = (tmp_path / "set.npz").read_bytes()
    for damaged in (data[:-40], b"", b"no archive", data[:140] + b"\xff\xff" + data[142:]):
        (tmp_path / "set.npz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"set\.npz cannot be read as arrays"):
            read_spoken_digits(tmp_path)
    (tmp_path / "set.npz").write_text("plain text\n" * 9)
    with pytest.raises(DataError, match=r"set\.npz cannot be read as arrays: it is not an \.npy or \.npz file"):
        read_spoken_digits(tmp_path)
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"single\.npy is a single array; expected an \.npz file with samples"):
        read_spoken_digits(tmp_path / "single.npy")
    np.savez(tmp_path / "other.npz", **ARRAYS)
    (tmp_path / "set.npz").rename(tmp_path / "set.NPZ")
    with pytest.raises(DataError, match=r"has several sets: other\.npz, set\.NPZ; pass one of them"):
        read_spoken_digits(tmp_path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_flipped_byte_is_found_in_every_compression(packing: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.npz", "w", packing) as archive:
        for name, value in ARRAYS.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, value)
    data = bytearray((tmp_path / "set.npz").read_bytes())
    assert len(read_spoken_digits(tmp_path)) == 3
    data[80] ^= 0x55
    (tmp_path / "set.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"set\.npz cannot be read as arrays: "):
        read_spoken_digits(tmp_path)


def test_a_member_that_is_not_an_array_and_an_unknown_compression_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **{name: value for name, value in ARRAYS.items() if name != "digit"})
    with zipfile.ZipFile(tmp_path / "set.npz", "a") as archive:
        archive.writestr("digit.npy", "4 0 9")
    with pytest.raises(DataError, match=r"set\.npz cannot be read as arrays: digit is not an array"):
        read_spoken_digits(tmp_path)
    data = (tmp_path / "set.npz").read_bytes()
    entry = data.index(b"PK\x01\x02")
    (tmp_path / "set.npz").write_bytes(data[: entry + 10] + b"\x63" + data[entry + 11 :])
    with pytest.raises(DataError, match=r"cannot be read as arrays: That compression method is not supported"):
        read_spoken_digits(tmp_path)


def some(count: int = 23) -> Recordings:
    """Recording i is i + 1 over and over, so that a string tells what it was joined from."""
    return Recordings(
        tuple(torch.full((100 + number,), number + 1.0) for number in range(count)),
        torch.arange(count) % 10,
        tuple("ann" if number % 3 else "bob" for number in range(count)),
        1000,
    )


def numbers(recordings: Recordings) -> list[int]:
    """The numbers of the recordings, from their samples."""
    return [int(sound[0]) - 1 for sound in recordings.sounds]


def test_a_split_shares_no_recording_and_loses_none() -> None:
    parts = some().split(5, 3, seed=2)
    assert [len(part) for part in parts] == [15, 5, 3]
    assert sorted(number for part in parts for number in numbers(part)) == list(range(23))
    for part in parts:
        for number, label, speaker in zip(numbers(part), part.labels, part.speakers, strict=True):
            assert (label, speaker) == (number % 10, "ann" if number % 3 else "bob")
    assert numbers(some().split(5, 3, seed=2)[1]) == numbers(parts[1])
    assert numbers(some().split(5, 3, seed=3)[1]) != numbers(parts[1])


def test_strings_have_one_speaker_and_pauses() -> None:
    recordings = some()
    found = make_digit_strings(recordings, 40, (2, 5), seed=1, pause=(0.05, 0.2))
    assert {len(labels) for labels in found.labels} == {2, 3, 4, 5}
    speakers = set()
    for sound, labels in zip(found.sounds, found.labels, strict=True):
        values, lengths = sound.unique_consecutive(return_counts=True)
        assert (values[::2] == 0).all()  # silences before, between and after
        assert all(50 <= length <= 200 for length in lengths[::2].tolist())
        said = (values[1::2] - 1).long()
        assert torch.equal(lengths[1::2], 100 + said)  # whole recordings
        assert torch.equal(recordings.labels[said], labels)
        own = {recordings.speakers[number] for number in said.tolist()}
        assert len(own) == 1
        speakers |= own
    assert speakers == {"ann", "bob"}


def test_a_string_does_not_depend_on_the_count() -> None:
    few, many = make_digit_strings(some(), 3, seed=4), make_digit_strings(some(), 9, seed=4)
    for number in range(3):
        assert torch.equal(few.sounds[number], many.sounds[number])
        assert torch.equal(few.labels[number], many.labels[number])
    assert not torch.equal(make_digit_strings(some(), 1, seed=5).sounds[0], few.sounds[0])
    assert (few.sample_rate, len(few)) == (1000, 3)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"length=\(5, 3\) is the minimum and maximum number of digits"):
        make_digit_strings(some(), 3, (5, 3))
    with pytest.raises(ConfigError, match=r"pause=\(0.2, 0.1\) is the minimum and maximum silence"):
        make_digit_strings(some(), 3, pause=(0.2, 0.1))
    with pytest.raises(DataError, match=r"digit strings need recordings, but there are none"):
        make_digit_strings(some(0), 3)
    with pytest.raises(
        DataError,
        match=r"Recordings needs the same number of sounds, labels, speakers, but has 1 sounds, 2 labels, 1 spe",
    ):
        Recordings((torch.zeros(3),), torch.tensor([1, 2]), ("ann",), 8000)


@pytest.mark.real
def test_the_spoken_digits_are_complete(real_data: Path) -> None:
    found = read_spoken_digits(real_data / "fsdd")
    assert (len(found), found.sample_rate) == (2700, 8000)
    assert torch.bincount(found.labels).tolist() == [270] * 10
    assert len(set(found.speakers)) == 6
    assert max(float(sound.abs().max()) for sound in found.sounds) <= 1
