"""The task of filling gaps: in texts, from which a span was moved to the end, and after questions."""

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
from regard.data.characters import Characters
from regard.data.sampler import ShuffledOrder, sampler_generator
from regard.data.span_corruption import IGNORED, MASK, PAD, PHRASE, prompt
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT
from regard.train.task import Loss

LONGEST = 40  # characters of an answer
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Asked:
    """Questions, and the share of what is read that they make up."""

    share: float
    questions: Sequence[BirthplaceQuestion]


@dataclass(frozen=True)
class GapTask:
    """Texts with gaps, questions mixed in. A text that does not fit is cut at its end: a life begins with its name.

    mixed    questions of several kinds; what they leave is for texts
    held     asked to see how good the model is
    phrases  how often a gap is a whole phrase
    pieces   how often only the title and a piece around the gap are left of a text
    titles   how many characters at the beginning of each text say whom it is about; needed for pieces
    offset   the place at which texts begin, behind padding
    span     the mean share of a text that another gap takes
    """

    texts: Sequence[str]
    mixed: Sequence[Asked]
    held: Sequence[BirthplaceQuestion]
    letters: Characters
    context: int
    batch_size: int
    phrases: float
    seed: int
    pieces: float = 0.0
    titles: Sequence[int] = ()
    offset: int = 0
    span: float = 0.25

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        records = self._order.part(part, of).at(step).numpy()
        # drawn for the whole batch at once, so that its shares make it up however many there are
        drawn = torch.rand(
            self.batch_size, 5, generator=sampler_generator(self.seed, step, "gaps"), dtype=torch.float64
        )
        draws = drawn.numpy()[part * len(records) : (part + 1) * len(records)].T
        rows, begin, end = self._cut(records, draws)
        table = self._table
        title, left, right = (each[:, None] for each in self._piece(rows, begin, end, step, part))
        begin, end = begin[:, None], end[:, None]
        place = numpy.arange(self.context + 1)[None]
        first = title + begin - left  # where the masks stand; what was in the gap comes after the second
        second = first + 1 + right - end
        source = numpy.where(place < title, place, place - title + left)
        source = numpy.where(place > first, place - first - 1 + end, source)
        source = numpy.where(place > second, place - second - 1 + begin, source)
        tokens = numpy.take_along_axis(table.tokens[rows], source.clip(0, table.tokens.shape[1] - 1), axis=1)
        pad, mask = self._marks
        tokens = numpy.where((place == first) | (place == second), mask, tokens)
        over = second + 1 + end - begin
        tokens = numpy.where(place >= over, pad, tokens)
        start = numpy.where(rows[:, None] < len(self.texts), max(1, self.offset), second + 1)
        learned = (place >= start) & (place <= over)  # with the padding that says that the content is over
        targets = numpy.where(learned, tokens, IGNORED)
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:])

    def _cut(self, records: Numbers, draws: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Rows of the table, and where the gap in each begins and ends."""
        table = self._table
        if self._pool is not self.texts:
            rows = len(self.texts) + records
            return rows, table.begins[rows], table.lengths[rows]
        kind, which, phrase, size, place = draws
        counts = table.phrase_counts[records]
        length = table.lengths[records]
        picked = table.phrases[records, (phrase * counts).astype(int)]
        own = length - self.offset
        most = numpy.maximum(1, numpy.rint(2 * self.span * own) - 1)
        sizes = 1 + (size * most).astype(int)
        anywhere = self.offset + (place * (own - sizes + 1)).astype(int)
        whole = (counts > 0) & (which < self.phrases)
        begin = numpy.where(whole, picked[:, 0], anywhere)
        end = numpy.where(whole, picked[:, 1], anywhere + sizes)
        rows, below, at = records, 0.0, len(self.texts)
        for asked in self.mixed:
            chosen = (kind >= below) & (kind < below + asked.share)
            rows = numpy.where(chosen, at + (which * len(asked.questions)).astype(int), rows)
            below, at = below + asked.share, at + len(asked.questions)
        question = rows >= len(self.texts)
        return rows, numpy.where(question, table.begins[rows], begin), numpy.where(question, table.lengths[rows], end)

    def _piece(
        self, rows: Numbers, begin: Numbers, end: Numbers, step: int, part: int
    ) -> tuple[Numbers, Numbers, Numbers]:
        """How long the title is that is left, and where the piece around the gap begins and ends."""
        nothing, length = numpy.zeros_like(begin), self._table.lengths[rows]
        if not self.pieces:
            return nothing, nothing, length
        drawn = torch.rand(
            self.batch_size, 3, generator=sampler_generator(self.seed, step, "pieces"), dtype=torch.float64
        )
        which, before, after = drawn.numpy()[part * len(rows) : (part + 1) * len(rows)].T
        titles = self._titles[rows]
        cut = (which < self.pieces) & (titles > 0) & (begin >= titles)
        # a side is often left out as a whole: a question gives the name and nothing else
        before, after = ((1.5 * each - 0.5).clip(0, 1) for each in (before, after))
        left = begin - (before * (begin - titles + 1)).astype(int).clip(0, (begin - titles).clip(0))
        right = end + (after * (length - end + 1)).astype(int).clip(0, length - end)
        return numpy.where(cut, titles, 0), numpy.where(cut, left, 0), numpy.where(cut, right, length)

    @cached_property
    def _titles(self) -> Numbers:
        """Where the title of each text ends; questions have none."""
        asked = sum(len(each.questions) for each in self.mixed)
        return numpy.array([*(size and self.offset + size for size in self.titles), *[0] * asked])

    @cached_property
    def _pool(self) -> Sequence[str] | Sequence[BirthplaceQuestion]:
        """What the order of records goes through: texts, or questions where there is nothing else."""
        alone = len(self.mixed) == 1 and self.mixed[0].share == 1
        return self.mixed[0].questions if alone else self.texts

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self._pool), self.batch_size, self.seed)

    @cached_property
    def _marks(self) -> list[int]:
        return self.letters.encode(PAD + MASK)

    @cached_property
    def _table(self) -> "_Table":
        """Every text as far as it fits, with its phrases, and every question with its answer."""
        room = self.context - 2 - self.offset  # two masks, and the end
        short = [PAD * self.offset + text[:room] for text in self.texts]
        asked = [question for each in self.mixed for question in each.questions]
        told = short + [each.text + each.place for each in asked]
        tokens = numpy.full((len(told), max(map(len, told))), self._marks[0])
        for row, text in zip(tokens, told, strict=True):
            row[: len(text)] = self.letters.encode(text)
        found = [[match.span() for match in PHRASE.finditer(text)] for text in short]
        phrases = numpy.zeros((len(short), max(1, *map(len, found)), 2), int)
        for each, spans in zip(phrases, found, strict=True):
            each[: len(spans)] = spans or each[:0]
        return _Table(
            tokens=tokens,
            lengths=numpy.array([*map(len, told)]),
            begins=numpy.array([0] * len(short) + [len(each.text) for each in asked]),
            phrases=phrases,
            phrase_counts=numpy.array([*map(len, found)]),
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, targets = batch
        logits = model(tokens).flatten(0, 1).float()
        total = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, GPT)
        return {"accuracy": accuracy(model, self.letters, self.held)}


@dataclass(frozen=True)
class _Table:
    """All that can be read, a row each: its tokens, how many, where the answer begins, where its phrases are."""

    tokens: Numbers
    lengths: Numbers
    begins: Numbers
    phrases: Numbers
    phrase_counts: Numbers


def answers(model: GPT, letters: Characters, questions: Sequence[str], at_once: int = 256) -> list[GeneratedText]:
    """The likeliest characters after each question, one after the other."""
    found: list[GeneratedText] = []
    stop = letters.encode(PAD)[0]
    for start in range(0, len(questions), at_once):
        prompts = [letters.encode(prompt(each)) for each in questions[start : start + at_once]]
        found += generate(model, prompts, max_new_tokens=LONGEST, stop=[stop])
    return found


def verdicts(
    model: GPT, letters: Characters, questions: Sequence[BirthplaceQuestion]
) -> tuple[list[float], list[bool]]:
    """The log-probability of each answer, and whether it is right to the letter."""
    told = answers(model, letters, [each.text for each in questions])
    right = [letters.decode(text.body) == each.place for text, each in zip(told, questions, strict=True)]
    return [text.log_probability for text in told], right


def accuracy(model: GPT, letters: Characters, questions: Sequence[BirthplaceQuestion]) -> float:
    """The share of questions whose answer is right."""
    _, right = verdicts(model, letters, questions)
    return sum(right) / len(right)
