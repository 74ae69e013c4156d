"""The answers to the course sheets: every question, with definition, formula, reasons, numbers and errata."""

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

import regard
from regard.base.errors import UnknownNameError
from regard.base.formulas import mathml, parse_latex
from regard.cli import app
from regard.cli.settings import parse_settings
from regard.cli.train import build_settings
from regard.lab.answers import (
    SECTIONS,
    SheetAnswer,
    find_answer,
    formulas_as_text,
    sheet_answers,
    sheet_questions,
    sheet_titles,
)
from regard.lab.claim import claims
from regard.lab.errata import wrong_answers
from regard.lab.html_page import answer_markdown, answers_page
from regard.lab.results import Result, shipped_results
from regard.models.presets import list_models
from regard.recipes.recipe import get_recipe
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.exercises import EXERCISE_SETS

# every question of the sheets; none may be missing
QUESTIONS = {
    "000": """1.1a 1.1b 1.1c 1.1d 1.1e 1.1f 1.2a 1.2b 1.3a 1.3b 1.3c 1.3d 1.3e 1.4 1.4a 1.4b 1.4c 1.4d 1.4e 1.5 1.5a
        1.5b 1.5c 1.5d 2""",
    "001": """review_1 review_2 review_3 review_4 review_5 review_6 review_7 review_8 review_9 review_10 review_11
        review_12 1a 1b 1c-i 1c-ii 1d-i 1d-ii 1e-i 1e-ii 2 2_ii 3a 3b 3b_look 3c""",
    "002": """1.1a 1.1b 1.1c 1.1d 1.1e 1.1f 1.1g 1.2a 1.2b 1.3a 1.3b 1.3c 1.3d 1.3e 1.4 1.4a 1.4b 1.4c 1.4d 1.4e 1.5
        1.5a 1.5b 1.5c 1.5d 2""",
    "003": "12.1 12.2 12.3 12.4 12.4_code 12.5 12.6 12.7 12.8 12.9 12.10",
    "004": "1a 1b 1c 1d 2a-i 2a-ii 2b 2c 2d 3a 3b 3c 3d",
}
ANSWERS = sheet_answers()


@cache
def shipped() -> dict[str, Result]:
    return shipped_results()


def result(name: str) -> Result:
    return shipped()[name]


@pytest.mark.parametrize("sheet", QUESTIONS)
def test_every_question_of_a_sheet_is_answered_in_order(sheet: str) -> None:
    wanted = [f"{sheet} {number.replace('_', ' ')}" for number in QUESTIONS[sheet].split()]
    assert list(sheet_questions(sheet)) == wanted
    assert set(sheet_titles()) == set(QUESTIONS)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_an_answer_has_definition_formula_reasons_and_numbers(answer: SheetAnswer) -> None:
    assert tuple(answer.sections) == SECTIONS
    assert all(len(answer.sections[title].split()) >= 8 for title in ("Definition", "Why"))
    assert answer.formulas
    for formula in answer.formulas:
        ElementTree.fromstring(mathml(parse_latex(formula)))
    assert answer.claims
    assert re.match(r"regard |python ", answer.command)
    body = answer.body(result)
    assert re.search(r"\d", body.split("## Measured")[1]), "what was measured has numbers"
    assert "{{" not in body
    assert "{%" not in body


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_the_first_claim_of_an_answer_names_every_question(answer: SheetAnswer) -> None:
    source = " ".join(claims()[answer.claims[0]].source.split())
    assert [place for place in answer.questions if place not in source.split(", ")] == []


def arguments_of(command: Any, words: list[str], parent: Any = None) -> tuple[str, dict[str, Any]]:
    """The name of a command and its arguments, as the command line reads them; an unknown option raises an error."""
    context = command.make_context(command.name, list(words), parent=parent)
    if not hasattr(command, "resolve_command"):
        return context.command_path.strip(), context.params
    _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return arguments_of(inner, rest, context)


def check_command(line: str) -> None:
    """Check that a command line of an answer would run: its options, and the names of claims, recipes and models."""
    words = shlex.split(line)
    assert words[0] == "regard"
    name, given = arguments_of(typer.main.get_command(app), words[1:])
    match name.split()[-1]:
        case "run":
            for claim in [claims()[each] for each in given["ids"]]:
                claim.setup(parse_settings(given["settings"] or [], claim.module.Setup))
        case "show" if given["name"] not in claims():
            find_answer(given["name"])
        case "sheet":
            find_answer(" ".join([given["sheet"], *given["question"]]))
        case "train" if given["name"] != "list":
            build_settings(get_recipe(given["name"]), None, given["variant"], [])
        case "count" | "look":
            assert given.get("model", given.get("name")) in [*list_models(), *list_models(pretrained=True)]
        case "work":
            assert given["name"] in BUILTIN_PROBLEMS
        case "exercises":
            assert given["name"] in EXERCISE_SETS


def split_commands(words: str) -> list[str]:
    """The parts of a list whose parts are commands, names or pages; a command may have commas inside."""
    return re.split(r", (?=regard\b)", words)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_the_commands_of_an_answer_exist(answer: SheetAnswer) -> None:
    named = re.findall(r"`(regard [^`]+)`", answer.body(result))
    for part in [answer.command, *split_commands(answer.view), *named]:
        if part.startswith("regard."):
            module, _, attribute = part.rpartition(".")
            assert hasattr(import_module(module), attribute) or import_module(part)
        elif part.startswith("docs/"):
            assert (Path(regard.__file__).parent.parent / part).is_file()
        elif part.startswith("regard "):
            check_command(part)
        else:
            assert part.startswith("python -c"), part


@pytest.mark.parametrize(
    "line", ["regard train birthplaces --form course", "regard lab run bata", "regard train birthplaces --variant x"]
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"--form|bata|variant"):
        check_command(line)


def named_places(source: str) -> set[str]:
    """The places that a claim's source names; "000 1.1c-d" names two."""
    found = set()
    for part in " ".join(source.split()).split(", "):
        several = re.fullmatch(r"(.*)([a-z])-([a-z])", part)
        letters = range(ord(several[2]), ord(several[3]) + 1) if several else ()
        found |= {f"{several[1]}{chr(letter)}" for letter in letters} if several else {part}
    return found


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_a_claim_that_names_000_names_002_where_both_ask(answer: SheetAnswer) -> None:
    asked = {sheet: {place for place in answer.questions if place.startswith(sheet)} for sheet in ("000", "002")}
    for name in answer.claims if all(asked.values()) else ():
        named = named_places(claims()[name].source)
        assert not (named & asked["000"]) or asked["002"] <= named, name


def test_every_erratum_is_shown_with_its_question() -> None:
    shown = {each.quote for answer in ANSWERS for place in answer.questions for each in answer.errata(place, result)}
    assert shown == {answer.quote for answer in wrong_answers()}


@pytest.mark.parametrize(
    ("place", "sources"), [("000 1.4a", {"000 1.4a"}), ("004 1b", {"004 1b"}), ("002 1.4a", {"000 1.4a", "004 1b"})]
)
def test_a_question_shows_its_own_errata_or_those_of_other_sheets(place: str, sources: set[str]) -> None:
    assert {each.source for each in find_answer(place)[1].errata(place, result)} == sources


@pytest.mark.parametrize("place", ["002 1.2a", "002 1.2(a)", " 002  1.2A", "000 1.2a"])
def test_a_question_is_found_by_its_place(place: str) -> None:
    assert find_answer(place)[1].name == "multi-head"


@pytest.mark.parametrize("place", ["001 1c-ii", "001 1(c)ii", "001 1 c (ii)", "001 1C II", "001 1c ii"])
def test_a_part_of_a_question_is_found_as_the_sheet_or_the_list_writes_it(place: str) -> None:
    assert find_answer(place)[0] == "001 1c-ii"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("002 9.9", "sheet 002 has no question '9.9'; it has 1.1a, 1.1b"),
        ("007 1a", "there is no sheet '007'; there are 000, 001"),
        ("2 1.2a", "there is no sheet '2'; there are 000, 001"),
        ("heads", "a question is a sheet and a number, such as 002 1.2a, not 'heads'"),
    ],
)
def test_an_unknown_question_is_an_error(place: str, words: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(words)):
        find_answer(place)


def test_a_page_has_every_answer_of_a_sheet_with_figures_and_errata() -> None:
    shown = list(sheet_questions("004").items())
    page = answers_page("Sheet 004", shown, result)
    assert page.count("<article") == len(shown)
    assert all(f'id="question-{place.replace(" ", "-")}"' in page for place, _ in shown)
    figures = {answer.figure for _, answer in shown} - {""}
    assert page.count("<svg") == len(figures)
    assert "And in RNNs, there is no attention architectural component." in page
    assert "://" not in page
    repeated = sum(bool(answer.figure) for _, answer in shown) - len(figures)
    assert page.count("Figure: see ") == repeated > 0


def test_the_page_of_a_question_shows_its_figure_or_none() -> None:
    diagrams, transposed = (answers_page("", [find_answer(f"001 review {at}")], result) for at in (12, 3))
    assert diagrams.count("<svg") == 1
    assert "<figure" not in transposed
    assert "Figure: see" not in transposed


def test_an_answer_as_markdown_quotes_the_sheet() -> None:
    place, answer = find_answer("000 1.1d")
    text = answer_markdown(place, answer, result)
    assert text.startswith("# Sheet 000 1.1d: When is the output a spread version")
    assert "\n> The value of β should be very big or it should be hot." in text
    assert "soft attention" in " ".join(text.split())
    assert text.endswith(f"`{answer.command}`\n\nSee also: {answer.view}")


def test_a_wrong_answer_shows_its_status() -> None:
    page = answers_page("", [find_answer("000 1.1d")], result)
    assert re.findall(r'class="badge refuted">([^<]+)', page) == ["partly right", "wrong"]


def test_formulas_of_an_answer_as_text() -> None:
    assert "xᵢ" in formulas_as_text("$$x_i$$")
