"""Speech recognition of digit strings: a streaming encoder trained by CTC on telephone tones or spoken digits.

New training strings are made for every step, from tones or from concatenated recordings of single digits. They are
augmented on the model's device by speed, loudness, noise and SpecAugment masks (Park et al. 2019, arXiv:1904.08779).
One string in four has long silences, so that the model learns to output nothing there.

Expected: built-in a token error rate of at most 1 % on tones, streamed, and no digits in silence. Real, trained on
2,160 recordings of six speakers, at least 98.5 % of 300 other recordings right and a token error rate under 2 % on
strings of 3 to 10 digits, streamed (two seeds: 100 % and 0.4 %, 99.7 % and 0.1 %; on a CPU, with plan.steps=800,
plan.batch_size=32, plan.precision=float32 and plan.compile=false, 99.3 % and 1.2 %), and no digits in silence. The
algorithmic latency, which follows from the settings, is 175 ms built-in and 215 ms for real recordings.
Time: built-in one minute of one core; real five minutes on one H200 shared with five other runs, or eight minutes of
one core with the settings for a CPU.
Memory: built-in 1 GB; real 0.9 GB on a CPU, 1.2 GiB of GPU memory.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number, check_range
from regard.data.characters import CharacterTokenizer
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel
from regard.data.sampler import sampler_generator
from regard.data.spoken_digits import Recordings, check_pause, make_digit_strings, read_spoken_digits
from regard.data.tones import check_length, sample_long_silences, tones
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.speech import STEP, Speech, SpeechConfig
from regard.recipes.audio_augment import DRAWS, AudioAugmentation, augment_audio, max_augmented_length, spec_augment
from regard.recipes.digit_listener import (
    DIGITS,
    DigitListener,
    algorithmic_latency,
    normalized_log_mel,
    recognize,
    recognize_streaming,
)
from regard.recipes.error_rate import sequence_accuracy, token_error_rate
from regard.recipes.recipe import Phase, RunLocation, TrainingSetup
from regard.recipes.recorded_strings import RecordedStrings
from regard.train.objectives import ctc
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine
from regard.train.task import Loss

CPU_SETTINGS = {"plan.compile": False, "plan.precision": "float32", "plan.batch_size": 32, "plan.steps": 800}
NEXT_COMMAND = "regard listen {folder} FILE.wav"
SILENCE = 5.0  # maximum seconds of long silences in evaluation
SILENCE_NOISE = (0.0, 0.001, 0.01)  # standard deviations of noise in silences where no digit is expected


@dataclass(frozen=True, kw_only=True)
class SpeechSettings:
    """Settings of the speech recipe.

    log_mel         how spectrograms are computed
    augmentation    how training strings are augmented
    train_digits    minimum and maximum number of digits of a training string
    pause           minimum and maximum seconds of silence before, between and after digits in training; not used for
                    built-in tones
    no_pause_share  fraction of the pauses that are left out, so that some digits follow each other without silence
    max_seconds     maximum seconds of a training string; recorded digits that do not fit are left out
    silence_share   fraction of the training strings, and of the test tones, with long silences
    eval_digits     minimum and maximum number of digits of a validation or test string
    validation      number of recordings for validation; with built-in tones, number of strings
    test            number of recordings for test; with built-in tones, number of strings
    eval_strings    number of strings for validation, made of the validation recordings; as many strings for test are
                    made of the test recordings. Not used for built-in tones
    """

    model: SpeechConfig
    plan: TrainingPlan
    log_mel: LogMel = field(default_factory=LogMel)
    augmentation: AudioAugmentation = field(default_factory=AudioAugmentation)
    train_digits: tuple[int, int] = (1, 10)
    pause: tuple[float, float] = (0.0, 0.4)
    no_pause_share: float = 0.0
    max_seconds: float = 7.0
    silence_share: float = 0.0
    eval_digits: tuple[int, int] = (3, 10)
    validation: int = 240
    test: int = 300
    eval_strings: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("validation", "test", "eval_strings"):
            check_integer(name, getattr(self, name), 1)
        for length in (self.train_digits, self.eval_digits):
            check_length(length)
        check_pause(self.pause)
        check_range("no_pause_share", self.no_pause_share, 0, 1, below=True)
        check_range("silence_share", self.silence_share, 0, 1)
        if not self.log_mel.num_frames(self.max_samples) >= STEP:
            raise ConfigError(f"max_seconds={self.max_seconds} is shorter than the {STEP} frames of a row")
        if self.model.vocab != DIGITS.vocab:
            raise ConfigError(f"model.vocab is {DIGITS.vocab}, the ten digits and the blank, not {self.model.vocab}")
        if self.model.mels != self.log_mel.mels:
            raise ConfigError(f"model.mels={self.model.mels} and log_mel.mels={self.log_mel.mels} must be equal")

    @property
    def max_samples(self) -> int:
        """The maximum number of audio samples of a training string."""
        return round(check_number("max_seconds", self.max_seconds) * self.log_mel.sample_rate)

    @property
    def latency(self) -> float:
        """The algorithmic latency in seconds."""
        return algorithmic_latency(self.model, self.log_mel)


def built_in() -> SpeechSettings:
    """Return the settings for built-in telephone tones."""
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=64, depth=2, heads=4, chunk=4, look_back=2, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=600, batch_size=32, optimizer=AdamW(lr=3e-3, weight_decay=0.01), schedule=Cosine(warmup=50),
        evaluate_every=150, save_every=150,
    )  # fmt: skip
    return SpeechSettings(
        model=model, plan=plan, augmentation=AudioAugmentation(gain_db=6.0, masks=1, time_mask=2, mel_mask=3),
        train_digits=(3, 7), eval_digits=(3, 7), max_seconds=2.2, silence_share=0.25, validation=100, test=200,
    )  # fmt: skip


def real() -> SpeechSettings:
    """Return the settings for recordings of spoken digits."""
    model = SpeechConfig(
        vocab=DIGITS.vocab, mels=40, width=128, depth=4, heads=4, chunk=5, look_back=6, dropout=0.1,
        attention_dropout=0.0,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=4000, batch_size=64, optimizer=Muon(lr=0.02, weight_decay=0.05, adamw=AdamW(lr=2e-3, weight_decay=0.05)),
        schedule=Cosine(warmup=50), precision="bfloat16", compile=True, evaluate_every=500, save_every=500,
    )  # fmt: skip
    augmentation = AudioAugmentation(
        speed=0.1, gain_db=6.0, snr_db=(20.0, 60.0), masks=1, time_mask=8, mel_mask=5
    )  # fmt: skip
    return SpeechSettings(
        model=model, plan=plan, augmentation=augmentation, train_digits=(1, 5), no_pause_share=0.4, max_seconds=3.5,
        silence_share=0.25,
    )  # fmt: skip


@dataclass(frozen=True)
class SpeechSplits:
    """The data of the speech recipe: digit strings for training, validation and test.

    train              function that takes the number of a training string and returns its sound and its digits
    validation_single,
    test_single        recordings of one digit each; None for tones
    """

    train: Callable[[int], tuple[Tensor, Tensor]]
    validation: DigitStrings
    test: DigitStrings
    validation_single: DigitStrings | None = None
    test_single: DigitStrings | None = None


def load_data(path: Path | None, settings: SpeechSettings) -> SpeechSplits:
    """Read recordings of spoken digits from a path, or generate telephone tones if the path is None."""
    rate = settings.log_mel.sample_rate
    if path is None:
        generate = partial(tones, sample_rate=rate, silence_share=settings.silence_share)
        longest = settings.max_seconds + SILENCE
        one = partial(generate, 1, settings.train_digits, max_seconds=settings.max_seconds)
        return SpeechSplits(
            lambda number: _first_string(one(seed=_seed(settings, "train", number))),
            generate(settings.validation, settings.eval_digits, seed=_seed(settings, "held"), max_seconds=longest),
            generate(settings.test, settings.eval_digits, seed=_seed(settings, "test"), max_seconds=longest),
        )
    found = read_spoken_digits(path, rate)
    if settings.validation + settings.test >= len(found):
        raise ConfigError(
            f"validation={settings.validation} and test={settings.test} leave none of the {len(found)} recordings of "
            f"{path} for training"
        )
    # the same split for every seed, so that runs with different seeds are comparable
    train, validation, test = found.split(settings.validation, settings.test, seed=0)
    return SpeechSplits(
        DigitStringSampler(train, settings),
        *(
            make_digit_strings(part, settings.eval_strings, settings.eval_digits, seed=_seed(settings, name))
            for name, part in (("held", validation), ("test", test))
        ),
        *(DigitStrings(part.sounds, tuple(part.labels[:, None]), rate) for part in (validation, test)),
    )


class DigitStringSampler:
    """Generates training strings by number: random recordings of one speaker, concatenated.

    The same number always gives the same string.
    """

    def __init__(self, recordings: Recordings, settings: SpeechSettings) -> None:
        self.recordings, self.settings = recordings, settings
        self.speakers = sorted(set(recordings.speakers))
        self.by_speaker = {
            each: [number for number, who in enumerate(recordings.speakers) if who == each] for each in self.speakers
        }
        self.sizes = [len(sound) for sound in recordings.sounds]
        self.recorded_sizes = numpy.array(self.sizes)
        self.offsets = numpy.cumsum(self.recorded_sizes) - self.recorded_sizes
        self.samples = torch.cat(recordings.sounds)
        needed = max(self.sizes) + 2 * round(settings.pause[1] * recordings.sample_rate)
        if needed > settings.max_samples:
            raise ConfigError(
                f"max_seconds={settings.max_seconds} is too short for a recording with silence before and after it, "
                f"which takes up to {needed / recordings.sample_rate:.2f}"
            )

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the sound and the digits of training string `number`."""
        records, begins, size = self.choose(number)
        string = self.strings([records], [begins])
        return string.sounds(self.samples, size)[0], self.recordings.labels[records]

    def choose(self, number: int) -> tuple[list[int], list[int], int]:
        """Choose the recordings of training string `number`.

        Returns the indices of the recordings, the sample of the string at which each begins, and the length of the
        string in samples.
        """
        settings, rate = self.settings, self.recordings.sample_rate
        room = settings.max_samples
        draw = sampler_generator(settings.seed, number, "joined")
        fewest, most = settings.train_digits
        shares = torch.rand(2 * most + 3, generator=draw, dtype=torch.float64).tolist()
        own = self.by_speaker[self.speakers[int(shares[0] * len(self.speakers))]]
        count = fewest + int(shares[1] * (most - fewest + 1))
        pauses = [round(self._pause(each) * rate) for each in shares[most + 2 :]]
        records, gaps, size = [], [pauses[0]], pauses[0]  # gaps: silence before each digit and after the last
        for share, pause in zip(shares[2 : 2 + count], pauses[1:], strict=False):
            record = own[int(share * len(own))]
            if size + self.sizes[record] + pause > room:
                break
            records.append(record)
            gaps.append(pause)
            size += self.sizes[record] + pause
        silence_draw = sampler_generator(settings.seed, number, "quiet")  # its own, so that other strings do not change
        if torch.rand((), generator=silence_draw).item() < settings.silence_share:
            for gap, samples in sample_long_silences(len(gaps), room - size, silence_draw):
                gaps[gap] += samples
            size = sum(gaps) + sum(self.sizes[record] for record in records)
        begins, end = [], 0
        for record, gap in zip(records, gaps, strict=False):
            begins.append(end + gap)
            end = begins[-1] + self.sizes[record]
        return records, begins, size

    def strings(self, records: list[list[int]], begins: list[list[int]]) -> RecordedStrings:
        """Return a batch of strings as `RecordedStrings`, for which no samples are copied yet.

        records  for each string, the indices of its recordings
        begins   for each string, the sample at which each of its recordings begins
        """
        shape = len(records), self.settings.train_digits[1]
        # a column that is not used begins after all others
        table = numpy.zeros((3, *shape), numpy.int64)
        table[0] = self.settings.max_samples
        for row, (own, first) in enumerate(zip(records, begins, strict=True)):
            table[0, row, : len(own)] = first
            table[1, row, : len(own)] = self.offsets[own]
            table[2, row, : len(own)] = self.recorded_sizes[own]
        return RecordedStrings(*map(torch.from_numpy, table))

    def _pause(self, share: float) -> float:
        """Convert a uniform random number from 0 to 1 to the seconds of a pause; below no_pause_share they are 0."""
        none, (shortest, longest) = self.settings.no_pause_share, self.settings.pause
        return 0.0 if share < none else shortest + (longest - shortest) * (share - none) / (1 - none)


def _seed(settings: SpeechSettings, use: str, number: int = 0) -> int:
    """Return a seed derived from the seed of the settings, different for each number and each use, such as "test"."""
    return sampler_generator(settings.seed, number, use).initial_seed()


def _first_string(strings: DigitStrings) -> tuple[Tensor, Tensor]:
    return strings.sounds[0], strings.labels[0]


@dataclass(frozen=True)
class SpeechBatch:
    """A micro-batch of digit strings, padded with silence at their ends.

    sounds   samples, or the recordings from which the samples are made
    samples  number of samples of each sound, without padding
    targets  CTC targets: each digit plus 1, because token 0 is the blank
    lengths  number of targets of each string
    draws    uniform random numbers from 0 to 1 for the augmentation
    seeds    seed of the noise of each sound
    """

    sounds: Float[Tensor, "b n"] | RecordedStrings
    samples: Int[Tensor, "b"]
    targets: Int[Tensor, "b t"]
    lengths: Int[Tensor, "b"]
    draws: Float[Tensor, "b k"]
    seeds: Int[Tensor, "b"]


@dataclass(frozen=True, eq=False)
class DigitRecognitionTask:
    """Training task: recognise digit strings with the CTC loss.

    Step `step` uses the training strings with the numbers from step * batch_size to (step + 1) * batch_size - 1.
    """

    splits: SpeechSplits
    settings: SpeechSettings
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def batch(self, step: int, part: int, of: int) -> SpeechBatch:
        """Return micro-batch `part`, counted from 0, of a training step that is split into `of` micro-batches."""
        settings, size = self.settings, self.settings.plan.batch_size
        share = size // of
        mine = slice(part * share, (part + 1) * share)
        numbers = range(step * size, (step + 1) * size)[mine]
        strings = self._record if isinstance(self.splits.train, DigitStringSampler) else self._generate
        sounds, samples, labels = strings(numbers)
        targets = torch.zeros(share, settings.train_digits[1], dtype=torch.int64)
        for row, digits in zip(targets, labels, strict=True):
            row[: len(digits)] = digits + 1
        lengths = torch.tensor([len(digits) for digits in labels])
        # drawn for the whole batch, so that the examples do not depend on the number of processes
        draw = sampler_generator(settings.seed, step, "variation")
        draws = torch.rand(size, DRAWS + 4 * settings.augmentation.masks, generator=draw)[mine]
        seeds = torch.randint(1 << 32, (size,), generator=draw)[mine]
        return SpeechBatch(sounds, torch.tensor(samples), targets, lengths, draws, seeds)

    @property
    def width(self) -> int:
        """The padded length of all sounds: the maximum length of an augmented string.

        All batches then have one shape.
        """
        return max_augmented_length(self.settings.max_samples, self.settings.augmentation.speed)

    def _record(self, numbers: range) -> tuple[RecordedStrings, list[int], list[Tensor]]:
        """Return training strings made of recordings, the length of each string in samples, and the digits of each."""
        sampler = self.splits.train
        assert isinstance(sampler, DigitStringSampler)
        records, begins, samples = zip(*map(sampler.choose, numbers), strict=True)
        labels = [sampler.recordings.labels[own] for own in records]
        return sampler.strings(list(records), list(begins)), list(samples), labels

    def _generate(self, numbers: range) -> tuple[Tensor, list[int], list[Tensor]]:
        """Return training strings as samples (b n), the length of each string in samples, and the digits of each."""
        settings, sounds, samples, labels = self.settings, torch.zeros(len(numbers), self.width), [], []
        for row, number in zip(sounds, numbers, strict=True):
            sound, digits = self.splits.train(number)
            if len(sound) > settings.max_samples:
                raise ConfigError(
                    f"max_seconds={settings.max_seconds} is too short for string {number}, which takes "
                    f"{len(sound) / settings.log_mel.sample_rate:.2f}"
                )
            row[: len(sound)] = sound
            samples.append(len(sound))
            labels.append(digits)
        return sounds, samples, labels

    def sounds(self, batch: SpeechBatch) -> Tensor:
        """Return the sounds of a batch. The first call on a device copies all recordings to it."""
        if isinstance(batch.sounds, Tensor):
            return batch.sounds
        device = batch.samples.device
        if device not in self._on_device:
            assert isinstance(self.splits.train, DigitStringSampler)
            self._on_device[device] = self.splits.train.samples.to(device)
        return batch.sounds.sounds(self._on_device[device], self.width)

    def loss(self, model: nn.Module, batch: SpeechBatch) -> Loss:
        """Augment the sounds and return their CTC loss."""
        augmentation, settings = self.settings.augmentation, self.settings.log_mel
        with torch.autocast(batch.samples.device.type, enabled=False):  # half precision cannot represent the powers
            sounds, samples = augment_audio(self.sounds(batch), batch.samples, batch.draws, batch.seeds, augmentation)
            frames = (samples - settings.window_length) // settings.hop_length + 1
            spectrogram = normalized_log_mel(sounds, settings)
            spectrogram = spec_augment(spectrogram, frames, batch.draws[:, DRAWS:], augmentation)
        logits = model(spectrogram, lengths=frames)
        return ctc(logits, batch.targets, rows=frames // STEP, lengths=batch.lengths)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the validation metrics.

        The metric "score" selects the best weights. For tones it is 1 - token error rate, for recordings the mean of
        1 - token error rate and the accuracy on single digits.
        """
        assert isinstance(model, Speech)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            return _validation_metrics(model, self.splits, self.settings.log_mel)


def prepare(settings: SpeechSettings, location: RunLocation) -> TrainingSetup:
    """Build the untrained model and its training task."""
    model = build_from_config(settings.model, seed=settings.seed)
    task = DigitRecognitionTask(load_data(location.data, settings), settings)
    # the final evaluation streams the test strings, in small pieces
    return TrainingSetup(model, (Phase("training", task, settings.plan),), DIGITS, final_validations=20)


def evaluate(
    settings: SpeechSettings, model: Model, tokenizer: CharacterTokenizer, location: RunLocation
) -> dict[str, float]:
    """Return metrics of the trained model: the token error rate of streamed test strings, the latency and others.

    Streaming runs on the CPU in float32, where the logits of a stream equal those of one pass over the whole sound, up
    to rounding.
    """
    assert isinstance(model, Speech)
    model = deepcopy(model).cpu().float().eval()
    splits = load_data(location.data, settings)
    digits, difference = recognize_streaming(model, splits.test, settings.log_mel)
    metrics = {"token error": token_error_rate(digits, splits.test)}
    if splits.test_single is not None:
        digits, other = recognize_streaming(model, splits.test_single, settings.log_mel)
        metrics["digit accuracy"], difference = sequence_accuracy(digits, splits.test_single), max(difference, other)
    validation = _validation_metrics(model, splits, settings.log_mel)
    return {
        **metrics, "digits in silence": float(count_digits_in_silence(model, settings.log_mel)),
        "latency": settings.latency, "streamed - whole": difference,
        **{f"validation {name}": value for name, value in validation.items()},
    }  # fmt: skip


@torch.no_grad()
def count_digits_in_silence(model: Speech, settings: LogMel) -> int:
    """Return how many digits the model recognises in sounds without digits, silent or with weak noise. 0 is correct."""
    count = 0
    for number, spread in enumerate(SILENCE_NOISE):
        generator = sampler_generator(0, number, "silence")
        white = torch.randn(round(SILENCE * settings.sample_rate), generator=generator)
        listener = DigitListener(model, settings)
        count += len(listener.push(spread * white)) + len(listener.finish())
    return count


def _validation_metrics(model: Speech, splits: SpeechSplits, settings: LogMel) -> dict[str, float]:
    error = token_error_rate(recognize(model, splits.validation, settings), splits.validation)
    if splits.validation_single is None:
        return {"score": 1 - error, "token error": error}
    single = recognize(model, splits.validation_single, settings)
    accuracy = sequence_accuracy(single, splits.validation_single)
    return {"score": (1 - error + accuracy) / 2, "token error": error, "digit accuracy": accuracy}
