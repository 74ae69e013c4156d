"""Self-supervised objectives of BERT: masked words, next sentence, sentence order and matching halves.

words   masked language modelling: predict masked words (Devlin et al. 2018, arXiv:1810.04805)
next    next sentence prediction: whether the second sentence follows the first (0) or comes from another passage (1)
        (Devlin et al. 2018)
order   sentence order prediction: whether two consecutive sentences are in the order of the text (0) or swapped (1)
        (Lan et al. 2019, arXiv:1909.11942)
halves  contrastive matching: which of eight second halves belongs to the first half of a sentence. The model encodes
        every half separately, and the pooled vectors are compared (after Logeswaran and Lee 2018, arXiv:1803.02893)

A sentence ends at a punctuation mark, commas included, and has at least six words. The first token of an example names
the objective. The objectives `next` and `order` have as many examples with label 0 as with label 1.

A passage is the text between two empty lines. A pair consists of two consecutive sentences of one passage, so the
opening sentence of a passage is never the second of a pair, and the last sentence never the first. In a text without
passages, every sentence would be first and second equally often, so a single sentence would not show its order.
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
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.sampler import ShuffledOrder, random_index, sampler_generator
from regard.models.bert import BERTOutput
from regard.train.objectives import IGNORED
from regard.train.task import Loss

CHOICES = 8  # second halves to choose from
SIMILARITY_SCALE = 10.0  # cosine similarities are multiplied by this
MIN_WORDS = 6  # words of a sentence; a shorter one is joined with the next
PASSAGE = re.compile(r"\n\s*\n")
SENTENCE_END = re.compile(r"(?<=[.!?;:,])\s+")


def split_passages(text: str) -> list[list[str]]:
    """Split a text at empty lines into passages, and each passage into sentences.

    A passage of fewer than MIN_WORDS words, such as a heading, is left out.
    """
    found = []
    for passage in PASSAGE.split(text):
        sentences: list[str] = []
        begun: list[str] = []
        for piece in SENTENCE_END.split(passage):
            begun += piece.split()
            if len(begun) >= MIN_WORDS:
                sentences.append(" ".join(begun))
                begun = []
        if sentences:
            sentences[-1] = " ".join([sentences[-1], *begun])
            found.append(sentences)
    return found


@dataclass(frozen=True)
class SentenceCorpus:
    """The tokenised sentences of a text and the pairs of consecutive sentences, for the objectives of BERT.

    sentences  token ids of each sentence
    pairs      for each pair, the index of its first sentence in `sentences`; the next sentence is its second
    context    maximum number of tokens of an example. To shorten a pair, tokens are removed at the start of the first
               sentence and at the end of the second
    """

    sentences: tuple[tuple[int, ...], ...]
    pairs: tuple[int, ...]
    tokenizer: BytePairTokenizer
    context: int

    @staticmethod
    def from_text(text: str, tokenizer: BytePairTokenizer, context: int) -> "SentenceCorpus":
        """Split a text into sentences, tokenise them and find the pairs of consecutive sentences.

        Raise DataError if the text has too few pairs (fewer than CHOICES), or fewer than 2 passages with a pair.
        """
        found = split_passages(text)
        last = set(accumulate(map(len, found)))  # one after the last sentence of each passage
        count = max(last, default=0)
        pairs = tuple(index for index in range(count) if index + 1 not in last)
        passages = sum(len(sentences) > 1 for sentences in found)
        if len(pairs) < CHOICES or passages < 2:
            raise DataError(
                f"the objectives need {CHOICES} pairs of consecutive sentences of {MIN_WORDS} words each in 2 "
                f"passages, but the text, or its validation or test part, has {len(pairs)} in {passages}; use a longer "
                "text, with empty lines between passages"
            )
        sentences = tokenizer.encode_batch([each for some in found for each in some])
        return SentenceCorpus(tuple(map(tuple, sentences)), pairs, tokenizer, context)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The token id of each special token, by its name."""
        return {name: self.tokenizer.token(name) for name in SPECIAL}

    @cached_property
    def _same_passage(self) -> tuple[range, ...]:
        """For each pair in `pairs`, the range of indices of the pairs from the same passage."""
        found: list[range] = []
        for number, index in enumerate(self.pairs):
            follows = number > 0 and index == self.pairs[number - 1] + 1
            found.append(range(found[-1].start if follows else number, number + 1))
        for number in range(len(found) - 2, -1, -1):
            if found[number + 1].start == found[number].start:
                found[number] = found[number + 1]
        return tuple(found)

    def sample_other_passage(self, number: int, draws: torch.Generator) -> int:
        """Return the index of the first sentence of a random pair, from another passage than pair `number`."""
        here = self._same_passage[number]
        drawn = random_index(len(self.pairs) - len(here), draws)
        return self.pairs[drawn + len(here) * (drawn >= here.start)]

    def sample_choices(self, number: int, draws: torch.Generator) -> list[int]:
        """Return the indices of the sentences of one group for contrastive matching, CHOICES in number.

        The first one is the first sentence of pair `number`; the others are first sentences of other random pairs.
        """
        chosen = [number]
        while len(chosen) < CHOICES:
            drawn = random_index(len(self.pairs) - len(chosen), draws)
            for taken in sorted(chosen):
                drawn += drawn >= taken
            chosen.append(drawn)
        return [self.pairs[each] for each in chosen]


class PretrainingExample(NamedTuple):
    """The input of BERT for one example, with its labels.

    tokens    token ids
    segments  segment of each token: 0 for the first sentence, 1 for the second
    words     token id to predict at each position. Where no word is masked, it is IGNORED, which the loss skips
    pair      label of the objectives `next` and `order`, 0 or 1; IGNORED for the other objectives
    """

    tokens: Int[Tensor, "n"]
    segments: Int[Tensor, "n"]
    words: Int[Tensor, "n"]
    pair: int = IGNORED


def masked_words(corpus: SentenceCorpus, number: int, draws: torch.Generator) -> tuple[PretrainingExample, ...]:
    """Return the example of pair `number` for masked language modelling: two consecutive sentences, not masked yet.

    `mask_words` masks some of the words afterwards.
    """
    index = corpus.pairs[number]
    return (_pair_example(corpus, "words", corpus.sentences[index], corpus.sentences[index + 1], IGNORED),)


def next_sentence(corpus: SentenceCorpus, number: int, draws: torch.Generator) -> tuple[PretrainingExample, ...]:
    """Return two examples for next-sentence prediction, made from pair `number`.

    The first example has a sentence and the one that follows it (label 0), the second has the same sentence and
    a sentence of another passage (label 1).
    """
    here, there = corpus.pairs[number], corpus.sample_other_passage(number, draws)
    return tuple(
        _pair_example(corpus, "next", corpus.sentences[here], corpus.sentences[each + 1], false)
        for false, each in enumerate((here, there))
    )


def sentence_order(corpus: SentenceCorpus, number: int, draws: torch.Generator) -> tuple[PretrainingExample, ...]:
    """Return two examples for sentence-order prediction: the sentences of pair `number` in order (label 0) and swapped
    (label 1).
    """
    index = corpus.pairs[number]
    both = corpus.sentences[index], corpus.sentences[index + 1]
    return _pair_example(corpus, "order", *both, 0), _pair_example(corpus, "order", *both[::-1], 1)


def matching_halves(corpus: SentenceCorpus, number: int, draws: torch.Generator) -> tuple[PretrainingExample, ...]:
    """Return the examples for contrastive matching: the two halves of CHOICES sentences.

    Each half is an example of its own: first all first halves, then all second halves in the same order.
    """
    indices = corpus.sample_choices(number, draws)
    return _half_examples(corpus, "halves", [_split_sentence(corpus.sentences[each], draws) for each in indices])


OBJECTIVES: dict[str, Callable[[SentenceCorpus, int, torch.Generator], tuple[PretrainingExample, ...]]] = {
    "words": masked_words,
    "next": next_sentence,
    "order": sentence_order,
    "halves": matching_halves,
}
# the objectives of consecutive records; words are masked in all of them, and `halves` is the most expensive
OBJECTIVE_CYCLE = (*("next", "order") * 7, "next", "words", *("next", "order") * 7, "halves", "order")
SPECIAL = ("pad", "mask", "between", *OBJECTIVES)


def mask_words(
    example: PretrainingExample, share: float, corpus: SentenceCorpus, draws: torch.Generator
) -> PretrainingExample:
    """Mask words of an example for masked language modelling; `words` of the result has the tokens to predict.

    A word is any token that is not special. Each word is chosen with probability `share`; at least one is chosen. Of
    the chosen words about 80 % are replaced by the mask token, 10 % by a random token, and 10 % are kept.
    """
    maskable = (example.tokens >= len(SPECIAL)).nonzero().flatten()
    chosen = maskable[torch.rand(len(maskable), generator=draws) < share]
    if not len(chosen):
        chosen = maskable[random_index(len(maskable), draws)][None]
    fate = torch.rand(len(chosen), generator=draws)
    others = torch.randint(len(SPECIAL), corpus.tokenizer.vocab, chosen.shape, generator=draws)
    tokens, words = example.tokens.clone(), torch.full_like(example.words, IGNORED)
    words[chosen] = tokens[chosen]
    tokens[chosen] = torch.where(
        fate < 0.8, corpus.special_ids["mask"], torch.where(fate < 0.9, others, tokens[chosen])
    )
    return example._replace(tokens=tokens, words=words)


class PretrainingBatch(NamedTuple):
    """A batch of pretraining examples, padded to the same length.

    lengths  number of tokens of each example, without padding
    words    token id to predict at each position; IGNORED where no word is masked
    pair     label of each example of the objectives `next` and `order`, 0 or 1; IGNORED for the other objectives
    choices  for each group of contrastive matching, the rows of its examples in this batch: the first halves, then the
             second halves in the same order
    """

    tokens: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    lengths: Int[Tensor, "b"]
    words: Int[Tensor, "b n"]
    pair: Int[Tensor, "b"]
    choices: Int[Tensor, "g m"]


def collate(records: Sequence[Sequence[PretrainingExample]], corpus: SentenceCorpus) -> PretrainingBatch:
    """Return a batch of examples, each padded to the context length.

    All batches have the same width, so `torch.compile` compiles one shape.

    records  lists of examples; each list was returned by one call of an objective
    """
    examples = [each for record in records for each in record]
    shape = len(examples), corpus.context
    tokens = torch.full(shape, corpus.special_ids["pad"])
    segments, words = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for row, each in enumerate(examples):
        here = slice(len(each.tokens))
        tokens[row, here], segments[row, here], words[row, here] = each.tokens, each.segments, each.words
    rows = torch.arange(len(examples)).split([len(record) for record in records])
    chosen = [some for some in rows if len(some) == 2 * CHOICES]
    return PretrainingBatch(
        tokens,
        segments,
        torch.tensor([len(each.tokens) for each in examples]),
        words,
        torch.tensor([each.pair for each in examples]),
        torch.stack(chosen) if chosen else torch.zeros(0, 2 * CHOICES, dtype=torch.int64),
    )


@dataclass(frozen=True)
class BERTPretrainingTask:
    """Training task of BERT. The four objectives alternate as in OBJECTIVE_CYCLE; words are masked in all examples.

    corpus          sentences for training
    validation      sentences for evaluation
    mask_share      fraction of words that are masked
    eval_sentences  maximum number of sentences for each objective in evaluation
    """

    corpus: SentenceCorpus
    validation: SentenceCorpus
    batch_size: int
    mask_share: float
    eval_sentences: int
    seed: int

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self.corpus.pairs), self.batch_size, self.seed)

    def batch(self, step: int, part: int, of: int) -> PretrainingBatch:
        """Return micro-batch `part`, counted from 0, of a training step that is split into `of` micro-batches."""
        pairs = self._order.at(step, part, of).tolist()
        records = []
        # random numbers depend on the number of a record only, so batches do not depend on the number of processes
        for number, pair in enumerate(pairs, step * self.batch_size + part * len(pairs)):
            draws = sampler_generator(self.seed, number, "sentences")
            record = OBJECTIVES[OBJECTIVE_CYCLE[number % len(OBJECTIVE_CYCLE)]](self.corpus, pair, draws)
            records.append([mask_words(each, self.mask_share, self.corpus, draws) for each in record])
        return collate(records, self.corpus)

    def loss(self, model: nn.Module, batch: PretrainingBatch) -> Loss:
        """Return the loss, summed over examples.

        The loss of an example is the mean cross-entropy of its masked words, plus the cross-entropy of the
        label of its pair (`next`, `order`) or of the choice of the matching second half (`halves`).
        """
        out = run_bert(model, batch)
        assert out.logits is not None
        assert out.pair_logits is not None
        masked = batch.words != IGNORED
        costs = cross_entropy(out.logits.flatten(0, 1).float(), batch.words.flatten(), reduction="none")
        words = (costs.view(masked.shape).sum(1) / masked.sum(1)).sum()
        fits = half_similarity(out, batch)
        answers = cross_entropy(out.pair_logits.float(), batch.pair, ignore_index=IGNORED, reduction="sum")
        answers = answers + cross_entropy(fits.flatten(0, 1), _matching_indices(fits).flatten(), reduction="sum")
        return Loss(words + answers, len(batch.pair))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean validation accuracy of the four objectives, then the accuracy of each."""
        found = evaluate_objectives(model, self.validation, self.mask_share, self.eval_sentences, self.seed)
        return {"accuracy": sum(each.accuracy for each in found.values()) / len(found)} | {
            f"{name} accuracy": each.accuracy for name, each in found.items()
        }


class ObjectiveScore(NamedTuple):
    """The accuracy of a model on one pretraining objective.

    chance    accuracy of always giving the most frequent answer
    interval  half the width of the 95 % confidence interval of the accuracy
    """

    accuracy: float
    chance: float
    interval: float


def evaluate_objectives(
    model: nn.Module, corpus: SentenceCorpus, mask_share: float, sentences: int, seed: int, batch_size: int = 16
) -> dict[str, ObjectiveScore]:
    """Return the accuracy on each objective, as a dict from the name of the objective to the score.

    Words are masked for masked language modelling only.

    sentences  maximum number of sentences for each objective
    """
    found = {}
    device = next(model.parameters()).device
    most = min(sentences, len(corpus.pairs))
    for objective, make_examples in OBJECTIVES.items():
        count = -(-most // CHOICES) if objective == "halves" else most
        records = []
        for number in range(count):
            draws = sampler_generator(seed, number, "held", objective)
            record = make_examples(corpus, number * len(corpus.pairs) // count, draws)
            if objective == "words":
                record = tuple(mask_words(each, mask_share, corpus, draws) for each in record)
            records.append(record)
        answers, truth = [], []
        for start in range(0, count, batch_size):
            some = records[start : start + batch_size]
            batch = PretrainingBatch(*(each.to(device) for each in collate(some, corpus)))
            with torch.no_grad():
                predicted, wanted = (each.cpu() for each in _predict(objective, run_bert(model, batch), batch))
            answers.append(predicted.view(len(some), -1))  # a row for each record
            truth.append(wanted.view(len(some), -1))
        found[objective] = score_answers(torch.cat(answers), torch.cat(truth))
    return found


def score_answers(answers: Int[Tensor, "records m"], truth: Int[Tensor, "records m"]) -> ObjectiveScore:
    """Return the accuracy of answers with its confidence interval and the accuracy by chance.

    Answers in one row were made from the same sentence pair and are not independent, so the interval is
    computed from the variation between rows.

    answers  predicted class of each example
    truth    correct class of each example; where it is IGNORED, the answer does not count
    """
    labelled = truth != IGNORED
    hits, sizes = ((answers == truth) & labelled).sum(1).double(), labelled.sum(1).double()
    right = hits.sum() / sizes.sum()
    spread = (hits - right * sizes).square().sum().sqrt() / sizes.sum()
    chance = truth[labelled].bincount().max() / sizes.sum()
    return ObjectiveScore(right.item(), chance.item(), 1.96 * spread.item())


def run_bert(model: nn.Module, batch: PretrainingBatch) -> BERTOutput:
    """Return the outputs of BERT for a batch; padding is masked."""
    out = model(batch.tokens, segments=batch.segments, padding=padding(batch.lengths))
    assert isinstance(out, BERTOutput)
    return out


def half_similarity(out: BERTOutput, batch: PretrainingBatch) -> Float[Tensor, "g choices choices"]:
    """Return the scaled cosine similarities of the first halves (rows) and second halves (columns) of each group."""
    assert out.pooled is not None
    vectors = normalize(out.pooled.float(), dim=-1)[batch.choices]
    first, second = vectors[:, :CHOICES], vectors[:, CHOICES:]
    return SIMILARITY_SCALE * first @ second.transpose(1, 2)


def _matching_indices(fits: Float[Tensor, "g choices choices"]) -> Int[Tensor, "g choices"]:
    """Return, for each first half, the index of the matching second half.

    The indices are 0, 1, 2, ..., because first and second halves are in the same order.

    fits  similarities from `half_similarity`; only their shape is used
    """
    return torch.arange(CHOICES, device=fits.device).expand(fits.shape[:2])


def _predict(objective: str, out: BERTOutput, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
    """Return the predicted classes of a batch of examples of one objective, and the labels."""
    if len(batch.choices):
        fits = half_similarity(out, batch)
        return fits.argmax(-1), _matching_indices(fits)
    logits = out.logits if objective == "words" else out.pair_logits
    assert logits is not None
    return logits.argmax(-1), batch.words if objective == "words" else batch.pair


def _pair_example(
    corpus: SentenceCorpus, objective: str, first: Sequence[int], second: Sequence[int], pair: int
) -> PretrainingExample:
    """Return the example of two tokenised sentences, truncated to the context.

    Only the longer sentence is truncated if this is enough, else both are truncated to half of the context. The first
    sentence loses tokens at its start, the second at its end.
    """
    room = corpus.context - 3
    shorter = min(len(first), len(second), room // 2)
    first = first[-(room - shorter) :] if len(first) >= len(second) else first[-shorter:]
    return _make_example(corpus, objective, first, second[: room - len(first)], pair=pair)


def _half_examples(
    corpus: SentenceCorpus, objective: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[PretrainingExample, ...]:
    """Make one example of each half of the sentences: all first halves, then all second halves.

    A first half that is too long loses tokens at its start, a second half at its end.
    """
    room = corpus.context - 2
    firsts = [_make_example(corpus, objective, first[-room:]) for first, _ in pairs]
    return (*firsts, *(_make_example(corpus, objective, second[:room]) for _, second in pairs))


def _make_example(
    corpus: SentenceCorpus, objective: str, *sentences: Sequence[int], pair: int = IGNORED
) -> PretrainingExample:
    """Make an example: [objective] sentence [between], or [objective] first [between] second [between]."""
    tokens, segments = [corpus.special_ids[objective]], [0]
    for number, each in enumerate(sentences):
        tokens += [*each, corpus.special_ids["between"]]
        segments += [number] * (len(each) + 1)
    return PretrainingExample(torch.tensor(tokens), torch.tensor(segments), torch.full((len(tokens),), IGNORED), pair)


def _split_sentence(sentence: Sequence[int], draws: torch.Generator) -> tuple[Sequence[int], Sequence[int]]:
    """Split a sentence in two, at a random position between its first and its last quarter."""
    quarter = len(sentence) // 4
    cut = quarter + 1 + random_index(max(1, len(sentence) - 2 * quarter - 1), draws)
    return sentence[:cut], sentence[cut:]
