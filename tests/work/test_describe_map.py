"""The description of an attention map in text, and the pictures of it."""

from fractions import Fraction
from xml.etree import ElementTree

import pytest

from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.describe_map import attended_keys, describe_map
from regard.work.exact_numbers import Matrix
from regard.work.map_picture import AttentionMap, attention_maps, draw_maps, render_table, render_text
from regard.work.problem import Problem, build_problem, mask_from_rows
from regard.work.solution import solve


def ones(rows: int) -> Matrix:
    return tuple((Fraction(1),) for _ in range(rows))


def tokens(count: int, *, queries: int | None = None, names: tuple[str, ...] | None = None, **more: object) -> Problem:
    given = {"q": (ones(queries or count),), "k": (ones(count),), "v": (ones(count),)}
    return build_problem("read", given, tokens=names, **more)  # type: ignore[arg-type]


def test_three_tokens_are_described() -> None:
    matrices, _, own = BUILTIN_PROBLEMS["three-tokens"]()
    for scaled in (False, True):
        solved = solve(build_problem(matrices=matrices, **{**own, "scaled": scaled}))
        assert describe_map(solved.problem, solved.weights()) == (
            "Tokens 1 and 2 attend to token 3. Token 3 attends to token 1 and less to token 2. "
            "No token attends to itself."
        )


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            [[0.5, 0.5], [0.1, 0.9]],
            "Token 1 attends equally to all tokens. Token 2 attends to token 2. Every token attends",
        ),
        (
            [[0.9, 0.1], [0.2, 0.8]],
            "Token 1 attends to token 1. Token 2 attends to token 2. Every token attends to itself",
        ),
        ([[0.1, 0.9], [0.1, 0.9]], "Tokens 1 and 2 attend to token 2. Token 2 attends to itself."),
    ],
)
def test_ties_and_self_attention_are_described(weights: list[list[float]], text: str) -> None:
    assert describe_map(tokens(2), weights).startswith(text)


def test_some_tokens_attend_to_themselves() -> None:
    weights = [[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.45, 0.45, 0.1]]
    assert describe_map(tokens(3), weights) == (
        "Token 1 attends to token 1. Token 2 attends to token 2. Token 3 attends equally to tokens 1 and 2. "
        "Tokens 1 and 2 attend to themselves."
    )


def test_hidden_keys_are_not_described() -> None:
    causally = tokens(3, mask=causal())
    assert "Token 2 attends equally to all visible tokens." in describe_map(causally, solve(causally).weights())
    blind = tokens(1, mask=mask_from_rows(((False,),)))
    assert (
        describe_map(blind, [[0.0]])
        == "Token 1 attends to nothing, because every key is hidden. No token attends to itself."
    )


def test_token_names_are_used() -> None:
    problem = tokens(3, queries=2, names=("the", "old", "cat"))
    text = describe_map(problem, [[0.9, 0.1, 0.0], [0.0, 0.1, 0.9]])
    assert text == "Token old attends to token the. Token cat attends to token cat."


def test_queries_and_keys_of_two_sequences_are_not_called_tokens() -> None:
    assert describe_map(tokens(3, queries=2), [[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]) == (
        "Query 1 attends to key 1. Query 2 attends equally to keys 2 and 3."
    )
    across = describe_map(tokens(2, queries=3), [[0.5, 0.5]] * 3)
    assert across == "Queries 1, 2 and 3 attend equally to all keys."


def test_attended_keys_are_sorted_and_grouped() -> None:
    assert attended_keys([0.2, 0.35, 0.35, 0.1], [True] * 4) == [[1, 2], [0]]


def example_map() -> AttentionMap:
    return AttentionMap("A <map>", ((0.0, 1.0), (0.75, 0.25)), ("a&b", "<i>"), ("x", "yy"), "query", "key")


def test_shades_show_weights_and_names() -> None:
    lines = render_text(example_map()).splitlines()
    assert lines[0] == "query \\ key"
    assert "██ 1.00" in lines[2]
    assert "▓▓ 0.75" in lines[3]


def test_the_table_has_every_name_and_weight() -> None:
    table = ElementTree.fromstring(render_table(example_map()))
    assert [cell.text for cell in table.iter("th")] == ["query \\ key", "x", "yy", "a&b", "<i>"]
    weights = [(cell.text, cell.get("style")) for cell in table.iter("td")]
    assert [text for text, _ in weights] == ["0.00", "1.00", "0.75", "0.25"]
    assert [style for _, style in weights[:2]] == ["background:#ffffff;color:#000", "background:#21528b;color:#fff"]


def test_a_map_in_columns_has_keys_down() -> None:
    matrices, biases, own = BUILTIN_PROBLEMS["udl-12-2"]()
    first, second = attention_maps(solve(build_problem(matrices=matrices, biases=biases, **own)))
    assert (first.title, second.title, first.row_kind, first.column_kind) == ("Head 1", "Head 2", "key", "query")
    assert [sum(row[c] for row in second.weights) for c in range(6)] == pytest.approx([1.0] * 6)


def test_all_maps_are_drawn_in_one_figure() -> None:
    figure = draw_maps([example_map(), example_map()])
    assert [ax.get_title() for ax in figure.axes] == ["A <map>", "A <map>"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["0.00", "1.00", "0.75", "0.25"]
