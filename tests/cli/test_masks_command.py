"""`regard masks`: the gallery, one expression, and sizes too large to draw."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.masks import LARGEST_DRAWN, drawing
from regard.core.masks import forms
from regard.core.masks.expression import makers, parse_mask

run = CliRunner()
EXAMPLES = {name: forms.examples(name, 12)[0] for name in forms.FORMS}


def numbers(*words: str) -> Any:
    result = run.invoke(app, ["masks", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def text(*words: str) -> str:
    result = run.invoke(app, ["masks", *words], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_gallery_shows_every_mask_with_its_meaning() -> None:
    shown = text()
    for name, expression in EXAMPLES.items():
        assert repr(parse_mask(expression)).split(",")[0] in shown
        assert (makers()[name].__doc__ or "").split()[0] in shown
    assert set(EXAMPLES) == set(makers())
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


@pytest.mark.parametrize("size", [1, 5, 12, 25, 70])
def test_the_gallery_fits_any_size(size: int) -> None:
    gallery = numbers("--queries", str(size))
    visible = {entry["mask"]: entry["visible"] for entry in gallery}
    assert (visible["full()"], visible["causal()"]) == (size * size, size * (size + 1) // 2)
    assert max(map(len, text("--queries", str(size)).splitlines())) <= 80


@pytest.mark.parametrize("expression", [*EXAMPLES.values(), "causal() & window(before=3) | global_tokens(1)"])
def test_the_numbers_are_those_of_the_matrix(expression: str) -> None:
    entry = numbers(expression, "--queries", "9", "--keys", "12")
    seen = parse_mask(expression).dense(9, 12).reshape(9, 12)
    blocks = [seen[i : i + 4, j : j + 4] for i in (0, 4, 8) for j in (0, 4, 8)]
    assert entry["visible"] == seen.sum()
    assert (entry["queries"], entry["keys"], entry["pairs"]) == (9, 12, 108)
    assert entry["share"] == pytest.approx(float(seen.float().mean()))
    # "some" may be cautious; "none" and "all" are certain
    assert entry["blocks"]["none"] <= sum(not block.any() for block in blocks)
    assert entry["blocks"]["all"] <= sum(bool(block.all()) for block in blocks)
    assert entry["blocks"]["none"] + entry["blocks"]["some"] + entry["blocks"]["all"] == 9


def test_an_expression_is_drawn_and_counted() -> None:
    shown = text("causal() & window(before=1)", "--queries", "4")
    assert shown.startswith("causal() & window(before=1)\n\n██ · · ·\n████ · ·\n ·████ ·\n · ·████\n\n")
    assert "4 queries (rows) x 4 keys (columns)" in shown
    assert "7 of 16 pairs, 43.8%" in shown
    assert "1: 0 empty, 1 partly visible, 0 full; 100% have to be computed" in shown


def test_fewer_queries_than_keys_are_the_last_rows() -> None:
    assert " · ·" not in text("causal()", "--queries", "2", "--keys", "5").split("\n\n")[1].splitlines()[1]
    assert numbers("causal()", "--queries", "2", "--keys", "5")["visible"] == 9


def test_sequences_are_told_apart() -> None:
    entry = numbers("padding([3, 5])", "--queries", "6")
    assert (entry["sequences"], entry["visible"], entry["pairs"]) == (2, 6 * 3 + 6 * 5, 72)
    shown = text("padding([3, 5])", "--queries", "6")
    assert "(the first of 2 sequences)" in shown
    assert "in each of 2 sequences" in shown


def test_documents_bring_their_own_length() -> None:
    assert parse_mask("causal() & documents([0, 0, 1])").length() == 3
    assert numbers("causal() & documents([0, 0, 1])")["queries"] == 3
    assert numbers("causal()")["queries"] == 16


def test_a_wide_drawing_takes_one_column_a_cell() -> None:
    wide = drawing(parse_mask("causal()"), 50, 50).plain.splitlines()
    assert {len(line) for line in wide} == {50}
    assert wide[0] == "█" + "·" * 49
    assert {len(line) for line in drawing(parse_mask("causal()"), 40, 40).plain.splitlines()} == {80}


def test_large_masks_are_counted_without_the_matrix() -> None:
    shown = text("causal() & window(before=300)", "--queries", "1000000")
    assert "not drawn, only counted: 1,000,000 positions are more than 4,096" in shown
    assert "300,954,850 of 1,000,000,000,000 pairs, 0.0301%" in shown
    assert numbers("causal()", "--queries", str(LARGEST_DRAWN + 1))["visible"] == 4097 * 4098 // 2


def test_a_drawing_of_many_positions_is_pooled() -> None:
    lines = text("causal()", "--queries", "1000").split("\n\n")[1].splitlines()
    assert len(lines) <= 64
    assert max(map(len, lines)) <= 80


def test_blocks_of_long_masks_are_large_so_that_their_table_stays_small() -> None:
    blocks = numbers("causal()", "--queries", "1000000")["blocks"]
    assert blocks["size"] == 1024
    assert blocks["none"] > 0
    sizes = [numbers(f"padding({[7] * n})", "--queries", "65536")["blocks"]["size"] for n in (1, 5)]
    assert sizes == [64, 128]  # five tables of 64 would have 5 M blocks


@pytest.mark.parametrize("words", [[], ["causal() & window(before=3)"]])
def test_a_picture_is_saved(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "picture.png"
    result = run.invoke(app, ["masks", *words, "--picture", str(path)])
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert result.stderr.startswith(f"wrote {path}, ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["causal()", "--picture", "no/such/folder/picture.png"], "there is no folder"),
        (["causal()", "--picture", "picture.words"], "has no known picture format"),
        (["causal()", "--queries", "5000", "--picture", "picture.png"], "at most 4096 positions, not 5000"),
        (["--keys", "4"], "--keys goes with an expression"),
        (["documents([0, 1])", "--queries", "5"], "give an id for every position"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run.invoke(app, ["masks", *words])
    assert result.exit_code == 2
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
