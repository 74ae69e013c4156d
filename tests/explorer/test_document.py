"""Lessons and answers: Markdown becomes a tree of known elements, with live views and questions."""

from pathlib import Path

import pytest

from regard.base.errors import ConfigError
from regard.explorer.views.document import formula_node, parse_document, plain_text
from regard.explorer.views.lessons import SHIPPED, load_lesson, load_lessons

QUESTION = "```question before\nWhy?\n- [ ] no\n- [x] yes\nBecause.\n```\n"


def test_text_stays_text() -> None:
    nodes = parse_document("A <script>alert(1)</script> and `code` and **bold**")
    [[tag, attributes, children]] = nodes
    assert (tag, attributes) == ("p", {})
    bold = ["strong", {}, ["bold"]]
    assert children[:4] == ["A <script>alert(1)</script> and ", ["code", {}, ["code"]], " and ", bold]


def test_only_links_into_the_page_are_links() -> None:
    nodes = parse_document("[here](#plane) [there](https://example.org) [bad](javascript:alert(1))")
    assert [part for part in nodes[0][2] if isinstance(part, list)] == [["a", {"href": "#plane"}, ["here"]]]
    assert "https://example.org" in plain_text(nodes)


def test_a_live_view_has_the_state_of_the_address() -> None:
    [node] = parse_document('```regard plane beta=4 keys="1,0;0,1" predict=weights\nA caption\n```')
    assert node == ["view", {"view": "plane", "state": "b=4&k=1%2C0%3B0%2C1", "predict": "weights"}, ["A caption"]]


def test_a_question_knows_its_right_answer() -> None:
    [node] = parse_document(QUESTION)
    answers = [{"text": "no", "right": False}, {"text": "yes", "right": True}]
    assert node == ["question", {"when": "before", "answers": answers, "explanation": "Because."}, ["Why?"]]


def test_a_formula_becomes_mathml() -> None:
    node = formula_node(r"a_j = \frac{1}{n}")
    assert node[0] == "math"
    assert "mfrac" in str(node)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("```regard plan\n```", "there is no view 'plan'"),
        ("```regard plane gamma=2\n```", "no setting 'gamma=2'"),
        ("```regard masks predict=weights\n```", "no setting 'predict=weights'"),
        ('```regard plane beta="4\n```', "No closing quotation"),
        ("```regard plane query=1;0\n```", "'query=1;0' should be a point, such as 1,0.5"),
        ("```regard plane keys=1,0,5\n```", "should be points"),
        ("```regard plane keys=1,0;4,0\n```", "beyond 3.1"),
        ("```regard plane beta=-1\n```", "a number from 0, or inf"),
        ("```regard masks mask=casual()\n```", "did you mean"),
        ("```regard models edit=ablate\n```", "such as ablate:1.0"),
        ("```question before\nWhy?\n- [ ] no\n```", "one line `- [x] answer`"),
        ("```question during\nWhy?\n- [x] a\n- [ ] b\n```", "before or after"),
        ("![x](y.png)", "pictures are not shown"),
        (QUESTION * 6, "6 questions before"),
        ("x" * 200_001, "at most 200000"),
    ],
)
def test_errors_say_where_and_what(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match="mine") as caught:
        parse_document(source, "mine.md")
    assert words in str(caught.value)


def test_six_lessons_ship_with_questions_and_views() -> None:
    lessons = load_lessons()
    assert len(lessons) == 6
    for lesson in lessons:
        kinds = [node[0] for node in lesson["content"] if isinstance(node, list)]
        assert kinds.count("view") >= 2, lesson["title"]
        assert kinds.count("question") >= 2, lesson["title"]


def test_ones_own_lesson_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "my lesson.md"
    own.write_text("# Mine\n\nText.\n", encoding="utf-8")
    assert load_lessons(own)[0] == {"name": "my-lesson", "title": "Mine", "content": [["p", {}, ["Text."]]]}
    own.write_text("no title", encoding="utf-8")
    with pytest.raises(ConfigError, match="starts with its title"):
        load_lesson(own)
    assert len(list(SHIPPED.glob("*.md"))) == 6
