"""The letters of axes, and the format of sizes and shapes."""

import torch

from regard.base.axes import LEGEND, format_axis, format_shape


def test_every_letter_has_one_meaning():
    assert all(len(letter) == 1 and letter.islower() for letter in LEGEND)
    assert len(set(LEGEND.values())) == len(LEGEND)


def test_the_letters_are_those_of_the_notation():
    assert "".join(LEGEND) == "bhgijncedfw"


def test_the_notation_page_has_the_same_letters(root):
    page = (root / "docs" / "notation.md").read_text()
    assert [meaning for letter, meaning in LEGEND.items() if letter not in page or meaning not in page] == []


def test_a_size_is_formatted_with_its_meaning():
    assert format_axis("c", 8) == "c=8 (width per head of q and k)"
    assert format_axis("b", 0) == "b=0 (batch)"


def test_a_shape_is_formatted_with_its_letters():
    assert format_shape("k", (2, 4, 9, 8), "b g j c") == "k is (2, 4, 9, 8) read as (b g j c)"
    assert format_shape("x", torch.zeros(3, 5).shape, "n  d") == "x is (3, 5) read as (n d)"
    assert format_shape("lengths", [7], "b") == "lengths is (7,) read as (b)"
