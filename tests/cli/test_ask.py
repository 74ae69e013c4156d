"""`regard ask`: what it prints, as JSON too, and errors about what it cannot read in one line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from regard.cli import app
from regard.cli.ask import percent
from regard.data.tokenizers import load_tokenizer
from regard.models.gpt import GPT
from regard.models.saving import load, save
from regard.recipes import birthplaces
from regard.recipes.span_infilling import MAX_ANSWER

QUESTION = "Where was Ada Nemo born?"
TINY = [
    "--set", "people=12", "--set", "validation=3", "--set", "model.width=16", "--set", "model.depth=1", "--set",
    "model.heads=2", "--set", "pretraining.steps=4", "--set", "pretraining.batch_size=4", "--device", "cpu",
]  # fmt: skip


def regard(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "births"
    ran = regard("train", "birthplaces", "--folder", str(place), *TINY)
    assert ran.exit_code == 0, ran.output
    assert "unknown people answered" in ran.stdout
    assert "accuracy of answered" not in ran.stdout, "no question was answered"
    return place


@pytest.mark.parametrize(
    ("words", "origin"), [(("x\udcff",), "the question"), ((QUESTION, "--answer", "y\udcff"), "--answer")]
)
def test_invalid_utf8_is_refused_in_one_line(folder: Path, words: tuple[str, ...], origin: str) -> None:
    ran = regard("ask", *words, "--folder", str(folder))
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert f"{origin}, line 1, byte 1: 0xFF is not UTF-8 (invalid start byte); convert it to UTF-8" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_the_example_of_the_help_has_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search("Example: regard (.+)", regard("ask", "--help").stdout)
    assert example is not None
    ran = regard(*shlex.split(example[1]))
    assert (ran.exit_code, ran.stdout) == (0, "Ostton\n")


@pytest.mark.parametrize("option", [("--steps", "3"), ("--data", "nowhere"), ("--device", "tape")])
def test_options_of_learning_are_refused_with_a_question(folder: Path, option: tuple[str, str]) -> None:
    ran = regard("ask", QUESTION, "--folder", str(folder), *option)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert f"{' '.join(option)} needs --learn" in ran.stderr


def test_a_question_of_another_form_is_answered_with_the_supported_form(folder: Path) -> None:
    ran = regard("ask", "Whence came Ada Nemo?", "--folder", str(folder))
    assert ran.exit_code == 1
    assert 'the answer is unknown; the model reads questions such as "Where was Ada Lovelace born?"' in ran.stderr


def test_confidence_is_rounded_down() -> None:
    assert [percent(each) for each in (0.0, 0.5, 0.9, 0.996)] == ["0%", "50%", "90%", "99%"]


def test_a_saved_answer_is_reported_as_json(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "facts.sqlite"
    ran = regard("ask", QUESTION, "--answer", " Bern", "--folder", str(folder), "--store", str(store), "--json")
    assert json.loads(ran.stdout) == {
        "saved": {"question": QUESTION, "answer": "Bern"},
        "store": str(store),
        "reply": {"answer": "Bern", "source": "store", "guess": None, "confidence": 0.0},
    }
    assert f"saved in {store}\n" in ran.stderr


def test_learned_facts_are_reported(folder: Path, tmp_path: Path) -> None:
    there = ("--folder", str(shutil.copytree(folder, tmp_path / "run")))
    model, letters = load(tmp_path / "run" / "model"), load_tokenizer(tmp_path / "run" / "model")
    assert isinstance(model, GPT)
    with torch.no_grad():  # it says one thing whatever it is asked, and a step of training does not change that
        model.norm.weight.zero_()
        model.norm.bias.copy_(10_000 * model.tokens.weight[letters.encode("o")[0]])
    save(model, tmp_path / "run" / "model")
    said = "o" * MAX_ANSWER
    assert regard("ask", QUESTION, "--answer", said, *there).exit_code == 0
    ran = regard("ask", "--learn", "--steps", "1", "--device", "cpu", "--json", *there)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["learned"] == [{"question": QUESTION, "answer": said, "learned": True}]


def test_the_pretrained_model_answers_its_example_and_knows_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    splits = birthplaces.load_data(None, birthplaces.built_in())
    example = regard("ask")
    assert (example.exit_code, example.stdout) == (0, f"{splits.test[0].place}\n")
    assert f"the question is {splits.test[0].text!r}, the example of biographies-gpt" in example.stderr
    assert regard("ask", splits.test[3].text).stdout == f"{splits.test[3].place}\n"
    assert regard("ask", QUESTION).exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert regard("ask", QUESTION, "--answer", "Nowhere").exit_code == 0
    assert regard("ask", QUESTION).stdout == "Nowhere\n"
    assert [file.name for file in tmp_path.iterdir()] == ["facts.sqlite"], "nothing is written into the package"
