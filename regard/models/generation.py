"""Text generation by autoregressive decoding: greedy, sampling, beam search.

    texts = model.generate([[5, 17], [3, 8, 2]], max_new_tokens=40, temperature=0.8, top_p=0.9, seed=1, stop=[0])
    for token in stream_tokens(model, [[5, 17]]): ...

A text depends only on its prompt, the strategy, and the index of the prompt in the batch, which selects its random
numbers. The other prompts, padding and the KV cache change rounding and nothing else.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, RegardError, ShapeError
from regard.base.keywords import reject_keywords
from regard.base.validation import check_integer
from regard.models.beam_search import BeamSearch
from regard.models.captured_decoding import (
    ROUND,
    StepLoop,
    capture_refusals,
    draw_uniform,
    keep_loop,
    look_ahead,
    on_device,
    read_prompts,
    take_loop,
)
from regard.models.device_strategies import DeviceBeamSearch, DeviceSampling, candidate_count
from regard.models.generation_adapters import BatchReader, GenerationAdapter, make_adapter
from regard.models.generation_types import GeneratedText, GenerationOptions, Prompts, TokenIds, make_strategy
from regard.models.gpt import GPT
from regard.models.hypothesis import FinishReason, GeneratedToken, Hypothesis
from regard.models.sampling import StepwiseStrategy, Strategy, top_tokens
from regard.models.transformer import DecoderState
from regard.nn.embeddings import check_tokens

WORTH_CAPTURING = 16  # new tokens; for fewer, capturing a step takes about as long as decoding without a graph
NOT_FINITE = "the model's logits contain NaN or infinity; check its weights"


def generate(
    model: GPT | GenerationAdapter, tokens: Prompts, **options: Unpack[GenerationOptions]
) -> list[GeneratedText]:
    """Generate text: continue each prompt by autoregressive decoding. Returns one `GeneratedText` for each prompt.

    model           a GPT; for an encoder-decoder see `Transformer.generate`
    tokens          prompts: lists of token ids, whose lengths may differ, or a tensor (b n)
    max_new_tokens  maximum number of new tokens, 64 by default. A text also ends when the model's context is full
    temperature, top_k, top_p, seed
                    sample the next token, see `Sample`; each prompt of the batch has its own random numbers
    num_beams, length_penalty, early_stopping
                    beam search, see `BeamSearch`
    strategy        "greedy", "sample", "beam", or an object such as KthLargest(2). By default the keywords
                    above decide; without any of them it is greedy decoding
    stop            token ids, and sequences of token ids, that end a text; occurrences in a prompt do not count
    use_cache       False runs the whole sequence through the model for every token instead of using a KV cache
    capture         whether one decoding step is captured as a CUDA graph and replayed for each token, which changes
                    results by rounding only. None captures if that is possible and max_new_tokens is 16 or more. True
                    raises an error with the reasons if it is not possible

    >>> texts = regard.generate(model, [[5, 17]], max_new_tokens=8, temperature=0.8, top_p=0.9, seed=0)
    >>> len(texts[0].tokens), texts[0].finish_reason
    (8, 'length')
    """
    run = _prepare(model, tokens, **options)
    generated: list[list[GeneratedToken]] = [[] for _ in run.prompts]
    for token in run.tokens():
        generated[token.prompt_index].append(token)
    return [collect_tokens(prompt, new, run.stop) for prompt, new in zip(run.prompts, generated, strict=True)]


def stream_tokens(
    model: GPT | GenerationAdapter, tokens: Prompts, **options: Unpack[GenerationOptions]
) -> Iterator[GeneratedToken]:
    """Yield each new token of `generate` as soon as it is known. The arguments are those of `generate`.

    Beam search yields the tokens of a prompt when the search of this prompt has ended.
    """
    return _prepare(model, tokens, **options).tokens()


def collect_tokens(
    prompt: Sequence[int], tokens: Sequence[GeneratedToken], stop: Sequence[int | TokenIds] = ()
) -> GeneratedText:
    """Join the tokens that `stream_tokens` yielded for one prompt into a `GeneratedText`.

    stop  the stop sequences that were passed to `stream_tokens`
    """
    if not tokens or tokens[-1].finish_reason is None:
        raise ConfigError("the stream of this text has not ended: its last token has no finish_reason")
    new = tuple(each.token for each in tokens)
    values = tuple(each.log_probability for each in tokens)
    matched = _matched_stop(_stop_sequences(stop), new) if tokens[-1].finish_reason == "stop" else ()
    return GeneratedText(tuple(prompt), new, values, tokens[-1].finish_reason, matched)


@dataclass(frozen=True)
class GenerationRun:
    """The checked arguments of one call of `generate`, and the decoding loops.

    reader    runs the model's forward pass for each token; None if a `StepLoop` decodes
    captured  whether the `StepLoop` runs its decoding step as a CUDA graph or eagerly
    """

    adapter: GenerationAdapter
    parts: tuple[nn.Module, ...]  # listed once: a walk through all modules at every step would take time
    reader: BatchReader | None
    prompts: list[list[int]]
    strategy: Strategy
    max_new_tokens: int
    stop: tuple[tuple[int, ...], ...]
    captured: bool = False

    def tokens(self) -> Iterator[GeneratedToken]:
        """Return an iterator over the new tokens of all prompts, in the order in which they are generated."""
        rows = [Hypothesis(index, prompt) for index, prompt in enumerate(self.prompts)]
        ahead = self.reader is None
        if isinstance(self.strategy, BeamSearch):
            return self._beams_ahead(rows, self.strategy) if ahead else self._beam_search(rows, self.strategy)
        assert isinstance(self.strategy, StepwiseStrategy)
        return self._steps_ahead(self.strategy) if ahead else self._step_by_step(rows, self.strategy)

    def _steps_ahead(self, strategy: StepwiseStrategy) -> Iterator[GeneratedToken]:
        """Run greedy decoding or sampling with a `StepLoop` and yield the new tokens.

        The host reads the tokens while the device already runs later steps.
        """
        count = len(self.prompts)
        room = [min(self.max_new_tokens, self.adapter.context + 1 - len(prompt)) for prompt in self.prompts]
        with self._on_device():
            logits, caches, source = read_prompts(self.adapter, self.prompts, self.device)
            log_probabilities = _log_probabilities(logits)
            uniform = draw_uniform(strategy, count, max(room)).to(self.device)
            chosen = strategy.choose(logits, uniform[0] if len(uniform) else log_probabilities[:, 0])
            first = chosen.tolist(), log_probabilities.gather(1, chosen[:, None])[:, 0].tolist()
        new: list[list[int]] = [[] for _ in self.prompts]
        running = list(range(count))
        yield from self._append(running, new, room, *first)
        if not running:
            return
        with self._on_device():
            loop = self._take_loop(max(room) - 1, source)
            assert isinstance(loop.choice, DeviceSampling)
            positions = torch.tensor([len(prompt) for prompt in self.prompts])
            loop.load(self.adapter.module, caches, source, chosen, positions)
            loop.choice.start(uniform[1:])
        del caches, source, logits, log_probabilities
        try:
            for tokens, values in look_ahead(loop, self.adapter.module, max(room) - 1):
                yield from self._append(running, new, room, tokens, values)
                if not running:
                    break
        finally:
            keep_loop(self.adapter.module, loop)

    def _append(
        self, running: list[int], new: list[list[int]], room: list[int], tokens: list[int], values: list[float]
    ) -> Iterator[GeneratedToken]:
        """Append the next token to each unfinished text and yield it as a `GeneratedToken`.

        running  indices of the unfinished texts; those that end are removed
        new      the new tokens of each text; this function appends to them
        room     maximum number of new tokens of each text
        tokens   the next token of each text
        values   log-probabilities of these tokens
        """
        for row in tuple(running):
            token, value, text = tokens[row], values[row], new[row]
            if math.isnan(value):
                raise RegardError(NOT_FINITE)
            text.append(token)
            reason: FinishReason | None = None
            if self.stop and _matched_stop(self.stop, text):
                reason = "stop"
            elif len(text) == room[row]:
                reason = "length" if len(text) == self.max_new_tokens else "context"
            if reason is not None:
                running.remove(row)
            yield GeneratedToken(row, token, value, reason)

    def _beams_ahead(self, rows: list[Hypothesis], strategy: BeamSearch) -> Iterator[GeneratedToken]:
        """Run beam search with a `StepLoop` and yield the new tokens.

        The device chooses the hypotheses; the host reads them while the device already runs later steps.
        """
        beams, count = strategy.num_beams, candidate_count(strategy, self.stop)
        with self._on_device():
            logits, caches, source = read_prompts(self.adapter, self.prompts, self.device)
            best = _best_continuations(rows, _log_probabilities(logits), count)
        finished: list[list[Hypothesis]] = [[] for _ in rows]
        running: dict[int, list[Hypothesis]] = {}
        for row, found in zip(rows, best, strict=True):
            following = self._continue([row], [(0, *each[:2]) for each in found], finished[row.prompt_index], strategy)
            if following:
                running[row.prompt_index] = [text for _, text in following]
            else:
                yield from finished[row.prompt_index][0].generated()
        if not running:
            return
        nothing = Hypothesis(0, [0], [-math.inf])
        slots = [(*running.get(row.prompt_index, ()), *[nothing] * beams)[:beams] for row in rows]
        texts = [text for each in slots for text in each]
        # all texts of a prompt have the same length
        steps = max(min(self.max_new_tokens, self.adapter.context + 1 - len(prompt)) for prompt in self.prompts) - 1
        with self._on_device():
            loop = self._take_loop(steps, source)
            assert isinstance(loop.choice, DeviceBeamSearch)
            positions = torch.tensor([len(prompt) for prompt in self.prompts]).repeat_interleave(beams)
            tokens = torch.tensor([text.tokens[-1] for text in texts])
            loop.load(self.adapter.module, caches, source, tokens, positions)
            totals = torch.tensor([text.log_probability for text in texts], dtype=torch.float64)
            loop.choice.start(totals, [text.new_tokens for text in texts])
        del caches, source, logits
        try:
            for records in look_ahead(loop, self.adapter.module, steps):
                for index in tuple(running):
                    candidates = [
                        each[:3] for each in zip(*(record[index] for record in records), strict=True) if each[3]
                    ]
                    if any(math.isnan(value) for value in records[2][index]):
                        raise RegardError(NOT_FINITE)
                    following = self._continue(running[index], candidates, finished[index], strategy)
                    running[index] = [text for _, text in following]
                    if not following:
                        del running[index]
                        yield from finished[index][0].generated()
                if not running:
                    break
        finally:
            keep_loop(self.adapter.module, loop)

    def _take_loop(self, steps: int, source: DecoderState | None) -> StepLoop:
        """Return a `StepLoop` whose KV caches have room for `steps` decoding steps after the longest prompt.

        source  decoding state of an encoder-decoder, with the encoded source; else None
        """
        longest = max(map(len, self.prompts)) + steps
        capacity = min(self.adapter.context, _round_up(longest))
        sources = 0 if source is None else _round_up(source.memory[0].k.shape[2])
        return take_loop(
            self.adapter.module, self.strategy, self.stop, len(self.prompts), capacity, sources, self.captured
        )

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.no_grad(), eval_mode(*self.parts), on_device(self.device):
            yield

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(self.adapter.module.parameters()).device
        return device

    def _step_by_step(self, rows: list[Hypothesis], strategy: StepwiseStrategy) -> Iterator[GeneratedToken]:
        # numpy makes independent streams of random numbers from a seed and the number of a prompt
        generators = [np.random.default_rng((strategy.seed, strategy.stream + index)) for index in range(len(rows))]
        while rows:
            ready, logits, log_probabilities = self._next_logits(rows)
            uniform = [generators[rows[row].prompt_index].random() for row in ready]
            chosen = strategy.choose(logits, torch.tensor(uniform, dtype=torch.float64, device=logits.device))
            values = log_probabilities.gather(1, chosen[:, None])[:, 0]
            for row, token, value in zip(ready, chosen.tolist(), values.tolist(), strict=True):
                rows[row] = self._extend(rows[row], token, value)
                yield GeneratedToken(rows[row].prompt_index, token, value, rows[row].finish_reason)
            unfinished = [number for number, row in enumerate(rows) if row.finish_reason is None]
            rows = self._select(rows, unfinished, [rows[number] for number in unfinished])

    def _beam_search(self, rows: list[Hypothesis], strategy: BeamSearch) -> Iterator[GeneratedToken]:
        finished: list[list[Hypothesis]] = [[] for _ in rows]
        count = candidate_count(strategy, self.stop)
        while rows:
            ready, _, log_probabilities = self._next_logits(rows)
            best = _best_continuations([rows[row] for row in ready], log_probabilities, count)
            candidates = {row: [(row, *each) for each in found] for row, found in zip(ready, best, strict=True)}
            following: list[tuple[int, Hypothesis]] = []  # each with the row that it continues
            for index, group in groupby(range(len(rows)), key=lambda number: rows[number].prompt_index):
                members = list(group)
                if members[0] not in candidates:  # a longer prompt that is still being read
                    following += [(member, rows[member]) for member in members]
                    continue
                # the sort is stable: of equally likely ones, earlier rows first, then lower token ids
                likely = sorted((each for member in members for each in candidates[member]), key=lambda each: -each[-1])
                running = self._continue(rows, [each[:3] for each in likely[:count]], finished[index], strategy)
                following += running
                if not running:
                    yield from finished[index][0].generated()
            rows = self._select(rows, [row for row, _ in following], [text for _, text in following])

    def _continue(
        self,
        rows: Sequence[Hypothesis],
        likely: Sequence[tuple[int, int, float]],
        finished: list[Hypothesis],
        strategy: BeamSearch,
    ) -> list[tuple[int, Hypothesis]]:
        """Extend the hypotheses of one prompt by one token each, and return those that have not ended.

        Returns pairs (index in `rows`, extended hypothesis). An empty list means that the search of this prompt has
        ended. Hypotheses that end are added to `finished`, which keeps the best `num_beams`.

        likely  the most likely continuations, the best first: index in `rows`, token and log-probability of the token
        """
        beams = strategy.num_beams
        extended = [(row, self._extend(rows[row], token, value)) for row, token, value in likely]
        ended = [text for _, text in extended[:beams] if text.finish_reason is not None]
        running = [(row, text) for row, text in extended if text.finish_reason is None][:beams]
        finished[:] = strategy.rank(finished + ended)[:beams]
        if running and strategy.can_improve(running[0][1], finished, self.max_new_tokens):
            return running
        return []

    def _next_logits(self, rows: list[Hypothesis]) -> tuple[list[int], Float[Tensor, "r w"], Float[Tensor, "r w"]]:
        """Run the model on the next tokens of all sequences.

        Returns the indices of the sequences that the model has now read completely, the logits of the next token of
        these sequences, and the log-probabilities.
        """
        assert self.reader is not None
        with torch.no_grad(), eval_mode(*self.parts):
            ready, logits = self.reader.read([row.tokens for row in rows])
        return ready, logits, _log_probabilities(logits)

    def _select(self, rows: list[Hypothesis], parents: list[int], following: list[Hypothesis]) -> list[Hypothesis]:
        """Reorder the KV cache for the hypotheses of the next step, and return these hypotheses unchanged.

        rows       the hypotheses of the last step
        parents    for each hypothesis of the next step, the index in `rows` of the hypothesis that it continues
        following  the hypotheses of the next step
        """
        if following and parents != list(range(len(rows))):
            assert self.reader is not None
            self.reader.reorder(parents)
        return following

    def _extend(self, row: Hypothesis, token: int, log_probability: float) -> Hypothesis:
        """Return the sequence with one more token. Its finish_reason is set if the text ends there."""
        row = row.with_token(token, log_probability)
        if _matched_stop(self.stop, row.new_tokens):
            row.finish_reason = "stop"
        elif row.length == self.max_new_tokens:
            row.finish_reason = "length"
        elif len(row.tokens) > self.adapter.context:
            row.finish_reason = "context"
        return row


def _log_probabilities(logits: Float[Tensor, "r w"]) -> Float[Tensor, "r w"]:
    """Return the log-probability of every token, in float64. A logit of -inf has the log-probability -inf.

    Raises RegardError if a logit is NaN or +inf, or if all logits of a sequence are -inf.
    """
    log_probabilities = logits.log_softmax(-1, dtype=torch.float64)
    if log_probabilities[:, 0].isnan().any():  # one bad logit makes its whole row NaN
        raise RegardError(NOT_FINITE)
    return log_probabilities


def _best_continuations(
    rows: list[Hypothesis], log_probabilities: Float[Tensor, "r w"], count: int
) -> list[list[tuple[int, float, float]]]:
    """Return the `count` most likely one-token continuations of each sequence, without impossible ones.

    A continuation is (token, log-probability of the token, log-probability of the whole sequence). It is impossible if
    the last number is -inf.
    """
    before = torch.tensor([row.log_probability for row in rows], dtype=torch.float64, device=log_probabilities.device)
    totals = before[:, None] + log_probabilities
    tokens = top_tokens(totals, count)
    values, sums = log_probabilities.gather(1, tokens), totals.gather(1, tokens)
    return [
        [each for each in zip(*row, strict=True) if each[-1] > -math.inf]
        for row in zip(tokens.tolist(), values.tolist(), sums.tolist(), strict=True)
    ]


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Context manager: set modules to eval mode; on exit, restore training mode for those that were in it."""
    # through __dict__: nn.Module.__setattr__ for all modules of a model takes as long as some of its layers
    training = [vars(module) for module in modules if module.training]
    for part in training:
        part["training"] = False
    try:
        yield
    finally:
        for part in training:
            part["training"] = True


def _prepare(
    model: GPT | GenerationAdapter,
    tokens: Prompts,
    *,
    max_new_tokens: int = 64,
    stop: Sequence[int | TokenIds] = (),
    use_cache: bool = True,
    capture: bool | None = None,
    **choice: Any,
) -> GenerationRun:
    """Check the arguments of `generate` and return them as a `GenerationRun`.

    choice  the arguments of `make_strategy`
    """
    reject_keywords("generate", choice.keys() - GenerationOptions.__annotations__, GenerationOptions.__annotations__)
    adapter, strategy = make_adapter(model), make_strategy(**choice)
    strategy.check(adapter.vocab)
    check_integer("max_new_tokens", max_new_tokens, 1)
    prompts = _check_prompts(tokens, adapter)
    if adapter.batch not in (None, len(prompts)):
        raise ShapeError(f"there are {len(prompts)} prompts, but {adapter.batch} sources; give one prompt for each")
    stops = _stop_sequences(stop, adapter.vocab)
    capacity = min(adapter.context, max(map(len, prompts)) + max_new_tokens)
    parts = tuple(adapter.module.modules())
    if capture is None and max_new_tokens < WORTH_CAPTURING:
        capture = False
    captured, reader = _is_captured(adapter, strategy, use_cache, capture), None
    if not captured:
        with torch.no_grad(), eval_mode(*parts):  # an encoder-decoder encodes its source here
            reader = BatchReader(adapter, len(prompts), capacity, use_cache)
    return GenerationRun(adapter, parts, reader, prompts, strategy, max_new_tokens, stops, captured)


def _is_captured(adapter: GenerationAdapter, strategy: Strategy, use_cache: bool, capture: bool | None) -> bool:
    """Return whether decoding runs as a CUDA graph. Raises ConfigError if capture=True and it cannot."""
    if capture not in (None, True, False):
        raise ConfigError(f"capture is None, True or False, not {capture!r}")
    if capture is False:
        return False
    reasons = capture_refusals(adapter, strategy) if use_cache else ["use_cache=False keeps no cache"]
    if reasons and capture:
        raise ConfigError(f"decoding cannot be captured: {'; '.join(reasons)}; leave out capture=True")
    return not reasons


def _check_prompts(tokens: Prompts, adapter: GenerationAdapter) -> list[list[int]]:
    """Check the prompts and return them as lists of token ids. Raises an error if one is empty or too long."""
    if isinstance(tokens, Tensor):
        check_tokens(tokens, adapter.vocab)
        rows = tokens.tolist()
    elif not isinstance(tokens, list | tuple) or not tokens:
        raise ConfigError(f"tokens takes prompts, a list of lists of token ids or a tensor (b n), not {tokens!r}")
    else:
        rows = [_token_list(f"tokens[{number}]", prompt, adapter.vocab) for number, prompt in enumerate(tokens)]
    for number, row in enumerate(rows):
        if not row:
            raise ShapeError(f"tokens[{number}] is empty; a prompt needs at least one token")
        if len(row) > adapter.context:
            raise ShapeError(
                f"tokens[{number}] has {len(row)} tokens, but the model can read {adapter.context}; "
                f"keep the last ones: prompt[-{adapter.context}:]"
            )
    return rows


def _token_list(name: str, tokens: object, vocab: int | None) -> list[int]:
    """Check a sequence of token ids and return it as a list.

    name   name of the sequence in error messages
    vocab  size of the vocabulary; None does not check it
    """
    if isinstance(tokens, Tensor) and tokens.ndim == 1:
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise ConfigError(f"{name} takes a list of token ids such as [3, 1, 4], not {tokens!r}")
    found = [check_integer(f"a token of {name}", token, 0) for token in tokens]
    if vocab is not None and found and max(found) >= vocab:
        raise ShapeError(f"{name} has token {max(found)}, but the vocabulary has tokens 0 to {vocab - 1}")
    return found


def _stop_sequences(stop: Sequence[int | TokenIds], vocab: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the stop sequences as tuples, longest first, so that the longest match is reported."""
    if not isinstance(stop, list | tuple):
        raise ConfigError(f"stop takes a list of token ids and of sequences of token ids, not {stop!r}")
    found = set()
    for each in stop:
        tokens = _token_list("stop", each if isinstance(each, str | Sequence | Tensor) else [each], vocab)
        if not tokens:
            raise ConfigError("stop has an empty sequence, which would end every text at once")
        found.add(tuple(tokens))
    return tuple(sorted(found, key=lambda tokens: (-len(tokens), tokens)))


def _round_up(length: int) -> int:
    """Round a buffer size up to a multiple of `ROUND`, so that calls of similar lengths use the same CUDA graph."""
    return -(-length // ROUND) * ROUND


def _matched_stop(stop: Sequence[tuple[int, ...]], new: Sequence[int]) -> tuple[int, ...]:
    """Return the stop sequence with which the new tokens end, or an empty tuple if there is none."""
    return next((tokens for tokens in stop if tuple(new[-len(tokens) :]) == tokens), ())
