"""The quiz: every answer comes out of a run, every student has questions of their own, and marks are fair."""

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
from regard.lab.claim import CHAPTERS, SUPPORTED
from regard.work.notebook import export
from regard.work.quiz import KINDS, Quiz, QuizQuestion, as_number, dealt, shown
from regard.work.quiz_notebook import of_quiz
from regard.work.quiz_question import Tolerance


def asked(name: str, student: str = "ann", seed: int = 0) -> QuizQuestion:
    """A question of one kind."""
    draw = Random(f"{student} {seed}")
    return QuizQuestion(1, KINDS[name], KINDS[name].pose(draw), draw.randrange(1000))


def test_there_are_many_kinds_from_every_chapter() -> None:
    chapters = [KINDS[name].chapter for name in KINDS]
    assert len(chapters) >= 12
    assert set(chapters) == set(CHAPTERS)
    assert min(chapters.count(chapter) for chapter in CHAPTERS) >= 10


@pytest.mark.parametrize("name", list(KINDS))
def test_a_run_answers_and_supports_its_claim(name: str) -> None:
    question = asked(name)
    right = question.right
    assert question.outcome.verdict.word == SUPPORTED, question.outcome.verdict.sentence
    assert question.reveal(right).ok
    if question.letters:
        assert len(question.letters) >= 3
        wrong = [letter for letter in question.letters if letter != right]
        assert not any(question.reveal(letter).ok for letter in wrong)
    else:
        assert isinstance(right, float)
        far = 3 * max(question.posed.tolerance.by, question.posed.tolerance.share * abs(right), 1)
        assert not question.reveal(right + far).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_whatever_is_drawn_has_one_answer(name: str) -> None:
    for seed in range(12):
        question = asked(name, "ben", seed)
        assert question.reveal(question.right).ok
        assert question.outcome.verdict.word == SUPPORTED, question.outcome.verdict.sentence


@pytest.mark.parametrize("name", list(KINDS))
def test_questions_differ_between_students(name: str) -> None:
    drawn = {(question.posed.text, question.seed) for question in (asked(name, f"student {at}") for at in range(12))}
    assert len(drawn) > 6


def test_a_student_always_has_the_same_quiz_and_nobody_else_has_it() -> None:
    mine = Quiz.of("ann", count=9, seed=3).to_dict()
    assert Quiz.of("ann", count=9, seed=3).to_dict() == mine
    for other in (Quiz.of("ben", count=9, seed=3), Quiz.of("ann", count=9, seed=4)):
        questions = other.to_dict()["questions"]
        assert sum(one == two for one, two in zip(mine["questions"], questions, strict=True)) <= 2
    assert Quiz.of("ann", count=4, seed=3).to_dict()["questions"] == mine["questions"][:4]


def test_chapters_take_turns_and_kinds_do_not_repeat_early() -> None:
    kinds = dealt(Random(0))
    first = [next(kinds) for _ in range(30)]
    assert [kind.chapter for kind in first[:3]] == list(CHAPTERS)
    assert len({kind.name for kind in first}) == 30
    assert Quiz.of("ann", count=60).questions[-1].number == 60


def test_nothing_that_is_shown_before_has_the_answer() -> None:
    quiz = Quiz.of("ann", count=20)
    told = json.dumps(quiz.to_dict())
    assert '"right"' not in told
    for question in quiz.questions:
        assert set(question.to_dict()) - {"choices", "answer"} == {"number", "kind", "claim", "chapter", "question"}
        assert "outcome" not in vars(question), "asking ran nothing"


def sharper_is_flatter(q: Tensor, k: Tensor, v: Tensor, *, beta: float | None = None, **rest: Any) -> Tensor:
    """An attention with beta upside down."""
    beta = q.shape[-1] ** -0.5 if beta is None else beta
    return attend(q, k, v, beta=1 / beta if beta else torch.inf, **rest)


@pytest.mark.parametrize("name", ["small-beta", "when-it-spreads"])
def test_the_answer_is_what_the_run_says_not_what_was_typed(name: str) -> None:
    question = asked(name)
    setup = question.claim.setup(question.posed.settings, seed=question.seed, smoke=True)
    broken = question.claim.run(setup, attention=sharper_is_flatter)
    true = [choice.text for choice in question.posed.choices if choice.holds(broken.numbers)]
    assert true[:1] == [question.claim.wrong_answers[0].says], "with such an attention the sheet would be right"
    assert question.letters[str(question.right)] != question.claim.wrong_answers[0].says


def test_a_number_comes_from_the_run_too() -> None:
    question = asked("weight-at-beta")
    setup = question.claim.setup(question.posed.settings, seed=question.seed, smoke=True)
    broken = question.claim.run(setup, attention=sharper_is_flatter)
    assert question.posed.number is not None
    assert not question.posed.tolerance.allows(float(question.right), question.posed.number(broken.numbers))


def test_wrong_answers_of_the_sheets_are_choices_and_never_right() -> None:
    sheets = 0
    for name in KINDS:
        question = asked(name)
        says = [sheet.says for sheet in question.claim.wrong_answers]
        found = [letter for letter, text in question.letters.items() if text in says]
        sheets += len(found)
        assert not found or question.right not in found
    assert sheets >= 10


def test_the_run_is_about_as_many_tokens_as_the_question() -> None:
    for seed in range(3):
        question = asked("what-a-new-token-changes", "ann", seed)
        (before,) = re.findall(r"over (\d+) tokens", question.posed.text)
        assert f"After {before} tokens" in question.outcome.verdict.sentence


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].claim == "feed-forward"])
def test_question_and_run_name_the_same_token(name: str) -> None:
    for seed in range(3):
        question = asked(name, "ann", seed)
        (place,) = re.findall(r"Token \d+ of \d+", question.posed.text)
        assert f"{place} replaced" in question.outcome.verdict.sentence


@pytest.mark.parametrize("name", ["weight-at-beta", "larger-nudge"])
def test_the_explanation_leads_to_the_number(name: str) -> None:
    question = asked(name)
    told = question.reveal().explanation
    assert told[0].startswith("How to get it: ")
    assert f" is {float(question.right):.4g}." in told[0]


def test_the_explanation_has_the_maths_of_the_claim() -> None:
    assert "The maths: aⱼ = " in str(asked("small-beta").reveal())


def test_a_question_about_size_says_all_that_it_takes() -> None:
    text = asked("size-of-a-vit").posed.text
    assert re.search(
        r"patches of 1[46] x 1[46] pixels and \d+ blocks of width \d+, feed-forward parts four times", text
    )


def test_the_reveal_explains() -> None:
    question = asked("small-beta")
    wrong = next(letter for letter in question.letters if letter != question.right)
    told = str(question.reveal(wrong))
    assert told.startswith(f"Not so: it is {question.right}) A small beta makes all weights nearly alike")
    assert "The run: At beta=0.00" in told
    assert "The claim: The larger beta, the sharper the weights" in told
    assert 'A wrong answer that is about: "A small beta makes the weights one-hot." (refuted)' in told
    assert "Run it again: regard lab run beta --smoke --set scores=" in told
    assert str(question.reveal(question.right)).startswith("Right: it is")
    assert str(question.reveal()).startswith("Not answered: it is")


def test_the_command_of_a_reveal_runs_the_same_experiment(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from regard.cli import app

    question = asked("two-values")
    words = question.reveal().explanation[-1].removeprefix("Run it again: regard ").split()
    done = CliRunner().invoke(app, [*words, "--json", "--results", str(tmp_path)])
    (told,) = json.loads(done.stdout)
    assert told["result"]["numbers"]["weight of a"][1] == question.right


@pytest.mark.parametrize(
    ("given", "number"),
    [("0.25", 0.25), (" -3 ", -3.0), ("1,024", 1024.0), ("1,024.5", 1024.5), ("1e-3", 1e-3), (7, 7.0), (0.5, 0.5)],
)
def test_numbers_are_read_as_they_are_written(given: object, number: float) -> None:
    assert as_number(given) == number


@pytest.mark.parametrize("given", ["", "0,5", "10,24", "29%", "x", "nan", "inf", True, None, [1], float("nan")])
def test_what_is_not_plainly_a_number_is_none(given: object) -> None:
    assert as_number(given) is None


def test_an_answer_of_another_form_is_refused() -> None:
    number, choice = asked("two-values"), asked("small-beta")
    with pytest.raises(ConfigError, match=r"question 1 takes a number, such as 0\.25 or 1,024, not 'b'"):
        number.read("b")
    with pytest.raises(ConfigError, match="question 1 takes one of a, b, c, d, not 'e'"):
        choice.read("e")
    with pytest.raises(ConfigError, match="question 1 takes one of a, b, c, d, not 2"):
        choice.read(2)
    assert choice.read(" B) ") == "b"


def test_a_tolerance_is_kept_to_the_word() -> None:
    assert [str(each) for each in (Tolerance(), Tolerance(by=0.02), Tolerance(share=0.15))] == [
        "exactly",
        "within 0.02",
        "within 15%",
    ]
    assert Tolerance(by=0.02).allows(0.52, 0.5)
    assert not Tolerance(by=0.02).allows(0.521, 0.5)
    assert Tolerance(share=0.1).allows(-110, -100)
    assert not Tolerance().allows(100.001, 100)
    assert [shown(each) for each in (1024.0, 0.12345, 12345.6)] == ["1,024", "0.1235", "1.235e+04"]


def test_a_quiz_is_graded_as_a_whole() -> None:
    quiz = Quiz.of("ann", count=3)
    answers: dict[str, object] = {str(each.number): each.right for each in quiz.questions}
    assert [mark.ok for mark in quiz.grade(answers)] == [True] * 3
    seen: list[int] = []
    marks = quiz.grade({"2": answers["2"], "3": None}, lambda question: seen.append(question.number))
    assert [(mark.ok, mark.given is None) for mark in marks] == [(False, True), (True, False), (False, True)]
    assert seen == [1, 2, 3]
    assert marks[1].to_dict()["right"] == answers["2"]
    with pytest.raises(ConfigError, match="answers are named by the numbers of questions, 1 to 3, not '4'"):
        quiz.grade({"4": "a"})
    with pytest.raises(ConfigError, match="there are questions 1 to 3, not 0"):
        quiz.answer(0, "a")
    with pytest.raises(ConfigError, match="question 1 has no answer yet; predict first"):
        quiz.answer(1, ...)
    with pytest.raises(ConfigError, match="count"):
        Quiz.of("ann", count=0)


def test_a_question_that_two_choices_answer_is_refused() -> None:
    question = asked("small-beta")
    double = replace(question.posed, choices=question.posed.choices[1:2] * 2)
    with pytest.raises(ConfigError, match="small-beta was drawn so that 2 choices hold; try another seed"):
        _ = replace(question, posed=double).right


def test_a_quiz_is_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiz = Quiz.of("ann", count=3, seed=1)
    files = export(of_quiz(quiz), of_quiz(quiz, key=True), tmp_path / "quiz.ipynb")
    student, key = (json.loads(file.read_text(encoding="utf-8")) for file in files)
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
    assert printed.count("Right: it is") == 3
