"""Which tasks is BERT pre-trained on, why are there two, and which tasks need no labels?

Claim: Predicting masked words is generative: a word is chosen among all words. Predicting whether a sentence follows
    another is contrastive: a true pair against a false one. The first trains the outputs of the words, the second the
    output of the first token, which stands for the pair: a model trained on one task alone is at chance in the other, a
    model trained on both masters both. Whether two consecutive sentences are in the right order, and whether their
    words are, are contrastive too. The text itself contains the answers to these four, so no labels are needed, and a
    small BERT learns each far better than chance. Whether a sentence follows from another by logic can be learned too,
    but only from labels: the text does not contain it.
Measures: A generated text of consecutive sentences. One small BERT for all tasks at once, over seeds, whose first token
    names the task; accuracy on new text against the best constant answer. The same model pre-trained on masked words
    alone, on next sentences alone, and on both: accuracy in both tasks, and in the order of sentences after the same
    short fine-tuning. Logic with labels, and with random labels, since a text has none.
Finding: Accuracy on new text, and of the best constant answer: {% for task in accuracy %}{{ task }} {{ accuracy[task]
    }} against {{ n["accuracy of the best constant"][task]|percent }}{{ ", " if not loop.last }}{% endfor %} ({{
    n.repeats }} seeds, in brackets the 95 % confidence interval). Masked words are chosen among {{ n.words }} words,
    the other answers among 2. Masked words and next sentences after pre-training: {% for kind in pretrained %}{{ kind
    }} {{ pretrained[kind]["masked words"] }} and {{ pretrained[kind]["next sentence"] }}{{ "; " if not loop.last }}{%
    endfor %}. The order of sentences after {{ n["fine-tuning steps"] }} steps of fine-tuning: {% for kind in pretrained
    %}{{ kind }} {{ pretrained[kind]["sentence order"] }}{{ ", " if not loop.last else "." }}{% endfor %}
Budget: 90 seconds
Source: 003 12.6
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_shares
from regard.lab.fitting import fit
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.bert import BERT, BERTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = (
    r"\mathrm{generative}: p(w_i | w_1 \dots M \dots w_n), \quad "
    r"\mathrm{contrastive}: p(\mathrm{true} | a, b), \quad (a, b) \mathrm{or} (a, c)"
)

WORDS, LABELLED, UNLABELLED = "masked words", "logic, labelled", "logic"
FREE = (WORDS, "next sentence", "sentence order", "word order")  # need no labels: the text has the answers
ORDER = "sentence order"
BOTH = (WORDS, "next sentence")
PRETRAINED = {"masked words alone": BOTH[:1], "next sentence alone": BOTH[1:], "both": BOTH}
TASKS = (*FREE, LABELLED, UNLABELLED)
MASK, BETWEEN = len(TASKS), len(TASKS) + 1  # the tokens before these name the tasks
SPECIAL = len(TASKS) + 2
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: an artificial language, the BERT model, its training, and the tests.

    kinds   number of classes of nouns, each with its own pronoun; at least 2, so that a pronoun can be wrong
    nouns   number of nouns in each class
    verbs   number of verbs, each with its own object
    hidden  fraction of words that are masked
    width   width of the model
    depth   number of blocks
    heads   number of heads
    batch   number of pairs of sentences per task and training step
    steps   number of training steps on all tasks, and of each pre-training
    tuning  number of steps of fine-tuning a pre-trained model on the order of sentences
    rate    learning rate
    trials  number of test examples per task
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
    tuning: int = 40
    rate: float = 0.003
    trials: int = 1000
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("kinds", self.kinds, 2, "kinds of nouns, which pronouns distinguish")
        check_integer("nouns", self.nouns, 1)
        check_integer("verbs", self.verbs, 2)
        if not 0.05 <= self.hidden <= 1:
            raise setting_error(self, "hidden must be a share of words between 0.05 and 1", "hidden")

    @property
    def words(self) -> int:
        """The number of different words: nouns, pronouns, verbs and objects."""
        return self.kinds * (self.nouns + 1) + 2 * self.verbs


SMOKE = Setup(kinds=2, nouns=1, verbs=2, batch=6, steps=120, rate=0.007, trials=300, repeats=3)


class Examples(NamedTuple):
    """A batch of sentence pairs with the targets of BERT's tasks; the value IGNORED means that there is no target.

    tokens    both sentences with special tokens
    segments  0 for the first sentence and 1 for the second
    words     the target of each token: the original word where it is masked
    pair      the target of the sentence pair: 0 for true, 1 for false
    """

    tokens: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    words: Int[Tensor, "b n"]
    pair: Int[Tensor, "b"]


def run(setup: Setup, bert: Callable[[BERTConfig], Any] = BERT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    bert  builds the model: bert(config)
    """
    right: dict[str, list[float]] = {task: [] for task in TASKS}
    same: dict[str, list[float]] = {task: [] for task in TASKS}
    pretrained: dict[str, dict[str, list[float]]] = {kind: {} for kind in PRETRAINED}
    for seed in setup.seeds:
        model = _train(_build_model(setup, seed, bert), setup, TASKS, seed)
        for task in TASKS:
            right[task].append(_accuracy(model, setup, task, seed + 500))
            _, wanted = _predict_task(model, examples(setup, task, setup.trials, make_generator(seed + 500)))
            same[task].append(wanted.bincount().max().item() / len(wanted))
        for kind, tasks in PRETRAINED.items():
            model = _train(_build_model(setup, seed, bert), setup, tasks, seed)
            found = {task: _accuracy(model, setup, task, seed + 500) for task in BOTH}
            _train(model, setup, (ORDER,), seed + 700, steps=setup.tuning)
            for task, share in (found | {ORDER: _accuracy(model, setup, ORDER, seed + 500)}).items():
                pretrained[kind].setdefault(task, []).append(share)
    return {
        "words": setup.words,
        "repeats": setup.repeats,
        "fine-tuning steps": setup.tuning,
        **mean_and_interval("accuracy", right),
        "accuracy of the best constant": {task: fmean(shares) for task, shares in same.items()},
        **mean_and_interval("accuracy by pre-training", pretrained),
        "choices": {task: setup.words if task == WORDS else 2 for task in TASKS},
    }


def _accuracy(model: Any, setup: Setup, task: str, seed: int) -> float:
    predicted, wanted = _predict_task(model, examples(setup, task, setup.trials, make_generator(seed)))
    return float((predicted.argmax(-1) == wanted).double().mean())


def sentences(
    setup: Setup, count: int, draws: torch.Generator
) -> tuple[Int[Tensor, "b 3"], Int[Tensor, "b 3"], Int[Tensor, "b"]]:
    """Sample `count` labelled pairs of sentences, such as "Ann sold apples" and "she met friends".

    Returns the first sentences, the second sentences and the labels. A second sentence starts with the pronoun for the
    subject of the first one. Its verb is random. The label, 0 or 1, is the parity of the sum of the two verbs' indices,
    which the sentences themselves do not show.
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
    """Sample `count` examples of one of BERT's tasks.

    In the tasks "next sentence", "sentence order" and "word order" each pair is changed with probability 1/2, for
    example by exchanging the two sentences; its target is 1 if it was changed, else 0. The task "logic, labelled" has
    the labels of `sentences` as targets. The task "logic" has random targets. The task "masked words" has targets of
    words and none of the pair.

    task  a name in TASKS
    """
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


def _build_model(setup: Setup, seed: int, bert: Callable[[BERTConfig], Any]) -> Any:
    sizes = {"width": setup.width, "depth": setup.depth, "heads": setup.heads}
    model = bert(BERTConfig(vocab=SPECIAL + setup.words, context=9, dropout=0.0, attention_dropout=0.0, **sizes))  # type: ignore[arg-type]  # the config checks
    # a larger init than for large models, since there are few training steps
    table = {"tokens.weight": normal(0.3), "*norm.weight": constant(1.0), "*.bias": constant(0.0)}
    init_parameters(model, {**table, "*norm.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def _train(model: Any, setup: Setup, tasks: Sequence[str], seed: int, steps: int | None = None) -> Any:
    draws = make_generator(seed)

    def loss() -> Tensor:
        parts = zip(*(examples(setup, task, setup.batch, draws) for task in tasks), strict=True)
        found = [each for each in _predict(model, Examples(*map(torch.cat, parts))) if len(each[1])]
        return torch.stack([functional.cross_entropy(*each) for each in found]).sum()

    fit(model.train().parameters(), loss, steps=steps or setup.steps, rate=setup.rate)
    return model.eval()


def _predict(model: Any, given: Examples) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (logits, targets) of the masked words, and (logits, targets) of the sentence pairs.

    Words and pairs without a target are left out.
    """
    out = model(given.tokens, segments=given.segments)
    words, pairs = given.words != IGNORED, given.pair != IGNORED
    return (out.logits[words], given.words[words]), (out.pair_logits[pairs], given.pair[pairs])


@torch.no_grad()
def _predict_task(model: Any, given: Examples) -> tuple[Tensor, Tensor]:
    words, pairs = _predict(model, given)
    return words if len(words[1]) else pairs


def verdict(numbers: Numbers) -> Decision:
    accuracy, constant = estimates(numbers, "accuracy"), numbers["accuracy of the best constant"]
    margins = [accuracy[task] - constant[task] - 0.2 for task in (*FREE, LABELLED)]
    margins += [accuracy[UNLABELLED] - 0.4, 0.6 - accuracy[UNLABELLED]]
    pretrained = estimates(numbers, "accuracy by pre-training")
    for task, other in zip(BOTH, ("next sentence alone", "masked words alone"), strict=True):
        margins += [pretrained["both"][task] - pretrained[other][task] - 0.2]
        margins += [pretrained["both"][task] - constant[task] - 0.2]
    generative = [task for task in TASKS if numbers["choices"][task] == numbers["words"]]
    return decide(generative == [WORDS], margins, accuracy=accuracy, pretrained=pretrained)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=6.4)
    bars = {task.replace(" ", "\n", 1): numbers["accuracy"][task] for task in TASKS}
    plot_shares(left, bars, [numbers["interval of accuracy"][task] for task in TASKS])
    constant = [numbers["accuracy of the best constant"][task] for task in TASKS]
    left.scatter(range(len(TASKS)), constant, color=COLOURS[1], marker="D", zorder=3, label="one answer for all")
    left.legend(frameon=False)
    left.set(xlabel="task", ylabel="accuracy on new text", title="Tasks without labels, and logic")
    means, halves = numbers["accuracy by pre-training"], numbers["interval of accuracy by pre-training"]
    names = {f"{kind.removesuffix(' alone')}:\n{task}": (kind, task) for kind in means for task in BOTH}
    shares = {name: means[kind][task] for name, (kind, task) in names.items()}
    plot_shares(right, shares, [halves[kind][task] for kind, task in names.values()])
    right.tick_params(axis="x", labelrotation=30)
    right.set(xlabel="pre-trained on: tested on", ylabel="accuracy on new text", title="One task or both")
    return figure
