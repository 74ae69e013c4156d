"""`regard generate`: what it prints is what the library writes, from folders and from presets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Library, models, pre_tokenizers
from typer.testing import CliRunner

from regard.cli import app
from regard.core.cache import DynamicCache
from regard.data.characters import CharacterTokenizer
from regard.data.tokenizers import ByteTokenizer, load_tokenizer
from regard.models.beam_search import BeamSearch
from regard.models.caches import Caches
from regard.models.generation import generate
from regard.models.generation_types import STRATEGIES
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build, build_from_config
from regard.models.sampling import Greedy, Sample, Strategy
from regard.models.saving import save
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.int8 import quantize_int8
from regard.recipes.recipe import RecipeResult, get_recipe, save_result

run = CliRunner()
WORDS = ["the", "cat", "sat", "on", "a", "mat", ".", "end", "?"]


def lively(vocab: int) -> GPT:
    model = build_from_config(
        GPTConfig(vocab=vocab, context=31, width=16, depth=1, heads=2, ff_width=24, tied=False), seed=3
    )
    assert isinstance(model, GPT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> GPT:
    return lively(256)


@pytest.fixture(scope="module")
def folder(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows bytes."""
    path = tmp_path_factory.mktemp("bytes")
    save(model, path)
    return str(path)


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a tokenizer of nine words beside it."""
    path = tmp_path_factory.mktemp("words")
    save(lively(len(WORDS)), path)
    write_words(path / "tokenizer.json")
    return str(path)


def write_words(path: Path) -> None:
    library = Library(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(path))


def run_json(*words: str, stdin: str | None = None) -> Any:
    result = run.invoke(app, ["generate", *words, "--json"], input=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def written(*words: str, stdin: str | None = None) -> str:
    result = run.invoke(app, ["generate", *words], input=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ([], Greedy()),
        (["--no-cache"], Greedy()),
        (["--temperature", "1"], Sample()),
        (
            ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--seed", "7"],
            Sample(1.5, 40, 0.9, 7),
        ),
        (["--num-beams", "2", "--length-penalty", "0.6"], BeamSearch(2, 0.6)),
        (["--num-beams", "2", "--early-stopping", "never"], BeamSearch(2, 0.0, "never")),
        (["--num-beams", "2", "--early-stopping", "true"], BeamSearch(2, 0.0, True)),
    ],
)
def test_it_generates_what_the_library_generates(folder: str, model: GPT, words: list[str], strategy: Strategy) -> None:
    (truth,) = generate(model, [list(b"Where")], strategy=strategy, max_new_tokens=11)
    assert written(folder, "Where", "--max-new-tokens", "11", *words) == ByteTokenizer().decode(truth.tokens) + "\n"
    (text,) = run_json(folder, "Where", "--max-new-tokens", "11", *words)["texts"]
    assert text["tokens"] == list(truth.tokens)
    assert text["log_probabilities"] == pytest.approx(truth.log_probabilities, abs=2e-5)
    assert (text["prompt"], text["finish_reason"], text["stop"]) == (list(b"Where"), "length", [])
    assert text["text"] == ByteTokenizer().decode(truth.tokens)


def test_only_no_cache_makes_no_cache(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(GPT, "cache", lambda self, capacity: asked.append(capacity) or Caches(DynamicCache, 1))
    written(folder, "Where", "--max-new-tokens", "4", "--no-cache")
    assert asked == []
    written(folder, "Where", "--max-new-tokens", "4")
    assert asked == [9]


def test_json_has_the_options(folder: str) -> None:
    asked = run_json(folder, "Hi", "--top-p", "0.5", "--max-new-tokens", "3")
    assert (asked["model"], asked["prompt"], asked["max_new_tokens"]) == (folder, "Hi", 3)
    chosen = {"name": "sample", "temperature": 1.0, "top_k": None, "top_p": 0.5, "seed": 0, "stream": 0}
    assert asked["strategy"] == chosen
    assert run_json(folder, "Hi", "--max-new-tokens", "1")["strategy"] == {"name": "greedy"}


def test_several_samples_are_those_of_a_batch(folder: str, model: GPT) -> None:
    words = ["--temperature", "1", "--seed", "5", "--num-return-sequences", "3", "--max-new-tokens", "6"]
    truth = generate(model, [list(b"ab")] * 3, strategy=Sample(seed=5), max_new_tokens=6)
    assert [text["tokens"] for text in run_json(folder, "ab", *words)["texts"]] == [list(text.tokens) for text in truth]
    assert written(folder, "ab", *words) == "".join(ByteTokenizer().decode(text.tokens) + "\n" for text in truth)


def test_the_prompt_can_come_from_stdin(folder: str) -> None:
    assert written(folder, "-", "--max-new-tokens", "5", stdin="Wo?\n") == written(
        folder, "Wo?", "--max-new-tokens", "5"
    )
    assert run_json(folder, "-", stdin="two\nlines\n\n")["prompt"] == "two\nlines\n"


def test_a_stop_ends_the_text_and_is_not_shown(folder: str, model: GPT) -> None:
    (whole,) = generate(model, [list(b"Where")], strategy=Sample(temperature=0.3), max_new_tokens=12)
    plain = [number for number, byte in enumerate(whole.tokens) if byte < 128 and byte not in whole.tokens[:number]]
    for size in (1, 2):
        stop, before = next(
            (whole.tokens[at : at + size], whole.tokens[:at])
            for at in plain
            if at and all(byte < 128 for byte in whole.tokens[at : at + size])
        )
        words = ["Where", "--temperature", "0.3", "--stop", bytes(stop).decode()]
        assert written(folder, *words, "--stop", "never") == ByteTokenizer().decode(before) + "\n"
        (text,) = run_json(folder, *words)["texts"]
        assert (text["finish_reason"], text["stop"], text["text"]) == (
            "stop",
            list(stop),
            ByteTokenizer().decode(before),
        )


def test_the_eos_token_of_a_folder_ends_the_text(model: GPT, tmp_path: Path) -> None:
    (whole,) = generate(model, [list(b"Where")], strategy=Sample(), max_new_tokens=9)
    end = whole.tokens[4]
    before = whole.tokens.index(end)
    save(model, tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    for named in (end, [end, 999], None):
        (tmp_path / "config.json").write_text(json.dumps({**about, "eos_token_id": named}))
        (text,) = run_json(str(tmp_path), "Where", "--temperature", "1", "--max-new-tokens", "9")["texts"]
        expected = whole.tokens if named is None else whole.tokens[: before + 1]
        assert tuple(text["tokens"]) == expected
        assert text["stop"] == ([] if named is None else [end])


def test_generation_config_overrides_the_end_token(model: GPT, tmp_path: Path) -> None:
    (whole,) = generate(model, [list(b"Where")], strategy=Sample(), max_new_tokens=9)
    early, *_, late = dict.fromkeys(whole.tokens)  # in order of their first places
    save(model, tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    for ours, theirs, end in ((None, late, late), (early, late, late), (late, [early], early), (late, None, late)):
        (tmp_path / "config.json").write_text(json.dumps({**about, "eos_token_id": ours}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": theirs}))
        (text,) = run_json(str(tmp_path), "Where", "--temperature", "1", "--max-new-tokens", "9")["texts"]
        assert (text["stop"], len(text["tokens"])) == ([end], whole.tokens.index(end) + 1)
    (tmp_path / "generation_config.json").write_text("{")
    result = run.invoke(app, ["generate", str(tmp_path), "Where"])
    assert result.exit_code == 2
    assert "generation_config.json, line 1, column 2 is not JSON" in result.stderr


def test_an_encoder_decoder_answers_the_prompt(tmp_path: Path) -> None:
    translator = build_from_config(
        TransformerConfig(vocab=259, context=31, width=16, depth=1, heads=2, ff_width=24), seed=3
    ).eval()
    assert isinstance(translator, Transformer)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.mul_(6.0)
    save(translator, tmp_path)
    result = run.invoke(app, ["generate", str(tmp_path), "Where"])
    assert result.exit_code == 2
    assert "is a Transformer, which needs a start token" in result.stderr
    source = torch.tensor([list(b"Where")])
    (whole,) = translator.generate(source, start_token=257, strategy=Sample(seed=5), max_new_tokens=9)
    end = whole.tokens[4]
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**about, "decoder_start_token_id": 257, "eos_token_id": end, "pad_token_id": 258})
    )
    words = [str(tmp_path), "Where", "--temperature", "1", "--seed", "5", "--max-new-tokens", "9"]
    (text,) = run_json(*words)["texts"]
    before = whole.tokens[: whole.tokens.index(end)]
    assert (text["prompt"], text["tokens"], text["stop"]) == ([257], [*before, end], [end])
    assert written(*words) == ByteTokenizer().decode(before) + "\n"


def test_the_tokenizer_of_the_folder_is_used(wordy: str) -> None:
    asked = run_json(wordy, "the cat sat", "--max-new-tokens", "5")
    (text,) = asked["texts"]
    assert text["prompt"] == [0, 1, 2]
    assert text["text"] == " ".join(WORDS[token] for token in text["tokens"])
    assert written(wordy, "the cat sat", "--max-new-tokens", "5") == text["text"] + "\n"


def test_a_tokenizer_can_be_named(tmp_path: Path, folder: str) -> None:
    write_words(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        (text,) = run_json(folder, "a mat", "--tokenizer", str(path), "--max-new-tokens", "1")["texts"]
        assert text["prompt"] == [4, 5]
    assert load_tokenizer(tmp_path).vocab == 9


def test_a_preset_says_that_its_weights_are_random() -> None:
    result = run.invoke(app, ["generate", "birthplace-rotary", "Where", "--max-new-tokens", "4"])
    assert result.exit_code == 0
    first, text = result.stdout.split("\n", 1)
    assert first == "birthplace-rotary is a preset without trained weights, so the text is random:"
    model = build("birthplace-rotary").eval()
    assert isinstance(model, GPT)
    assert text == ByteTokenizer().decode(generate(model, [list(b"Where")], max_new_tokens=4)[0].tokens) + "\n"
    assert run_json("birthplace-rotary", "Where", "--max-new-tokens", "4")["weights"] == "random"


def test_a_pretrained_model_continues_its_example() -> None:
    result = run.invoke(app, ["generate", "--max-new-tokens", "9"])
    assert (result.exit_code, result.stderr) == (0, "the prompt is 'The for statement', the example of text-gpt\n")
    assert (
        run.invoke(app, ["generate", "text-gpt", "The for statement", "--max-new-tokens", "9"]).output == result.stdout
    )
    found = run_json("induction-gpt", "q8Zw#kT q8Z", "--max-new-tokens", "4")
    assert (found["texts"][0]["text"], found["weights"]) == ("w#kT", "trained")


def test_tokens_are_printed_one_by_one(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("regard.cli.generate.write_text", said.append)
    assert run.invoke(app, ["generate", folder, "Where", "--max-new-tokens", "11"]).exit_code == 0
    shown = list(said)
    assert len(shown) == 12, "eleven tokens and the end of the line"
    # a stop of three tokens could have begun, so two are always held back; of a longer one, more
    for stop in ("xyz", "a long stop"):
        said.clear()
        assert run.invoke(app, ["generate", folder, "Where", "--max-new-tokens", "11", "--stop", stop]).exit_code == 0
        assert "".join(said) == "".join(shown)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["FOLDER"], "there is no prompt; give one after the model, or - to read it from stdin"),
        (["FOLDER", ""], "the prompt is empty; it needs at least one token"),
        (["FOLDER", "x" * 32], "tokens[0] has 32 tokens, but the model can read 31; keep the last ones"),
        (["FOLDER", "x", "--max-new-tokens", "0"], "max_new_tokens is 0, but must be at least 1"),
        (
            ["FOLDER", "x", "--num-return-sequences", "3"],
            "--num-return-sequences 3 is for sampling; set --temperature, --top-k or --top-p too",
        ),
        (
            ["FOLDER", "x", "--top-k", "2", "--num-beams", "3"],
            "top_k=2 is for strategy='sample', but num_beams=3 was chosen; leave it out",
        ),
        (["FOLDER", "x", "--num-beams", "2", "--length-penalty", "nan"], "length_penalty is nan"),
        (["FOLDER", "x", "--num-beams", "0"], "num_beams is 0, but must be at least 1"),
        (
            ["FOLDER", "x", "--temperature", "1", "--num-return-sequences", "0"],
            "--num-return-sequences is 0, but must be at least 1",
        ),
        (["FOLDER", "x", "--top-p", "1.5"], "above 0 and at most 1, not 1.5"),
        (["FOLDER", "x", "--temperature", "0"], "leave it out (greedy decoding)"),
        (["FOLDER", "x", "--top-k", "257"], "but the vocabulary has only 256 tokens"),
        (["FOLDER", "x", "--stop", ""], "an empty sequence, which would end every text at once"),
        (["FOLDER", "x", "--tokenizer", "absent.json"], "absent.json does not exist; pass a tokenizer.json"),
        (["gtp2", "x"], "there is no folder 'gtp2', and no model of this name; did you mean 'gpt2'?"),
        (["digit-vit", "x"], "there is no folder 'digit-vit', and no model of this name; did you mean 'digits-vit'?"),
        (["./absent", "x"], "there is no folder './absent'; a model is a folder with config.json"),
        (
            ["runs/no/model", "x"],
            "there is no folder 'runs/no/model'; a model is a folder with config.json",
        ),
        (
            ["number-words", "x"],
            "number-words has a run of translation, whose model does not continue a text;",
        ),
        (["gpt2"], "there is no prompt; give one after the model, or - to read it from stdin"),
        (["hello world"], "is a folder with config.json and its weights; if this is the input, give the model before"),
        ([__file__], "test_generate_command.py is a file, not a model; give the model before its input"),
        (
            ["transformer-tiny", "x"],
            "transformer-tiny is a Transformer, which needs a start token, but it has no config.json with a "
            "decoder_start_token_id; in Python use model.generate(source, start_token=...)",
        ),
        (["vit-b/16", "x"], "vit-b/16 is a ViT, which does not generate text; a GPT does: "),
        (["bert-base", "x"], "bert-base is a BERT, which does not generate text; a GPT does: "),
        (["vit-b/17", "x"], "there is no folder 'vit-b/17', and no model of this name; did you mean 'vit-b/16' or"),
    ],
)
def test_errors_are_one_line(folder: str, words: list[str], error: str) -> None:
    result = run.invoke(app, ["generate", *(folder if word == "FOLDER" else word for word in words)])
    assert result.exit_code == 2
    assert error in result.stderr
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("words", [["x\udcff"], ["-"], ["x", "--stop", "x\udcff"]])
def test_invalid_utf8_is_refused(folder: str, words: list[str]) -> None:
    result = run.invoke(app, ["generate", folder, *words], input=b"x\xff")
    assert result.exit_code == 2
    origin = {"-": "stdin", "x": "--stop"}.get(words[0], "the prompt")
    assert f"{origin}, line 1, byte 1: 0xFF is not UTF-8 (invalid start byte); convert it to UTF-8" in result.stderr
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize(("words", "origin"), [(["Ward éö?é"], "the prompt"), (["Ada", "--stop", "öé"], "--stop")])
def test_an_error_lists_all_unknown_characters(words: list[str], origin: str, tmp_path: Path) -> None:
    letters = CharacterTokenizer.from_texts("Where was Ada born?")
    save_result(
        "language",
        get_recipe("language").settings(real=False),
        RecipeResult({}, lively(letters.vocab), letters),
        tmp_path,
    )
    result = run.invoke(app, ["generate", str(tmp_path), *words])
    assert result.exit_code == 2
    unknown = "éö" if origin == "the prompt" else "öé"
    assert f"{origin} has {unknown!r}, which is not in the model's vocabulary; leave it out" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_small_vocabulary_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save(lively(9), tmp_path)
    result = run.invoke(app, ["generate", str(tmp_path), "x"])
    assert result.exit_code == 2
    assert "has no tokenizer.json, and its vocabulary of 9 is too small for bytes, which need 256" in result.stderr
    assert "give a tokenizer with --tokenizer" in result.stderr


@pytest.mark.parametrize("name", ["language", "birthplaces"])
def test_a_finished_run_generates_with_its_model(name: str, tmp_path: Path) -> None:
    letters = CharacterTokenizer.from_texts("Where was Ada born?")
    outcome = RecipeResult({}, lively(letters.vocab), letters)
    save_result(name, get_recipe(name).settings(real=False), outcome, tmp_path)
    text = written(str(tmp_path), "Where", "--max-new-tokens", "7")
    assert text == written(str(tmp_path / "model"), "Where", "--max-new-tokens", "7")
    assert set(text.strip("\n")) <= set(letters.alphabet)
    assert run_json(str(tmp_path), "Where")["model"] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("vision", "`regard eval RUN` evaluates it"),
        ("translation", "`regard translate RUN TEXT` translates"),
        ("speech", "`regard listen RUN FILE` transcribes speech"),
    ],
)
def test_a_run_that_does_not_generate_is_refused(name: str, instead: str, tmp_path: Path) -> None:
    settings = get_recipe(name).settings(real=False)
    save_result(name, settings, RecipeResult({}, build_from_config(settings.model)), tmp_path)
    result = run.invoke(app, ["generate", str(tmp_path), "Where"])
    assert (result.exit_code, result.stdout) == (2, "")
    does = instead.replace("RUN", str(tmp_path))
    assert result.stderr == (f"regard: {tmp_path} has a run of {name}, whose model does not continue a text; {does}\n")


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"recipe": "language"}')
    result = run.invoke(app, ["generate", str(tmp_path), "Where"])
    assert result.exit_code == 2
    assert "has a run of language that is not finished; `regard train language --resume --folder" in result.stderr


def test_the_whole_help_names_the_settings_of_every_strategy() -> None:
    result = run.invoke(app, ["generate", "--help-all"])
    for _, names in STRATEGIES.values():
        for name in names:
            assert f"--{name.replace('_', '-')} " in result.stdout


def test_it_runs_as_a_command_and_pipes(folder: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard", "generate", folder, "-", "--max-new-tokens", "3"],
        cwd=root,
        input="Grüße",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == written(folder, "Grüße", "--max-new-tokens", "3")


def test_int8_weights_are_those_of_the_library(folder: str, model: GPT) -> None:
    (truth,) = generate(quantize_int8(model), [list(b"Where")], max_new_tokens=11)
    (text,) = run_json(folder, "Where", "--max-new-tokens", "11", "--int8")["texts"]
    assert text["log_probabilities"] == pytest.approx(truth.log_probabilities, abs=1e-6)
    assert text["log_probabilities"] != list(generate(model, [list(b"Where")], max_new_tokens=11)[0].log_probabilities)
