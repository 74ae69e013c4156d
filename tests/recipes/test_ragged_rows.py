"""Ragged rows compared with lists."""

import numpy
import pytest

from regard.recipes.ragged_rows import RaggedRows

LISTS = [[5, 6], [], [7], [8, 9, 10], [], [11]]


def as_lists(rows: RaggedRows) -> list[list[int]]:
    return [
        rows.values[start : start + length].tolist() for start, length in zip(rows.starts, rows.lengths, strict=True)
    ]


@pytest.mark.parametrize("numbers", [[0], [3, 3, 1], [5, 4, 0, 2], []])
def test_rows_are_selected_in_the_order_of_their_numbers(numbers: list[int]) -> None:
    chosen = RaggedRows.from_lists(LISTS).select(numpy.array(numbers, numpy.int64))
    assert as_lists(chosen) == [LISTS[number] for number in numbers]


def test_consecutive_rows_are_joined() -> None:
    joined = RaggedRows.from_lists(LISTS).join(numpy.array([2, 0, 3, 1]))
    assert as_lists(joined) == [[5, 6], [], [7, 8, 9, 10], [11]]


@pytest.mark.parametrize("first", [0, 1])
def test_rows_are_padded_from_a_column_on(first: int) -> None:
    padded = RaggedRows.from_lists(LISTS).pad(5, -1, first=first)
    assert padded.tolist() == [([-1] * first + row + [-1] * 5)[:5] for row in LISTS]
