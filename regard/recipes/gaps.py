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

from regard.data.birthplaces import Question
from regard.data.characters import Characters
from regard.data.corruption import IGNORED, MASK, PAD, PHRASE, prompt
from regard.data.order import Order, generator
from regard.models.generation import Text, generate
from regard.models.gpt import GPT
from regard.train.task import Loss

LONGEST = 40  # characters of an answer
Tokens = NDArray[Any]
NOTHING: Tokens = numpy.zeros(0, dtype=numpy.int64)


@dataclass(frozen=True)
class GapTask:
    """Texts with gaps, questions mixed in. A text that does not fit is cut at its end: a life begins with its name.

    questions  asked in training
    held       asked to see how good the model is
    share      of records that are questions; 1 is fine-tuning
    phrases    how often a gap is a whole phrase
    span       the mean share of a text that another gap takes
    """

    texts: Sequence[str]
    questions: Sequence[Question]
    held: Sequence[Question]
    letters: Characters
    context: int
    batch_size: int
    share: float
    phrases: float
    seed: int
    span: float = 0.25

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        pool = self.questions if self.share == 1 else self.texts
        records = Order(len(pool), self.batch_size, self.seed).part(part, of).at(step).tolist()
        # drawn for the whole batch at once, so that its shares make it up however many there are
        draws = torch.rand(
            self.batch_size, 5, generator=generator(self.seed, step, "gaps"), dtype=torch.float64
        ).tolist()
        mine = draws[part * len(records) : (part + 1) * len(records)]
        rows = numpy.full((len(records), self.context + 1), self._marks[0])
        learned = numpy.zeros(rows.shape, bool)
        for row, inside, record, draw in zip(rows, learned, records, mine, strict=True):
            prefix, content, suffix = self._cut(record, draw)
            told = numpy.concatenate((prefix, self._marks[1:], suffix, self._marks[1:], content))
            row[: len(told)] = told
            first = len(told) - len(content) if suffix is NOTHING else 1
            inside[first : len(told) + 1] = True  # with the padding that says that the content is over
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens.masked_fill(torch.from_numpy(~learned), IGNORED)[:, 1:]

    def _cut(self, record: int, draw: list[float]) -> tuple[Tokens, Tokens, Tokens]:
        """What stands before the gap, in it and after it."""
        if draw[0] < self.share:
            question, answer = self._asked[record if self.share == 1 else int(draw[1] * len(self._asked))]
            return question, answer, NOTHING
        text, spans = self._read[record]
        if spans and draw[1] < self.phrases:
            begin, end = spans[int(draw[2] * len(spans))]
        else:
            size = 1 + int(draw[3] * max(1, round(2 * self.span * len(text)) - 1))
            begin = int(draw[4] * (len(text) - size + 1))
            end = begin + size
        return text[:begin], text[begin:end], text[end:]

    @cached_property
    def _order(self) -> Order:
        return Order(len(self.questions if self.share == 1 else self.texts), self.batch_size, self.seed)

    @cached_property
    def _marks(self) -> Tokens:
        return numpy.array(self.letters.encode(PAD + MASK))

    @cached_property
    def _asked(self) -> list[tuple[Tokens, Tokens]]:
        return [(self._encoded(each.text), self._encoded(each.place)) for each in self.questions]

    @cached_property
    def _read(self) -> list[tuple[Tokens, list[tuple[int, int]]]]:
        """Each text as far as it fits, and where its phrases are."""
        short = [text[: self.context - 2] for text in self.texts]  # two masks, and the end
        return [(self._encoded(text), [found.span() for found in PHRASE.finditer(text)]) for text in short]

    def _encoded(self, text: str) -> Tokens:
        return numpy.array(self.letters.encode(text), dtype=numpy.int64)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, targets = batch
        logits = model(tokens).flatten(0, 1).float()
        total = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, GPT)
        return {"accuracy": accuracy(model, self.letters, self.held)}


def answers(model: GPT, letters: Characters, questions: Sequence[str], at_once: int = 256) -> list[Text]:
    """The likeliest characters after each question, one after the other."""
    found: list[Text] = []
    stop = letters.encode(PAD)[0]
    for start in range(0, len(questions), at_once):
        prompts = [letters.encode(prompt(each)) for each in questions[start : start + at_once]]
        found += generate(model, prompts, length=LONGEST, stops=[stop])
    return found


def verdicts(model: GPT, letters: Characters, questions: Sequence[Question]) -> tuple[list[float], list[bool]]:
    """The log-probability of each answer, and whether it is right to the letter."""
    told = answers(model, letters, [each.text for each in questions])
    right = [letters.decode(text.body) == each.place for text, each in zip(told, questions, strict=True)]
    return [text.log_probability for text in told], right


def accuracy(model: GPT, letters: Characters, questions: Sequence[Question]) -> float:
    """The share of questions whose answer is right."""
    _, right = verdicts(model, letters, questions)
    return sum(right) / len(right)
