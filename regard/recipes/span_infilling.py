"""Span infilling: a decoder predicts a masked span of a text, or the answer to a question, at the end of its input."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.data.birthplaces_dataset import BirthplaceQuestion
from regard.data.characters import CharacterTokenizer
from regard.data.sampler import ShuffledOrder, sampler_generator
from regard.data.span_corruption import IGNORED, MASK, PAD, PHRASE, question_prompt
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT
from regard.train.task import Loss

MAX_ANSWER = 40  # characters
Numbers = NDArray[Any]


@dataclass(frozen=True)
class QuestionMix:
    """A set of questions, and the fraction of training examples that are sampled from it."""

    share: float
    questions: Sequence[BirthplaceQuestion]


@dataclass(frozen=True)
class SpanInfillingTask:
    """Training task: infill masked spans of texts, with questions mixed in. Texts that are too long are truncated.

    mixes            sets of questions, each with its fraction of the examples; all other examples are texts
    validation       questions for evaluation
    phrase_share     fraction of masked spans that are a whole phrase
    context          number of characters of an input
    crop_share       fraction of texts of which only the title and a piece around the masked span are kept
    title_lengths    number of characters of the title of each text, which is the name of the person at its start, or 0
                     without a title; needed for cropping
    position_offset  position of the first character of a text in the input; padding comes before it
    span_share       mean length of a span that is not a phrase, as a fraction of the text
    """

    texts: Sequence[str]
    mixes: Sequence[QuestionMix]
    validation: Sequence[BirthplaceQuestion]
    tokenizer: CharacterTokenizer
    context: int
    batch_size: int
    phrase_share: float
    seed: int
    crop_share: float = 0.0
    title_lengths: Sequence[int] = ()
    position_offset: int = 0
    span_share: float = 0.25

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        """Return the input tokens and next-token targets of one micro-batch of a training step, each of shape (b, n).

        part  index of the micro-batch, from 0
        of    number of micro-batches of the step
        """
        records = self._order.at(step, part, of).numpy()
        # drawn for the whole batch, so that the examples do not depend on the number of processes
        drawn = torch.rand(
            self.batch_size, 5, generator=sampler_generator(self.seed, step, "gaps"), dtype=torch.float64
        )
        draws = drawn.numpy()[part * len(records) : (part + 1) * len(records)].T
        rows, begin, end = self._choose_spans(records, draws)
        table = self._table
        title, left, right = (each[:, None] for each in self._choose_crop(rows, begin, end, step, part))
        begin, end = begin[:, None], end[:, None]
        place = numpy.arange(self.context + 1)[None]
        first = title + begin - left  # positions of the two masks; the content of the span follows the second
        second = first + 1 + right - end
        source = numpy.where(place < title, place, place - title + left)
        source = numpy.where(place > first, place - first - 1 + end, source)
        source = numpy.where(place > second, place - second - 1 + begin, source)
        tokens = numpy.take_along_axis(table.tokens[rows], source.clip(0, table.tokens.shape[1] - 1), axis=1)
        pad, mask = self._marks
        tokens = numpy.where((place == first) | (place == second), mask, tokens)
        over = second + 1 + end - begin
        tokens = numpy.where(place >= over, pad, tokens)
        start = numpy.where(rows[:, None] < len(self.texts), max(1, self.position_offset), second + 1)
        learned = (place >= start) & (place <= over)  # includes the first padding character, which ends the content
        targets = numpy.where(learned, tokens, IGNORED)
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:])

    def _choose_spans(self, records: Numbers, draws: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Choose the examples of a batch, and the masked span of each example.

        Returns three arrays: the row of each example in `_table`, and the begin and the end of its masked span.

        records  index of a text (or of a question, if all examples are questions) for each example
        draws    uniform random numbers from 0 to 1, in five rows with one column for each example
        """
        table = self._table
        if self._pool is not self.texts:
            rows = len(self.texts) + records
            return rows, table.begins[rows], table.lengths[rows]
        kind, which, phrase, size, place = draws
        counts = table.phrase_counts[records]
        length = table.lengths[records]
        picked = table.phrases[records, (phrase * counts).astype(int)]
        own = length - self.position_offset
        most = numpy.maximum(1, numpy.rint(2 * self.span_share * own) - 1)
        sizes = 1 + (size * most).astype(int)
        anywhere = self.position_offset + (place * (own - sizes + 1)).astype(int)
        whole = (counts > 0) & (which < self.phrase_share)
        begin = numpy.where(whole, picked[:, 0], anywhere)
        end = numpy.where(whole, picked[:, 1], anywhere + sizes)
        rows, below, at = records, 0.0, len(self.texts)
        for asked in self.mixes:
            chosen = (kind >= below) & (kind < below + asked.share)
            rows = numpy.where(chosen, at + (which * len(asked.questions)).astype(int), rows)
            below, at = below + asked.share, at + len(asked.questions)
        question = rows >= len(self.texts)
        return rows, numpy.where(question, table.begins[rows], begin), numpy.where(question, table.lengths[rows], end)

    def _choose_crop(
        self, rows: Numbers, begin: Numbers, end: Numbers, step: int, part: int
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Choose at random how each text is cropped.

        Returns three arrays: the length of the title that is kept, and the begin and the end of the text that is kept
        around the masked span.

        rows        row of each example in `_table`
        begin, end  masked span of each example
        """
        nothing, length = numpy.zeros_like(begin), self._table.lengths[rows]
        if not self.crop_share:
            return nothing, nothing, length
        drawn = torch.rand(
            self.batch_size, 3, generator=sampler_generator(self.seed, step, "pieces"), dtype=torch.float64
        )
        which, before, after = drawn.numpy()[part * len(rows) : (part + 1) * len(rows)].T
        titles = self._titles[rows]
        cut = (which < self.crop_share) & (titles > 0) & (begin >= titles)
        # a side is often left out completely, as in a question, which has only the name
        before, after = ((1.5 * each - 0.5).clip(0, 1) for each in (before, after))
        left = begin - (before * (begin - titles + 1)).astype(int).clip(0, (begin - titles).clip(0))
        right = end + (after * (length - end + 1)).astype(int).clip(0, length - end)
        return numpy.where(cut, titles, 0), numpy.where(cut, left, 0), numpy.where(cut, right, length)

    @cached_property
    def _titles(self) -> Numbers:
        """For each row of `_table`, the index at which the title ends; 0 for questions and texts without a title."""
        asked = sum(len(each.questions) for each in self.mixes)
        return numpy.array([*(size and self.position_offset + size for size in self.title_lengths), *[0] * asked])

    @cached_property
    def _pool(self) -> Sequence[str] | Sequence[BirthplaceQuestion]:
        """The examples of one epoch: the texts, or the questions if every example is a question."""
        alone = len(self.mixes) == 1 and self.mixes[0].share == 1
        return self.mixes[0].questions if alone else self.texts

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self._pool), self.batch_size, self.seed)

    @cached_property
    def _marks(self) -> list[int]:
        return self.tokenizer.encode(PAD + MASK)

    @cached_property
    def _table(self) -> "_ExampleTable":
        """The table of all examples: every truncated text with its phrases, and every question with its answer."""
        room = self.context - 2 - self.position_offset  # two masks, and the end
        short = [PAD * self.position_offset + text[:room] for text in self.texts]
        asked = [question for each in self.mixes for question in each.questions]
        rows = short + [each.text + each.place for each in asked]
        tokens = numpy.full((len(rows), max(map(len, rows))), self._marks[0])
        for row, text in zip(tokens, rows, strict=True):
            row[: len(text)] = self.tokenizer.encode(text)
        found = [[match.span() for match in PHRASE.finditer(text)] for text in short]
        phrases = numpy.zeros((len(short), max(1, *map(len, found)), 2), int)
        for each, spans in zip(phrases, found, strict=True):
            each[: len(spans)] = spans or each[:0]
        return _ExampleTable(
            tokens=tokens,
            lengths=numpy.array([*map(len, rows)]),
            begins=numpy.array([0] * len(short) + [len(each.text) for each in asked]),
            phrases=phrases,
            phrase_counts=numpy.array([*map(len, found)]),
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the cross-entropy of the next tokens: in all of a text, but only in the answer of a question."""
        tokens, targets = batch
        logits = model(tokens).flatten(0, 1).float()
        total = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the exact-match accuracy on the validation questions."""
        assert isinstance(model, GPT)
        return {"accuracy": accuracy(model, self.tokenizer, self.validation)}


@dataclass(frozen=True)
class _ExampleTable:
    """All texts and questions as arrays, one row for each.

    tokens         token ids, padded
    lengths        number of tokens
    begins         index at which the answer of a question begins; 0 for texts
    phrases        begin and end of each phrase of a text, such as a name, as token indices
    phrase_counts  number of phrases of each text
    """

    tokens: Numbers
    lengths: Numbers
    begins: Numbers
    phrases: Numbers
    phrase_counts: Numbers


def generate_answers(
    model: GPT, tokenizer: CharacterTokenizer, questions: Sequence[str], batch_size: int = 256
) -> list[GeneratedText]:
    """Answer each question by greedy decoding and return the generated texts."""
    found: list[GeneratedText] = []
    stop = tokenizer.encode(PAD)[0]
    for start in range(0, len(questions), batch_size):
        prompts = [tokenizer.encode(question_prompt(each)) for each in questions[start : start + batch_size]]
        found += generate(model, prompts, max_new_tokens=MAX_ANSWER, stop=[stop])
    return found


def grade_answers(
    model: GPT, tokenizer: CharacterTokenizer, questions: Sequence[BirthplaceQuestion]
) -> tuple[list[float], list[bool]]:
    """Answer questions by greedy decoding; return the log-probability and the correctness of each answer.

    An answer is correct if it is exactly the `place` of the question.
    """
    answers = generate_answers(model, tokenizer, [each.text for each in questions])
    correct = [tokenizer.decode(text.body) == each.place for text, each in zip(answers, questions, strict=True)]
    return [text.log_probability for text in answers], correct


def accuracy(model: GPT, tokenizer: CharacterTokenizer, questions: Sequence[BirthplaceQuestion]) -> float:
    """Return the exact-match accuracy: the fraction of questions that the model answers exactly right."""
    _, correct = grade_answers(model, tokenizer, questions)
    return sum(correct) / len(correct)
