"""The speech recipe: training strings, evaluation and whole runs."""

import math
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy
import pytest
import torch

from regard.base.errors import ConfigError, DataError
from regard.data.log_mel import LogMel
from regard.data.spoken_digits import read_spoken_digits
from regard.data.tones import tones
from regard.models.speech import Speech
from regard.recipes import speech
from regard.recipes.audio_augment import AudioAugmentation
from regard.recipes.digit_listener import DigitListener
from regard.recipes.error_rate import token_error_rate
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.recipes.speech import DigitRecognitionTask, DigitStringSampler, SpeechSettings
from regard.train.averaging import ExponentialAverage
from regard.train.loop import Progress
from regard.train.optimizers import AdamW
from regard.train.plan import TrainingPlan
from tests.recipes.listeners import LOG_MEL, MODEL, RATE, random_listener

TINY = SpeechSettings(
    model=MODEL, plan=TrainingPlan(steps=6, batch_size=6, optimizer=AdamW(lr=1e-2), evaluate_every=4, save_every=2),
    log_mel=LOG_MEL,
    augmentation=AudioAugmentation(speed=0.1, gain_db=6.0, snr_db=(5.0, 30.0), masks=2, time_mask=5, mel_mask=2),
    train_digits=(1, 3), max_seconds=1.1, pause=(0.02, 0.1), eval_digits=(2, 4), validation=7, test=9, eval_strings=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of two speakers who whistle: digit d is a tone of its own, and no two takes are the same."""
    takes = [(digit, speaker, take) for speaker in range(2) for take in range(3) for digit in range(10)]
    sounds = []
    for number, (digit, speaker, _) in enumerate(takes):
        times = numpy.arange(700 + 13 * number) / RATE
        sounds.append((8000 * numpy.sin(2 * math.pi * (200 + 100 * digit + 30 * speaker) * times)).astype(numpy.int16))
    folder = tmp_path_factory.mktemp("recorded")
    numpy.savez(
        folder / "whistles.npz",
        samples=numpy.concatenate(sounds), offsets=numpy.cumsum([0, *map(len, sounds)]),
        digit=[digit for digit, _, _ in takes], speaker=[speaker for _, speaker, _ in takes],
        speakers=["ann", "bob"], sample_rate=RATE,
    )  # fmt: skip
    return folder


def test_the_recipe_has_its_expected_results():
    found = get_recipe("speech")
    assert "98.5 %" in found.expected
    assert found.time
    assert found.memory
    assert found.settings(real=True).plan.compile
    assert not found.settings(real=False).plan.compile


@pytest.mark.parametrize("settings", [speech.built_in(), speech.real()], ids=["built-in", "real"])
def test_the_algorithmic_latency_is_at_most_a_quarter_of_a_second(settings: SpeechSettings):
    assert settings.latency <= 0.25
    frames = 4 * settings.model.chunk * (1 + settings.model.look_ahead)
    assert settings.latency == pytest.approx((frames - 1) * 0.010 + 0.025)


@pytest.mark.parametrize("real", [False, True], ids=["tones", "recordings"])
def test_the_shards_of_a_batch_concatenate_to_the_batch_and_steps_differ(real: bool, recorded: Path):
    task = DigitRecognitionTask(speech.load_data(recorded if real else None, TINY), TINY)
    whole, again = task.batch(5, 0, 1), task.batch(5, 0, 1)
    shares = [task.batch(5, part, 3) for part in range(3)]

    def read(batch: speech.SpeechBatch, name: str) -> torch.Tensor:
        return task.sounds(batch) if name == "sounds" else getattr(batch, name)

    for name in ("sounds", "samples", "targets", "lengths", "draws", "seeds"):
        together = torch.cat([read(share, name) for share in shares])
        assert torch.equal(together, read(whole, name)), name
        assert torch.equal(read(again, name), read(whole, name)), name
        assert not torch.equal(read(task.batch(6, 0, 1), name), read(whole, name)), name
    model = random_listener()
    losses = [task.loss(model, share) for share in shares]
    one = task.loss(model, whole)
    assert sum(int(loss.count) for loss in losses) == int(one.count) == int(whole.lengths.sum())
    torch.testing.assert_close(torch.stack([loss.total for loss in losses]).sum(), one.total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("real", [False, True], ids=["tones", "recordings"])
def test_a_batch_has_its_strings_and_the_loss_works_in_half_precision(real: bool, recorded: Path):
    task = DigitRecognitionTask(speech.load_data(recorded if real else None, TINY), TINY)
    batch = task.batch(0, 0, 1)
    sound, digits = task.splits.train(4)
    assert torch.equal(task.sounds(batch)[4, : len(sound)], sound)
    assert not task.sounds(batch)[4, len(sound) :].any()
    assert batch.targets[4, : len(digits)].tolist() == [each + 1 for each in digits.tolist()]
    model = random_listener()
    exact = task.loss(model, batch).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = task.loss(model, batch).total
        metrics = task.evaluate(model)
    torch.testing.assert_close(lower, exact, rtol=0.03, atol=0)
    assert not torch.equal(lower, exact)
    assert metrics == task.evaluate(model)  # which is always in full precision


def test_the_splits_share_no_recording(recorded: Path):
    found = speech.load_data(recorded, TINY)
    assert isinstance(found.train, DigitStringSampler)
    assert found.validation_single is not None
    assert found.test_single is not None
    parts = [found.train.recordings.sounds, found.validation_single.sounds, found.test_single.sounds]
    sizes = [{len(sound) for sound in part} for part in parts]  # no two recordings are equally long
    assert [len(part) for part in sizes] == [44, 7, 9]
    assert len(set.union(*sizes)) == 60
    assert (len(found.validation), len(found.test)) == (5, 5)
    told = [[label.item()] for label in torch.cat(found.test_single.labels)]
    assert token_error_rate(told, found.test_single) == 0


def test_training_strings_have_one_speaker_and_leave_out_digits_that_do_not_fit(recorded: Path):
    recordings = read_spoken_digits(recorded)
    settings = replace(TINY, train_digits=(2, 5), max_seconds=1.1, pause=(0.03, 0.05))
    join = DigitStringSampler(recordings, settings)
    seen, counts = set(), set()
    by_size = {len(sound): number for number, sound in enumerate(recordings.sounds)}
    for number in range(60):
        sound, digits = join(number)
        again = join(number)
        assert torch.equal(sound, again[0])
        assert len(sound) <= settings.max_samples
        counts.add(len(digits))
        loud = (
            torch.nn.functional.max_pool1d(sound.abs()[None], 60, 1, 30)[0] > 0.01
        )  # a whistle crosses 0 now and then
        edges = torch.cat([torch.zeros(1), loud.float(), torch.zeros(1)]).diff().nonzero().flatten().tolist()
        spans = [end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        records = [min(by_size, key=lambda size, span=span: abs(size + 58 - span)) for span in spans]
        assert len(records) == len(digits)
        names = {recordings.speakers[by_size[size]] for size in records}
        assert len(names) == 1
        seen |= names
        assert [int(recordings.labels[by_size[size]]) for size in records] == digits.tolist()
    assert seen == {"ann", "bob"}
    assert counts == {2, 3, 4}  # five do not fit into 1.1 seconds


def test_pauses_are_left_out_with_their_share_and_have_their_length(recorded: Path):
    settings = replace(TINY, train_digits=(1, 1), pause=(0.05, 0.15), no_pause_share=0.3)
    join = DigitStringSampler(read_spoken_digits(recorded), settings)
    before = []
    for number in range(200):
        loud = join(number)[0].abs() > 0.01
        before.append(int(loud.nonzero()[0]) / RATE)
    at_once = [each for each in before if each < 0.01]
    later = [each for each in before if each >= 0.01]
    assert 0.2 < len(at_once) / 200 < 0.4
    assert 0.05 <= min(later) < 0.06
    assert 0.14 < max(later) <= 0.152


def test_strings_with_long_silences_leave_the_others_unchanged(recorded: Path):
    settings = replace(TINY, max_seconds=2.3)
    plain, mixed = (
        DigitStringSampler(read_spoken_digits(recorded), replace(settings, silence_share=share))
        for share in (0.0, 0.25)
    )
    longer, silent = [], []
    for number in range(200):
        (before, said), (after, digits) = plain(number), mixed(number)
        assert torch.equal(said, digits)
        if torch.equal(before, after):
            continue
        longer.append(len(after))
        assert after.abs().sum() == pytest.approx(float(before.abs().sum()), rel=1e-5)
        loud = (after.abs() > 0.01).nonzero().flatten()
        silent.append((int(loud[0]), int(loud.diff().max()), len(after) - 1 - int(loud[-1])))
    assert 0.15 < len(longer) / 200 < 0.35
    assert 0.95 * settings.max_samples < max(longer) <= settings.max_samples
    assert all(max(places) > 0.5 * RATE for places in zip(*silent, strict=True))  # before, between and after


def test_training_and_test_tones_have_long_silences():
    settings = replace(TINY, silence_share=0.5, max_seconds=1.7, test=20, validation=20)
    found = speech.load_data(None, settings)
    practised = [len(found.train(number)[0]) / RATE for number in range(40)]
    assert 1.3 < max(practised) <= 1.7
    for judged in (found.validation, found.test):
        assert 1.7 + 3 < max(map(len, judged.sounds)) / RATE <= 1.7 + 5
        assert sum(len(sound) > 1.7 * RATE for sound in judged.sounds) > 4
        assert sum(len(sound) < 1.2 * RATE for sound in judged.sounds) > 4
    plain = speech.load_data(None, replace(settings, silence_share=0.0))
    assert max(map(len, plain.test.sounds)) < 1.2 * RATE


def test_digits_in_silence_are_counted():
    model = random_listener()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.eye(11)[0])
        assert speech.count_digits_in_silence(model, LOG_MEL) == 0
        model.head.bias.copy_(torch.eye(11)[7])
    assert speech.count_digits_in_silence(model, LOG_MEL) == 3  # one that does not end, in each silence


@pytest.mark.parametrize("real", [False, True], ids=["tones", "recordings"])
def test_a_saved_run_gives_the_same_metrics(real: bool, recorded: Path, tmp_path: Path):
    place = RunLocation(data=recorded if real else None, folder=tmp_path / "run")
    outcome = get_recipe("speech").run(TINY, place)
    found, settings, model, tokenizer = load_finished_run(tmp_path / "run")
    assert settings == TINY
    again = found.module.evaluate(settings, model, tokenizer, place)
    assert again == {name: figure for name, figure in outcome.metrics.items() if name != "seconds"}
    assert ("digit accuracy" in again) == real
    assert again["latency"] == TINY.latency
    assert again["streamed - whole"] < 1e-4
    assert again["validation score"] <= 1
    parts = [1 - again["validation token error"], *([again["validation digit accuracy"]] if real else [])]
    assert again["validation score"] == pytest.approx(sum(parts) / len(parts))
    assert again["digits in silence"] >= 0


def test_an_interrupted_run_resumes_to_the_same_parameters(tmp_path: Path):
    settings = replace(TINY, plan=replace(TINY.plan, averaging=ExponentialAverage(decay=0.9)))

    def stop(phase: str, progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    whole = get_recipe("speech").run(settings, RunLocation(folder=tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        get_recipe("speech").run(settings, RunLocation(folder=tmp_path / "stopped", on_progress=stop))
    resumed = get_recipe("speech").run(settings, RunLocation(folder=tmp_path / "stopped", resume=True))
    for (name, one), other in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation": 0}, "validation is 0, but must be at least 1"),
        ({"eval_digits": (4, 2)}, r"length=\(4, 2\) is the minimum and maximum number of digits"),
        ({"pause": (0.2, 0.1)}, r"pause=\(0.2, 0.1\) is the minimum and maximum silence"),
        ({"no_pause_share": 1.0}, "no_pause_share must be at least 0 and below 1, not 1"),
        ({"silence_share": -0.1}, "silence_share must be at least 0 and at most 1, not -0.1"),
        ({"max_seconds": 0.05}, "max_seconds=0.05 is shorter than the 4 frames of a row"),
        ({"model": replace(MODEL, vocab=12)}, "model.vocab is 11, the ten digits and the blank, not 12"),
        ({"model": replace(MODEL, mels=6)}, "model.mels=6 and log_mel.mels=5 must be equal"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_data_that_do_not_fit_the_settings_are_refused(recorded: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="validation=30 and test=30 leave none of the 60 recordings"):
        speech.load_data(recorded, replace(TINY, validation=30, test=30))
    with pytest.raises(
        ConfigError, match=r"max_seconds=0.4 is too short for a recording with silence .* takes up to 0\.\d\d"
    ):
        speech.load_data(recorded, replace(TINY, max_seconds=0.4))
    with pytest.raises(ConfigError, match=r"max_seconds=0.1 is too short for string 0, which takes 0\.\d\d"):
        DigitRecognitionTask(speech.load_data(None, TINY), replace(TINY, max_seconds=0.1)).batch(0, 0, 1)
    with pytest.raises(DataError, match="does not exist"):
        speech.load_data(tmp_path / "nowhere", TINY)


def test_the_built_in_run_reaches_its_error_rate_and_outputs_nothing_in_silence(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shapes are checked by the other tests
    torch.set_num_threads(2)
    try:
        outcome = get_recipe("speech").run(speech.built_in(), RunLocation())
    finally:
        torch.set_num_threads(1)
    metrics, model = outcome.metrics, outcome.model
    assert metrics["token error"] <= 0.01
    assert metrics["latency"] <= 0.25
    assert metrics["digits in silence"] == 0
    assert isinstance(model, Speech)
    noise = torch.randn(5 * 8000, generator=torch.Generator().manual_seed(5))
    assert [said(model, spread * noise) for spread in (0.0, 1e-4, 1e-3, 1e-2, 0.05)] == [[]] * 5
    dialled = tones(10, seed=11)  # none of them quiet
    silence = torch.zeros(2 * 8000)
    told = [said(model, torch.cat([silence, sound, silence])) for sound in dialled.sounds]
    assert token_error_rate(told, dialled) <= 0.05


def said(model: Speech, sound: torch.Tensor) -> list[int]:
    """What the built-in listener hears in a sound."""
    listener = DigitListener(model.eval(), LogMel())
    with torch.no_grad():
        return [int(word.text) for word in listener.push(sound) + listener.finish()]
