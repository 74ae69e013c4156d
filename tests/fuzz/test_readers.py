"""Fuzzing of every file reader: damaged files give our errors, never a foreign exception, a hang or much memory."""

import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regard.base.errors import RegardError
from tests.fuzz.readers import Reader, list_readers, mutate, replace_values

QUICK, MANY = 60, 2000  # damaged files for each reader
MAX_SECONDS = 60  # for one file
MAX_GROWTH = 500 << 10  # KiB of memory
MAX_MESSAGE = 5000  # characters of an error


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return {each.name: each for each in list_readers(tmp_path_factory.mktemp("seeds"))}


NAMES = (
    *("json", "arrays", "gzip", "wav", "image", "pickle", "cifar", "cifar binary", "tar", "recordings", "tokenizer"),
    *("text", "sentences", "facts", "model config", "weights", "records", "checkpoint", "checkpoint tensors", "log"),
    *("run", "problem", "problem table", "problem arrays", "matrix", "notebook", "quiz", "lab results"),
    *("regard model", "llama model", "dinov2 model", "distilbert model", "bart model", "t5 model"),
)
JSON_NAMES = (
    *("tokenizer", "checkpoint", "run", "problem", "notebook", "quiz", "lab results"),
    *(name for name in NAMES if name.endswith(" model")),
)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise in the block after some seconds: a reader hangs."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"the reader took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    reader: Reader, count: int, folder: Path, seed: int, damage: Callable[[bytes, random.Random], bytes] = mutate
) -> int:
    """Read this number of damaged files; return how many were refused."""
    refused = longest = 0
    rng = random.Random(seed)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        data = damage(rng.choice(reader.seeds), rng)
        place = folder / "now"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        reader.prepare(place)
        (place / reader.file).write_bytes(data)
        try:
            with time_limit(MAX_SECONDS):
                reader.read(place / reader.file)
        except RegardError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        except Exception as error:
            kept = folder.parent / f"{reader.name}-{seed}-{number}"
            kept.write_bytes(data)
            raise AssertionError(f"{type(error).__name__} for file {number}, kept in {kept}") from error
        assert longest <= MAX_MESSAGE, f"file {number}: a message of {longest:,} characters"
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
        assert growth <= MAX_GROWTH, f"file {number}: memory grew by {growth >> 10} MiB"
    return refused


def test_every_reader_is_listed(readers: dict[str, Reader]) -> None:
    assert sorted(readers) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_valid_files_are_read(name: str, readers: dict[str, Reader], tmp_path: Path) -> None:
    for number, data in enumerate(readers[name].seeds):
        place = tmp_path / str(number)
        place.mkdir()
        readers[name].prepare(place)
        (place / readers[name].file).write_bytes(data)
        readers[name].read(place / readers[name].file)


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_give_our_errors(name: str, count: int, readers: dict[str, Reader], tmp_path: Path) -> None:
    refused = fuzz(readers[name], count, tmp_path, seed=count)
    assert refused > 0 or name == "log", "a log of metrics drops damaged lines"


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", JSON_NAMES)
def test_hostile_values_give_our_errors(name: str, count: int, readers: dict[str, Reader], tmp_path: Path) -> None:
    assert fuzz(readers[name], count, tmp_path, count, replace_values) > 0
