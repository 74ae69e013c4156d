"""`regard listen`: streaming speech recognition of a WAV file or of raw samples on stdin."""

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer
from regard.cli.output import JsonOption, print_message, show_json, write_text
from regard.cli.pretrained import example_input

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models.speech import Speech
    from regard.recipes.digit_listener import RecognizedWord
    from regard.recipes.speech import SpeechSettings

PIECES_PER_SECOND = 100


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="model", help="A pretrained model, or the folder of a finished run of speech")
    ] = Path("tone-digits"),
    file: Annotated[
        str | None,
        typer.Argument(
            help="A WAV file, or - for raw 16-bit mono samples on stdin [default: the example of a pretrained model]"
        ),
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Sample rate of stdin [default: that of the model]")] = None,
    json: JsonOption = False,
) -> None:
    """Recognise the words of a sound while it is streamed.

    Each word is printed with the time at which it is recognised, and its delay: the seconds of sound between its
    position and that time. The algorithmic latency is the maximum delay.

    Example: regard listen tone-digits dialled.wav
    """
    if file is None:
        file = example_input(str(folder), "there is no sound; give a WAV file after the model, or - for stdin")
        print_message(f"the sound is {file}, the example of {folder}")
    settings, model = load_speech_run(folder)
    if file == "-":
        own = settings.log_mel.sample_rate if rate is None else check_integer("--rate", rate, 1, "samples per second")
        pieces = read_stdin(own)
    elif rate is not None:
        raise ConfigError("--rate is for raw samples on stdin; a WAV file has its own sample rate")
    else:
        pieces, own = read_pieces(file)
    resampler = StreamResampler(own, settings.log_mel.sample_rate)
    words: list[RecognizedWord] = []
    recognizer = StreamRecognizer(model, settings, resampler)
    for word in recognizer.words(pieces):
        words.append(word)
        if not json:
            write_text(f"{word.text}  recognised at {word.shown:.2f} s, delay {word.shown - word.at:.2f} s\n")
    if json:
        recognized = [asdict(word) for word in words]
        about = {"folder": str(folder), "file": file, "rate": own, "seconds": recognizer.seconds}
        show_json({**about, "latency": recognizer.latency, "words": recognized})
        return
    count = "1 word" if len(words) == 1 else f"{len(words)} words"
    write_text(
        f"{count} in {recognizer.seconds:.2f} s of sound; algorithmic latency {1000 * recognizer.latency:.0f} ms\n"
    )


def load_speech_run(folder: Path) -> "tuple[SpeechSettings, Speech]":
    """Load the settings and the model of a finished run of the speech recipe."""
    from regard.models.speech import Speech
    from regard.recipes.recipe import load_finished_run

    recipe, settings, model, _ = load_finished_run(folder)
    if not isinstance(model, Speech):
        raise ConfigError(f"{folder} has a run of the recipe {recipe.name}; `regard listen` needs a run of speech")
    return settings, model.eval()


def read_pieces(file: str) -> "tuple[Iterator[Tensor], int]":
    """Read a WAV file. Returns its samples in pieces, and its sample rate."""
    from regard.data.spoken_digits import read_wav

    sound, rate = read_wav(file)
    return iter(sound.split(max(1, rate // PIECES_PER_SECOND))), rate


def read_stdin(rate: int) -> "Iterator[Tensor]":
    """Yield raw 16-bit samples from stdin as they arrive, scaled to -1 to 1, until the input ends or Ctrl-C."""
    import numpy
    import torch

    size, held, first = 2 * max(1, rate // PIECES_PER_SECOND), b"", True
    while data := _read_available(size):
        held += data
        if first and len(held) >= 4:
            if held.startswith(b"RIFF"):
                raise DataError("stdin is a WAV file, not raw samples; pass the name of the file instead of -")
            first = False
        ready = len(held) - len(held) % 2
        samples = numpy.frombuffer(held[:ready], dtype="<i2").astype(numpy.float32)
        held = held[ready:]
        yield torch.from_numpy(samples) / 2**15
    if held:
        print_message("the input ended inside a 16-bit sample; are these raw 16-bit samples?")


def _read_available(size: int) -> bytes:
    try:
        return cast(BufferedReader, sys.stdin.buffer).read1(size)  # what is available, without waiting for more
    except KeyboardInterrupt:  # the usual end of live input
        return b""


class StreamRecognizer:
    """Streaming speech recogniser that also reports at which time each word was recognised."""

    def __init__(self, model: "Speech", settings: "SpeechSettings", resampler: "StreamResampler") -> None:
        from regard.models.speech import STEP
        from regard.recipes.digit_listener import DigitListener

        self.listener, self.resampler = DigitListener(model, settings.log_mel), resampler
        self.latency = settings.latency + resampler.latency
        self.chunk = (
            STEP * settings.model.chunk * settings.log_mel.hop_length
        )  # samples whose rows become final together
        self.needed = round(settings.latency * resampler.to)  # samples needed from the start of a chunk

    @property
    def seconds(self) -> float:
        """The seconds of sound received so far."""
        return self.resampler.received / self.resampler.rate

    def words(self, pieces: "Iterator[Tensor]") -> "Iterator[RecognizedWord]":
        """Yield the words in a sound that arrives in pieces, each as soon as it is recognised."""
        for piece in pieces:
            yield from self._set_times(self.listener.push(self.resampler.push(piece)))
        yield from self._set_times(self.listener.push(self.resampler.finish()))
        yield from self._set_times(self.listener.finish())

    def _set_times(self, words: "list[RecognizedWord]") -> "Iterator[RecognizedWord]":
        """Yield each word with the time at which enough sound for its chunk had arrived; at most the length of the
        sound.
        """
        for word in words:
            start = round(word.at * self.resampler.to) // self.chunk * self.chunk
            known = (start + self.needed) / self.resampler.to + self.resampler.latency
            yield replace(word, shown=min(self.seconds, known))


class StreamResampler:
    """Streaming version of `resample`: returns each new sample as soon as all samples it depends on have arrived.

    rate  old sample rate
    to    new sample rate
    """

    def __init__(self, rate: int, to: int) -> None:
        from regard.data.resample import PASSBAND, ZERO_CROSSINGS

        common = math.gcd(rate, to)
        self.rate, self.to = rate, to
        self.down, self.up = rate // common, to // common
        # old samples on either side that a new sample depends on
        self.reach = 0 if rate == to else math.ceil(ZERO_CROSSINGS / (PASSBAND * min(1.0, to / rate)))
        self.received = self.returned = 0
        self._buffer: Tensor | None = None
        self._begin = 0  # index of the first buffered sample: a multiple of `down`, where a new sample is too

    @property
    def latency(self) -> float:
        """The maximum delay, in seconds, between a sample and its resampled value."""
        return self.reach / self.rate

    def push(self, piece: "Tensor") -> "Tensor":
        """Add a piece of the sound and return the resampled samples that do not depend on later input."""
        self.received += len(piece)
        return self._up_to(piece, (self.received - self.reach) * self.up // self.down + 1)

    def finish(self) -> "Tensor":
        """End the sound and return the remaining resampled samples."""
        import torch

        return self._up_to(torch.zeros(0), -(-self.received * self.up // self.down))

    def _up_to(self, piece: "Tensor", ready: int) -> "Tensor":
        import torch

        from regard.data.resample import resample

        if self.rate == self.to:
            return piece
        buffer = piece if self._buffer is None else torch.cat([self._buffer, piece])
        if ready <= self.returned:
            self._buffer = buffer
            return buffer[:0]
        offset = self._begin // self.down * self.up
        found = resample(buffer, self.rate, self.to)[self.returned - offset : ready - offset]
        self.returned += len(found)
        needed = max(0, self.returned * self.down // self.up - self.reach) // self.down * self.down
        self._buffer, self._begin = buffer[needed - self._begin :].clone(), needed
        return found
