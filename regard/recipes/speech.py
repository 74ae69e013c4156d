"""Which digits were dialled, or said? An encoder hears frames of sound as they come and writes the digits down.

It is trained by CTC on strings of digits that are made anew for every step: tones, or recordings of single digits
joined. Speed, loudness, noise and masks (Park et al. 2019, arXiv:1904.08779) change each string on the model's device.
One string in four has long silences, so that no digit is heard where none is.

Expected: built-in at most 1 % of the digits of tones wrong, streamed, and none heard in silence. Real, learning from
2,160 recordings of six speakers, at least 98.5 % of 300 others of theirs right and under 2 % of the digits of strings
of 3 to 10 wrong, as they come (two seeds: 100 % and 0.4 %, 99.7 % and 0.1 %; on a CPU, with plan.steps=800,
plan.batch_size=32, plan.precision=float32 and plan.compile=false, 99.3 % and 1.2 %), and none in silence. Latency is
175 ms built-in and 215 ms for speech, by the settings.
Time: built-in one minute of one core; real five minutes on an H200 that five other runs share, or with those settings
eight of one core.
Memory: built-in 1 GB; real 0.9 GB on a CPU, 1.2 GiB of the GPU's.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number as real_number
from regard.data.characters import Characters
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel
from regard.data.sampler import sampler_generator
from regard.data.spoken import Recordings, read_spoken, strings
from regard.data.tones import check_length, check_silence, long_silences, tones
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.speech import STEP, Speech, SpeechConfig
from regard.recipes.audio_augment import DRAWS, Variation, masked, slowest, varied
from regard.recipes.digit_listener import DIGITS, DigitListener, at_once, exact, heard, latency, streamed, token_error
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, Start
from regard.train.objectives import ctc
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine
from regard.train.task import Loss

SILENCE = 5.0  # seconds, at most, in a quiet string that the model is judged by
FAINT = (0.0, 0.001, 0.01)  # how far noise spreads in silences where no digit is to be heard


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    sound      how frames are taken
    variation  how strings are changed in training
    practised  fewest and most digits of a string in training
    pause      shortest and longest silence around digits in training, in seconds; tones have their own
    abrupt     share of these silences that are left out: a recording begins and ends without any
    seconds    the longest string in training: digits that do not fit any more are left out
    quiet      share of the strings in training, and of the tones that the model is judged by, with long silences
    judged     fewest and most digits of a string that the model is judged by
    held       recordings kept back to see how good the model is; with tones, strings
    tested     recordings kept for the end; with tones, strings
    strings    strings joined from recordings for each of these
    """

    model: SpeechConfig
    plan: TrainingPlan
    sound: LogMel = field(default_factory=LogMel)
    variation: Variation = field(default_factory=Variation)
    practised: tuple[int, int] = (1, 10)
    pause: tuple[float, float] = (0.0, 0.4)
    abrupt: float = 0.0
    seconds: float = 7.0
    quiet: float = 0.0
    judged: tuple[int, int] = (3, 10)
    held: int = 240
    tested: int = 300
    strings: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("held", "tested", "strings"):
            check_integer(name, getattr(self, name), 1)
        for length in (self.practised, self.judged):
            check_length(length)
        if not 0 <= real_number("pause (shortest)", self.pause[0]) <= real_number("pause (longest)", self.pause[1]):
            raise ConfigError(f"pause={self.pause} has the shortest and the longest silence in seconds, 0 or more")
        if not 0 <= real_number("abrupt", self.abrupt) < 1:
            raise ConfigError(f"abrupt is a share of the silences, from 0 to below 1, not {self.abrupt}")
        check_silence(self.quiet)
        if not self.sound.frames(self.room) >= STEP:
            raise ConfigError(f"seconds={self.seconds} is shorter than the {STEP} frames of a row")
        if self.model.vocab != DIGITS.vocab:
            raise ConfigError(f"model.vocab is {DIGITS.vocab}, the ten digits and the blank, not {self.model.vocab}")
        if self.model.mels != self.sound.bands:
            raise ConfigError(
                f"the model reads frames of {self.model.mels} numbers, but sound.bands is {self.sound.bands}; set "
                "model.mels to the same"
            )

    @property
    def room(self) -> int:
        """Samples of the longest string in training."""
        return round(real_number("seconds", self.seconds) * self.sound.rate)

    @property
    def latency(self) -> float:
        return latency(self.model, self.sound)


def built_in() -> Settings:
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=64, depth=2, heads=4, chunk=4, look_back=2, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=600, batch_size=32, optimizer=AdamW(lr=3e-3, weight_decay=0.01), schedule=Cosine(warmup=50),
        evaluate_every=150, save_every=150,
    )  # fmt: skip
    return Settings(
        model=model, plan=plan, variation=Variation(gain=6.0, masks=1, stretch=2, band=3), practised=(3, 7),
        judged=(3, 7), seconds=2.2, quiet=0.25, held=100, tested=200,
    )  # fmt: skip


def real() -> Settings:
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=128, depth=4, heads=4, chunk=5, look_back=6, dropout=0.1,
        attention_dropout=0.0,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=4000, batch_size=64, optimizer=Muon(lr=0.02, weight_decay=0.05, adamw=AdamW(lr=2e-3, weight_decay=0.05)),
        schedule=Cosine(warmup=50), precision="bfloat16", compile=True, evaluate_every=500, save_every=500,
    )  # fmt: skip
    return Settings(
        model=model, plan=plan, practised=(1, 5), abrupt=0.4, seconds=3.5, quiet=0.25,
        variation=Variation(speed=0.1, gain=6.0, noise=(20.0, 60.0), masks=1, stretch=8, band=5),
    )  # fmt: skip


@dataclass(frozen=True)
class Set:
    """What is heard: strings without end to learn from, others to choose by and to be judged by.

    string         the sound of training string number so and so, and its digits
    held, test     strings
    held_single,
    test_single    recordings as they are, one digit each; None where there are none
    """

    string: Callable[[int], tuple[Tensor, Tensor]]
    held: DigitStrings
    test: DigitStrings
    held_single: DigitStrings | None = None
    test_single: DigitStrings | None = None


def data(path: Path | None, settings: Settings) -> Set:
    """Spoken digits where there is a path, else tones."""
    rate = settings.sound.rate
    if path is None:
        dialled = partial(tones, rate=rate, quiet=settings.quiet)
        longest = settings.seconds + SILENCE
        return Set(
            lambda number: _first(
                dialled(1, settings.practised, seed=_seed(settings, "train", number), seconds=settings.seconds)
            ),
            dialled(settings.held, settings.judged, seed=_seed(settings, "held"), seconds=longest),
            dialled(settings.tested, settings.judged, seed=_seed(settings, "test"), seconds=longest),
        )
    found = read_spoken(path, rate)
    if settings.held + settings.tested >= len(found):
        raise ConfigError(
            f"held={settings.held} and tested={settings.tested} leave none of the {len(found)} recordings of {path} to "
            "learn from"
        )
    # the same for every seed: runs are compared by recordings that none of them has heard
    train, held, test = found.split(settings.held, settings.tested, seed=0)
    return Set(
        Joined(train, settings),
        *(
            strings(part, settings.strings, settings.judged, seed=_seed(settings, name))
            for name, part in (("held", held), ("test", test))
        ),
        *(DigitStrings(part.sounds, tuple(part.labels[:, None]), rate) for part in (held, test)),
    )


class Joined:
    """Strings of recordings, each of one speaker: number so and so is always the same."""

    def __init__(self, recordings: Recordings, settings: Settings) -> None:
        self.recordings, self.settings = recordings, settings
        self.speakers = sorted(set(recordings.speakers))
        self.of = {
            each: [number for number, who in enumerate(recordings.speakers) if who == each] for each in self.speakers
        }
        needed = max(map(len, recordings.sounds)) + 2 * round(settings.pause[1] * recordings.rate)
        if needed > settings.room:
            raise ConfigError(
                f"seconds={settings.seconds} is too short for a recording with silence before and after it, which "
                f"takes up to {needed / recordings.rate:.2f}"
            )

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        settings, rate = self.settings, self.recordings.rate
        draw = sampler_generator(settings.seed, number, "joined")
        fewest, most = settings.practised
        shares = torch.rand(2 * most + 3, generator=draw, dtype=torch.float64).tolist()
        own = self.of[self.speakers[int(shares[0] * len(self.speakers))]]
        count = fewest + int(shares[1] * (most - fewest + 1))
        silences = [torch.zeros(round(self._silence(each) * rate)) for each in shares[most + 2 :]]
        parts, digits, size = [silences[0]], [], len(silences[0])
        for share, silence in zip(shares[2 : 2 + count], silences[1:], strict=False):
            record = own[int(share * len(own))]
            sound = self.recordings.sounds[record]
            size += len(sound) + len(silence)
            if size > settings.room:
                break
            parts += [sound, silence]
            digits.append(record)
        still = sampler_generator(
            settings.seed, number, "quiet"
        )  # its own, so that the other strings do not depend on it
        if torch.rand((), generator=still) < settings.quiet:
            for gap, samples in long_silences(len(digits) + 1, settings.room - sum(map(len, parts)), still):
                parts.insert(2 * gap, torch.zeros(samples))
        return torch.cat(parts), self.recordings.labels[digits]

    def _silence(self, share: float) -> float:
        """The seconds of a silence that a number from 0 to 1 stands for."""
        abrupt, (shortest, longest) = self.settings.abrupt, self.settings.pause
        return 0.0 if share < abrupt else shortest + (longest - shortest) * (share - abrupt) / (1 - abrupt)


def _seed(settings: Settings, use: str, number: int = 0) -> int:
    """A seed for one use, which no other use has."""
    return sampler_generator(settings.seed, number, use).initial_seed()


def _first(made_up: DigitStrings) -> tuple[Tensor, Tensor]:
    return made_up.sounds[0], made_up.labels[0]


@dataclass(frozen=True)
class Batch:
    """Strings of one share of a batch, as long as each other by silence at their ends.

    samples  how long each is
    draws    even numbers from 0 to 1 that decide how each varies
    seeds    of the noise that each gets
    """

    sounds: Float[Tensor, "b n"]
    samples: Int[Tensor, "b"]
    targets: Int[Tensor, "b t"]
    lengths: Int[Tensor, "b"]
    draws: Float[Tensor, "b k"]
    seeds: Int[Tensor, "b"]


@dataclass(frozen=True)
class DigitTask:
    """Strings to write down. A batch has strings number step * batch up to (step + 1) * batch."""

    found: Set
    settings: Settings

    def batch(self, step: int, part: int, of: int) -> Batch:
        settings, size = self.settings, self.settings.plan.batch_size
        share = size // of
        mine = slice(part * share, (part + 1) * share)
        # slower strings need more room; every batch has the same, so that a compiled model meets one shape
        room = slowest(settings.room, settings.variation.speed)
        sounds = torch.zeros(share, room)
        targets = torch.zeros(share, settings.practised[1], dtype=torch.int64)
        samples, lengths = torch.zeros(2, share, dtype=torch.int64)
        for row, number in enumerate(range(step * size, (step + 1) * size)[mine]):
            sound, digits = self.found.string(number)
            if len(sound) > settings.room:
                raise ConfigError(
                    f"seconds={settings.seconds} is too short for string {number}, which takes "
                    f"{len(sound) / settings.sound.rate:.2f}"
                )
            sounds[row, : len(sound)], samples[row] = sound, len(sound)
            targets[row, : len(digits)], lengths[row] = digits + 1, len(digits)
        # drawn for the whole batch at once, so that its shares make it up however many there are
        draw = sampler_generator(settings.seed, step, "variation")
        draws = torch.rand(size, DRAWS + 4 * settings.variation.masks, generator=draw)[mine]
        seeds = torch.randint(1 << 32, (size,), generator=draw)[mine]
        return Batch(sounds, samples, targets, lengths, draws, seeds)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        variation, sound = self.settings.variation, self.settings.sound
        with torch.autocast(batch.sounds.device.type, enabled=False):  # powers span more than half precision holds
            sounds, samples = varied(batch.sounds, batch.samples, batch.draws, batch.seeds, variation)
            frames = heard(sounds, sound)
            real = (samples - sound.length) // sound.hop + 1
            frames = masked(frames, real, batch.draws[:, DRAWS:], variation)
        logits = model(frames, lengths=real)
        return ctc(logits, batch.targets, rows=real // STEP, lengths=batch.lengths)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """A score, 1 less the error in the mean of strings and single recordings, where there are any; then each.

        More digits can be heard than were said, so that the error can be above 1 and the score below 0.
        """
        assert isinstance(model, Speech)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            return _held_figures(model, self.found, self.settings.sound)


def start(settings: Settings, place: RunLocation) -> Start:
    model = build_from_config(settings.model, seed=settings.seed)
    return Start(model, (Phase("training", DigitTask(data(place.data, settings), settings), settings.plan),), DIGITS)


def run(settings: Settings, place: RunLocation) -> RecipeResult:
    begun = start(settings, place)
    seconds = begun.trained(place)
    return RecipeResult({**judged(settings, begun.model, DIGITS, place), "seconds": seconds}, begun.model, DIGITS)


def judged(settings: Settings, model: Model, tokenizer: Characters, place: RunLocation) -> dict[str, float]:
    """The share of digits that is wrong in strings never heard, streamed; the rest is about how that came to be.

    A stream has to give the rows of one pass. It runs on the CPU in float32, where this holds to rounding.
    """
    assert isinstance(model, Speech)
    hearing = deepcopy(model).cpu().float().eval()
    found = data(place.data, settings)
    told, apart = streamed(hearing, found.test, settings.sound)
    figures = {"token error": token_error(told, found.test)}
    if found.test_single is not None:
        told, more = streamed(hearing, found.test_single, settings.sound)
        figures["digit accuracy"], apart = exact(told, found.test_single), max(apart, more)
    return {
        **figures, "digits in silence": float(digits_in_silence(hearing, settings.sound)),
        "latency": settings.latency, "streamed - whole": apart,
        **{f"held-out {name}": figure for name, figure in _held_figures(hearing, found, settings.sound).items()},
    }  # fmt: skip


@torch.no_grad()
def digits_in_silence(model: Speech, settings: LogMel) -> int:
    """How many digits are heard where there are none: in silences without noise and with a little."""
    count = 0
    for number, spread in enumerate(FAINT):
        white = torch.randn(round(SILENCE * settings.rate), generator=sampler_generator(0, number, "silence"))
        listener = DigitListener(model, settings)
        count += len(listener.push(spread * white)) + len(listener.finish())
    return count


def _held_figures(model: Speech, found: Set, settings: LogMel) -> dict[str, float]:
    told = at_once(model, found.held, settings)
    error = token_error(told, found.held)
    if found.held_single is None:
        return {"score": 1 - error, "token error": error}
    alone = exact(at_once(model, found.held_single, settings), found.held_single)
    return {"score": (1 - error + alone) / 2, "token error": error, "digit accuracy": alone}
