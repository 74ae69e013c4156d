"""Recognise spoken digits with a CTC model, in streams or in whole sounds."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import TrainingError
from regard.data.characters import CharacterTokenizer
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel, LogMelStream, log_mel
from regard.models.ctc_decoding import CTCGreedyDecoder, ctc_greedy_decode
from regard.models.speech import STEP, Speech, SpeechConfig

DIGITS = CharacterTokenizer("0123456789", special=("<blank>",))  # the CTC blank is token 0
MEAN, SPREAD = -7.0, 4.0  # approximate mean and standard deviation of log-mel values of speech
PIECE = 797  # samples of a piece in streaming evaluation; not a multiple of a hop or a chunk
TOLERANCE = 1e-3  # between logits of a stream and of one pass, in float32


def algorithmic_latency(model: SpeechConfig, settings: LogMel) -> float:
    """Return the algorithmic latency in seconds: how much sound after a sample its output row needs, at most.

    An output row has the logits for 4 frames together. It can be computed when its own chunk and the look-ahead chunks
    are complete. The last frame of these chunks begins `model.latency` hops after the first sample of the row. The time
    of computing is not included.
    """
    return (model.latency * settings.hop_length + settings.window_length) / settings.sample_rate


def normalized_log_mel(sound: Float[Tensor, "*b n"], settings: LogMel) -> Float[Tensor, "*b frames mels"]:
    """Return the log-mel spectrogram, scaled so that speech has about mean 0 and standard deviation 1.

    This is the input of the model.
    """
    return (log_mel(sound, settings) - MEAN) / SPREAD


@dataclass(frozen=True)
class RecognizedWord:
    """A recognised word with its time.

    at     seconds from the start of the sound to the first sample of the output row in which the word was
           recognised
    shown  seconds of sound that had been received when the word was recognised
    """

    text: str
    at: float
    shown: float


class DigitListener:
    """Streaming speech recogniser: `push` takes the next piece of a sound and returns newly recognised words.

    Pieces can have any size. `finish` returns the last words.
    """

    def __init__(self, model: Speech, settings: LogMel) -> None:
        self.settings = settings
        self.received = 0  # samples
        self._device = next(model.parameters()).device
        self._none = torch.zeros(1, 0, model.config.vocab, device=self._device)
        self._frames, self._stream, self._decoder = LogMelStream(settings), model.stream(), CTCGreedyDecoder()
        self._row = 0

    def push(self, samples: Float[Tensor, "n"]) -> list[RecognizedWord]:
        """Add samples of the sound and return the words that are recognised by now and were not returned before."""
        return self.words(self.rows(samples))

    def finish(self) -> list[RecognizedWord]:
        """End the sound and return the remaining words."""
        return self.words(self.last_rows())

    def rows(self, samples: Float[Tensor, "n"]) -> Float[Tensor, "1 r w"]:
        """Add samples of the sound and return the logits of the output rows that are now complete.

        The shape is (1, rows, vocabulary size).
        """
        self.received += len(samples)
        frames = (self._frames.push(samples.to(self._device)) - MEAN) / SPREAD
        return self._stream.push(frames[None]) if len(frames) else self._none

    def last_rows(self) -> Float[Tensor, "1 r w"]:
        """End the sound and return the logits of the remaining output rows, in the shape of `rows`."""
        return self._stream.finish() if self._stream.received else self._none

    def words(self, rows: Float[Tensor, "1 r w"]) -> list[RecognizedWord]:
        """Convert the logits of new output rows to recognised words, by greedy CTC decoding."""
        found = []
        rate = self.settings.sample_rate
        for row in range(rows.shape[1]):
            for token in self._decoder.push(rows[:, row : row + 1])[0]:
                at = self._row * STEP * self.settings.hop_length / rate
                found.append(RecognizedWord(DIGITS.decode([token]), at, self.received / rate))
            self._row += 1
        return found


@torch.no_grad()
def recognize_streaming(model: Speech, sounds: DigitStrings, settings: LogMel) -> tuple[list[list[int]], float]:
    """Recognise each sound as a stream of small pieces and return its digits.

    Also returns the largest difference between the logits of the stream and of one pass over the whole sound. Raises
    TrainingError if the difference exceeds a tolerance.
    """
    digits, largest = [], 0.0
    for number, sound in enumerate(sounds.sounds):
        listener = DigitListener(model, settings)
        rows = [*(listener.rows(piece) for piece in sound.split(PIECE)), listener.last_rows()]
        digits.append([int(word.text) for each in rows for word in listener.words(each)])
        frames = normalized_log_mel(sound, settings)
        if len(frames) < STEP:
            continue
        whole = model(frames[None])
        largest = max(largest, float((torch.cat(rows, 1) - whole).abs().max()))
        if not largest <= TOLERANCE:
            raise TrainingError(f"the streamed logits of sound {number} differ by {largest:.2g} from those of one pass")
    return digits, largest


@torch.no_grad()
def recognize(model: Speech, sounds: DigitStrings, settings: LogMel, batch_size: int = 64) -> list[list[int]]:
    """Recognise whole sounds in batches and return the digits of each."""
    digits: list[list[int]] = []
    device = next(model.parameters()).device
    least = settings.window_length + (STEP - 1) * settings.hop_length
    for start in range(0, len(sounds), batch_size):
        part = sounds.sounds[start : start + batch_size]
        padded = torch.zeros(len(part), max(least, *map(len, part)), device=device)
        for row, sound in zip(padded, part, strict=True):
            row[: len(sound)] = sound
        frames = torch.tensor([settings.num_frames(len(sound)) for sound in part], device=device)
        logits = model(normalized_log_mel(padded, settings), lengths=frames)
        digits += [[token - 1 for token in tokens] for tokens in ctc_greedy_decode(logits, lengths=frames // STEP)]
    return digits
