"""Worked solutions as text, Markdown, LaTeX and HTML."""

import re
from fractions import Fraction
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from regard.base.errors import ConfigError, UnknownNameError
from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.exact_numbers import Matrix
from regard.work.problem import build_problem
from regard.work.solution import Solution, solve
from regard.work.writing import FORMATS, SUFFIXES
from regard.work.writing.document import build_document

CASES: list[tuple[str, dict[str, Any]]] = [
    ("three-tokens", {}),
    ("three-tokens", {"scaled": True, "mask": causal(), "tokens": ("<b>", "a_b&{c}$", "`x|y`")}),
    ("udl-12-1", {}),
    ("udl-12-2", {}),
]
IDS = ["plain", "masked", "columns", "heads"]


def solved(name: str, **changes: Any) -> Solution:
    matrices, biases, own = BUILTIN_PROBLEMS[name]()
    return solve(build_problem(matrices=matrices, biases=biases, **{**own, **changes}))


def write_solution(form: str, solution: Solution, digits: int = 6, every_step: bool = True) -> str:
    return FORMATS[form](build_document(solution, digits=digits, every_step=every_step), digits)


def test_the_text_writes_out_every_step() -> None:
    text = write_solution("text", solved("three-tokens", scaled=True))
    for line in (
        "Q[3,1] = (-2)·0 + 2·1 + (-1)·(-1/2) + 0·1 = 5/2",
        "S[3,3] = (5/2)·(-5/2) + (-2)·(7/2) = -53/4",
        "Z[1,1] = (3/2)/√2 = 3/(2√2) ≈ 1.060660",
        "m[1] = max(3/(2√2), -5/(2√2), 4√2) = 4√2 ≈ 5.656854",
        "E[3,2] = e^(4√2 - 17/(2√2)) ≈ e^(-0.353553) ≈ 0.702189",
        "t[3] = 1 + 0.702189 + 2.092842e-07 ≈ 1.702189",
        "A[3,1] = 1/1.702189 ≈ 0.587479",
        "O[3,1] = 0.587479·(5/2) + 0.412521·(-1) + 1.229501e-07·(-2) ≈ 1.056176",
    ):
        assert f"  {line}\n" in text
    assert "No token attends to itself." in text
    assert "rounded to 6\nplaces" in text or "rounded to 6 places" in text


def test_brief_omits_the_calculation_of_entries() -> None:
    solution = solved("three-tokens")
    brief = write_solution("text", solution, every_step=False)
    assert "Q[1,1] =" not in brief
    assert "Q = X W_Q = ⎢  -1   1 ⎥" in brief
    assert len(brief) < len(write_solution("text", solution)) / 1.5


def test_the_number_of_digits_is_respected() -> None:
    text = write_solution("text", solved("three-tokens"), digits=3)
    assert "1.179" in text
    assert "1.1786" not in text
    assert "rounded to 3" in text
    with pytest.raises(ConfigError, match="digits is 16, but should be 1 to 15"):
        build_document(solved("three-tokens"), digits=16)


def test_rounded_numbers_are_marked_as_approximate() -> None:
    lines = [
        line for line in write_solution("text", solved("three-tokens")).splitlines() if re.match(r"  [A-Z]\[", line)
    ]
    for line in lines:
        last = re.split(r" (?:=|≈) ", line)[-1]
        assert ("≈" in line) == ("." in last or "e-" in last), line


def test_the_overview_formula_has_mask_heads_and_output_projection() -> None:
    assert "O = softmax(mask(Q Kᵀ)) V\n" in write_solution(
        "text", solved("three-tokens", mask=causal()), every_step=False
    )
    heads = write_solution("text", solved("three-tokens", heads=2), every_step=False)
    for line in ("O⁽¹⁾ = softmax(Q⁽¹⁾ K⁽¹⁾ᵀ) V⁽¹⁾", "H = concat(O⁽¹⁾, O⁽²⁾)"):
        assert f"{line}\n" in heads
    assert "R = Ω_c concat(O⁽¹⁾, O⁽²⁾)\n" in write_solution("text", solved("udl-12-2"), every_step=False)


def test_a_number_that_underflows_is_not_called_zero() -> None:
    far = build_problem(
        "far", {"q": (((Fraction(1000),),),), "k": (column(1000, -1000),), "v": (column(1, 2),)}, scaled=False
    )
    text = write_solution("text", solve(far))
    for line in ("t[1] = 1 + 0.000000 ≈ 1.000000", "A[1,2] = 0.000000/1.000000 ≈ 0.000000"):
        assert line in text
    assert "1 query and 2 keys" in text


def column(*values: int) -> Matrix:
    return tuple((Fraction(value),) for value in values)


def test_too_many_entries_need_the_brief_form() -> None:
    row = tuple((1.0,) for _ in range(36))
    solution = solve(build_problem("long", {"q": (row,), "k": (row,), "v": (row,)}))
    with pytest.raises(ConfigError, match="too many to write out one by one; use steps='brief'"):
        build_document(solution)
    assert build_document(solution, every_step=False)


class Page(HTMLParser):
    """Checks that every element is closed where it should be, and gathers what is used."""

    EMPTY = ("meta", "mspace")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.outside += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_the_page_is_valid_and_works_offline(name: str, changes: dict[str, Any]) -> None:
    page = write_solution("html", solved(name, **changes))
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.outside == []
    assert not {"script", "link", "img", "b"} & parser.tags
    assert {"math", "table", "mtable", "mfrac"} <= parser.tags
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    for formula in re.findall(r"<math .*?</math>", page):
        ElementTree.fromstring(formula)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_latex_is_balanced(name: str, changes: dict[str, Any]) -> None:
    source = write_solution("latex", solved(name, **changes))
    plain = re.sub(r"\\[{}]", "", source)
    depth = 0
    for each in plain:
        depth += {"{": 1, "}": -1}.get(each, 0)
        assert depth >= 0
    assert depth == 0
    begun, ended = (re.findall(rf"\\{word}{{([a-z*]+)}}", source) for word in ("begin", "end"))
    assert sorted(begun) == sorted(ended)
    assert source.count(r"\left(") == source.count(r"\right)")
    assert source.count(r"\[" + "\n") == source.count("\n" + r"\]")
    assert not [each for each in source.replace(r"\(", "") if ord(each) > 127], "pdflatex knows no such signs"


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_markdown_has_its_formulas_in_fences(name: str, changes: dict[str, Any]) -> None:
    source = write_solution("markdown", solved(name, **changes))
    assert source.startswith("# Worked solution: ")
    assert source.count("$$") % 2 == 0
    assert source.count("```") % 2 == 0
    assert r"\begin{aligned}" in source


def test_a_fence_in_a_token_does_not_end_the_code_block() -> None:
    source = write_solution("markdown", solved("three-tokens", tokens=("```", "<img src=x>", "````")))
    fence = re.search(r"^(`+)text$", source, re.MULTILINE)
    assert fence is not None
    body = source.split(f"{fence[1]}text\n")[1].split(f"\n{fence[1]}\n")[0]
    assert "````" in body
    assert len(fence[1]) == 5


def test_token_names_are_escaped() -> None:
    changes = CASES[1][1]
    assert "<b>" not in write_solution("html", solved("three-tokens", **changes))
    assert r"a\_b\&\{c\}\$" in write_solution("latex", solved("three-tokens", **changes))


def test_formats_have_a_name_and_a_file_ending() -> None:
    assert list(FORMATS) == ["text", "markdown", "latex", "html"]
    assert set(SUFFIXES.values()) == set(FORMATS)
    with pytest.raises(UnknownNameError, match="unknown format 'word'"):
        FORMATS["word"]


def test_latex_has_room_for_the_widest_matrix() -> None:
    keys = tuple((Fraction(at),) for at in range(70))
    matrices = {"q": (((Fraction(1),),),), "k": (keys,), "v": (keys,)}
    wide = solve(build_problem("wide", matrices))
    assert r"\setcounter{MaxMatrixCols}{70}" in write_solution("latex", wide, every_step=False)
    assert r"\setcounter{MaxMatrixCols}{10}" in write_solution("latex", solved("three-tokens"))
