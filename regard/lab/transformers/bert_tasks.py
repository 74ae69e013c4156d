"""Which tasks is BERT pre-trained on, and which of them need no labels?

Claim: Predicting masked words is generative: a word is chosen among all words. Predicting whether a sentence follows
    another is contrastive: a true pair against a false one. Whether two consecutive sentences are in the right order,
    and whether their words are, are contrastive too. The text itself contains the answers to these four, so no labels
    are needed, and a small BERT learns each far better than chance. Whether a sentence follows from another by logic
    can be learned too, but only from labels: the text does not contain it.
Measures: A generated text of consecutive sentences. One small BERT for all tasks at once, over seeds, whose first token
    names the task; accuracy on new text against the best constant answer. Logic with labels, and with random labels,
    since a text has none.
Budget: 90 seconds
Source: 003 12.6
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import COLOURS, Figure, make_figure
from regard.lab.fitting import fit
from regard.lab.seeds_interval import Estimate, estimates, interval_half_width
from regard.models.bert import BERT, BERTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = (
    r"\mathrm{generative}: p(w_i | w_1 \dots M \dots w_n), \quad "
    r"\mathrm{contrastive}: p(\mathrm{true} | a, b), \quad (a, b) \mathrm{or} (a, c)"
)

WORDS, LABELLED, UNLABELLED = "masked words", "logic, labelled", "logic"
FREE = (WORDS, "next sentence", "sentence order", "word order")  # the text contains their answers
TASKS = (*FREE, LABELLED, UNLABELLED)
MASK, BETWEEN = len(TASKS), len(TASKS) + 1  # the tokens before these name the tasks
SPECIAL = len(TASKS) + 2
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The language, the model, its training, and the number of test examples.

    kinds   kinds of nouns, each with its own pronoun
    nouns   nouns of each kind
    verbs   verbs, each with its own object
    hidden  the share of words that are masked
    batch   pairs of sentences for each task
    """

    kinds: int = 3
    nouns: int = 4
    verbs: int = 4
    hidden: float = 0.2
    width: int = 48
    depth: int = 2
    heads: int = 4
    batch: int = 16
    steps: int = 500
    rate: float = 0.003
    trials: int = 1000
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("kinds", self.kinds, 2, "kinds of nouns, which pronouns distinguish")
        check_integer("nouns", self.nouns, 1)
        check_integer("verbs", self.verbs, 2)
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")

    @property
    def words(self) -> int:
        """The number of words: nouns by kind, then pronouns, verbs and objects."""
        return self.kinds * (self.nouns + 1) + 2 * self.verbs


SMOKE = Setup(kinds=2, nouns=1, verbs=2, batch=6, steps=120, rate=0.007, trials=300, repeats=3)


class Examples(NamedTuple):
    """Input tokens, and targets for each word or for the pair; IGNORED where there is no target."""

    tokens: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    words: Int[Tensor, "b n"]
    pair: Int[Tensor, "b"]


def run(setup: Setup, bert: Callable[[BERTConfig], Any] = BERT) -> Numbers:
    """bert  builds the model: bert(config)"""
    right: dict[str, list[float]] = {task: [] for task in TASKS}
    same: dict[str, list[float]] = {task: [] for task in TASKS}
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        model = _train(setup, seed, bert)
        for task in TASKS:
            predicted, wanted = _predict_task(model, examples(setup, task, setup.trials, make_generator(seed + 500)))
            right[task].append((predicted.argmax(-1) == wanted).double().mean().item())
            same[task].append(wanted.bincount().max().item() / len(wanted))
    return {
        "words": setup.words,
        "repeats": setup.repeats,
        "right": {task: fmean(shares) for task, shares in right.items()},
        "interval": {task: interval_half_width(shares) for task, shares in right.items()},
        "right by one answer": {task: fmean(shares) for task, shares in same.items()},
        "choices": {task: setup.words if task == WORDS else 2 for task in TASKS},
    }


def sentences(
    setup: Setup, count: int, draws: torch.Generator
) -> tuple[Int[Tensor, "b 3"], Int[Tensor, "b 3"], Int[Tensor, "b"]]:
    """Sample two consecutive sentences, such as "Ann sold apples" and "she met friends", and the logic label.

    The second sentence starts with the pronoun of the first one's subject; the rest is random. The logic label depends
    on the two verbs and cannot be learned from the text.
    """

    def chosen(below: int) -> Tensor:
        return torch.randint(below, (count,), generator=draws)

    noun, one, other = chosen(setup.kinds * setup.nouns), chosen(setup.verbs), chosen(setup.verbs)
    pronouns = SPECIAL + setup.kinds * setup.nouns
    verbs = pronouns + setup.kinds
    objects = verbs + setup.verbs
    first = torch.stack([SPECIAL + noun, verbs + one, objects + one], 1)
    second = torch.stack([pronouns + noun // setup.nouns, verbs + other, objects + other], 1)
    return first, second, (one + other) % 2


def examples(setup: Setup, task: str, count: int, draws: torch.Generator) -> Examples:
    """Sample examples of a task; the answer is 0 for a true pair and 1 for a false one."""
    first, second, follows = sentences(setup, count, draws)
    false = torch.randint(2, (count,), generator=draws)
    pair = false if task != WORDS else torch.full((count,), IGNORED)
    if task == "next sentence":
        # the pronoun of another kind: a sentence from elsewhere in the text
        other = second.clone()
        start = SPECIAL + setup.kinds * setup.nouns
        away = 1 + torch.randint(setup.kinds - 1, (count,), generator=draws)
        other[:, 0] = start + (second[:, 0] - start + away) % setup.kinds
        second = _select(false, other, second)
    elif task == "sentence order":
        first, second = _select(false, second, first), _select(false, first, second)
    elif task == "word order":
        first, second = _select(false, first.flip(1), first), _select(false, second.flip(1), second)
    elif task == LABELLED:
        pair = follows
    marks = torch.ones(count, 1, dtype=torch.long)
    tokens = torch.cat([TASKS.index(task) * marks, first, BETWEEN * marks, second, BETWEEN * marks], 1)
    segments = torch.zeros_like(tokens)
    segments[:, first.shape[1] + 2 :] = 1
    words = torch.full_like(tokens, IGNORED)
    if task == WORDS:
        chosen = (torch.rand(tokens.shape, generator=draws) < setup.hidden) & (tokens >= SPECIAL)
        words = torch.where(chosen, tokens, IGNORED)
        tokens = tokens.masked_fill(chosen, MASK)
    return Examples(tokens, segments, words, pair)


def _select(flags: Int[Tensor, "b"], one: Int[Tensor, "b n"], other: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    return torch.where(flags[:, None] == 1, one, other)


def _train(setup: Setup, seed: int, bert: Callable[[BERTConfig], Any]) -> Any:
    draws = make_generator(seed)
    model = bert(
        BERTConfig(
            vocab=SPECIAL + setup.words,
            context=9,
            width=setup.width,
            depth=setup.depth,
            heads=setup.heads,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )
    # a larger init than for large models, since there are few training steps
    table = {"tokens.weight": normal(0.3), "*norm.weight": constant(1.0), "*.bias": constant(0.0)}
    init_parameters(model, {**table, "*norm.bias": constant(0.0), "*.weight": fan_in()}, seed)

    def loss() -> Tensor:
        parts = zip(*(examples(setup, task, setup.batch, draws) for task in TASKS), strict=True)
        (words, hidden), (pairs, truth) = _predict(model, Examples(*map(torch.cat, parts)))
        return functional.cross_entropy(words, hidden) + functional.cross_entropy(pairs, truth)

    fit(model.parameters(), loss, steps=setup.steps, rate=setup.rate)
    return model.eval()


def _predict(model: Any, given: Examples) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return predictions and targets for words and for pairs, where there is a target."""
    out = model(given.tokens, segments=given.segments)
    words, pairs = given.words != IGNORED, given.pair != IGNORED
    return (out.logits[words], given.words[words]), (out.pair_logits[pairs], given.pair[pairs])


@torch.no_grad()
def _predict_task(model: Any, given: Examples) -> tuple[Tensor, Tensor]:
    words, pairs = _predict(model, given)
    return words if len(words[1]) else pairs


def verdict(numbers: Numbers) -> Verdict:
    right, same = estimates(numbers["right"], numbers["interval"]), numbers["right by one answer"]
    learned = [right[task] - same[task] - 0.2 for task in (*FREE, LABELLED)]
    nothing = [right[UNLABELLED] - 0.4, 0.6 - right[UNLABELLED]]
    generative = [task for task in TASKS if numbers["choices"][task] == numbers["words"]]
    accuracies = ", ".join(f"{task} {right[task].percent()} against {same[task]:.0%}" for task in TASKS)
    return decide(
        generative == [WORDS],
        f"Accuracy on new text, and of the best constant answer: {accuracies}; {numbers['repeats']} seeds. Masked "
        f"words are chosen among {numbers['words']} words, the other answers among 2.",
        [*learned, *nothing],
    )


@wrong_answer(
    "003 12.6",
    says="Predicting whether one sentence follows from another by logic is a pre-training task.",
    right="Pre-training uses text without labels, which this task needs. The order of sentences is in the text.",
)
def _logic_without_labels(numbers: Numbers) -> Verdict:
    right = Estimate(numbers["right"][UNLABELLED], numbers["interval"][UNLABELLED])
    return decide(
        True,
        f"Without labels, logic is predicted correctly for {right.percent()} of the pairs.",
        [right - 0.6],
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=6.4)
    places = range(len(TASKS))
    axes.bar(
        places,
        [numbers["right"][task] for task in TASKS],
        yerr=[numbers["interval"][task] for task in TASKS],
        color=COLOURS[0],
        capsize=4,
        label="BERT",
    )
    chance = [numbers["right by one answer"][task] for task in TASKS]
    axes.scatter(places, chance, color=COLOURS[1], marker="D", zorder=3, label="one answer for all")
    axes.set_xticks(list(places), [task.replace(" ", "\n", 1) for task in TASKS])
    axes.legend(frameon=False, ncols=2)
    axes.set(ylim=(0, 1.3), xlabel="task", ylabel="accuracy on new text", title="Tasks without labels, and logic")
    return figure
