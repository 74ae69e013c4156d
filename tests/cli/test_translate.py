"""`regard translate`: what it prints is what the library writes about each line, with a run that a recipe left."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from regard.cli import print_errors, translate
from regard.data.number_words import english, german
from regard.data.sentence_pairs import SentencePairs
from regard.models.beam_search import BeamSearch
from regard.models.presets import build_from_config
from regard.models.sampling import Greedy, Strategy
from regard.models.transformer import Transformer, TransformerConfig
from regard.recipes.moses_tokenizer import moses_detokenize
from regard.recipes.recipe import RecipeResult, load_finished_run, save_result
from regard.recipes.translation import (
    LENGTH_PENALTY,
    TranslationSettings,
    built_in,
    generate_translations,
    train_tokenizer,
)

LINES = ["One hundred three.", "", "One hundred ten."]

app = typer.Typer()
app.command()(print_errors(translate.command))
run = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that knows numbers with a full stop, in lower case, and says something else about each."""
    some = range(100, 131)
    pairs = train_tokenizer(
        SentencePairs(tuple(f"{english(n)} ." for n in some), tuple(f"{german(n)} ." for n in some)), 90
    )
    config = TransformerConfig(vocab=pairs.vocab, context=19, width=12, depth=1, heads=3, ff_width=20)
    model = build_from_config(config, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    settings = TranslationSettings(
        model=config, plan=replace(built_in().plan, batch_size=6), bpe_vocab=90, num_beams=3, preprocessing="lc.tok"
    )
    path = tmp_path_factory.mktemp("run")
    save_result(
        "translation", settings, RecipeResult({"test BLEU": 1.0, LENGTH_PENALTY: 0.7}, model.eval(), pairs), path
    )
    return str(path)


def truth(folder: str, strategy: Strategy) -> list[Any]:
    _, _, model, pairs = load_finished_run(Path(folder))
    assert isinstance(model, Transformer)
    return generate_translations(model, pairs, ["one hundred three .", "one hundred ten ."], strategy)


def written(*words: str, stdin: str | None = None) -> str:
    result = run.invoke(app, list(words), input=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ([], BeamSearch(3, 0.7)),  # as in the run
        (["--num-beams", "1"], Greedy()),
        (["--num-beams", "2"], BeamSearch(2, 0.7)),
        (["--length-penalty", "2"], BeamSearch(3, 2.0)),
    ],
)
def test_each_line_is_translated_as_the_library_does(folder: str, words: list[str], strategy: Strategy) -> None:
    pairs = load_finished_run(Path(folder))[3]
    first, last = (moses_detokenize(pairs.decode(each.body)) for each in truth(folder, strategy))
    assert written(folder, "-", *words, stdin="\n".join(LINES) + "\n") == f"{first}\n\n{last}\n"


def test_argument_stdin_and_file_give_the_same_translation(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text(LINES[0] + "\n", encoding="utf-8")
    said = written(folder, LINES[0], "--num-beams", "1")
    assert (
        said
        == written(folder, "-", "--num-beams", "1", stdin=LINES[0])
        == written(folder, "--num-beams", "1", "--file", str(file))
    )
    assert said.count("\n") == 1


def test_json_has_tokens_and_log_probabilities(folder: str) -> None:
    told = json.loads(written(folder, "-", "--json", stdin="\n".join(LINES)))
    assert told["folder"] == folder
    assert told["strategy"] == {"name": "beam", "num_beams": 3, "length_penalty": 0.7, "early_stopping": False}
    first, empty, last = told["translations"]
    for each, line, text in zip((first, last), (LINES[0], LINES[2]), truth(folder, BeamSearch(3, 0.7)), strict=True):
        assert (each["source"], each["tokens"], each["finish_reason"]) == (line, list(text.tokens), text.finish_reason)
        assert each["log_probability"] == pytest.approx(text.log_probability, abs=1e-4)
    assert empty == {
        "source": "",
        "text": "",
        "tokens": [],
        "log_probability": None,
        "finish_reason": None,
        "unknown": "",
    }
    assert [first["unknown"], last["unknown"]] == ["", ""]
    assert json.loads(written(folder, "-", "--json", "--num-beams", "1", stdin=LINES[0]))["strategy"] == {
        "name": "greedy"
    }


def test_unknown_characters_are_reported_once_for_each_line(folder: str) -> None:
    text = "One hundred three.\n\nOne-hundred 日本日-ten.\nÇa\n"
    result = run.invoke(app, [folder, "-", "--json"], input=text)
    assert result.exit_code == 0
    assert [each["unknown"] for each in json.loads(result.stdout)["translations"]] == ["", "", "-日本", "ç"]
    assert result.stderr == (
        "stdin, line 3: '-日本' is not in the vocabulary; the translation may be wrong\n"
        "stdin, line 4: 'ç' is not in the vocabulary; the translation may be wrong\n"
    )
    plainly = run.invoke(app, [folder, "one-hundred"])
    assert plainly.stdout.count("\n") == 1
    assert plainly.stderr == "the text, line 1: '-' is not in the vocabulary; the translation may be wrong\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give one of: a sentence, - for lines from stdin, or --file"),
        (["one", "--file", "lines.txt"], "give one of: a sentence"),
        (["--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        ([" "], "there is nothing to translate: every line is empty"),
        (["one", "--num-beams", "0"], "num_beams is 0, but must be at least 1"),
        (["one " * 30], "has 30 tokens, but the model reads from 1 to 19"),
    ],
)
def test_errors_are_one_line(folder: str, words: list[str], complaint: str) -> None:
    result = run.invoke(app, [folder, *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert result.stderr.startswith("regard: ")
    assert result.stderr.count("\n") == 1


def test_a_line_that_is_too_long_is_named_before_any_is_translated(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "regard.models.transformer.Transformer.generate", lambda *_, **__: pytest.fail("something was translated")
    )
    text = "\n".join([LINES[0], "", "one " * 30, LINES[2], "ten " * 31])
    file = tmp_path / "lines.txt"
    file.write_text(text, encoding="utf-8")
    for words, origin in ([["-"], "stdin"], [["--file", str(file)], str(file)]):
        result = run.invoke(app, [folder, *words], input=text)
        assert (result.exit_code, result.stdout) == (2, "")
        assert (
            f"{origin}, line 3: '{'one ' * 10}' has 30 tokens, but the model reads from 1 to 19; split long "
            f"sentences and leave empty ones out; the same holds for {origin}, line 5\n"
        ) in result.stderr


def test_invalid_utf8_is_refused_from_every_source(folder: str, tmp_path: Path) -> None:
    data = "one hundred\nzwölf".encode("latin-1")
    file = tmp_path / "lines.txt"
    file.write_bytes(data)
    given = data.decode("utf-8", errors="surrogateescape")  # as a system hands over what it cannot read
    for words, origin in ([["-"], "stdin"], [["--file", str(file)], str(file)], [[given], "the text"]):
        result = run.invoke(app, [folder, *words], input=data)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{origin}, line 2, byte 14: 0xF6 is not UTF-8" in result.stderr


def test_stdin_is_utf8_whatever_the_system_thinks(folder: str) -> None:
    alone = {"PATH": "", "PYTHONIOENCODING": "ascii:surrogateescape", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", "translate", folder, "-", "--num-beams", "1"]
    refused = subprocess.run(command, input=b"one\n\xff\n", env=alone, capture_output=True)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"stdin, line 2, byte 4: 0xFF is not UTF-8" in refused.stderr


def test_a_folder_without_a_run_of_this_recipe_is_refused(folder: str, tmp_path: Path) -> None:
    result = run.invoke(app, [str(tmp_path), "one"])
    assert result.exit_code == 2
    assert "has no finished run" in result.stderr


def test_a_run_of_another_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.recipes import recipe

    other = recipe.Recipe("vision", "", "", "", "", recipe)  # type: ignore[arg-type]
    monkeypatch.setattr(recipe, "load_finished_run", lambda folder: (other, None, None, None))
    result = run.invoke(app, [str(tmp_path), "one"])
    assert result.exit_code == 2
    assert "has a run of vision, which does not translate" in result.stderr


def test_the_pretrained_model_translates_its_example_and_any_number() -> None:
    example = run.invoke(app, [])
    assert (example.exit_code, example.stdout) == (0, "sieben tausend vier hundert drei und zwanzig\n")
    assert example.stderr == "the text is 'seven thousand four hundred twenty three', the example of number-words\n"
    found = run.invoke(app, ["number-words", "three hundred forty one"])
    assert (found.stdout, found.stderr) == ("drei hundert ein und vierzig\n", "")
