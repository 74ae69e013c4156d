"""What the package offers by its own name, and what it leaves alone until it is needed."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import regard.data as data

NAMES = {
    *(
        "Birthplaces",
        "BirthplaceQuestion",
        "read_birthplaces",
        "SentencePairs",
        "read_sentence_pairs",
        "read_text",
        "python_text",
    ),
    *("Images", "read_images", "digits", "Recordings", "read_spoken", "strings", "tones", "DigitStrings"),
    *("LogMel", "LogMelStream", "log_mel", "resample", "number_pairs", "number_words"),
    *("Bytes", "BytePairs", "Characters", "Tokenizer", "load_tokenizer", "tokenizer_from_json"),
    *("LengthBuckets", "Biographies", "biographies", "ShuffledOrder", "sampler_generator", "split"),
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(data, name)
    assert inspect.isclass(thing) or inspect.isfunction(thing)
    assert inspect.getdoc(thing)


def test_nothing_else_is_offered() -> None:
    public = {name for name, thing in vars(data).items() if name[0] != "_" and not inspect.ismodule(thing)}
    assert public == NAMES


def test_loading_it_loads_nothing_that_only_one_set_needs(root: Path) -> None:
    names = ("PIL", "pyarrow")
    program = f"import sys, regard.data; print([name for name in {names} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
