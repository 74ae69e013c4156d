"""What does a model answer about people it has never read about?

Claim: It still answers with a place, spelled like a correct one. It guesses from the form of the name, if names have
    customs, and it is overconfident: most of its answers are wrong. Its confidence is lower than for people it has read
    about, so it can abstain: the fewer questions it answers, most confident first, the more answers are correct.
Measures: Biographies of people whose surnames mostly end according to their birth place. A small GPT that has read them
    answers questions about people it has read about and about unknown people, over seeds: the answers, the probability
    of each, how many are places, how many fit the ending of the surname, and accuracy against coverage.
Budget: 90 seconds
Source: 001 3b, 3c
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp
from statistics import fmean
from typing import Any

from regard.base.validation import check_integer
from regard.data.span_corruption import PAD, encode_text, question_prompt
from regard.data.synthetic_biographies import (
    ENDINGS,
    PLACES,
    Biographies,
    BiographyQuestion,
    biographies,
    surname_ending,
)
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_lines, plot_shares
from regard.lab.seeds_interval import Estimate, interval_half_width
from regard.lab.transformers.pretraining_knowledge import Reader, Training
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, GPTConfig

MATHS = (
    r"\mathrm{confidence} = \prod_i p(x_i | \mathrm{question}, x_1 \dots x_{i-1}), \quad "
    r"\mathrm{accuracy}(c) = \frac{\mathrm{right}}{\mathrm{answered}}, \quad \mathrm{confidence} \ge c"
)
COVERAGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW = 2  # the coverage compared with answering everything


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Numbers of people, unknown people and places, how informative surnames are, and the training."""

    people: int = 24
    strangers: int = 60
    places: int = 12
    tellings: int = 6
    telling: float = 0.9
    training: Training = field(default_factory=lambda: Training(steps=250, questions=0.2))
    repeats: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        check_integer("strangers", self.strangers, 2, "unknown people")


SMOKE = Setup(
    people=16,
    strangers=30,
    places=12,
    tellings=4,
    telling=1.0,
    training=Training(width=48, batch=12, steps=90, rate=0.015, questions=0.2),
    repeats=5,
)


@dataclass(frozen=True)
class Answer:
    """An answer and its probability under the model."""

    question: BiographyQuestion
    said: str
    confidence: float

    @property
    def right(self) -> bool:
        return self.said == self.question.answer


def run(
    setup: Setup, gpt: Callable[[GPTConfig], Any] = GPT, writer: Callable[..., list[GeneratedText]] = generate
) -> Numbers:
    """gpt     builds the model: gpt(config)
    writer  generates the answers: writer(model, prompts, max_new_tokens=..., stop=...)"""
    rows: list[dict[str, float]] = []
    curves: list[list[float]] = []
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        world = biographies(
            setup.people,
            unknown_people=setup.strangers,
            places=setup.places,
            texts_per_person=setup.tellings,
            informative_surnames=setup.telling,
            one_sentence=True,
            seed=seed,
        )
        reader = Reader.trained(world, setup.training, seed, gpt)
        known = _answers(reader, world.evaluation, writer)
        strange = _answers(reader, world.unknown_people, writer)
        curves.append(_accuracy_by_coverage(known, strange))
        rows.append(_measure_seed(known, strange, world) | {"gained by silence": curves[-1][FEW] - curves[-1][-1]})
    return {
        "repeats": setup.repeats,
        "telling": setup.telling,
        **{name: fmean(row[name] for row in rows) for name in rows[0]},
        "interval": {name: interval_half_width([row[name] for row in rows]) for name in rows[0]},
        "coverages": list(COVERAGES),
        "accuracy by coverage": [fmean(column) for column in zip(*curves, strict=True)],
    }


def _answers(
    reader: Reader, questions: Sequence[BiographyQuestion], writer: Callable[..., list[GeneratedText]]
) -> list[Answer]:
    prompts = [encode_text(question_prompt(question.text), reader.letters) for question in questions]
    end = encode_text(PAD, reader.letters)
    longest = max(len(question.answer) for question in questions) + 4
    texts = writer(reader.model, prompts, max_new_tokens=longest, stop=[end])
    return [
        Answer(question, "".join(reader.letters[token] for token in text.body), exp(text.log_probability))
        for question, text in zip(questions, texts, strict=True)
    ]


def _measure_seed(known: Sequence[Answer], strange: Sequence[Answer], world: Biographies) -> dict[str, float]:
    """Return the numbers of one seed."""
    named = [answer for answer in strange if answer.said in PLACES]
    commonest, _ = Counter(person.place for person in world.people[: len(world.training) * 2]).most_common(1)[0]
    right = [answer for answer in (*known, *strange) if answer.right]
    wrong = [answer for answer in (*known, *strange) if not answer.right]
    sure, unsure = (fmean(answer.confidence for answer in several) for several in (known, strange))
    return {
        "known right": fmean(answer.right for answer in known),
        "strangers right": fmean(answer.right for answer in strange),
        "strangers given a place": len(named) / len(strange),
        "strangers given what their ending says": fmean(_fits_custom(answer, world) for answer in strange),
        "by chance": 1 / len(ENDINGS),
        "strangers given the commonest place": fmean(answer.said == commonest for answer in strange),
        "confidence with known": sure,
        "confidence with strangers": unsure,
        # paired differences per seed, which vary less
        "surer with known": sure - unsure,
        "surer than right with strangers": unsure - fmean(answer.right for answer in strange),
        "right is surer than wrong": _roc_area(right, wrong),
    }


def _fits_custom(answer: Answer, world: Biographies) -> bool:
    name = answer.question.text.removesuffix(" born?")
    return answer.said in world.places and name.endswith(surname_ending(answer.said, world.places))


def _roc_area(right: Sequence[Answer], wrong: Sequence[Answer]) -> float:
    """Return the area under the ROC curve: how often a correct answer is more confident than a wrong one."""
    if not right or not wrong:
        return 0.5
    return fmean((a.confidence > b.confidence) + (a.confidence == b.confidence) / 2 for a in right for b in wrong)


def _accuracy_by_coverage(known: Sequence[Answer], strange: Sequence[Answer]) -> list[float]:
    """Return the accuracy among the most confident answers for every coverage, with both groups weighted equally."""
    counted = [(answer, 0.5 / len(group)) for group in (known, strange) for answer in group]
    counted.sort(key=lambda each: -each[0].confidence)
    covered = list(accumulate(share for _, share in counted))
    right = list(accumulate(share * answer.right for answer, share in counted))
    ends = [next(at for at, reached in enumerate(covered) if reached > share - 1e-9) for share in COVERAGES]
    return [right[end] / covered[end] for end in ends]


def verdict(numbers: Numbers) -> Verdict:
    def estimate(name: str) -> Estimate:
        return Estimate(numbers[name], numbers["interval"][name])

    answered, by_form = estimate("strangers given a place"), estimate("strangers given what their ending says")
    known, strange, chance = estimate("known right"), estimate("strangers right"), numbers["by chance"]
    sure, unsure = estimate("confidence with known"), estimate("confidence with strangers")
    surer, gained = estimate("right is surer than wrong"), estimate("gained by silence")
    few, every = numbers["accuracy by coverage"][FEW], numbers["accuracy by coverage"][-1]
    return decide(
        True,
        f"For unknown people {answered.percent()} of the answers are places and {strange.percent()} are correct; for "
        f"people in the texts {known.percent()} are correct. {by_form.percent()} fit the ending of the name "
        f"({chance:.0%} by chance), and {numbers['strangers given the commonest place']:.0%} are the most common "
        f"place. The confidence is {unsure.percent()} for unknown and {sure.percent()} for known people; a correct "
        f"answer is more confident than a wrong one in {surer.percent()} of pairs. If all questions are answered, "
        f"{every:.0%} are correct; of the {numbers['coverages'][FEW]:.0%} most confident, {few:.0%} "
        f"({numbers['repeats']} seeds).",
        [
            answered - 0.5,
            by_form - chance,
            known - strange - 0.3,
            0.5 - strange,
            estimate("surer with known"),
            estimate("surer than right with strangers"),
            surer - 0.5,
            gained,
        ],
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=4.8)
    names = {
        "right,\nread of": "known right",
        "right,\nstrangers": "strangers right",
        "confidence,\nread of": "confidence with known",
        "confidence,\nstrangers": "confidence with strangers",
    }
    plot_shares(
        left,
        {shown: numbers[name] for shown, name in names.items()},
        [numbers["interval"][name] for name in names.values()],
        colours=(COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]),
    )
    left.set(xlabel="people", ylabel="share", title="Confidence and accuracy")
    plot_lines(right, numbers["coverages"], {"right": numbers["accuracy by coverage"]})
    right.set(ylim=(0, 1.05), xlabel="share of questions answered, most confident first", ylabel="accuracy")
    right.set_title("Accuracy against coverage")
    return figure
