"""Hearing digits: in a sound that comes in piece by piece or is there as a whole, and how much of it is heard right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import TrainingError
from regard.data.characters import Characters
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel, LogMelStream, log_mel
from regard.models.ctc import CTCGreedyDecoder, ctc_greedy_decode
from regard.models.speech import STEP, Speech, SpeechConfig

DIGITS = Characters("0123456789", special=("<blank>",))  # the blank of CTC is token 0
MEAN, SPREAD = -7.0, 4.0  # of logarithms of power in speech, roughly: what the model sees is near 0 and 1
PIECE = 797  # samples at a time in which a stream is judged; no multiple of a hop or a chunk
TOLERANCE = 1e-3  # between logits of a stream and of one pass, in float32


def latency(model: SpeechConfig, sound: LogMel) -> float:
    """The algorithmic latency in seconds: the most sound that comes between a moment and what is said about it.

    A row of the model covers 4 frames. It is given out when the chunk it is in and those it looks ahead to are there:
    counted from the first sample of the row, `model.latency` hops later the last frame begins that is needed, and that
    takes its own length. Time to compute comes on top.
    """
    return (model.latency * sound.hop + sound.length) / sound.rate


def heard(sound: Float[Tensor, "*b n"], settings: LogMel) -> Float[Tensor, "*b frames bands"]:
    """Frames as the model has them: log-mel, about 0 and 1."""
    return (log_mel(sound, settings) - MEAN) / SPREAD


@dataclass(frozen=True)
class RecognizedWord:
    """A word that was heard.

    at     where in the sound the model has placed it, in seconds: the first sample of its row
    shown  how much sound had come when it was known
    """

    text: str
    at: float
    shown: float


class DigitListener:
    """A model that hears a sound as it comes in, in pieces of any size."""

    def __init__(self, model: Speech, sound: LogMel, tokenizer: Characters = DIGITS) -> None:
        self.sound, self.tokenizer = sound, tokenizer
        self.received = 0  # samples
        self._device = next(model.parameters()).device
        self._none = torch.zeros(1, 0, model.config.vocab, device=self._device)
        self._frames, self._stream, self._reader = LogMelStream(sound), model.stream(), CTCGreedyDecoder()
        self._row = 0

    def push(self, samples: Float[Tensor, "n"]) -> list[RecognizedWord]:
        """The words that are known with these samples."""
        return self.words(self.rows(samples))

    def finish(self) -> list[RecognizedWord]:
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

    def words(self, rows: Float[Tensor, "1 r w"]) -> list[RecognizedWord]:
        """What new rows say."""
        found = []
        for row in range(rows.shape[1]):
            for token in self._reader.push(rows[:, row : row + 1])[0]:
                at = self._row * STEP * self.sound.hop / self.sound.rate
                found.append(RecognizedWord(self.tokenizer.decode([token]), at, self.received / self.sound.rate))
            self._row += 1
        return found


@torch.no_grad()
def streamed(model: Speech, sounds: DigitStrings, settings: LogMel) -> tuple[list[list[int]], float]:
    """The digits of each sound, heard piece by piece, and how far logits were from those of one pass at most."""
    told, apart = [], 0.0
    for number, sound in enumerate(sounds.sounds):
        listener = DigitListener(model, settings)
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
        told += [[token - 1 for token in tokens] for tokens in ctc_greedy_decode(logits, lengths=real // STEP)]
    return told


def token_error(told: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """Digits to insert, leave out or change until all strings are right, as a share of the digits there are."""
    pairs = list(_pairs(told, sounds))
    return sum(edits(heard_digits, said) for heard_digits, said in pairs) / sum(len(said) for _, said in pairs)


def exact(told: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """The share of sounds of which all that was said was heard, and nothing else."""
    return sum(list(heard_digits) == said for heard_digits, said in _pairs(told, sounds)) / len(sounds)


def edits(one: Sequence[int], other: Sequence[int]) -> int:
    """The fewest insertions, deletions and changes that make one sequence the other (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for place, item in enumerate(one, 1):
        before, row[0] = row[0], place
        for at, wanted in enumerate(other, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (item != wanted))
    return row[-1]


def _pairs(told: Sequence[Sequence[int]], sounds: DigitStrings) -> Iterator[tuple[Sequence[int], list[int]]]:
    return zip(told, (label.tolist() for label in sounds.labels), strict=True)
