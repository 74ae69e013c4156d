"""The public names of regard.data, and what importing it does not import."""

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
    *(
        "Images",
        "read_images",
        "digits",
        "Recordings",
        "read_spoken_digits",
        "make_digit_strings",
        "tones",
        "DigitStrings",
    ),
    *("LogMel", "LogMelStream", "log_mel", "resample", "number_pairs", "number_words"),
    *("ByteTokenizer", "BytePairTokenizer", "CharacterTokenizer", "Tokenizer", "load_tokenizer", "tokenizer_from_json"),
    *("LengthBuckets", "Biographies", "biographies", "ShuffledOrder", "sampler_generator", "random_split"),
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_public_name_has_a_docstring(name: str) -> None:
    thing = getattr(data, name)
    assert inspect.isclass(thing) or inspect.isfunction(thing)
    assert inspect.getdoc(thing)


def test_there_are_no_other_public_names() -> None:
    public = {name for name, thing in vars(data).items() if name[0] != "_" and not inspect.ismodule(thing)}
    assert public == NAMES


def test_importing_the_package_imports_no_optional_packages(root: Path) -> None:
    names = ("PIL", "pyarrow")
    program = f"import sys, regard.data; print([name for name in {names} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
