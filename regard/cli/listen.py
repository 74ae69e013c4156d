"""`regard listen`: words as they are heard, in a file or in what comes in."""

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
from regard.cli.output import show_json, tell

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models.speech import Speech
    from regard.recipes.digit_listener import RecognizedWord
    from regard.recipes.speech import Settings

PIECE = 100  # of a second of sound is listened to at a time


def command(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run of the recipe speech")],
    file: Annotated[str, typer.Argument(help="A WAV file; - listens to raw 16-bit samples of one channel on stdin")],
    rate: Annotated[
        int | None, typer.Option(help="Samples a second of what comes on stdin; those of the model unless given")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="All words with their times, when the sound has ended")] = False,
) -> None:
    """Write down the words of a sound while it comes in.

    Each is shown with the seconds of sound that it takes to know it, and how many of them come after the moment at
    which the model has placed it. The algorithmic latency is the most that these can be.
    """
    settings, model = opened(folder)
    if file == "-":
        own = settings.sound.rate if rate is None else check_integer("--rate", rate, 1, "samples a second")
        pieces = from_stdin(own)
    elif rate is not None:
        raise ConfigError("--rate is about raw samples on stdin; a WAV file says itself which rate it has")
    else:
        pieces, own = from_file(file)
    bridge = Resampling(own, settings.sound.rate)
    words: list[RecognizedWord] = []
    hearing = Hearing(model, settings, bridge)
    for word in hearing.words(pieces):
        words.append(word)
        if not json:
            say(f"{word.text}  known at {word.shown:.2f} s, {word.shown - word.at:.2f} s after it was heard\n")
    if json:
        told = [asdict(word) for word in words]
        about = {"folder": str(folder), "file": file, "rate": own, "seconds": hearing.seconds}
        show_json({**about, "latency": hearing.latency, "words": told})
        return
    count = "1 word" if len(words) == 1 else f"{len(words)} words"
    say(f"{count} in {hearing.seconds:.2f} s of sound; algorithmic latency {1000 * hearing.latency:.0f} ms\n")


def opened(folder: Path) -> "tuple[Settings, Speech]":
    """What a finished run of the recipe left behind."""
    from regard.models.speech import Speech
    from regard.recipes.recipe import load_finished_run

    recipe, settings, model, _ = load_finished_run(folder)
    if not isinstance(model, Speech):
        raise ConfigError(
            f"{folder} holds a run of the recipe {recipe.name}, whose model does not listen; that of speech does"
        )
    return settings, model.eval()


def from_file(file: str) -> "tuple[Iterator[Tensor], int]":
    """The sound of a WAV file in pieces, and its rate."""
    from regard.data.spoken import read_wav

    sound, rate = read_wav(file)
    return iter(sound.split(max(1, rate // PIECE))), rate


def from_stdin(rate: int) -> "Iterator[Tensor]":
    """Raw samples as they come, until they end or the user stops them."""
    import numpy
    import torch

    size, held, first = 2 * max(1, rate // PIECE), b"", True
    while data := _more(size):
        held += data
        if first and len(held) >= 4:
            if held.startswith(b"RIFF"):
                raise DataError("what comes on stdin is a WAV file, not raw samples; give its name instead of -")
            first = False
        ready = len(held) - len(held) % 2
        samples = numpy.frombuffer(held[:ready], dtype="<i2").astype(numpy.float32)
        held = held[ready:]
        yield torch.from_numpy(samples) / 2**15
    if held:
        tell("the sound ended inside a sample of two bytes; are these raw 16-bit samples?")


def _more(size: int) -> bytes:
    try:
        return cast(BufferedReader, sys.stdin.buffer).read1(size)  # what is there, without waiting for all of it
    except KeyboardInterrupt:  # the usual end of a live sound
        return b""


class Hearing:
    """Pieces of a sound to words, and how many seconds have come."""

    def __init__(self, model: "Speech", settings: "Settings", bridge: "Resampling") -> None:
        from regard.models.speech import STEP
        from regard.recipes.digit_listener import DigitListener

        self.listener, self.bridge = DigitListener(model, settings.sound), bridge
        self.latency = settings.latency + bridge.latency
        self.chunk = STEP * settings.model.chunk * settings.sound.hop  # samples whose rows are given out together
        self.needed = round(settings.latency * bridge.to)  # samples from the first of a chunk

    @property
    def seconds(self) -> float:
        return self.bridge.received / self.bridge.rate

    def words(self, pieces: "Iterator[Tensor]") -> "Iterator[RecognizedWord]":
        for piece in pieces:
            yield from self._timed(self.listener.push(self.bridge.push(piece)))
        yield from self._timed(self.listener.push(self.bridge.finish()))
        yield from self._timed(self.listener.finish())

    def _timed(self, words: "list[RecognizedWord]") -> "Iterator[RecognizedWord]":
        """Timed by the last sample that the chunk of a word needs, or by the end of the sound where it came before."""
        for word in words:
            begun = round(word.at * self.bridge.to) // self.chunk * self.chunk
            known = (begun + self.needed) / self.bridge.to + self.bridge.latency
            yield replace(word, shown=min(self.seconds, known))


class Resampling:
    """`resampled` for a sound that comes in pieces: each sample as soon as all that it depends on is there."""

    def __init__(self, rate: int, to: int) -> None:
        from regard.data.resample import KEPT, ZEROS

        common = math.gcd(rate, to)
        self.rate, self.to = rate, to
        self.down, self.up = rate // common, to // common
        # so many old samples on either side of a new one take part in it
        self.reach = 0 if rate == to else math.ceil(ZEROS / (KEPT * min(1.0, to / rate)))
        self.received = self.given = 0
        self._held: Tensor | None = None
        self._begin = 0  # the place of the first sample held: a multiple of `down`, where a new one stands as well

    @property
    def latency(self) -> float:
        """The seconds that a sample waits at most."""
        return self.reach / self.rate

    def push(self, piece: "Tensor") -> "Tensor":
        """The samples at the new rate that are final now."""
        self.received += len(piece)
        return self._up_to(piece, (self.received - self.reach) * self.up // self.down + 1)

    def finish(self) -> "Tensor":
        """The samples that were waiting for more."""
        import torch

        return self._up_to(torch.zeros(0), -(-self.received * self.up // self.down))

    def _up_to(self, piece: "Tensor", ready: int) -> "Tensor":
        import torch

        from regard.data.resample import resample

        if self.rate == self.to:
            return piece
        held = piece if self._held is None else torch.cat([self._held, piece])
        if ready <= self.given:
            self._held = held
            return held[:0]
        offset = self._begin // self.down * self.up
        found = resample(held, self.rate, self.to)[self.given - offset : ready - offset]
        self.given += len(found)
        needed = max(0, self.given * self.down // self.up - self.reach) // self.down * self.down
        self._held, self._begin = held[needed - self._begin :].clone(), needed
        return found


def say(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()
