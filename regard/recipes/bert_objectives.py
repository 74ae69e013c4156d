"""What a text asks by itself, without anybody's labels: four questions about its sentences, asked of BERT all at once.

words   which words were hidden (Devlin et al. 2018, arXiv:1810.04805): chosen out of all tokens
next    whether a sentence follows another (0), or comes from elsewhere (1) (the same)
order   whether two sentences that follow each other stand in their order (0), or inverted (1) (Lan et al. 2019,
        arXiv:1909.11942)
halves  which of eight second halves belongs to the first half of a sentence, by the vectors of both, which are read
        apart (after Logeswaran and Lee 2018, arXiv:1803.02893)

A sentence is what stands between two stops, commas among them, and has six words or more. The first token says what is
asked. Whether is asked both ways, so that one answer for all is right half of the time. Sentences follow each other
inside a passage, never from one to the next: were a text one chain, each sentence would come first as often as second,
and nothing that one sentence says could tell.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from regard.base.errors import DataError
from regard.core.masks import padding
from regard.data.byte_pairs import BytePairs
from regard.data.sampler import ShuffledOrder, sampler_generator
from regard.models.bert import BERTOutput
from regard.train.objectives import IGNORED
from regard.train.task import Loss

CHOICES = 8  # halves of sentences to choose from
SHARPNESS = 10.0  # of that choice: cosines are times this
LEAST = 6  # words of a sentence: a shorter one says little, and goes with the one after it
PASSAGE = re.compile(r"\n\s*\n")
END = re.compile(r"(?<=[.!?;:,])\s+")


def passages(text: str) -> list[list[str]]:
    """The sentences of each passage in their order, words one blank apart. Passages stand apart by empty lines.

    A passage shorter than a sentence, such as a heading, is left out.
    """
    found = []
    for passage in PASSAGE.split(text):
        sentences: list[str] = []
        begun: list[str] = []
        for piece in END.split(passage):
            begun += piece.split()
            if len(begun) >= LEAST:
                sentences.append(" ".join(begun))
                begun = []
        if sentences:
            sentences[-1] = " ".join([sentences[-1], *begun])
            found.append(sentences)
    return found


@dataclass(frozen=True)
class Book:
    """Sentences as tokens, in their order, and how they are put before BERT.

    pairs    the places of sentences that are followed by another in their passage
    context  the most tokens of an example: what does not fit is left out where two sentences are furthest apart
    """

    sentences: tuple[tuple[int, ...], ...]
    pairs: tuple[int, ...]
    pieces: BytePairs
    context: int

    @staticmethod
    def of(text: str, pieces: BytePairs, context: int) -> "Book":
        found = passages(text)
        last = set(accumulate(map(len, found)))  # one after the last sentence of each passage
        count = max(last, default=0)
        pairs = tuple(place for place in range(count) if place + 1 not in last)
        places = sum(len(sentences) > 1 for sentences in found)
        if len(pairs) < CHOICES or places < 2:
            raise DataError(
                f"questions need {CHOICES} sentences that others follow in the same passage, of {LEAST} words each, in "
                f"2 passages, but a text, or a part of it that is held out, has {len(pairs)} in {places}; read a "
                "longer one, whose passages stand apart by empty lines"
            )
        return Book(
            tuple(map(tuple, pieces.encode_many([each for some in found for each in some]))), pairs, pieces, context
        )

    @cached_property
    def marks(self) -> dict[str, int]:
        """The numbers of special tokens."""
        return {name: self.pieces.token(name) for name in SPECIAL}

    @cached_property
    def _together(self) -> tuple[range, ...]:
        """The numbers of the pairs in the same passage, for each pair."""
        found: list[range] = []
        for number, place in enumerate(self.pairs):
            follows = number > 0 and place == self.pairs[number - 1] + 1
            found.append(range(found[-1].start if follows else number, number + 1))
        for number in range(len(found) - 2, -1, -1):
            if found[number + 1].start == found[number].start:
                found[number] = found[number + 1]
        return tuple(found)

    def elsewhere(self, number: int, draws: torch.Generator) -> int:
        """The place of a pair in another passage."""
        here = self._together[number]
        drawn = _below(len(self.pairs) - len(here), draws)
        return self.pairs[drawn + len(here) * (drawn >= here.start)]

    def others(self, number: int, draws: torch.Generator) -> list[int]:
        """The place of a pair, by its number, and those of as many others as there is a choice from."""
        chosen = [number]
        while len(chosen) < CHOICES:
            drawn = _below(len(self.pairs) - len(chosen), draws)
            for taken in sorted(chosen):
                drawn += drawn >= taken
            chosen.append(drawn)
        return [self.pairs[each] for each in chosen]


class Example(NamedTuple):
    """What BERT reads, and what it has to say: of each token, or of the pair; IGNORED where nothing is asked."""

    tokens: Int[Tensor, "n"]
    segments: Int[Tensor, "n"]
    words: Int[Tensor, "n"]
    pair: int = IGNORED


def words(book: Book, number: int, draws: torch.Generator) -> tuple[Example, ...]:
    """Two sentences that follow each other, of which words are to be hidden: see `hidden`."""
    place = book.pairs[number]
    return (_pair(book, "words", book.sentences[place], book.sentences[place + 1], IGNORED),)


def next_sentence(book: Book, number: int, draws: torch.Generator) -> tuple[Example, ...]:
    """A sentence and the one that follows it; and the same with one from elsewhere, which follows another there."""
    here, there = book.pairs[number], book.elsewhere(number, draws)
    return tuple(
        _pair(book, "next", book.sentences[here], book.sentences[each + 1], false)
        for false, each in enumerate((here, there))
    )


def inverted_order(book: Book, number: int, draws: torch.Generator) -> tuple[Example, ...]:
    """Two sentences that follow each other; and the later one first."""
    place = book.pairs[number]
    both = book.sentences[place], book.sentences[place + 1]
    return _pair(book, "order", *both, 0), _pair(book, "order", *both[::-1], 1)


def halves(book: Book, number: int, draws: torch.Generator) -> tuple[Example, ...]:
    """The first halves of a sentence and of others from elsewhere, then their second halves in the same order."""
    places = book.others(number, draws)
    return _choice(book, "halves", [_halves(book.sentences[each], draws) for each in places])


QUESTIONS: dict[str, Callable[[Book, int, torch.Generator], tuple[Example, ...]]] = {
    "words": words,
    "next": next_sentence,
    "order": inverted_order,
    "halves": halves,
}
# what records ask in turn: words are hidden in all of them, and a choice is much to read
TURNS = (*("next", "order") * 7, "next", "words", *("next", "order") * 7, "halves", "order")
SPECIAL = ("pad", "mask", "between", *QUESTIONS)


def hidden(example: Example, share: float, book: Book, draws: torch.Generator) -> Example:
    """The example with a share of its words to be told, one at least.

    Of these 80 % are masked, 10 % are some other token and 10 % stay, so that no word can be trusted.
    """
    sayable = (example.tokens >= len(SPECIAL)).nonzero().flatten()
    chosen = sayable[torch.rand(len(sayable), generator=draws) < share]
    if not len(chosen):
        chosen = sayable[_below(len(sayable), draws)][None]
    fate = torch.rand(len(chosen), generator=draws)
    others = torch.randint(len(SPECIAL), book.pieces.vocab, chosen.shape, generator=draws)
    tokens, told = example.tokens.clone(), torch.full_like(example.words, IGNORED)
    told[chosen] = tokens[chosen]
    tokens[chosen] = torch.where(fate < 0.8, book.marks["mask"], torch.where(fate < 0.9, others, tokens[chosen]))
    return example._replace(tokens=tokens, words=told)


class Examples(NamedTuple):
    """Examples filled up to one length, and which of them belong to one choice."""

    tokens: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    lengths: Int[Tensor, "b"]
    words: Int[Tensor, "b n"]
    pair: Int[Tensor, "b"]
    choices: Int[Tensor, "g m"]


def together(records: Sequence[Sequence[Example]], book: Book) -> Examples:
    """The examples of records as a batch, each as long as the context: a compiled model sees one shape."""
    examples = [each for record in records for each in record]
    shape = len(examples), book.context
    tokens = torch.full(shape, book.marks["pad"])
    segments, told = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for row, each in enumerate(examples):
        here = slice(len(each.tokens))
        tokens[row, here], segments[row, here], told[row, here] = each.tokens, each.segments, each.words
    rows = torch.arange(len(examples)).split([len(record) for record in records])
    chosen = [some for some in rows if len(some) == 2 * CHOICES]
    return Examples(
        tokens,
        segments,
        torch.tensor([len(each.tokens) for each in examples]),
        told,
        torch.tensor([each.pair for each in examples]),
        torch.stack(chosen) if chosen else torch.zeros(0, 2 * CHOICES, dtype=torch.int64),
    )


@dataclass(frozen=True)
class SentenceTask:
    """The four questions about a text, in turn; words are hidden in every example.

    held   what the questions are asked about to see how good the model is
    share  of words that are hidden
    asked  the most sentences that each question is asked about then
    """

    book: Book
    held: Book
    batch_size: int
    share: float
    asked: int
    seed: int

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self.book.pairs), self.batch_size, self.seed)

    def batch(self, step: int, part: int, of: int) -> Examples:
        pairs = self._order.part(part, of).at(step).tolist()
        records = []
        # what a record draws depends on its number alone, so shares of a batch make it up however many there are
        for number, pair in enumerate(pairs, step * self.batch_size + part * len(pairs)):
            draws = sampler_generator(self.seed, number, "sentences")
            record = QUESTIONS[TURNS[number % len(TURNS)]](self.book, pair, draws)
            records.append([hidden(each, self.share, self.book, draws) for each in record])
        return together(records, self.book)

    def loss(self, model: nn.Module, batch: Examples) -> Loss:
        """For each example the mean over its hidden words, and what its answer costs; examples are what is counted."""
        out = said(model, batch)
        assert out.logits is not None
        assert out.pair_logits is not None
        telling = batch.words != IGNORED
        costs = cross_entropy(out.logits.flatten(0, 1).float(), batch.words.flatten(), reduction="none")
        told = (costs.view(telling.shape).sum(1) / telling.sum(1)).sum()
        fits = fitting(out, batch)
        answers = cross_entropy(out.pair_logits.float(), batch.pair, ignore_index=IGNORED, reduction="sum")
        answers = answers + cross_entropy(fits.flatten(0, 1), _own(fits).flatten(), reduction="sum")
        return Loss(told + answers, len(batch.pair))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = answered(model, self.held, self.share, self.asked, self.seed)
        return {"accuracy": sum(each.right for each in found.values()) / len(found)} | {
            f"{name} accuracy": each.right for name, each in found.items()
        }


class Answered(NamedTuple):
    """The share of right answers to a question, what one answer for all would get, and how sure the first is.

    interval  half of that in which the share lies 95 times of 100, were records drawn anew
    """

    right: float
    chance: float
    interval: float


def answered(
    model: nn.Module, book: Book, share: float, asked: int, seed: int, at_once: int = 16
) -> dict[str, Answered]:
    """How well the model answers each question about a text. Words are hidden in the first question alone.

    asked  the most sentences that each is asked about
    """
    found = {}
    device = next(model.parameters()).device
    most = min(asked, len(book.pairs))
    for question, ask in QUESTIONS.items():
        count = -(-most // CHOICES) if question == "halves" else most
        records = []
        for number in range(count):
            draws = sampler_generator(seed, number, "held", question)
            record = ask(book, number * len(book.pairs) // count, draws)
            records.append([hidden(each, share, book, draws) if question == "words" else each for each in record])
        answers, truth = [], []
        for start in range(0, count, at_once):
            some = records[start : start + at_once]
            batch = Examples(*(each.to(device) for each in together(some, book)))
            with torch.no_grad():
                told, wanted = (each.cpu() for each in _answer(question, said(model, batch), batch))
            answers.append(told.view(len(some), -1))  # a row for each record
            truth.append(wanted.view(len(some), -1))
        found[question] = judged(torch.cat(answers), torch.cat(truth))
    return found


def judged(answers: Int[Tensor, "records m"], truth: Int[Tensor, "records m"]) -> Answered:
    """How good answers are. What is asked in one record is not told independently, so records are what is counted."""
    asked = truth != IGNORED
    hits, sizes = ((answers == truth) & asked).sum(1).double(), asked.sum(1).double()
    right = hits.sum() / sizes.sum()
    spread = (hits - right * sizes).square().sum().sqrt() / sizes.sum()
    chance = truth[asked].bincount().max() / sizes.sum()
    return Answered(right.item(), chance.item(), 1.96 * spread.item())


def said(model: nn.Module, batch: Examples) -> BERTOutput:
    """What the model says of a batch."""
    out = model(batch.tokens, segments=batch.segments, padding=padding(batch.lengths))
    assert isinstance(out, BERTOutput)
    return out


def fitting(out: BERTOutput, batch: Examples) -> Float[Tensor, "g choices choices"]:
    """How well each first part (row) fits each second part (column) of a choice."""
    assert out.pooled is not None
    vectors = normalize(out.pooled.float(), dim=-1)[batch.choices]
    first, second = vectors[:, :CHOICES], vectors[:, CHOICES:]
    return SHARPNESS * first @ second.transpose(1, 2)


def _own(fits: Float[Tensor, "g choices choices"]) -> Int[Tensor, "g choices"]:
    """The second parts that belong to the first ones: they stand in the same order."""
    return torch.arange(CHOICES, device=fits.device).expand(fits.shape[:2])


def _answer(question: str, out: BERTOutput, batch: Examples) -> tuple[Tensor, Tensor]:
    """What is answered to a question, and what should be."""
    if len(batch.choices):
        fits = fitting(out, batch)
        return fits.argmax(-1), _own(fits)
    logits = out.logits if question == "words" else out.pair_logits
    assert logits is not None
    return logits.argmax(-1), batch.words if question == "words" else batch.pair


def _pair(book: Book, question: str, first: Sequence[int], second: Sequence[int], pair: int) -> Example:
    """Two sentences, the longer one shortened until both fit."""
    room = book.context - 3
    shorter = min(len(first), len(second), room // 2)
    first = first[-(room - shorter) :] if len(first) >= len(second) else first[-shorter:]
    return _example(book, question, first, second[: room - len(first)], pair=pair)


def _choice(book: Book, question: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Example, ...]:
    """All first parts, then all second parts, each alone; what does not fit is what is furthest from the other."""
    room = book.context - 2
    firsts = [_example(book, question, first[-room:]) for first, _ in pairs]
    return (*firsts, *(_example(book, question, second[:room]) for _, second in pairs))


def _example(book: Book, question: str, *sentences: Sequence[int], pair: int = IGNORED) -> Example:
    """[question] first [between] second [between]"""
    tokens, segments = [book.marks[question]], [0]
    for number, each in enumerate(sentences):
        tokens += [*each, book.marks["between"]]
        segments += [number] * (len(each) + 1)
    return Example(torch.tensor(tokens), torch.tensor(segments), torch.full((len(tokens),), IGNORED), pair)


def _halves(sentence: Sequence[int], draws: torch.Generator) -> tuple[Sequence[int], Sequence[int]]:
    """A sentence cut somewhere in its middle half."""
    quarter = len(sentence) // 4
    cut = quarter + 1 + _below(max(1, len(sentence) - 2 * quarter - 1), draws)
    return sentence[:cut], sentence[cut:]


def _below(size: int, draws: torch.Generator) -> int:
    return int(torch.randint(size, (), generator=draws))
