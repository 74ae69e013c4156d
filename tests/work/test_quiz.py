"""The quiz: every answer is measured in a run, students get different questions, and answers are graded fairly."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.core.attend import attend
from regard.lab.claim import CHAPTERS
from regard.lab.verdict import SUPPORTED
from regard.work.notebook import to_text
from regard.work.quiz import Quiz, QuizQuestion, deal_templates, format_number, parse_number
from regard.work.quiz_notebook import quiz_notebook
from regard.work.quiz_question import QUESTION_TEMPLATES, Tolerance


def make_question(name: str, student: str = "ann", seed: int = 0) -> QuizQuestion:
    """A question of one template."""
    draw = Random(f"{student} {seed}")
    return QuizQuestion(1, QUESTION_TEMPLATES[name], QUESTION_TEMPLATES[name].generate(draw), draw.randrange(1000))


def test_every_chapter_has_many_question_templates() -> None:
    chapters = [QUESTION_TEMPLATES[name].chapter for name in QUESTION_TEMPLATES]
    assert len(chapters) >= 12
    assert set(chapters) == set(CHAPTERS)
    assert min(chapters.count(chapter) for chapter in CHAPTERS) >= 10


@pytest.mark.parametrize("name", list(QUESTION_TEMPLATES))
def test_a_run_answers_the_question_and_supports_its_claim(name: str) -> None:
    question = make_question(name)
    right = question.correct_answer
    assert question.outcome.verdict.word == SUPPORTED, question.outcome.verdict.sentence
    assert question.grade(right).ok
    if question.choices:
        assert len(question.choices) >= 3
        wrong = [letter for letter in question.choices if letter != right]
        assert not any(question.grade(letter).ok for letter in wrong)
    else:
        assert isinstance(right, float)
        far = 3 * max(question.content.tolerance.absolute, question.content.tolerance.relative * abs(right), 1)
        assert not question.grade(right + far).ok


@pytest.mark.parametrize("name", list(QUESTION_TEMPLATES))
def test_every_drawn_question_has_one_answer(name: str) -> None:
    for seed in range(3):
        question = make_question(name, "ben", seed)
        assert question.grade(question.correct_answer).ok
        assert question.outcome.verdict.word == SUPPORTED, question.outcome.verdict.sentence


@pytest.mark.parametrize("name", list(QUESTION_TEMPLATES))
def test_questions_differ_between_students(name: str) -> None:
    drawn = {
        (question.content.text, question.seed)
        for question in (make_question(name, f"student {at}") for at in range(12))
    }
    assert len(drawn) > 6


def test_a_student_always_gets_the_same_quiz_and_others_get_another() -> None:
    mine = Quiz.for_student("ann", count=9, seed=3).to_dict()
    assert Quiz.for_student("ann", count=9, seed=3).to_dict() == mine
    for other in (Quiz.for_student("ben", count=9, seed=3), Quiz.for_student("ann", count=9, seed=4)):
        questions = other.to_dict()["questions"]
        assert sum(one == two for one, two in zip(mine["questions"], questions, strict=True)) <= 2
    assert Quiz.for_student("ann", count=4, seed=3).to_dict()["questions"] == mine["questions"][:4]


def test_chapters_alternate_and_templates_do_not_repeat_early() -> None:
    templates = deal_templates(Random(0))
    first = [next(templates) for _ in range(30)]
    assert [template.chapter for template in first[:3]] == list(CHAPTERS)
    assert len({template.name for template in first}) == 30
    assert Quiz.for_student("ann", count=60).questions[-1].number == 60


def test_a_question_does_not_contain_its_answer() -> None:
    quiz = Quiz.for_student("ann", count=20)
    text = json.dumps(quiz.to_dict())
    assert '"correct_answer"' not in text
    for question in quiz.questions:
        assert set(question.to_dict()) - {"choices", "answer"} == {"number", "template", "claim", "chapter", "question"}
        assert "outcome" not in vars(question), "making a question runs nothing"


def sharper_is_flatter(q: Tensor, k: Tensor, v: Tensor, *, beta: float | None = None, **rest: Any) -> Tensor:
    """Attention with 1 / beta instead of beta."""
    beta = q.shape[-1] ** -0.5 if beta is None else beta
    return attend(q, k, v, beta=1 / beta if beta else torch.inf, **rest)


@pytest.mark.parametrize("name", ["small-beta", "when-it-spreads"])
def test_the_correct_choice_depends_on_the_run(name: str) -> None:
    question = make_question(name)
    setup = question.claim.setup(question.content.settings, seed=question.seed, smoke=True)
    broken = question.claim.run(setup, attention=sharper_is_flatter)
    true = [choice.text for choice in question.content.choices if choice.is_true(broken.numbers)]
    assert true[:1] == [question.claim.wrong_answers[0].says], "with this attention the sheet would be correct"
    assert question.choices[str(question.correct_answer)] != question.claim.wrong_answers[0].says


def test_the_correct_number_depends_on_the_run() -> None:
    question = make_question("weight-at-beta")
    setup = question.claim.setup(question.content.settings, seed=question.seed, smoke=True)
    broken = question.claim.run(setup, attention=sharper_is_flatter)
    assert question.content.number is not None
    assert not question.content.tolerance.allows(
        float(question.correct_answer), question.content.number(broken.numbers)
    )


def test_wrong_answers_of_the_sheets_are_distractors_and_never_correct() -> None:
    sheets = 0
    for name in QUESTION_TEMPLATES:
        question = make_question(name)
        says = [sheet.says for sheet in question.claim.wrong_answers]
        found = [letter for letter, text in question.choices.items() if text in says]
        sheets += len(found)
        assert not found or question.correct_answer not in found
    assert sheets >= 10


def test_the_run_has_as_many_tokens_as_the_question() -> None:
    for seed in range(3):
        question = make_question("what-a-new-token-changes", "ann", seed)
        (before,) = re.findall(r"over (\d+) tokens", question.content.text)
        assert f"after the first {before} is replaced" in question.outcome.verdict.sentence


@pytest.mark.parametrize(
    "name", [name for name in QUESTION_TEMPLATES if QUESTION_TEMPLATES[name].claim == "feed-forward"]
)
def test_question_and_run_name_the_same_token(name: str) -> None:
    for seed in range(3):
        question = make_question(name, "ann", seed)
        (place,) = re.findall(r"Token \d+ of \d+", question.content.text)
        assert f"{place.lower()} is replaced" in question.outcome.verdict.sentence


@pytest.mark.parametrize("name", ["weight-at-beta", "larger-nudge"])
def test_the_explanation_gives_the_number(name: str) -> None:
    question = make_question(name)
    text = question.grade().explanation
    assert text[0].startswith("How to calculate it: ")
    assert f" is {float(question.correct_answer):.4g}." in text[0]


def test_the_explanation_has_the_maths_of_the_claim() -> None:
    assert "The maths: aⱼ = " in str(make_question("small-beta").grade())


def test_a_question_about_size_states_the_architecture() -> None:
    text = make_question("size-of-a-vit").content.text
    assert re.search(
        r"patches of 1[46] x 1[46] pixels and \d+ blocks of width \d+, feed-forward parts four times", text
    )


def test_a_graded_answer_is_explained() -> None:
    question = make_question("small-beta")
    wrong = next(letter for letter in question.choices if letter != question.correct_answer)
    text = str(question.grade(wrong))
    assert text.startswith(
        f"Wrong: the answer is {question.correct_answer}) A small beta makes all weights nearly equal"
    )
    assert "The run: For the scores" in text
    assert "The claim: A larger beta makes the weights sharper" in text
    assert 'A common wrong answer: "A cold beta or a very small one makes the weights one-hot." (refuted)' in text
    assert "Run it again: regard lab run beta --smoke --set scores=" in text
    assert str(question.grade(question.correct_answer)).startswith("Correct: the answer is")
    assert str(question.grade()).startswith("Not answered: the answer is")


def test_the_command_in_the_explanation_runs_the_same_experiment(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from regard.cli import app

    question = make_question("two-values")
    words = question.grade().explanation[-1].removeprefix("Run it again: regard ").split()
    done = CliRunner().invoke(app, [*words, "--json", "--results", str(tmp_path)])
    (text,) = json.loads(done.stdout)
    assert text["result"]["numbers"]["weight of a"][1] == question.correct_answer


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("0.25", 0.25),
        (" -3 ", -3.0),
        ("1,024", 1024.0),
        ("1,024.5", 1024.5),
        ("0,125", 0.125),
        ("10,24", 10.24),
        ("1e-3", 1e-3),
        (7, 7.0),
        (0.5, 0.5),
    ],
)
def test_numbers_are_parsed(given: object, number: float) -> None:
    assert parse_number(given) == number


@pytest.mark.parametrize("given", ["", "1,2,3", "29%", "x", "nan", "inf", True, None, [1], float("nan")])
def test_ambiguous_numbers_are_refused(given: object) -> None:
    assert parse_number(given) is None


def test_a_malformed_answer_is_refused() -> None:
    number, choice = make_question("two-values"), make_question("small-beta")
    with pytest.raises(ConfigError, match=r"question 1 needs a number, such as 0\.25 or 1,024, not 'b'"):
        number.parse_answer("b")
    with pytest.raises(ConfigError, match="question 1 needs one of a, b, c, d, not 'e'"):
        choice.parse_answer("e")
    with pytest.raises(ConfigError, match="question 1 needs one of a, b, c, d, not 2"):
        choice.parse_answer(2)
    assert choice.parse_answer(" B) ") == "b"


def test_tolerances() -> None:
    assert [str(each) for each in (Tolerance(), Tolerance(absolute=0.02), Tolerance(relative=0.15))] == [
        "exactly",
        "within 0.02",
        "within 15%",
    ]
    assert Tolerance(absolute=0.02).allows(0.52, 0.5)
    assert not Tolerance(absolute=0.02).allows(0.521, 0.5)
    assert Tolerance(relative=0.1).allows(-110, -100)
    assert not Tolerance().allows(100.001, 100)
    assert [format_number(each) for each in (1024.0, 0.12345, 12345.6)] == ["1,024", "0.1235", "1.235e+04"]


def test_a_quiz_is_graded_as_a_whole() -> None:
    quiz = Quiz.for_student("ann", count=3)
    answers: dict[str, object] = {str(each.number): each.correct_answer for each in quiz.questions}
    assert [result.ok for result in quiz.grade(answers)] == [True] * 3
    seen: list[int] = []
    results = quiz.grade({"2": answers["2"], "3": None}, lambda question: seen.append(question.number))
    assert [(result.ok, result.answer is None) for result in results] == [(False, True), (True, False), (False, True)]
    assert seen == [1, 2, 3]
    assert results[1].to_dict()["correct_answer"] == answers["2"]
    with pytest.raises(ConfigError, match="answers are named by question numbers, 1 to 3, not '4'"):
        quiz.grade({"4": "a"})
    with pytest.raises(ConfigError, match="there is no question 0; the questions are 1 to 3"):
        quiz.answer(0, "a")
    with pytest.raises(ConfigError, match="question 1 has no answer yet; predict first"):
        quiz.answer(1, ...)
    with pytest.raises(ConfigError, match="count"):
        Quiz.for_student("ann", count=0)


def test_a_question_with_two_true_choices_is_refused() -> None:
    question = make_question("small-beta")
    double = replace(question.content, choices=question.content.choices[1:2] * 2)
    with pytest.raises(ConfigError, match="small-beta has 2 true choices with this seed; try another seed"):
        _ = replace(question, content=double).correct_answer


def test_a_quiz_is_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    quiz = Quiz.for_student("ann", count=3, seed=1)
    student, key = (json.loads(to_text(quiz_notebook(quiz, answer_key=answers))) for answers in (False, True))
    for made in (student, key):
        assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
        names = [cell["id"] for cell in made["cells"]]
        assert len(set(names)) == len(names)
        assert all(("outputs" in cell) == (cell["cell_type"] == "code") for cell in made["cells"])
    assert sum("TODO" in "".join(cell["source"]) for cell in student["cells"]) == 3
    assert quiz[1].outcome.verdict.sentence not in json.dumps(student)
    space: dict[str, Any] = {}
    for cell in key["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    printed = capsys.readouterr().out
    assert printed.count("Correct: the answer is") == 3
