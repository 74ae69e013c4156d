"""The recipe speech: what it hears, how it varies that, what it is judged by, and that it reaches what it says."""

import math
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy
import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, DataError, ShapeError, TrainingError
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel, log_mel
from regard.data.spoken import read_spoken
from regard.data.tones import tones
from regard.models.presets import made
from regard.models.speech import Speech, SpeechConfig
from regard.recipes import speech
from regard.recipes.recipe import Place, finished, recipe
from regard.recipes.speech import DigitTask, Joined, Listener, Settings, Variation, Word
from regard.train.averaging import Exponential
from regard.train.loop import Progress
from regard.train.optimiser import AdamW
from regard.train.plan import Plan

RATE = 4000
SOUND = LogMel(rate=RATE, bands=5)
MODEL = SpeechConfig(
    vocab=11, mels=5, width=12, depth=2, heads=3, ff_width=17, chunk=3, look_back=2, dropout=0.1, attention_dropout=0.0
)
VARIATION = Variation(speed=0.1, gain=6.0, noise=(5.0, 30.0), masks=2, stretch=5, band=2)
TINY = Settings(
    model=MODEL, plan=Plan(steps=6, batch=6, optimiser=AdamW(rate=1e-2), evaluate_every=4, save_every=2), sound=SOUND,
    variation=VARIATION, practised=(1, 3), seconds=1.1, pause=(0.02, 0.1), judged=(2, 4), held=7, tested=9, strings=5,
)  # fmt: skip


def listening(config: SpeechConfig = MODEL, seed: int = 1) -> Speech:
    """A model that has much to say, though nothing true."""
    model = made(config, seed=seed).eval()
    assert isinstance(model, Speech)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        sound = LogMel(rate=RATE, bands=config.mels)
        rows = model(speech.heard(tones(1, rate=RATE).sounds[0], sound)[None])
        model.head.bias.sub_(rows.mean((0, 1)))  # so that no token stands out all the time
    return model


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


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
        index=[take for _, _, take in takes], speakers=["ann", "bob"], sample_rate=RATE,
    )  # fmt: skip
    return folder


def test_it_says_what_it_needs_and_what_comes_of_it():
    found = recipe("speech")
    assert "98.5 %" in found.expected
    assert found.time
    assert found.memory
    assert found.settings(real=True).plan.compile
    assert not found.settings(real=False).plan.compile


@pytest.mark.parametrize("settings", [speech.built_in(), speech.real()], ids=["built-in", "real"])
def test_the_algorithmic_latency_is_at_most_a_quarter_of_a_second(settings: Settings):
    assert settings.latency <= 0.25
    frames = 4 * settings.model.chunk * (1 + settings.model.look_ahead)
    assert settings.latency == pytest.approx((frames - 1) * 0.010 + 0.025)


@pytest.mark.parametrize(("chunk", "look_ahead"), [(1, 0), (3, 0), (2, 1), (1, 3)])
def test_no_row_waits_longer_than_the_latency_and_one_waits_as_long(chunk: int, look_ahead: int):
    sound = LogMel(rate=800, bands=3)
    config = replace(MODEL, mels=3, chunk=chunk, look_ahead=look_ahead)
    listener = Listener(listening(config), sound)
    waited = []
    for received, sample in enumerate(random(390).split(1), 1):
        for _ in range(listener.rows(sample).shape[1]):
            begun = len(waited) * 4 * sound.hop  # the first sample of this row
            waited.append((received - begun) / sound.rate)
    assert len(waited) >= 2 * chunk
    assert max(waited) == pytest.approx(speech.latency(config, sound))


@pytest.mark.parametrize("piece", [1, 67, 797, 5000])
def test_a_stream_in_pieces_of_any_size_gives_the_rows_of_one_pass(piece: int):
    model, sounds = listening(), tones(1, (2, 3), rate=RATE).sounds[0][: 1300 if piece == 1 else None]
    listener = Listener(model, SOUND)
    rows = torch.cat([*(listener.rows(part) for part in sounds.split(piece)), listener.last_rows()], 1)
    with torch.no_grad():
        torch.testing.assert_close(rows, model(speech.heard(sounds, SOUND)[None]), rtol=0, atol=1e-5)


def test_words_come_with_where_they_were_heard_and_when_they_were_known():
    model, sounds = listening(), tones(3, (2, 4), rate=RATE)
    whole = speech.at_once(model, sounds, SOUND, together=2)
    assert min(map(len, whole)) > 2
    late = speech.latency(MODEL, SOUND)
    for sound, digits in zip(sounds.sounds, whole, strict=True):
        listener = Listener(model, SOUND)
        words: list[Word] = []
        for piece in sound.split(SOUND.hop):
            new = listener.push(piece)
            assert all(word.shown == pytest.approx(listener.received / RATE) for word in new)
            words += new
        assert all(0 < word.shown - word.at < late + SOUND.hop / RATE for word in words)
        words += listener.finish()
        assert [int(word.text) for word in words] == digits
        assert [word.at for word in words] == sorted(word.at for word in words)


def test_a_sound_without_a_row_says_nothing():
    model = listening()
    assert Listener(model, SOUND).finish() == []
    listener = Listener(model, SOUND)
    assert listener.push(torch.zeros(37)) == listener.finish() == []
    short = DigitStrings((torch.zeros(37),), (torch.tensor([3]),), RATE)
    assert speech.at_once(model, short, SOUND) == [[]]
    assert speech.streamed(model, short, SOUND) == ([[]], 0.0)


def test_a_stream_that_is_not_one_pass_is_told(monkeypatch: pytest.MonkeyPatch):
    rows = Listener.rows
    monkeypatch.setattr(Listener, "rows", lambda self, samples: rows(self, samples) + 0.01)
    with pytest.raises(
        TrainingError, match=r"sound 0, streamed, has logits that are 0\.01 away from those of one pass"
    ):
        speech.streamed(listening(), tones(1, rate=RATE), SOUND)


@pytest.mark.parametrize("real", [False, True], ids=["tones", "recordings"])
def test_shares_of_a_batch_make_it_up_and_steps_differ(real: bool, recorded: Path):
    task = DigitTask(speech.data(recorded if real else None, TINY), TINY)
    whole, again = task.batch(5, 0, 1), task.batch(5, 0, 1)
    shares = [task.batch(5, part, 3) for part in range(3)]
    for name in ("sounds", "samples", "targets", "lengths", "draws", "seeds"):
        together = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(together, getattr(whole, name)), name
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
        assert not torch.equal(getattr(task.batch(6, 0, 1), name), getattr(whole, name)), name
    model = listening()
    losses = [task.loss(model, share) for share in shares]
    one = task.loss(model, whole)
    assert sum(int(loss.count) for loss in losses) == int(one.count) == int(whole.lengths.sum())
    torch.testing.assert_close(torch.stack([loss.total for loss in losses]).sum(), one.total, rtol=1e-5, atol=0)


def test_the_loss_is_on_what_was_said_and_is_learned_in_half_precision_too():
    task = DigitTask(speech.data(None, TINY), TINY)
    batch = task.batch(0, 0, 1)
    sound, digits = task.found.string(4)
    assert torch.equal(batch.sounds[4, : len(sound)], sound)
    assert not batch.sounds[4, len(sound) :].any()
    assert batch.targets[4, : len(digits)].tolist() == [each + 1 for each in digits.tolist()]
    model = listening()
    exact = task.loss(model, batch).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = task.loss(model, batch).total
        figures = task.evaluate(model)
    torch.testing.assert_close(lower, exact, rtol=0.03, atol=0)
    assert not torch.equal(lower, exact)
    assert figures == task.evaluate(model)  # which is always in full precision


def test_a_string_at_another_speed_has_another_pitch_and_length():
    times = torch.arange(2000) / RATE
    wave = torch.sin(2 * math.pi * 250 * times)
    sounds = torch.stack([wave, wave, wave]) * (torch.arange(2000) < 1601)
    fast, samples = speech.sped(sounds, torch.tensor([1601, 1601, 1601]), torch.tensor([1.0, 1.25, 0.9]))
    assert samples.tolist() == [1601, 1281, 1778]
    torch.testing.assert_close(fast[0], sounds[0], rtol=0, atol=1e-6)
    for row, pitch in ((1, 312.5), (2, 225.0)):
        wanted = torch.sin(2 * math.pi * pitch * times)
        inside = slice(0, int(samples[row]) - 1)
        torch.testing.assert_close(fast[row, inside], wanted[inside], rtol=0, atol=0.03)
        assert not fast[row, int(samples[row]) :].any()


def test_noise_is_as_far_below_the_sound_as_asked_and_is_a_function_of_its_seed():
    sounds = 0.3 * random(3, 40_007) - 0.15
    samples = torch.tensor([40_007, 40_007, 20_000])
    sounds[2, 20_000:] = 0
    decibels, tilt, seeds = (
        torch.tensor([10.0, 20.0, 3.0]),
        torch.tensor([0.0, 0.9, -0.9]),
        torch.tensor([7, 8, 2**32 - 1]),
    )
    noise = speech.noise(sounds, samples, decibels, tilt, seeds)
    assert not noise[2, 20_000:].any()
    power = sounds.square().sum(1) / noise.square().sum(1)
    torch.testing.assert_close(10 * power.log10(), decibels, rtol=0, atol=0.2)
    neighbours = (noise[:, 1:] * noise[:, :-1]).sum(1) / noise.square().sum(1)
    torch.testing.assert_close(neighbours, tilt / (1 + tilt**2), rtol=0, atol=0.02)
    alone = speech.noise(sounds[1:2], samples[1:2], decibels[1:2], tilt[1:2], seeds[1:2])
    assert torch.equal(alone[0], noise[1])
    other = speech.noise(sounds[:1], samples[:1], decibels[:1], tilt[:1], seeds[:1] + 1)
    assert abs(float(torch.corrcoef(torch.stack([noise[0, :-1], other[0, 1:]]))[0, 1])) < 0.02


def test_strings_vary_no_further_than_asked():
    sounds, samples = random(7, 501) - 0.5, torch.full((7,), 450)
    sounds[:, 450:] = 0
    draws, seeds = random(7, 4, seed=2), torch.arange(7)
    same, size = speech.varied(sounds, samples, draws, seeds, Variation())
    assert torch.equal(same, sounds)
    assert torch.equal(size, samples)
    louder, _ = speech.varied(sounds, samples, draws, seeds, Variation(gain=20.0))
    factor = (louder.norm(dim=1) / sounds.norm(dim=1)).log10()
    torch.testing.assert_close(factor, 2 * draws[:, 3] - 1)
    _, size = speech.varied(sounds, samples, draws, seeds, Variation(speed=0.1))
    torch.testing.assert_close(size.float(), 450 / (0.9 + 0.2 * draws[:, 0]), rtol=0, atol=1.5)


def test_masks_hide_stretches_of_time_and_bands_inside_the_sound():
    frames, lengths = torch.ones(400, 23, 9), torch.arange(400) % 20 + 4
    draws = random(400, 4)
    hidden = speech.masked(frames, lengths, draws, Variation(masks=1, stretch=3, band=2)) == 0
    times, bands = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, times[:, :, None] | bands[:, None, :])
    assert sorted(set(times.sum(1).tolist())) == [0, 1, 2, 3]
    assert sorted(set(bands.sum(1).tolist())) == [0, 1, 2]
    assert not times[torch.arange(23) >= lengths[:, None]].any()
    for marks in (times, bands):
        assert (marks.int().diff(dim=1).abs().sum(1) <= 2).all()  # in one piece
        assert marks.any(0)[:9].all()
    assert torch.equal(speech.masked(frames, lengths, draws[:, :0], Variation()), frames)


def test_parts_of_the_recordings_share_none(recorded: Path):
    found = speech.data(recorded, TINY)
    assert isinstance(found.string, Joined)
    assert found.held_single is not None
    assert found.test_single is not None
    parts = [found.string.recordings.sounds, found.held_single.sounds, found.test_single.sounds]
    sizes = [{len(sound) for sound in part} for part in parts]  # no two recordings are equally long
    assert [len(part) for part in sizes] == [44, 7, 9]
    assert len(set.union(*sizes)) == 60
    assert (len(found.held), len(found.test)) == (5, 5)
    told = [[label.item()] for label in torch.cat(found.test_single.labels)]
    assert speech.token_error(told, found.test_single) == 0


def test_training_strings_are_of_one_speaker_and_leave_out_what_does_not_fit(recorded: Path):
    recordings = read_spoken(recorded)
    settings = replace(TINY, practised=(2, 5), seconds=1.1, pause=(0.03, 0.05))
    join = Joined(recordings, settings)
    seen, counts = set(), set()
    by_size = {len(sound): number for number, sound in enumerate(recordings.sounds)}
    for number in range(60):
        sound, digits = join(number)
        again = join(number)
        assert torch.equal(sound, again[0])
        assert len(sound) <= settings.room
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


def test_the_distance_between_strings_counts_edits():
    assert speech.edits([], []) == 0
    assert speech.edits([1, 2, 3], []) == speech.edits([], [1, 2, 3]) == 3
    assert speech.edits([1, 2, 3, 4], [1, 3, 4]) == 1
    assert speech.edits([1, 2, 3], [3, 1, 2]) == 2
    assert speech.edits([1, 1, 2], [1, 2, 2]) == 1
    sounds = DigitStrings((torch.zeros(1),) * 2, (torch.tensor([1, 2, 3]), torch.tensor([4, 5])), RATE)
    assert speech.token_error([[1, 3], [4, 5, 5]], sounds) == 2 / 5


@pytest.mark.parametrize("real", [False, True], ids=["tones", "recordings"])
def test_a_run_leaves_a_model_that_is_judged_alike(real: bool, recorded: Path, tmp_path: Path):
    place = Place(data=recorded if real else None, folder=tmp_path / "run")
    outcome = recipe("speech").run(TINY, place)
    found, settings, model, tokenizer = finished(tmp_path / "run")
    assert settings == TINY
    again = found.module.judged(settings, model, tokenizer, place)
    assert again == {name: figure for name, figure in outcome.figures.items() if name != "seconds"}
    assert ("digit accuracy" in again) == real
    assert again["latency"] == TINY.latency
    assert again["streamed - whole"] < 1e-4
    assert again["held-out accuracy"] <= 1


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path):
    settings = replace(TINY, plan=replace(TINY.plan, averaging=Exponential(decay=0.9)))

    def stop(phase: str, progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    whole = speech.run(settings, Place(folder=tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        speech.run(settings, Place(folder=tmp_path / "stopped", show=stop))
    resumed = speech.run(settings, Place(folder=tmp_path / "stopped", resume=True))
    for (name, one), other in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"held": 0}, "held is 0, but must be at least 1"),
        ({"judged": (4, 2)}, r"length=\(4, 2\) has the fewest and the most digits"),
        ({"pause": (0.2, 0.1)}, r"pause=\(0.2, 0.1\) has the shortest and the longest silence"),
        ({"seconds": 0.05}, "seconds=0.05 is shorter than the 4 frames of a row"),
        ({"model": replace(MODEL, vocab=12)}, "model.vocab is 11, the ten digits and the blank, not 12"),
        ({"model": replace(MODEL, mels=6)}, "reads frames of 6 numbers, but sound.bands is 5; set model.mels"),
    ],
)
def test_settings_that_cannot_be_are_told(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        replace(TINY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 1.0}, "speed is a share of the time, from 0 to below 1, not 1.0"),
        ({"gain": -1.0}, "gain is a number of decibels, 0 or more, not -1.0"),
        ({"noise": (20.0, 10.0)}, r"noise=\(20.0, 10.0\) has the least and the most decibels"),
        ({"masks": -1}, "masks is -1, but must be at least 0"),
    ],
)
def test_variations_that_cannot_be_are_told(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        replace(VARIATION, **changes)  # type: ignore[arg-type]


def test_data_that_do_not_fit_the_settings_are_told(recorded: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="held=30 and tested=30 leave none of the 60 recordings"):
        speech.data(recorded, replace(TINY, held=30, tested=30))
    with pytest.raises(
        ConfigError, match=r"seconds=0.4 is too short for a recording with silence .* takes up to 0\.\d\d"
    ):
        speech.data(recorded, replace(TINY, seconds=0.4))
    with pytest.raises(ConfigError, match=r"seconds=0.1 is too short for string 0, which takes 0\.\d\d"):
        DigitTask(speech.data(None, TINY), replace(TINY, seconds=0.1)).batch(0, 0, 1)
    with pytest.raises(DataError, match="is not there"):
        speech.data(tmp_path / "nowhere", TINY)


def test_the_model_sees_frames_less_their_mean_in_speech_over_its_spread():
    sound = tones(1, rate=RATE).sounds[0]
    torch.testing.assert_close(4 * speech.heard(sound, SOUND) - 7, log_mel(sound, SOUND), rtol=0, atol=1e-5)


def test_frames_of_another_size_are_refused_by_the_listener():
    with pytest.raises(ShapeError, match="with 5 mels"):
        Listener(listening(), replace(SOUND, bands=6)).push(torch.zeros(400))


@pytest.mark.slow
def test_the_built_in_default_hears_tones_with_at_most_one_error_in_a_hundred(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shapes are checked by the other tests
    torch.set_num_threads(2)
    try:
        figures = speech.run(speech.built_in(), Place()).figures
    finally:
        torch.set_num_threads(1)
    assert figures["token error"] <= 0.01
    assert figures["latency"] <= 0.25
