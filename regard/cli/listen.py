"""`regard listen`: streaming speech recognition of a WAV file or of raw samples on stdin."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from regard.base.errors import ConfigError, DataError
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
    json: JsonOption = False,
) -> None:
    """Recognise the words of a sound while it is streamed.

    Each word is printed with the time at which it is recognised, and its delay: the seconds of sound between its
    position and that time. The algorithmic latency is the maximum delay. Samples on stdin have the sample rate of the
    model, which is 8,000 per second for tone-digits.

    Example: regard listen tone-digits dialled.wav
    """
    if file is None:
        file = example_input(str(folder), "there is no sound; give a WAV file after the model, or - for stdin")
        print_message(f"the sound is {file}, the example of {folder}")
    settings, model = load_speech_run(folder)
    rate = settings.log_mel.sample_rate
    pieces = read_stdin(rate) if file == "-" else read_pieces(file, rate)
    words: list[RecognizedWord] = []
    recognizer = StreamRecognizer(model, settings)
    for word in recognizer.words(pieces):
        words.append(word)
        if not json:
            write_text(f"{word.text}  recognised at {word.shown:.2f} s, delay {word.shown - word.at:.2f} s\n")
    if json:
        recognized = [asdict(word) for word in words]
        about = {"folder": str(folder), "file": file, "rate": rate, "seconds": recognizer.seconds}
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


def read_pieces(file: str, rate: int) -> "Iterator[Tensor]":
    """Read a WAV file, resample it to this rate, and return an iterator over consecutive chunks of its samples."""
    from regard.data.resample import resample
    from regard.data.spoken_digits import read_wav

    sound, own = read_wav(file)
    return iter(resample(sound, own, rate).split(max(1, rate // PIECES_PER_SECOND)))


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

    def __init__(self, model: "Speech", settings: "SpeechSettings") -> None:
        from regard.models.speech import STEP
        from regard.recipes.digit_listener import DigitListener

        self.listener, self.latency = DigitListener(model, settings.log_mel), settings.latency
        self.rate, self.received = settings.log_mel.sample_rate, 0
        # samples whose rows become final together
        self.chunk = STEP * settings.model.chunk * settings.log_mel.hop_length
        self.needed = round(settings.latency * self.rate)  # samples needed from the start of a chunk

    @property
    def seconds(self) -> float:
        """The seconds of sound received so far."""
        return self.received / self.rate

    def words(self, pieces: "Iterator[Tensor]") -> "Iterator[RecognizedWord]":
        """Yield the words in a sound that arrives in pieces, each as soon as it is recognised."""
        for piece in pieces:
            self.received += len(piece)
            yield from self._set_times(self.listener.push(piece))
        yield from self._set_times(self.listener.finish())

    def _set_times(self, words: "list[RecognizedWord]") -> "Iterator[RecognizedWord]":
        """Yield each word with the time at which it was recognised, in seconds of sound.

        The model recognises the sound in chunks. The time is the one at which all samples that the word's chunk needs
        had arrived, but at most the length of the sound.
        """
        for word in words:
            start = round(word.at * self.rate) // self.chunk * self.chunk
            yield replace(word, shown=min(self.seconds, (start + self.needed) / self.rate))
