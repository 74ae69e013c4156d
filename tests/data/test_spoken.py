"""Spoken digits from both forms, every fault named, and strings that say what their labels say."""

import math
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.base.errors import ConfigError, DataError
from regard.data.spoken import Recordings, read_spoken, read_wav, strings


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


def test_a_rate_that_no_sound_has_is_refused_and_capitals_in_a_name_are_read(tmp_path: Path) -> None:
    write_wav(tmp_path / "7_ann_0.WAV", np.ones((50, 1)), 8_000)
    write_wav(tmp_path / "8_ann_0.wav", np.ones((50, 1)), 8_000)
    assert read_spoken(tmp_path).labels.tolist() == [7, 8]
    data = bytearray((tmp_path / "7_ann_0.WAV").read_bytes())
    data[24:28] = bytes(4)
    (tmp_path / "7_ann_0.WAV").write_bytes(data)
    with pytest.raises(DataError, match=r"7_ann_0\.WAV says that it has 0 samples a second"):
        read_spoken(tmp_path)


def test_a_folder_of_wav_files_tells_digit_speaker_and_take(tmp_path: Path) -> None:
    made = spoken(tmp_path)
    found = read_spoken(tmp_path)
    assert found.labels.tolist() == [0, 3, 7, 7, 9]
    assert found.speakers == ("bob", "ann", "ann", "ann", "bob")
    assert found.takes.tolist() == [3, 5, 0, 12, 1]
    assert found.rate == 8000
    assert torch.equal(found.sounds[3], torch.from_numpy(made["7_ann_12.wav"][:, 0]).float() / 2**15)


def test_other_rates_are_brought_to_one_where_asked(tmp_path: Path) -> None:
    spoken(tmp_path)
    times = np.arange(4410) / 44_100
    write_wav(tmp_path / "5_cid_0.wav", np.round(20_000 * np.sin(2 * math.pi * 600 * times))[:, None], 44_100)
    with pytest.raises(
        DataError,
        match=r"5_cid_0\.wav has 44100 samples a second, but 0_bob_3\.wav has 8000; bring .* to "
        r"one rate, or read them with read_spoken\(path, rate=8000\)",
    ):
        read_spoken(tmp_path)
    found = read_spoken(tmp_path, rate=8000)
    sound = found.sounds[found.speakers.index("cid")]
    wanted = 20_000 / 2**15 * torch.sin(2 * math.pi * 600 * torch.arange(800) / 8000)
    torch.testing.assert_close(sound[30:-30], wanted[30:-30], rtol=0, atol=2e-3)
    assert len(read_spoken(tmp_path, rate=4000).sounds[0]) == math.ceil(len(found.sounds[0]) / 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("7_a_2.flac", r"7_a_2\.flac is no WAV file, and no other sound is read; convert it to 7_a_2\.wav"),
        ("noise.MP3", r"noise\.MP3 is no WAV file"),
        ("7_a_2.wav.gz", r"7_a_2\.wav\.gz is no WAV file, and no other sound is read; convert it to 7_a_2\.wav"),
        ("7_a_2", r"7_a_2 is no WAV file"),
        (
            "sub/7_a_1.wav",
            r"sub/7_a_1\.wav lies in a folder of its own, and only .*; give the folder .*/sub, or put all",
        ),
        ("sub/deeper/7_a_1.flac", r"7_a_1\.flac lies in a folder of its own, .*; give the folder .*/sub/deeper, or"),
        ("set.npz", r"has set\.npz and also 7_a_0\.wav; give .*/set\.npz, or move one of them away"),
    ],
)
def test_a_recording_that_is_not_read_is_named(name: str, words: str, tmp_path: Path) -> None:
    write_wav(tmp_path / "7_a_0.wav", np.ones((50, 1)))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"some")
    with pytest.raises(DataError, match=words):
        read_spoken(tmp_path)


def test_what_is_no_recording_may_lie_beside_those(tmp_path: Path) -> None:
    write_wav(tmp_path / "7_a_0.wav", np.ones((50, 1)))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    for name in (
        *("README.md", "LICENSE", "notes.txt", "7_a_0.txt", "pictures/7_a_0.png", "code.tar.gz", "Thumbs.db"),
        *("._7_a_0.wav", ".7_a_1.flac", "__MACOSX/7_a_0.wav", "__MACOSX/._7_a_0.wav"),
    ):
        (tmp_path / name).write_bytes(b"some")
    assert read_spoken(tmp_path).labels.tolist() == [7]


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def test_faults_of_wav_files_are_named(tmp_path: Path) -> None:
    spoken(tmp_path)
    file = tmp_path / "7_ann_0.wav"
    cut(file, 44 + 2 * 250)
    with pytest.raises(
        DataError, match=r"7_ann_0\.wav is cut off: its header promises 300 samples, but sample 250 is no"
    ):
        read_spoken(tmp_path)
    for length, words in [
        (20, r"7_ann_0\.wav is no WAV file of whole numbers: it ends inside its header"),
        (0, r"7_ann_0\.wav is no WAV file of whole numbers: it ends inside its header"),
    ]:
        cut(file, length)
        with pytest.raises(DataError, match=words):
            read_spoken(tmp_path)
    file.write_bytes(b"ID3 this is no wave file at all ......................")
    with pytest.raises(DataError, match=r"7_ann_0\.wav is no WAV file of whole numbers: file does not start with RIFF"):
        read_spoken(tmp_path)
    write_wav(file, np.zeros((0, 1)))
    with pytest.raises(DataError, match=r"7_ann_0\.wav has no samples"):
        read_spoken(tmp_path)
    write_wav(file, np.zeros((9, 1)))
    data = bytearray(file.read_bytes())
    data[20] = 3  # floating samples
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"7_ann_0\.wav is no WAV file of whole numbers: unknown format: 3"):
        read_spoken(tmp_path)
    file.rename(tmp_path / "seven.wav")
    with pytest.raises(DataError, match=r"seven\.wav is not named digit_speaker_take\.wav, such as 7_ann_0\.wav"):
        read_spoken(tmp_path)
    with pytest.raises(DataError, match=r"absent\.wav cannot be read: No such file"):
        read_wav(tmp_path / "absent.wav")


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "little")


LIST = b"LIST" + number(4) + b"INFO"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (34, number(12, 2), r"has 12 bits a sample; expected 8, 16, 24 or 32"),
        (34, number(40, 2), r"has 40 bits a sample; expected 8, 16, 24 or 32"),
        (34, number(8, 2), r"says that it is built of 4 bytes for all channels of a sample, but .* 2 x 8 .* 2 bytes"),
        (22, number(1, 2), r"says that it is built of 4 bytes for all .* 1 x 16 bits; expected 2 bytes"),
        (
            40,
            number(100),
            r"says that it has 100 bytes of sound, from byte 44 on, but 212 follow, and what .* byte 144",
        ),
        (40, number(196), r"says that it has 196 bytes of sound, from byte 44 on, but 212 follow, .* byte 240 is no"),
        (40, number(199), r"says that it has 199 bytes of sound; expected a multiple of 4, those a sample"),
        (40, number(198), r"says that it has 198 bytes of sound; expected a multiple of 4, those a sample"),
        (248, number(5), r"says that it has 200 bytes of sound, .* byte 244 is no other part of a WAV file"),
        (256, b"T", r"says that it has 200 bytes of sound, from byte 44 on, but 213 follow, .* byte 256 is no other"),
        (16, number(9_000), r"is no WAV file of whole numbers: it ends inside its header"),
    ],
)
def test_a_header_that_does_not_fit_its_sound_is_refused(place: int, value: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "7_ann_0.wav"
    write_wav(file, 9 * np.arange(1, 101).reshape(50, 2))
    data = bytearray(file.read_bytes() + LIST)
    data[4:8] = number(len(data) - 8)
    file.write_bytes(data)
    assert len(read_wav(file)[0]) == 50
    data[place : place + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"7_ann_0\.wav {words}"):
        read_wav(file)


def test_sound_of_an_odd_size_is_read_with_the_byte_that_fills_it_up(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.arange(7).reshape(7, 1), width=3)
    whole = (tmp_path / "a.wav").read_bytes()
    for more in (b"", b"\0", b"\0" + LIST):
        (tmp_path / "a.wav").write_bytes(whole + more)
        assert (read_wav(tmp_path / "a.wav")[0] * 2**23).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("again", ["1_a_00.wav", "1_a_000.WAV"])
def test_a_take_that_is_there_twice_is_named(again: str, tmp_path: Path) -> None:
    for name in ("1_a_0.wav", "1_a_10.wav", "1_b_0.wav", "2_a_0.wav"):
        write_wav(tmp_path / name, np.ones((50, 1)))
    assert len(read_spoken(tmp_path)) == 4
    write_wav(tmp_path / again, np.ones((50, 1)))
    with pytest.raises(DataError, match=r"1_a_0.* is take 0, as 1_a_0.* is; leave one of them there"):
        read_spoken(tmp_path)


ARRAYS: dict[str, Any] = {
    "samples": np.arange(-10, 13, dtype=np.int16) * 1000,
    "offsets": np.array([0, 5, 12, 23]),
    "digit": np.array([4, 0, 9], dtype=np.uint8),
    "speaker": np.array([1, 0, 1], dtype=np.uint8),
    "index": np.array([7, 8, 9], dtype=np.uint8),
    "speakers": np.array(["ann", "bob"]),
    "sample_rate": np.array(8000),
}


def test_a_file_of_arrays_is_read_alone_and_from_its_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **ARRAYS)
    for path in (tmp_path, tmp_path / "set.npz"):
        found = read_spoken(path)
        assert [len(sound) for sound in found.sounds] == [5, 7, 11]
        assert torch.equal(torch.cat(found.sounds), torch.from_numpy(ARRAYS["samples"]).float() / 2**15)
        assert (found.labels.tolist(), found.takes.tolist()) == ([4, 0, 9], [7, 8, 9])
        assert (found.speakers, found.rate) == (("bob", "ann", "bob"), 8000)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("samples", np.zeros(23), r"samples should be int16 in a row, not float64"),
        ("offsets", np.array([0, 5, 12, 22]), r"offsets should run from 0 to the 23 samples there are"),
        ("offsets", np.array([1, 5, 12, 23]), r"offsets should run from 0 to the 23 samples there are"),
        ("offsets", np.array([0, 12, 5, 23]), r"recording 1 has no samples: offsets should rise"),
        ("offsets", np.array([0, 5, 23]), r"digit has 3 entries, but offsets tell of 2 recordings"),
        ("offsets", np.array([0.0, 5, 12, 23]), r"offsets should be whole numbers in a row, not float64"),
        ("digit", np.array([4, 10, 9]), r"recording 1 has no digit from 0 to 9"),
        ("digit", np.array([4, 0]), r"digit has 2 entries, but offsets tell of 3 recordings"),
        ("speaker", np.array([0, 1, 2]), r"recording 2 has none of the 2 speakers"),
        ("index", np.array([1, 2, 3, 4]), r"index has 4 entries, but offsets tell of 3 recordings"),
        *(
            ("sample_rate", np.array(rate), rf"sample_rate should be .* a second, from 1 to 999999, not {rate}")
            for rate in (0, 1_000_000, 4_000_000_000, 0.5)
        ),
        ("speakers", None, r"is no set of recordings: it lacks speakers; expected arrays samples, offsets"),
        ("speakers", np.array([None, "a"]), r"is no set of recordings: .*allow_pickle=False"),
    ],
)
def test_faults_of_a_file_of_arrays_are_named(name: str, value: Any, words: str, tmp_path: Path) -> None:
    arrays = {key: item for key, item in (ARRAYS | {name: value}).items() if item is not None}
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError, match=rf"set\.npz:? {words}"):
        read_spoken(tmp_path)


def test_damaged_missing_and_doubled_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"absent is not there; expected an \.npz file, or a folder of files such as 7_an"
    ):
        read_spoken(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has no \.wav and no \.npz files"):
        read_spoken(tmp_path)
    np.savez(tmp_path / "set.npz", **ARRAYS)
    data = (tmp_path / "set.npz").read_bytes()
    for damaged in (data[:-40], b"", b"no archive", data[:140] + b"\xff\xff" + data[142:]):
        (tmp_path / "set.npz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"set\.npz is no set of recordings"):
            read_spoken(tmp_path)
    (tmp_path / "set.npz").write_text("plain text\n" * 9)
    with pytest.raises(
        DataError, match=r"set\.npz is no set of recordings: it is no \.npz file; expected arrays sampl"
    ):
        read_spoken(tmp_path)
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"single\.npy is no set of recordings: it is a single array"):
        read_spoken(tmp_path / "single.npy")
    np.savez(tmp_path / "other.npz", **ARRAYS)
    (tmp_path / "set.npz").rename(tmp_path / "set.NPZ")
    with pytest.raises(DataError, match=r"has several sets: other\.npz, set\.NPZ; give one of them"):
        read_spoken(tmp_path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_flipped_byte_is_named_however_the_file_is_packed(packing: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.npz", "w", packing) as archive:
        for name, value in ARRAYS.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, value)
    data = bytearray((tmp_path / "set.npz").read_bytes())
    assert len(read_spoken(tmp_path)) == 3
    data[80] ^= 0x55
    (tmp_path / "set.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"set\.npz is no set of recordings: .*; expected arrays samples"):
        read_spoken(tmp_path)


def test_a_member_that_is_no_array_and_a_packing_that_nobody_knows_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **{name: value for name, value in ARRAYS.items() if name != "digit"})
    with zipfile.ZipFile(tmp_path / "set.npz", "a") as archive:
        archive.writestr("digit.npy", "4 0 9")
    with pytest.raises(DataError, match=r"set\.npz is no set of recordings: digit is no array; expected arrays"):
        read_spoken(tmp_path)
    data = (tmp_path / "set.npz").read_bytes()
    entry = data.index(b"PK\x01\x02")
    (tmp_path / "set.npz").write_bytes(data[: entry + 10] + b"\x63" + data[entry + 11 :])
    with pytest.raises(DataError, match=r"set\.npz is no set of recordings: That compression method is not supported"):
        read_spoken(tmp_path)


def some(count: int = 23) -> Recordings:
    """Recording i is i + 1 over and over, so that a string tells what it was joined from."""
    return Recordings(
        tuple(torch.full((100 + number,), number + 1.0) for number in range(count)),
        torch.arange(count) % 10,
        tuple("ann" if number % 3 else "bob" for number in range(count)),
        1000,
        torch.arange(count),
    )


def test_a_split_shares_no_recording_and_loses_none() -> None:
    parts = some().split(5, 3, seed=2)
    assert [len(part) for part in parts] == [15, 5, 3]
    assert sorted(take for part in parts for take in part.takes.tolist()) == list(range(23))
    for part in parts:
        for sound, label, speaker, take in zip(part.sounds, part.labels, part.speakers, part.takes, strict=True):
            assert (sound[0], label, speaker) == (take + 1, take % 10, "ann" if take % 3 else "bob")
    again = some().split(5, 3, seed=2)
    assert torch.equal(again[1].takes, parts[1].takes)
    assert not torch.equal(some().split(5, 3, seed=3)[1].takes, parts[1].takes)


def test_strings_are_recordings_of_one_speaker_with_silences_between() -> None:
    recordings = some()
    found = strings(recordings, 40, (2, 5), seed=1, pause=(0.05, 0.2))
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


def test_a_string_is_the_same_however_many_are_made() -> None:
    few, many = strings(some(), 3, seed=4), strings(some(), 9, seed=4)
    for number in range(3):
        assert torch.equal(few.sounds[number], many.sounds[number])
        assert torch.equal(few.labels[number], many.labels[number])
    assert not torch.equal(strings(some(), 1, seed=5).sounds[0], few.sounds[0])
    assert (few.rate, len(few)) == (1000, 3)


def test_unfit_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"length=\(5, 3\) has the fewest and the most digits"):
        strings(some(), 3, (5, 3))
    with pytest.raises(ConfigError, match=r"pause=\(0.2, 0.1\) has the shortest and the longest silence"):
        strings(some(), 3, pause=(0.2, 0.1))
    with pytest.raises(DataError, match=r"strings are joined from recordings, but there are none"):
        strings(some(0), 3)
    with pytest.raises(
        DataError, match=r"each recording has one of each, but there are 1 sounds, 2 labels, 1 speakers"
    ):
        Recordings((torch.zeros(3),), torch.tensor([1, 2]), ("ann",), 8000)


@pytest.mark.real
def test_the_spoken_digits_are_whole(real_data: Path) -> None:
    found = read_spoken(real_data / "fsdd")
    assert (len(found), found.rate) == (2700, 8000)
    assert torch.bincount(found.labels).tolist() == [270] * 10
    assert len(set(found.speakers)) == 6
    assert max(float(sound.abs().max()) for sound in found.sounds) <= 1
