"""What does a model answer about people it has never read about?

Claim: The model still answers with the name of a place. If surnames depend on the place of birth, the model guesses the
    place from the surname. The model is overconfident: most of its answers are wrong. Its confidence is lower than for
    people it has read about, so it can abstain: the fewer questions it answers, most confident first, the more answers
    are correct.
Measures: Biographies of people whose surnames mostly end according to their birth place. A small GPT that has read them
    answers questions about people it has read about and about unknown people, over seeds: the answers, the probability
    of each, how many are places, how many fit the ending of the surname, and accuracy against coverage.
Finding: A model that has read biographies was asked about people in them (known) and in no text (unknown). For unknown
    people {{ means["unknown: answered with a place"] }} of the answers are places and {{ means["accuracy, unknown
    people"] }} are correct; for known people {{ means["accuracy, known people"] }} are correct. Of the answers for
    unknown people {{ means["unknown: fits the surname"] }} fit the ending of the surname ({{ n["chance of fitting the
    surname"]|percent }} by chance), and {{ means["unknown: most common place"] }} are the most common place. The
    confidence, the probability that the model gives its answer, is {{ means["confidence, unknown people"] }} for
    unknown and {{ means["confidence, known people"] }} for known people on average; if one correct and one wrong answer
    are taken at random, the model is more confident in the correct one in {{ means["area under the ROC curve"] }} of
    the cases ({{ 0.5|percent }} would be chance). If all questions are answered, {{ n["accuracy by
    coverage"][-1]|percent }} are correct; of the {{ n.coverages[2]|percent }} most confident, {{ n["accuracy by
    coverage"][2]|percent }} ({{ n.repeats }} seeds). Of the wrong answers, {{ means["wrong answers as confident as
    right ones"] }} are more confident than the median correct answer.
Budget: 90 seconds
Source: 001 3b, 001 3b look, 001 3c
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp
from statistics import fmean, median
from typing import Any

from regard.base.validation import check_integer
from regard.data.span_corruption import PAD, encode_text, question_prompt
from regard.data.synthetic_biographies import (
    ENDINGS,
    PLACES,
    Biographies,
    BiographyQuestion,
    surname_ending,
)
from regard.lab.drawing import Figure, make_figure, plot_lines, plot_shares
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.transformers.pretraining_knowledge import Reader, Training, sample_world
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, GPTConfig

MATHS = (
    r"\mathrm{confidence} = \prod_i p(x_i | \mathrm{question}, x_1 \dots x_{i-1}), \quad "
    r"\mathrm{accuracy}(c) = \frac{\mathrm{right}}{\mathrm{answered}}, \quad \mathrm{confidence} \ge c"
)
COVERAGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW = 2  # index in COVERAGES of the fraction that is compared with answering everything
EXAMPLES = 4  # answers about known and about unknown people that are kept to be read


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: invented people, texts about them, and the training of a GPT on these texts.

    people                number of people about whom there are texts
    unknown_people        number of people who are in no text
    places                number of places of birth
    texts_per_person      number of texts about each person
    informative_surnames  fraction of people whose surname ending depends on the place of birth
    training              settings of the model and its training
    """

    people: int = 24
    unknown_people: int = 60
    places: int = 12
    texts_per_person: int = 6
    informative_surnames: float = 0.9
    training: Training = field(default_factory=lambda: Training(steps=250, questions=0.2))
    repeats: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("unknown_people", self.unknown_people, 2)


SMOKE = Setup(
    people=16,
    unknown_people=30,
    places=12,
    texts_per_person=4,
    informative_surnames=1.0,
    training=Training(width=48, batch=12, steps=90, rate=0.015, questions=0.2),
    repeats=5,
)


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question, with its probability.

    said        the answer that the model generated
    confidence  probability of this answer under the model
    """

    question: BiographyQuestion
    said: str
    confidence: float

    @property
    def right(self) -> bool:
        return self.said == self.question.answer


def run(
    setup: Setup, gpt: Callable[[GPTConfig], Any] = GPT, writer: Callable[..., list[GeneratedText]] = generate
) -> Numbers:
    """Ask models about people they have and have not read about; return accuracies and confidences by name.

    gpt     builds the model: gpt(config)
    writer  generates the answers: writer(model, prompts, max_new_tokens=..., stop=...)
    """
    rows: list[dict[str, float]] = []
    curves: list[list[float]] = []
    examples: list[dict[str, Any]] = []
    for seed in setup.seeds:
        world = sample_world(setup, seed, informative_surnames=setup.informative_surnames)
        reader = Reader.trained(world, setup.training, seed, gpt)
        known = _answers(reader, world.evaluation, writer)
        unknown = _answers(reader, world.unknown_people, writer)
        # examples are of the first seed, and not chosen by the answers
        examples = examples or [
            _as_example(answer, group)
            for group, answers in (("known", known), ("unknown", unknown))
            for answer in answers[:EXAMPLES]
        ]
        curves.append(_accuracy_by_coverage(known, unknown))
        rows.append(_measure_seed(known, unknown, world) | {"gain by abstaining": curves[-1][FEW] - curves[-1][-1]})
    numbers: Numbers = {
        "repeats": setup.repeats,
        "informative surnames": setup.informative_surnames,
        "chance of fitting the surname": 1 / len(ENDINGS),
        "coverages": list(COVERAGES),
        "accuracy by coverage": [fmean(column) for column in zip(*curves, strict=True)],
        "examples": examples,
    }
    for name in rows[0]:
        numbers |= mean_and_interval(name, [row[name] for row in rows])
    return numbers


def _as_example(answer: Answer, group: str) -> dict[str, Any]:
    """Return an answer as values that JSON can hold.

    group  whether the person is "known" or "unknown"
    """
    return {
        "person": group,
        "question": answer.question.text,
        "answer": answer.said,
        "truth": answer.question.answer,
        "confidence": answer.confidence,
        "correct": answer.right,
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


def _measure_seed(known: Sequence[Answer], unknown: Sequence[Answer], world: Biographies) -> dict[str, float]:
    """Return accuracies, confidences and their differences for the model trained with one seed, by name.

    known, unknown  the model's answers about people with texts, and about people in no text
    """
    most_common, _ = Counter(person.place for person in world.people[: len(world.training) * 2]).most_common(1)[0]
    right = [answer for answer in (*known, *unknown) if answer.right]
    wrong = [answer for answer in (*known, *unknown) if not answer.right]
    accuracy = fmean(answer.right for answer in unknown)
    sure, unsure = (fmean(answer.confidence for answer in several) for several in (known, unknown))
    middle = median(answer.confidence for answer in right) if right else 1.0
    return {
        "accuracy, known people": fmean(answer.right for answer in known),
        "accuracy, unknown people": accuracy,
        "unknown: answered with a place": fmean(answer.said in PLACES for answer in unknown),
        "unknown: fits the surname": fmean(_fits_custom(answer, world) for answer in unknown),
        "unknown: most common place": fmean(answer.said == most_common for answer in unknown),
        "confidence, known people": sure,
        "confidence, unknown people": unsure,
        # paired differences per seed, which vary less
        "confidence difference": sure - unsure,
        "overconfidence, unknown people": unsure - accuracy,
        "area under the ROC curve": _roc_area(right, wrong),
        "wrong answers as confident as right ones": fmean(answer.confidence >= middle for answer in wrong or right),
    }


def _fits_custom(answer: Answer, world: Biographies) -> bool:
    name = answer.question.text.removesuffix(" born?")
    return answer.said in world.places and name.endswith(surname_ending(answer.said, world.places))


def _roc_area(right: Sequence[Answer], wrong: Sequence[Answer]) -> float:
    """Return the area under the ROC curve: how often a correct answer is more confident than a wrong one.

    Ties count as one half. The result is 0.5 if there are no correct or no wrong answers.
    """
    if not right or not wrong:
        return 0.5
    return fmean((a.confidence > b.confidence) + (a.confidence == b.confidence) / 2 for a in right for b in wrong)


def _accuracy_by_coverage(known: Sequence[Answer], unknown: Sequence[Answer]) -> list[float]:
    """Return the accuracy of the most confident tenth of the answers, of the most confident two tenths, and so on.

    The answers about known and about unknown people have the same total weight.
    """
    counted = [(answer, 0.5 / len(group)) for group in (known, unknown) for answer in group]
    counted.sort(key=lambda each: -each[0].confidence)
    covered = list(accumulate(share for _, share in counted))
    right = list(accumulate(share * answer.right for answer, share in counted))
    ends = [next(at for at, reached in enumerate(covered) if reached > share - 1e-9) for share in COVERAGES]
    return [right[end] / covered[end] for end in ends]


def verdict(numbers: Numbers) -> Decision:
    means = {name: estimates(numbers, name) for name in numbers if f"interval of {name}" in numbers}
    known, unknown = (means[f"accuracy, {kind} people"] for kind in ("known", "unknown"))
    margins = [
        means["unknown: answered with a place"] - 0.5,
        means["unknown: fits the surname"] - numbers["chance of fitting the surname"],
        known - unknown - 0.3,
        0.5 - unknown,
        means["confidence difference"],
        means["overconfidence, unknown people"],
        means["area under the ROC curve"] - 0.5,
        means["gain by abstaining"],
    ]
    return decide(True, margins, means=means)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=4.8)
    names = [f"{what}, {who} people" for what in ("accuracy", "confidence") for who in ("known", "unknown")]
    bars = {name.replace(", ", ",\n").removesuffix(" people"): numbers[name] for name in names}
    plot_shares(left, bars, [numbers[f"interval of {name}"] for name in names])
    left.set(xlabel="people", ylabel="share", title="Confidence and accuracy")
    plot_lines(right, numbers["coverages"], {"accuracy": numbers["accuracy by coverage"]})
    right.set(ylim=(0, 1.05), xlabel="share of questions answered, most confident first", ylabel="accuracy")
    right.set_title("Accuracy against coverage")
    return figure
