"""Text from a model that tells each next token.

    texts = generate(model, [[5, 17], [3, 8, 2]], strategy=sample(top_p=0.9, seed=1), length=40, stops=[0])
    for token in stream(model, [[5, 17]]): ...

A text is a function of its prompt, the strategy and its number in the batch. What stands beside it, how the batch is
padded, and whether a cache is used change the rounding of numbers and nothing else.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, RegardError, ShapeError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.models.generation_adapters import Aligned, GenerationAdapter, Reader, Shifted, as_decoder, make_adapter
from regard.models.gpt import GPT
from regard.models.sampling import Beam, Choice, Strategy, beam, check_strategy, greedy, kth_largest, leading, sample
from regard.nn.embeddings import check_tokens

__all__ = [
    "GeneratedText",
    "GeneratedToken",
    "GenerationAdapter",
    "beam",
    "collect_tokens",
    "generate",
    "greedy",
    "kth_largest",
    "make_adapter",
    "sample",
    "stream",
]

Ended = Literal["stop", "length", "context"]
Side = Literal["left", "right"]
Tokens = Sequence[int] | Tensor
Stop = int | Tokens
GREEDY = greedy()


class GeneratedToken(NamedTuple):
    """One token as it comes."""

    text: int  # of which prompt
    token: int
    log_probability: float  # what the model gave it, whatever the strategy made of that
    ended: Ended | None  # why it is its text's last, if it is


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """What was written after a prompt.

    tokens             the new ones, with the stop that ended them
    log_probabilities  what the model gave each of them, whatever the strategy made of that
    ended              "stop"; "length": as long as was asked for; "context": the model can read no further
    stop               the tokens that ended it, if some did
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    ended: Ended
    stop: tuple[int, ...] = ()

    @property
    def body(self) -> tuple[int, ...]:
        """The new tokens without the stop."""
        return self.tokens[: len(self.tokens) - len(self.stop)]

    @property
    def log_probability(self) -> float:
        """Of all new tokens together."""
        return sum(self.log_probabilities)


def generate(
    model: GPT | GenerationAdapter,
    prompts: Sequence[Tokens] | Tensor,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    filled: Side = "right",
    strategy: Strategy = GREEDY,
    length: int = 64,
    stops: Sequence[Stop] = (),
    cache: bool = True,
    padding: Side = "right",
) -> list[GeneratedText]:
    """Each prompt's continuation.

    model    a GPT; for an encoder-decoder `make_adapter(model, source)`, with prompts that hold its start token
    prompts  lists of tokens, or a tensor (b n) of which `lengths[r]` tokens of row r are real
    filled   on which side such a tensor was filled up: "right" means that the real tokens come first, "left" that they
             come last. It says nothing about `padding`
    length   the most new tokens. A text also ends when the model has read as many as its context holds: the last token
             may then be one that could not be read any more
    stops    tokens, and sequences of tokens, that end a text where they are written; a prompt's tokens do not count
    cache    False runs a whole pass for every token
    padding  how prompts of different lengths share a batch inside, however they were given. "right" keeps each token at
             its own position and suits all models; "left" fills up at the front and reads all prompts in one pass.
             Texts are the same
    """
    task = _task(model, prompts, lengths, filled, strategy, length, stops, cache, padding)
    written: list[list[GeneratedToken]] = [[] for _ in task.prompts]
    for token in task.run():
        written[token.text].append(token)
    return [collect_tokens(prompt, tokens, task.stops) for prompt, tokens in zip(task.prompts, written, strict=True)]


def stream(
    model: GPT | GenerationAdapter,
    prompts: Sequence[Tokens] | Tensor,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    filled: Side = "right",
    strategy: Strategy = GREEDY,
    length: int = 64,
    stops: Sequence[Stop] = (),
    cache: bool = True,
    padding: Side = "right",
) -> Iterator[GeneratedToken]:
    """The tokens that `generate` puts together, as they come; those of a beam come when its search is over."""
    return _task(model, prompts, lengths, filled, strategy, length, stops, cache, padding).run()


@dataclass(slots=True)
class Row:
    """A text under way."""

    text: int
    tokens: list[int]  # prompt and all
    log_probabilities: list[float] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def new(self) -> int:
        return len(self.log_probabilities)

    def extended(self, token: int, log_probability: float) -> "Row":
        return Row(self.text, [*self.tokens, token], [*self.log_probabilities, log_probability])


@dataclass(frozen=True)
class GenerationRun:
    """All that was asked for, checked."""

    decoder: GenerationAdapter
    reader: Reader
    prompts: list[list[int]]
    strategy: Strategy
    length: int
    stops: tuple[tuple[int, ...], ...]

    def run(self) -> Iterator[GeneratedToken]:
        rows = [Row(text, prompt) for text, prompt in enumerate(self.prompts)]
        if isinstance(self.strategy, Beam):
            return self._search(rows, self.strategy)
        assert isinstance(self.strategy, Choice)
        return self._choose(rows, self.strategy)

    def _choose(self, rows: list[Row], strategy: Choice) -> Iterator[GeneratedToken]:
        draws = [make_generator(strategy.seed + text) for text in range(len(rows))]
        while rows:
            ready, logits, log_probabilities = self._read(rows)
            chance = [torch.rand((), generator=draws[rows[row].text], dtype=torch.float64) for row in ready]
            chosen = strategy.choose(logits, torch.stack(chance).to(logits.device))
            values = log_probabilities.gather(1, chosen[:, None])[:, 0]
            for row, token, value in zip(ready, chosen.tolist(), values.tolist(), strict=True):
                rows[row] = rows[row].extended(token, value)
                rows[row].ended = self._ended(rows[row])
                yield GeneratedToken(rows[row].text, token, value, rows[row].ended)
            going = [number for number, row in enumerate(rows) if row.ended is None]
            rows = self._kept(rows, going, [rows[number] for number in going])

    def _search(self, rows: list[Row], strategy: Beam) -> Iterator[GeneratedToken]:
        done: list[list[Row]] = [[] for _ in rows]
        while rows:
            ready, _, log_probabilities = self._read(rows)
            best = dict(zip(ready, _best([rows[row] for row in ready], log_probabilities, strategy.width), strict=True))
            following: list[Row] = []
            parents: list[int] = []
            for text, group in groupby(range(len(rows)), key=lambda number: rows[number].text):
                members = list(group)
                if members[0] not in best:  # a longer prompt, still being read
                    following += [rows[member] for member in members]
                    parents += members
                    continue
                free = strategy.width - len(done[text])
                possible = [(member, *each) for member in members for each in best[member]]
                # equally likely ones stay in order: earlier rows first, and then lower tokens
                for member, token, value, _ in sorted(possible, key=lambda each: -each[-1])[:free]:
                    row = rows[member].extended(token, value)
                    row.ended = self._ended(row)
                    if row.ended is not None:
                        done[text].append(row)
                    else:
                        following.append(row)
                        parents.append(member)
                if not following or following[-1].text != text:
                    yield from _told(max(done[text], key=lambda row: strategy.score(_total(row), row.new)))
            rows = self._kept(rows, parents, following)

    def _read(self, rows: list[Row]) -> tuple[list[int], Float[Tensor, "r w"], Float[Tensor, "r w"]]:
        """Which rows have been read to their ends, the logits of their next tokens, and the log-probabilities."""
        with torch.no_grad(), eval_mode(self.decoder.module):
            ready, logits = self.reader.read([row.tokens for row in rows])
        log_probabilities = logits.log_softmax(-1, dtype=torch.float64)
        if log_probabilities[:, 0].isnan().any():  # one bad logit spoils its whole row
            raise RegardError("the model's logits hold NaN or infinity and tell no next token; look at its weights")
        return ready, logits, log_probabilities

    def _kept(self, rows: list[Row], parents: list[int], following: list[Row]) -> list[Row]:
        """The rows that follow, of which number r goes on from rows[parents[r]]; the reader does likewise."""
        if following and parents != list(range(len(rows))):
            self.reader.keep(parents)
        return following

    def _ended(self, row: Row) -> Ended | None:
        if _met(self.stops, row.tokens[len(row.tokens) - row.new :]):
            return "stop"
        if row.new == self.length:
            return "length"
        return "context" if len(row.tokens) > self.decoder.context else None


def collect_tokens(
    prompt: Sequence[int], tokens: Sequence[GeneratedToken], stops: Sequence[Stop] = ()
) -> GeneratedText:
    """The text that the tokens of a stream make up, from the first to the one that says why it ended."""
    if not tokens or tokens[-1].ended is None:
        raise ConfigError("the stream of this text has not ended; its last token says why it did")
    new = tuple(each.token for each in tokens)
    values = tuple(each.log_probability for each in tokens)
    stop = _met(_in_order(stops), new) if tokens[-1].ended == "stop" else ()
    return GeneratedText(tuple(prompt), new, values, tokens[-1].ended, stop)


def _best(rows: list[Row], log_probabilities: Float[Tensor, "r w"], count: int) -> list[list[tuple[int, float, float]]]:
    """The likeliest continuations of each row by one token, best first: the token, its log-probability, that of all.

    All rows at once: what a GPU is asked for should not grow with the number of texts.
    """
    before = torch.tensor([_total(row) for row in rows], dtype=torch.float64, device=log_probabilities.device)
    totals = before[:, None] + log_probabilities
    tokens = leading(totals, count)
    values, sums = log_probabilities.gather(1, tokens), totals.gather(1, tokens)
    return [
        [each for each in zip(*row, strict=True) if each[-1] > -math.inf]
        for row in zip(tokens.tolist(), values.tolist(), sums.tolist(), strict=True)
    ]


def _told(row: Row) -> Iterator[GeneratedToken]:
    tokens = row.tokens[len(row.tokens) - row.new :]
    for number, (token, value) in enumerate(zip(tokens, row.log_probabilities, strict=True), 1):
        yield GeneratedToken(row.text, token, value, row.ended if number == row.new else None)


def _total(row: Row) -> float:
    return sum(row.log_probabilities)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; afterwards every part is in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _task(
    model: GPT | GenerationAdapter,
    prompts: Sequence[Tokens] | Tensor,
    lengths: Sequence[int] | Tensor | None,
    filled: str,
    strategy: Strategy,
    length: int,
    stops: Sequence[Stop],
    cache: bool,
    padding: str,
) -> GenerationRun:
    decoder = as_decoder(model)
    check_strategy(strategy, decoder.vocab)
    length = check_integer("length", length, 1, "new tokens")
    rows = _prompts(prompts, lengths, filled, decoder)
    decoder.check_texts(len(rows))
    ends = _in_order(stops, decoder.vocab)
    capacity = min(decoder.context, max(map(len, rows)) + length)
    reader: Reader
    if padding == "right":
        with torch.no_grad(), eval_mode(decoder.module):  # an encoder-decoder reads its source here
            reader = Aligned(decoder, len(rows), capacity, cache)
    elif padding == "left":
        reader = Shifted(decoder, capacity, cache)
    else:
        raise ConfigError(f"padding is 'left' or 'right', not {padding!r}")
    return GenerationRun(decoder, reader, rows, strategy, length, ends)


def _prompts(
    prompts: Sequence[Tokens] | Tensor, lengths: Sequence[int] | Tensor | None, filled: str, decoder: GenerationAdapter
) -> list[list[int]]:
    """Prompts as lists, or an error that says which one does not fit."""
    if filled not in ("left", "right"):
        raise ConfigError(f"filled is 'left' or 'right', not {filled!r}")
    if filled == "left" and lengths is None:
        raise ConfigError("filled='left' goes with lengths, which say how many tokens at each row's end are real")
    if isinstance(prompts, Tensor):
        check_tokens(prompts, decoder.vocab, "prompts")
        rows = prompts.tolist()
        if lengths is not None:
            real = _lengths(lengths, *prompts.shape)
            starts = [len(row) - count if filled == "left" else 0 for row, count in zip(rows, real, strict=True)]
            rows = [row[start : start + count] for row, start, count in zip(rows, starts, real, strict=True)]
    else:
        if lengths is not None:
            raise ConfigError("lengths go with prompts in one tensor (b n); lists of tokens have lengths of their own")
        if not isinstance(prompts, list | tuple):
            raise ConfigError(f"prompts are lists of tokens, or one tensor of them (b n), not {prompts!r}")
        if not prompts:
            raise ConfigError("there are no prompts; give at least one list of tokens")
        rows = [_tokens(f"prompts[{number}]", prompt, decoder.vocab) for number, prompt in enumerate(prompts)]
    for number, row in enumerate(rows):
        if not row:
            raise ShapeError(f"prompts[{number}] is empty; a text needs a first token to go on from")
        if len(row) > decoder.context:
            raise ShapeError(
                f"prompts[{number}] has {len(row)} tokens, but the model can read {decoder.context}; "
                f"keep the last ones: prompt[-{decoder.context}:]"
            )
    return rows


def _lengths(lengths: Sequence[int] | Tensor, b: int, n: int) -> list[int]:
    found: list[int] = [check_integer("lengths", each, 0) for each in lengths]
    if len(found) != b or max(found) > n:
        raise ShapeError(f"lengths are one number up to {n} for each of {b} prompts, not {found}")
    return found


def _tokens(name: str, tokens: object, vocab: int | None) -> list[int]:
    """A list of tokens of the vocabulary."""
    if isinstance(tokens, Tensor) and tokens.ndim == 1:
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise ConfigError(f"{name} is a list of tokens such as [3, 1, 4], not {tokens!r}")
    found = [check_integer(f"a token of {name}", token, 0) for token in tokens]
    if vocab is not None and found and max(found) >= vocab:
        raise ShapeError(f"{name} holds {max(found)}, but the vocabulary has tokens 0 to {vocab - 1}")
    return found


def _in_order(stops: Sequence[Stop], vocab: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Stops as sequences, long ones first, so that the longest is the one that is told."""
    if not isinstance(stops, list | tuple):
        raise ConfigError(f"stops is a list of tokens and of sequences of tokens, not {stops!r}")
    found = set()
    for stop in stops:
        tokens = _tokens("a stop", stop if isinstance(stop, str | Sequence | Tensor) else [stop], vocab)
        if not tokens:
            raise ConfigError("a stop is a token or a sequence of tokens; an empty one would end every text at once")
        found.add(tuple(tokens))
    return tuple(sorted(found, key=lambda stop: (-len(stop), stop)))


def _met(stops: Sequence[tuple[int, ...]], new: Sequence[int]) -> tuple[int, ...]:
    """The stop that these tokens end in, if they do."""
    return next((stop for stop in stops if tuple(new[-len(stop) :]) == stop), ())
