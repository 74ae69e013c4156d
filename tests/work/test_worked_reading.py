"""The sentence that reads a map, and the pictures of it."""

from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

from regard.base.errors import ConfigError
from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.describe_map import looks, read_map
from regard.work.exact_numbers import Grid
from regard.work.map_picture import Map, colour, maps, save, shade, shades, svg
from regard.work.problem import Problem, build, mask_of
from regard.work.solution import solve


def ones(rows: int) -> Grid:
    return tuple((Fraction(1),) for _ in range(rows))


def tokens(count: int, *, queries: int | None = None, names: tuple[str, ...] | None = None, **more: object) -> Problem:
    given = {"q": (ones(queries or count),), "k": (ones(count),), "v": (ones(count),)}
    return build("read", given, tokens=names, **more)  # type: ignore[arg-type]


def test_three_tokens_are_read() -> None:
    matrices, _, own = BUILTIN_PROBLEMS["three-tokens"]()
    for scaled in (False, True):
        solved = solve(build(matrices=matrices, **{**own, "scaled": scaled}))
        assert read_map(solved.problem, solved.weights()) == (
            "Tokens 1 and 2 look at token 3. Token 3 looks at token 1 and less at token 2. No token looks at itself."
        )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([[0.5, 0.5], [0.1, 0.9]], "Token 1 looks equally at all tokens. Token 2 looks at token 2. Every token looks"),
        ([[0.9, 0.1], [0.2, 0.8]], "Token 1 looks at token 1. Token 2 looks at token 2. Every token looks at itself"),
        ([[0.1, 0.9], [0.1, 0.9]], "Tokens 1 and 2 look at token 2. Token 2 looks at itself."),
    ],
)
def test_ties_and_selves_are_said(weights: list[list[float]], words: str) -> None:
    assert read_map(tokens(2), weights).startswith(words)


def test_some_look_at_themselves() -> None:
    weights = [[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.45, 0.45, 0.1]]
    assert read_map(tokens(3), weights) == (
        "Token 1 looks at token 1. Token 2 looks at token 2. Token 3 looks equally at tokens 1 and 2. "
        "Tokens 1 and 2 look at themselves."
    )


def test_a_mask_is_read_along() -> None:
    causally = tokens(3, mask=causal())
    assert "Token 2 looks equally at all that it sees." in read_map(causally, solve(causally).weights())
    blind = tokens(1, mask=mask_of(((False,),)))
    assert read_map(blind, [[0.0]]) == "Token 1 looks at nothing, for all is hidden from it. No token looks at itself."


def test_names_of_tokens_are_used() -> None:
    problem = tokens(3, queries=2, names=("the", "old", "cat"))
    words = read_map(problem, [[0.9, 0.1, 0.0], [0.0, 0.1, 0.9]])
    assert words == "Token old looks at token the. Token cat looks at token cat."


def test_queries_and_keys_of_two_sequences_are_not_called_tokens() -> None:
    assert read_map(tokens(3, queries=2), [[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]) == (
        "Query 1 looks at key 1. Query 2 looks equally at keys 2 and 3."
    )
    across = read_map(tokens(2, queries=3), [[0.5, 0.5]] * 3)
    assert across == "Queries 1, 2 and 3 look equally at all keys."


def test_an_image_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"map\.gif: end it in \.png, \.svg, \.pdf"):
        save(maps(solve(tokens(2))), tmp_path / "map.gif")


def test_looks_are_ordered_and_grouped() -> None:
    assert looks([0.2, 0.35, 0.35, 0.1], [True] * 4) == [[1, 2], [0]]


def drawn() -> Map:
    return Map("A <map>", ((0.0, 1.0), (0.75, 0.25)), ("a&b", "<i>"), ("x", "yy"), "query", "key")


def test_shades_show_weights_and_names() -> None:
    lines = shades(drawn()).splitlines()
    assert lines[0] == "query \\ key"
    assert "██ 1.00" in lines[2]
    assert "▓▓ 0.75" in lines[3]
    assert [shade(weight) for weight in (0, 0.2, 0.5, 0.7, 1)] == [" ", "░", "▒", "▓", "█"]


def test_the_drawing_is_xml_with_every_weight_in_it() -> None:
    root = ElementTree.fromstring(svg(drawn()))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}rect")) == 4
    written = [each.text for each in root.findall(f"{space}text")]
    assert {"a&b", "<i>", "0.00", "1.00", "0.75", "0.25"} <= set(written)
    assert (colour(0), colour(1)) == ("#ffffff", "#21528b")


def test_a_map_in_columns_has_keys_down() -> None:
    matrices, biases, own = BUILTIN_PROBLEMS["udl-12-2"]()
    first, second = maps(solve(build(matrices=matrices, biases=biases, **own)))
    assert (first.title, second.title, first.down, first.across) == ("Head 1", "Head 2", "key", "query")
    assert [sum(row[c] for row in second.weights) for c in range(6)] == pytest.approx([1.0] * 6)


def test_the_picture_is_saved(tmp_path: Path) -> None:
    save([drawn(), drawn()], tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot save"):
        save([drawn()], tmp_path / "map.nothing")
