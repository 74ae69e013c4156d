"""`regard listen`: what it prints is what the recipe's listener hears, from files of any sample rate and from stdin."""

import io
import json
import struct
import sys
import wave
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from regard.cli import listen, print_errors
from regard.cli.listen import StreamRecognizer
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel
from regard.data.resample import resample
from regard.data.tones import tones
from regard.models.presets import build_from_config
from regard.models.speech import Speech, SpeechConfig
from regard.recipes import speech
from regard.recipes.digit_listener import DIGITS, normalized_log_mel, recognize
from regard.recipes.recipe import RecipeResult, save_result
from regard.recipes.speech import SpeechSettings
from regard.train.plan import TrainingPlan

RATE = 4000
SETTINGS = SpeechSettings(
    model=SpeechConfig(vocab=11, mels=5, width=12, depth=2, heads=3, chunk=3, look_back=2),
    plan=TrainingPlan(steps=1, batch_size=1),
    log_mel=LogMel(sample_rate=RATE, mels=5),
)
app = typer.Typer()
app.command()(print_errors(listen.command))
run = CliRunner()


@pytest.fixture(scope="module")
def model() -> Speech:
    """A model that outputs many random digits."""
    found = build_from_config(SETTINGS.model, seed=1).eval()
    assert isinstance(found, Speech)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        rows = found(normalized_log_mel(tones(1, sample_rate=RATE).sounds[0], SETTINGS.log_mel)[None])
        found.head.bias.sub_(rows.mean((0, 1)))  # so that no token dominates
    return found


@pytest.fixture(scope="module")
def folder(model: Speech, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run")
    save_result("speech", SETTINGS, RecipeResult({}, model, DIGITS), path)
    return str(path)


def raw(sound: Tensor) -> bytes:
    return struct.pack(f"<{len(sound)}h", *(sound * 2**15).round().clamp(-(2**15), 2**15 - 1).int().tolist())


def written(path: Path, data: bytes, rate: int) -> str:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(data)
    return str(path)


def said(model: Speech, data: bytes, rate: int = RATE) -> list[str]:
    """The words of the whole sound."""
    sound = torch.tensor(struct.unpack(f"<{len(data) // 2}h", data[: len(data) // 2 * 2])) / 2**15
    strings = DigitStrings((resample(sound, rate, RATE),), (torch.tensor([0]),), RATE)
    return [str(digit) for digit in recognize(model, strings, SETTINGS.log_mel)[0]]


def run_json(*words: str, stdin: bytes | None = None) -> Any:
    result = run.invoke(app, [*words, "--json"], input=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def dialled() -> bytes:
    return raw(tones(1, (3, 3), sample_rate=RATE).sounds[0])


def test_the_words_of_a_file_are_those_of_one_pass_with_their_times(
    folder: str, model: Speech, dialled: bytes, tmp_path: Path
) -> None:
    file = written(tmp_path / "dialled.wav", dialled, RATE)
    found = run_json(folder, file)
    truth = said(model, dialled)
    assert len(truth) > 2
    assert [word["text"] for word in found["words"]] == truth
    assert (found["folder"], found["file"], found["rate"]) == (folder, file, RATE)
    assert found["seconds"] == pytest.approx(len(dialled) / 2 / RATE)
    assert found["latency"] == SETTINGS.latency == 0.135
    waited = [word["shown"] - word["at"] for word in found["words"]]
    assert 0 < min(waited) < max(waited) <= 0.135 + 1e-9
    assert all(word["shown"] <= found["seconds"] for word in found["words"])
    result = run.invoke(app, [folder, file])
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines == [
        f"{word['text']}  recognised at {word['shown']:.2f} s, delay {word['shown'] - word['at']:.2f} s"
        for word in found["words"]
    ] + [f"{len(truth)} words in {found['seconds']:.2f} s of sound; algorithmic latency 135 ms"]


def test_raw_samples_on_stdin_give_the_words_of_the_file(folder: str, dialled: bytes, tmp_path: Path) -> None:
    file = run_json(folder, written(tmp_path / "dialled.wav", dialled, RATE))
    assert run_json(folder, "-", stdin=dialled) == {**file, "file": "-"}


@pytest.mark.parametrize("rate", [11025, 3000])
def test_a_file_of_another_sample_rate_is_resampled(folder: str, model: Speech, tmp_path: Path, rate: int) -> None:
    data = raw(tones(1, (3, 3), sample_rate=rate).sounds[0])
    found = run_json(folder, written(tmp_path / "other.wav", data, rate))
    assert [word["text"] for word in found["words"]] == said(model, data, rate)
    assert found["rate"] == RATE
    assert found["seconds"] == pytest.approx(len(data) / 2 / rate, abs=1 / RATE)


def test_words_are_timed_by_the_last_sample_they_need(model: Speech) -> None:
    sound = tones(1, (3, 3), sample_rate=RATE).sounds[0][: RATE // 2]
    timed = []
    for piece in (RATE // listen.PIECES_PER_SECOND, 5):  # as the command does, and more finely
        recognizer = StreamRecognizer(model, SETTINGS)
        found = [(word, recognizer.seconds) for word in recognizer.words(iter(sound.split(piece)))]
        assert len(found) > 2
        for word, come in found:
            assert word.shown <= come
            assert word.shown - word.at <= recognizer.latency + 1e-9
            assert come - word.shown < piece / RATE + 1 / RATE
        timed.append([word.shown for word, _ in found])
    assert timed[0] == pytest.approx(timed[1])


def test_words_are_printed_while_the_sound_is_streamed(
    folder: str, dialled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Live(io.BytesIO):
        """Bytes that come a few at a time, also halves of samples, and are stopped by the user."""

        def read1(self, size: int | None = -1) -> bytes:
            heard.append(output.getvalue().count("\n"))
            if found := super().read1(min(size or 7, 7)):
                return found
            raise KeyboardInterrupt

    heard: list[int] = []
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Live(dialled)))
    monkeypatch.setattr(sys, "stdout", output)
    listen.command(Path(folder), "-")
    lines = output.getvalue().splitlines()
    assert heard == sorted(heard)
    assert len(set(heard)) > 3  # lines that stood there while the sound went on
    assert lines[-1].endswith("algorithmic latency 135 ms")
    assert [line[0] for line in lines[:-1]] == [word["text"] for word in told_again(folder, dialled, monkeypatch)]


def told_again(folder: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.undo()
    return run_json(folder, "-", stdin=data)["words"]


def test_an_empty_sound_has_no_words(folder: str) -> None:
    assert (
        run.invoke(app, [folder, "-"], input=b"").stdout == "0 words in 0.00 s of sound; algorithmic latency 135 ms\n"
    )
    assert run_json(folder, "-", stdin=b"\0\0" * 50)["words"] == []


def test_half_a_sample_at_the_end_is_reported(folder: str) -> None:
    result = run.invoke(app, [folder, "-"], input=b"\0\0\0")
    assert result.exit_code == 0
    assert result.stderr == "the input ended inside a 16-bit sample; are these raw 16-bit samples?\n"


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["nothing.wav"], None, "nothing.wav cannot be read: No such file or directory"),
        (["-"], b"RIFF\0\0\0\0WAVE", "stdin is a WAV file, not raw samples; pass the name of the file instead of -"),
    ],
)
def test_invalid_input_is_an_error_of_one_line(
    folder: str, words: list[str], stdin: bytes | None, message: str
) -> None:
    result = run.invoke(app, [folder, *words], input=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"regard: {message}")
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_speech_run_is_refused(tmp_path: Path) -> None:
    result = run.invoke(app, [str(tmp_path), "-"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path} has no finished run" in result.stderr
    from regard.models.gpt import GPTConfig
    from regard.recipes import birthplaces

    settings = birthplaces.built_in()
    small = GPTConfig(vocab=7, context=5, width=4, depth=1, heads=1)
    save_result("birthplaces", replace(settings, model=small), RecipeResult({}, build_from_config(small)), tmp_path)
    result = run.invoke(app, [str(tmp_path), "-"])
    assert result.exit_code == 2
    assert "has a run of the recipe birthplaces; `regard listen` needs a run of speech" in result.stderr


def test_the_pretrained_model_recognises_its_example() -> None:
    digits = speech.load_data(None, replace(speech.built_in(), test=1)).test.labels[0].tolist()
    result = run.invoke(app, ["--json"])
    assert [int(word["text"]) for word in json.loads(result.stdout)["words"]] == digits
    assert result.stderr.startswith("the sound is ")
    assert "example.wav, the example of tone-digits" in result.stderr
