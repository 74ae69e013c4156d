"""Which digits were dialled, or said? An encoder hears frames of sound as they come and writes the digits down.

It is trained by CTC on strings of digits that are made anew for every step: tones, or recordings of single digits
joined. Speed, loudness, noise and masks (Park et al. 2019, arXiv:1904.08779) change each string on the model's device.

Expected: built-in at most 1 % of the digits of tones wrong, streamed. Spoken digits are not yet measured: the aim is
98.5 % of single recordings right and under 2 % of the digits of strings of 3 to 10 wrong, streamed. Latency is 175 ms
built-in and 215 ms for speech, by the settings.
Time: built-in two minutes on two cores; real about ten minutes on one H200, by estimate.
Memory: built-in 1 GB; real about 4 GB, by estimate.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, TrainingError
from regard.base.numbers import real as real_number, whole
from regard.base.seeds import scramble
from regard.data.characters import Characters
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel, LogMelStream, log_mel
from regard.data.order import generator
from regard.data.spoken import Recordings, read_spoken, strings
from regard.data.tones import checked_length, tones
from regard.models.ctc import CTCGreedy, ctc_greedy
from regard.models.model import Model
from regard.models.presets import made
from regard.models.speech import STEP, Speech, SpeechConfig
from regard.recipes.recipe import Outcome, Phase, Place, Start
from regard.train.averaging import Exponential
from regard.train.objectives import ctc
from regard.train.optimiser import AdamW
from regard.train.plan import Plan
from regard.train.schedule import Cosine
from regard.train.task import Loss

DIGITS = Characters("0123456789", special=("<blank>",))  # the blank of CTC is token 0
MEAN, SPREAD = -7.0, 4.0  # of logarithms of power in speech, roughly: what the model sees is near 0 and 1
PIECE = 797  # samples at a time in which a stream is judged; no multiple of a hop or a chunk
TOLERANCE = 1e-3  # between logits of a stream and of one pass, in float32
DRAWS = 4  # numbers that decide how one string varies, before its masks


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How far a string may be changed each time it is heard in training.

    speed      slower or faster by up to this share, pitch and all (Ko et al. 2015)
    gain       louder or softer by up to so many decibels
    noise      least and most decibels that a string stands above noise; None adds none
    masks      stretches of time, and as many bands of pitch, that are hidden
    stretch    the longest stretch, in frames
    band       the widest band
    """

    speed: float = 0.0
    gain: float = 0.0
    noise: tuple[float, float] | None = None
    masks: int = 0
    stretch: int = 10
    band: int = 6

    def __post_init__(self) -> None:
        if not 0 <= real_number("speed", self.speed) < 1:
            raise ConfigError(f"speed is a share of the time, from 0 to below 1, not {self.speed}")
        if real_number("gain", self.gain) < 0:
            raise ConfigError(f"gain is a number of decibels, 0 or more, not {self.gain}")
        if self.noise is not None and real_number("noise (least)", self.noise[0]) > real_number("noise", self.noise[1]):
            raise ConfigError(f"noise={self.noise} has the least and the most decibels; most must not be smaller")
        whole("masks", self.masks, 0, "stretches and bands")
        whole("stretch", self.stretch, 1, "frames")
        whole("band", self.band, 1, "bands of pitch")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    sound      how frames are taken
    variation  how strings are changed in training
    practised  fewest and most digits of a string in training
    pause      shortest and longest silence around digits in training, in seconds; tones have their own
    seconds    the longest string in training: digits that do not fit any more are left out
    judged     fewest and most digits of a string that the model is judged by
    held       recordings kept back to see how good the model is; with tones, strings
    tested     recordings kept for the end; with tones, strings
    strings    strings joined from recordings for each of these
    """

    model: SpeechConfig
    plan: Plan
    sound: LogMel = field(default_factory=LogMel)
    variation: Variation = field(default_factory=Variation)
    practised: tuple[int, int] = (1, 10)
    pause: tuple[float, float] = (0.0, 0.4)
    seconds: float = 7.0
    judged: tuple[int, int] = (3, 10)
    held: int = 240
    tested: int = 300
    strings: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("held", "tested", "strings"):
            whole(name, getattr(self, name), 1)
        for length in (self.practised, self.judged):
            checked_length(length)
        if not 0 <= real_number("pause (shortest)", self.pause[0]) <= real_number("pause (longest)", self.pause[1]):
            raise ConfigError(f"pause={self.pause} has the shortest and the longest silence in seconds, 0 or more")
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


def latency(model: SpeechConfig, sound: LogMel) -> float:
    """The algorithmic latency in seconds: the most sound that comes between a moment and what is said about it.

    A row of the model covers 4 frames. It is given out when the chunk it is in and those it looks ahead to are there:
    counted from the first sample of the row, `model.delay` hops later the last frame begins that is needed, and that
    takes its own length. Time to compute comes on top.
    """
    return (model.delay * sound.hop + sound.length) / sound.rate


def built_in() -> Settings:
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=64, depth=2, heads=4, chunk=4, look_back=2, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    plan = Plan(
        steps=600, batch=32, optimiser=AdamW(rate=3e-3, decay=0.01), schedule=Cosine(warmup=50),
        evaluate_every=150, save_every=150,
    )  # fmt: skip
    return Settings(
        model=model, plan=plan, variation=Variation(gain=6.0, masks=1, stretch=2, band=3), practised=(3, 7),
        judged=(3, 7), seconds=2.2, held=100, tested=200,
    )  # fmt: skip


def real() -> Settings:
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=192, depth=6, heads=4, chunk=5, look_back=6, dropout=0.1,
        attention_dropout=0.1,
    )  # fmt: skip
    plan = Plan(
        steps=12_000, batch=64, optimiser=AdamW(rate=1e-3, decay=0.05), schedule=Cosine(warmup=500),
        averaging=Exponential(decay=0.999), precision="bfloat16", compile=True, evaluate_every=1000, save_every=1000,
    )  # fmt: skip
    return Settings(
        model=model, plan=plan,
        variation=Variation(speed=0.15, gain=12.0, noise=(10.0, 50.0), masks=2, stretch=12, band=6),
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
        return Set(
            lambda number: _first(tones(1, settings.practised, seed=_seed(settings, "train", number), rate=rate)),
            tones(settings.held, settings.judged, seed=_seed(settings, "held"), rate=rate),
            tones(settings.tested, settings.judged, seed=_seed(settings, "test"), rate=rate),
        )
    found = read_spoken(path, rate)
    if settings.held + settings.tested >= len(found):
        raise ConfigError(
            f"held={settings.held} and tested={settings.tested} leave none of the {len(found)} recordings of {path} to "
            "learn from"
        )
    train, held, test = found.split(settings.held, settings.tested, seed=settings.seed)
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
        draw = generator(settings.seed, number, "joined")
        fewest, most = settings.practised
        shares = torch.rand(2 * most + 3, generator=draw, dtype=torch.float64).tolist()
        own = self.of[self.speakers[int(shares[0] * len(self.speakers))]]
        count = fewest + int(shares[1] * (most - fewest + 1))
        shortest, longest = settings.pause
        silences = [torch.zeros(round((shortest + (longest - shortest) * each) * rate)) for each in shares[most + 2 :]]
        parts, digits, size = [silences[0]], [], len(silences[0])
        for share, silence in zip(shares[2 : 2 + count], silences[1:], strict=False):
            record = own[int(share * len(own))]
            sound = self.recordings.sounds[record]
            size += len(sound) + len(silence)
            if size > settings.room:
                break
            parts += [sound, silence]
            digits.append(record)
        return torch.cat(parts), self.recordings.labels[digits]


def _seed(settings: Settings, use: str, number: int = 0) -> int:
    """A seed for one use, which no other use has."""
    return generator(settings.seed, number, use).initial_seed()


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
        settings, size = self.settings, self.settings.plan.batch
        share = size // of
        mine = slice(part * share, (part + 1) * share)
        # slower strings need more room; every batch has the same, so that a compiled model meets one shape
        room = _slowest(settings.room, settings.variation.speed)
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
        draw = generator(settings.seed, step, "variation")
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
        """How far from no error, in the mean of strings and single recordings, where there are any; then each."""
        assert isinstance(model, Speech)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            return _held_figures(model, self.found, self.settings.sound)


def heard(sound: Float[Tensor, "*b n"], settings: LogMel) -> Float[Tensor, "*b frames bands"]:
    """Frames as the model has them: log-mel, about 0 and 1."""
    return (log_mel(sound, settings) - MEAN) / SPREAD


def varied(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    seeds: Int[Tensor, "b"],
    variation: Variation,
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Strings faster or slower, louder or softer, and with noise, as the draws of each say; and how long they are."""
    between = 2 * draws - 1
    if variation.speed:
        sounds, samples = sped(sounds, samples, 1 + variation.speed * between[:, 0])
    if variation.noise is not None:
        least, most = variation.noise
        decibels = least + (most - least) * draws[:, 1]
        sounds = sounds + noise(sounds, samples, decibels, 0.9 * between[:, 2], seeds)
    return sounds * 10 ** (variation.gain / 20 * between[:, 3:4]), samples


def sped(
    sounds: Float[Tensor, "b n"], samples: Int[Tensor, "b"], speed: Float[Tensor, "b"]
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b"]]:
    """Each sound at its own speed, between samples on the line from one to the next."""
    places = torch.arange(sounds.shape[1], device=sounds.device) * speed.double()[:, None]
    before = places.long().clamp(max=sounds.shape[1] - 2)
    share = (places - before).to(sounds.dtype)
    samples = ((samples - 1) / speed.double()).long() + 1  # the last one stands at or before the old last one
    between = torch.lerp(sounds.gather(1, before), sounds.gather(1, before + 1), share)
    return between * _inside(samples, sounds.shape[1]), samples


def noise(
    sounds: Float[Tensor, "b n"],
    samples: Int[Tensor, "b"],
    decibels: Float[Tensor, "b"],
    tilt: Float[Tensor, "b"],
    seeds: Int[Tensor, "b"],
) -> Float[Tensor, "b n"]:
    """Noise that each sound stands so many decibels above: a function of the seed of each, on every device.

    tilt  from -1, all high, to 1, all low; 0 is white
    """
    places = torch.arange(sounds.shape[1] + 1, device=sounds.device)
    # sums stay below 2^33, and `scramble` keeps 32 bits of them
    white = scramble(seeds[:, None] + places, 1).to(sounds.dtype) / 2**32 - 0.5
    coloured = (white[:, 1:] + tilt[:, None] * white[:, :-1]) * (12 / (1 + tilt**2)).sqrt()[:, None]  # of power 1
    power = sounds.square().sum(1) / samples
    return coloured * (power * 10 ** (-decibels / 10)).sqrt()[:, None] * _inside(samples, sounds.shape[1])


def masked(
    frames: Float[Tensor, "b n bands"],
    lengths: Int[Tensor, "b"],
    draws: Float[Tensor, "b k"],
    variation: Variation,
) -> Float[Tensor, "b n bands"]:
    """Frames with stretches of time and bands of pitch set to 0, where and how wide being as drawn."""
    for at in range(0, draws.shape[1], 4):
        size, begin, width, low = draws[:, at : at + 4].T
        times = _stretch(frames.shape[1], (size * (variation.stretch + 1)).long(), begin, lengths)
        bands = _stretch(frames.shape[2], (width * (variation.band + 1)).long(), low, lengths * 0 + frames.shape[2])
        frames = frames.masked_fill(times[:, :, None] | bands[:, None, :], 0.0)
    return frames


def _stretch(size: int, wide: Tensor, share: Tensor, within: Tensor) -> Tensor:
    """Places of a stretch that is so wide and begins at a share of the room that it leaves."""
    begin = (share * (within - wide + 1).clamp(min=1)).long()[:, None]
    places = torch.arange(size, device=share.device)
    return (places >= begin) & (places < begin + wide[:, None])


def _inside(samples: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=samples.device) < samples[:, None]


def _slowest(samples: int, speed: float) -> int:
    """The most samples that so many can become."""
    return int(samples / (1 - speed)) + 1


@dataclass(frozen=True)
class Word:
    """A word that was heard.

    at     where in the sound the model has placed it, in seconds: the first sample of its row
    shown  how much sound had come when it was known
    """

    text: str
    at: float
    shown: float


class Listener:
    """A model that hears a sound as it comes in, in pieces of any size."""

    def __init__(self, model: Speech, sound: LogMel, tokenizer: Characters = DIGITS) -> None:
        self.sound, self.tokenizer = sound, tokenizer
        self.received = 0  # samples
        self._device = next(model.parameters()).device
        self._none = torch.zeros(1, 0, model.config.vocab, device=self._device)
        self._frames, self._stream, self._reader = LogMelStream(sound), model.stream(), CTCGreedy()
        self._row = 0

    def push(self, samples: Float[Tensor, "n"]) -> list[Word]:
        """The words that are known with these samples."""
        return self.words(self.rows(samples))

    def finish(self) -> list[Word]:
        """The sound has ended: the words that were waiting for more."""
        return self.words(self.last_rows())

    def rows(self, samples: Float[Tensor, "n"]) -> Float[Tensor, "1 r w"]:
        """Logits of the rows that are final with these samples."""
        self.received += len(samples)
        frames = (self._frames.push(samples.to(self._device)) - MEAN) / SPREAD
        return self._stream.push(frames[None]) if len(frames) else self._none

    def last_rows(self) -> Float[Tensor, "1 r w"]:
        """Logits of the rows that were waiting for more."""
        return self._stream.finish() if self._stream.received else self._none

    def words(self, rows: Float[Tensor, "1 r w"]) -> list[Word]:
        """What new rows say."""
        found = []
        for row in range(rows.shape[1]):
            for token in self._reader.push(rows[:, row : row + 1])[0]:
                at = self._row * STEP * self.sound.hop / self.sound.rate
                found.append(Word(self.tokenizer.decode([token]), at, self.received / self.sound.rate))
            self._row += 1
        return found


def start(settings: Settings, place: Place) -> Start:
    model = made(settings.model, seed=settings.seed)
    return Start(model, (Phase("training", DigitTask(data(place.data, settings), settings), settings.plan),), DIGITS)


def run(settings: Settings, place: Place) -> Outcome:
    begun = start(settings, place)
    seconds = begun.trained(place)
    return Outcome({**judged(settings, begun.model, DIGITS, place), "seconds": seconds}, begun.model, DIGITS)


def judged(settings: Settings, model: Model, tokenizer: Characters, place: Place) -> dict[str, float]:
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
        figures["digit accuracy"], apart = _exact(told, found.test_single), max(apart, more)
    return {
        **figures, "latency": settings.latency, "streamed - whole": apart,
        **{f"held-out {name}": figure for name, figure in _held_figures(hearing, found, settings.sound).items()},
    }  # fmt: skip


@torch.no_grad()
def streamed(model: Speech, sounds: DigitStrings, settings: LogMel) -> tuple[list[list[int]], float]:
    """The digits of each sound, heard piece by piece, and how far logits were from those of one pass at most."""
    told, apart = [], 0.0
    for number, sound in enumerate(sounds.sounds):
        listener = Listener(model, settings)
        rows = [*(listener.rows(piece) for piece in sound.split(PIECE)), listener.last_rows()]
        told.append([int(word.text) for each in rows for word in listener.words(each)])
        frames = heard(sound, settings)
        if len(frames) < STEP:
            continue
        one = model(frames[None])
        apart = max(apart, float((torch.cat(rows, 1) - one).abs().max()))
        if not apart <= TOLERANCE:
            raise TrainingError(
                f"sound {number}, streamed, has logits that are {apart:.2g} away from those of one pass"
            )
    return told, apart


@torch.no_grad()
def at_once(model: Speech, sounds: DigitStrings, settings: LogMel, together: int = 64) -> list[list[int]]:
    """The digits of each sound, heard as a whole."""
    told: list[list[int]] = []
    device = next(model.parameters()).device
    least = settings.length + (STEP - 1) * settings.hop
    for start in range(0, len(sounds), together):
        part = sounds.sounds[start : start + together]
        padded = torch.zeros(len(part), max(least, *map(len, part)), device=device)
        for row, sound in zip(padded, part, strict=True):
            row[: len(sound)] = sound
        real = torch.tensor([settings.frames(len(sound)) for sound in part], device=device)
        logits = model(heard(padded, settings), lengths=real)
        told += [[token - 1 for token in tokens] for tokens in ctc_greedy(logits, lengths=real // STEP)]
    return told


def _held_figures(model: Speech, found: Set, settings: LogMel) -> dict[str, float]:
    told = at_once(model, found.held, settings)
    error = token_error(told, found.held)
    if found.held_single is None:
        return {"accuracy": 1 - error, "token error": error}
    alone = _exact(at_once(model, found.held_single, settings), found.held_single)
    return {"accuracy": (1 - error + alone) / 2, "token error": error, "digit accuracy": alone}


def token_error(told: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """Digits to insert, leave out or change until all strings are right, as a share of the digits there are."""
    pairs = list(_pairs(told, sounds))
    return sum(edits(heard_digits, said) for heard_digits, said in pairs) / sum(len(said) for _, said in pairs)


def _exact(told: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """The share of sounds of which all that was said was heard, and nothing else."""
    return sum(list(heard_digits) == said for heard_digits, said in _pairs(told, sounds)) / len(sounds)


def _pairs(told: Sequence[Sequence[int]], sounds: DigitStrings) -> Iterator[tuple[Sequence[int], list[int]]]:
    return zip(told, (label.tolist() for label in sounds.labels), strict=True)


def edits(one: Sequence[int], other: Sequence[int]) -> int:
    """The fewest insertions, deletions and changes that make one sequence the other (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for place, item in enumerate(one, 1):
        before, row[0] = row[0], place
        for at, wanted in enumerate(other, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (item != wanted))
    return row[-1]
