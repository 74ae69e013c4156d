"""What a text asks by itself, without anybody's labels: four questions about its sentences, asked of BERT all at once.

words   which words were hidden (Devlin et al. 2018, arXiv:1810.04805): chosen out of all tokens
next    whether the second sentence follows the first, or stands elsewhere: a true pair (0) or a false one (1)
order   whether two sentences that follow each other stand in their order (0), or inverted (1) (Lan et al. 2019,
        arXiv:1909.11942)
halves  which of eight second halves belongs to the first half of a sentence, by the vectors of halves that were read
        apart (contrast after van den Oord et al. 2018, arXiv:1807.03748)

The first token says which is asked.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from regard.base.errors import DataError
from regard.core.masks import padding
from regard.data.byte_pairs import BytePairs
from regard.data.order import Order, generator
from regard.models.bert import BERTOutput
from regard.train.objectives import IGNORED
from regard.train.task import Loss

CHOICES = 8  # halves to choose from
SHARPNESS = 10.0  # of that choice: cosines are times this
LEAST = 6  # words of a sentence: a shorter one is no question, and goes with the one after it
END = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n")


def sentences_of(text: str) -> list[str]:
    """The sentences of a text in their order, their words one blank apart."""
    found: list[str] = []
    begun: list[str] = []
    for piece in END.split(text):
        begun += piece.split()
        if len(begun) >= LEAST:
            found.append(" ".join(begun))
            begun = []
    if begun and found:
        found[-1] = " ".join([found[-1], *begun])
    return found


@dataclass(frozen=True)
class Book:
    """Sentences as tokens, in their order, and how they are put before BERT.

    context  the most tokens of an example: what does not fit is left out where two sentences are furthest apart
    """

    sentences: tuple[tuple[int, ...], ...]
    pieces: BytePairs
    context: int

    @staticmethod
    def of(text: str, pieces: BytePairs, context: int) -> "Book":
        found = sentences_of(text)
        if len(found) <= CHOICES:
            raise DataError(
                f"questions are asked about more than {CHOICES} sentences, of {LEAST} words or more each, and a text "
                f"or its held-out part has {len(found)}; read a longer one"
            )
        return Book(tuple(map(tuple, pieces.encode_many(found))), pieces, context)

    @property
    def pairs(self) -> int:
        """How many sentences have one after them."""
        return len(self.sentences) - 1

    @cached_property
    def marks(self) -> dict[str, int]:
        """The numbers of special tokens."""
        return {name: self.pieces.token(name) for name in SPECIAL}

    def elsewhere(self, but: Sequence[int], draws: torch.Generator) -> int:
        """The place of some sentence that is none of these."""
        place = _below(len(self.sentences) - len(but), draws)
        for taken in sorted(but):
            place += place >= taken
        return place


class Example(NamedTuple):
    """What BERT reads, and what it has to say: of each token, or of the pair; IGNORED where nothing is asked."""

    tokens: Int[Tensor, "n"]
    segments: Int[Tensor, "n"]
    words: Int[Tensor, "n"]
    pair: int = IGNORED


def words(book: Book, place: int, draws: torch.Generator) -> tuple[Example, ...]:
    """Two sentences that follow each other, of which words are to be hidden: see `hidden`."""
    return (_pair(book, "words", book.sentences[place], book.sentences[place + 1], IGNORED),)


def next_sentence(book: Book, place: int, draws: torch.Generator) -> tuple[Example, ...]:
    """A sentence and the next one, or one from elsewhere."""
    false = _below(2, draws)
    second = book.elsewhere([place, place + 1], draws) if false else place + 1
    return (_pair(book, "next", book.sentences[place], book.sentences[second], false),)


def inverted_order(book: Book, place: int, draws: torch.Generator) -> tuple[Example, ...]:
    """Two sentences that follow each other, or the later one first."""
    false = _below(2, draws)
    return (_pair(book, "order", book.sentences[place + false], book.sentences[place + 1 - false], false),)


def halves(book: Book, place: int, draws: torch.Generator) -> tuple[Example, ...]:
    """The first halves of a sentence and of others from elsewhere, then their second halves in the same order."""
    places = [place]
    while len(places) < CHOICES:
        places.append(book.elsewhere(places, draws))
    cut = [_halves(book.sentences[each], draws) for each in places]
    room = book.context - 2
    firsts = [_example(book, "halves", first[-room:]) for first, _ in cut]
    return (*firsts, *(_example(book, "halves", second[:room]) for _, second in cut))


QUESTIONS: dict[str, Callable[[Book, int, torch.Generator], tuple[Example, ...]]] = {
    "words": words,
    "next": next_sentence,
    "order": inverted_order,
    "halves": halves,
}
TURNS = (*("words", "next", "order") * 5, "halves")  # what records ask in turn: halves are many to read
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
    """Examples filled up to one length, and which of them are the halves of one choice."""

    tokens: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    lengths: Int[Tensor, "b"]
    words: Int[Tensor, "b n"]
    pair: Int[Tensor, "b"]
    halves: Int[Tensor, "g m"]


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
    chosen = [some for some in rows if len(some) > 1]
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
    """The four questions about a text, asked in turn; words are hidden in every example.

    held   what the questions are asked about to see how good the model is
    share  of words that are hidden
    asked  how often each question is asked then
    """

    book: Book
    held: Book
    batch_size: int
    share: float
    asked: int
    seed: int

    @cached_property
    def _order(self) -> Order:
        return Order(self.book.pairs, self.batch_size, self.seed)

    def batch(self, step: int, part: int, of: int) -> Examples:
        places = self._order.part(part, of).at(step).tolist()
        records = []
        # what a record draws depends on its number alone, so shares of a batch make it up however many there are
        for number, place in enumerate(places, step * self.batch_size + part * len(places)):
            draws = generator(self.seed, number, "sentences")
            record = QUESTIONS[TURNS[number % len(TURNS)]](self.book, place, draws)
            records.append([hidden(each, self.share, self.book, draws) for each in record])
        return together(records, self.book)

    def loss(self, model: nn.Module, batch: Examples) -> Loss:
        """For each example the mean over its hidden words, and what its answer costs; examples are what is counted."""
        out = said(model, batch)
        assert out.logits is not None
        assert out.pair_logits is not None
        telling = batch.words != IGNORED
        costs = cross_entropy(out.logits.flatten(0, 1).float(), batch.words.flatten(), reduction="none")
        total = (costs.view(telling.shape).sum(1) / telling.sum(1)).sum()
        total = total + cross_entropy(out.pair_logits.float(), batch.pair, ignore_index=IGNORED, reduction="sum")
        fits = fitting(out, batch)
        return Loss(total + cross_entropy(fits.flatten(0, 1), _own(fits).flatten(), reduction="sum"), len(batch.pair))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = answered(model, self.held, self.share, self.asked, self.seed)
        return {"accuracy": sum(each.right for each in found.values()) / len(found)} | {
            f"{name} accuracy": each.right for name, each in found.items()
        }


class Answered(NamedTuple):
    """The share of right answers to a question, and what one answer for all would get."""

    right: float
    chance: float


def answered(
    model: nn.Module, book: Book, share: float, asked: int, seed: int, at_once: int = 16
) -> dict[str, Answered]:
    """How well the model answers each question about a text. Words are hidden in the first question alone."""
    found = {}
    device = next(model.parameters()).device
    for question, ask in QUESTIONS.items():
        count = -(-asked // CHOICES) if question == "halves" else asked
        records = []
        for number in range(count):
            draws = generator(seed, number, "held", question)
            record = ask(book, number * book.pairs // count, draws)
            records.append([hidden(each, share, book, draws) if question == "words" else each for each in record])
        told, truth = [], []
        for start in range(0, count, at_once):
            some = Examples(*(each.to(device) for each in together(records[start : start + at_once], book)))
            with torch.no_grad():
                answer, wanted = _answer(question, said(model, some), some)
            told.append(answer[wanted != IGNORED].cpu())
            truth.append(wanted[wanted != IGNORED].cpu())
        wanted = torch.cat(truth)
        right = (torch.cat(told) == wanted).double().mean().item()
        found[question] = Answered(right, wanted.bincount().max().item() / len(wanted))
    return found


def said(model: nn.Module, batch: Examples) -> BERTOutput:
    """What the model says of a batch."""
    out = model(batch.tokens, segments=batch.segments, padding=padding(batch.lengths))
    assert isinstance(out, BERTOutput)
    return out


def fitting(out: BERTOutput, batch: Examples) -> Float[Tensor, "g choices choices"]:
    """How well each first half (row) fits each second half (column) of its choice."""
    assert out.pooled is not None
    vectors = normalize(out.pooled.float(), dim=-1)[batch.halves]
    first, second = vectors[:, :CHOICES], vectors[:, CHOICES:]
    return SHARPNESS * first @ second.transpose(1, 2)


def _own(fits: Float[Tensor, "g choices choices"]) -> Int[Tensor, "g choices"]:
    """The second halves that belong to the first ones: they stand in the same order."""
    return torch.arange(CHOICES, device=fits.device).expand(fits.shape[:2])


def _answer(question: str, out: BERTOutput, batch: Examples) -> tuple[Tensor, Tensor]:
    """What is answered to a question, and what should be."""
    if question == "halves":
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
