"""Masks as pictures: exact cells while they are few, shades of blocks beyond."""

import matplotlib as mpl
import pytest
import torch

from regard import Mask, Positions, causal, documents, full, padding, prefix, window
from regard.core.masks import as_mask
from regard.core.masks.drawing import _cell, draw

mpl.use("Agg")
from matplotlib import pyplot as plt


def cells(picture: str) -> list[list[str]]:
    """Every cell is two characters wide, so that it looks square."""
    rows = picture.split("\n")
    assert all(len(row) % 2 == 0 for row in rows)
    return [[row[at : at + 2] for at in range(0, len(row), 2)] for row in rows]


def test_a_small_mask_is_drawn_pair_by_pair():
    assert causal().draw(3) == "██ · ·\n████ ·\n██████"
    assert window(before=1).draw(2, 5) == " · ·████ ·\n · · ·████"


def test_sixteen_positions_are_drawn_if_nothing_is_said():
    assert [len(row) for row in cells(causal().draw())] == [16] * 16


def test_places_move_what_is_drawn():
    assert causal().draw(2, 3, positions=Positions(4, 5)) == " · · ·\n██ · ·"
    assert causal().draw(1, 3, positions=Positions(4, torch.tensor([4, 9, 0]))) == "██ ·██"


def test_the_first_sequence_stands_for_all():
    assert padding([1, 3]).draw(2, 3) == "██ · ·\n██ · ·"
    assert documents([[0, 1], [0, 0]]).draw(2) == "██ ·\n ·██"


@pytest.mark.parametrize("leading", [(), (1,), (3,), (1, 1), (2, 3)])
def test_the_first_head_stands_for_all(leading):
    data = torch.ones(*leading, 1, 2, dtype=torch.bool)
    data.reshape(-1, 2)[0, 1] = False
    assert as_mask(data).draw(1, 2) == "██ ·"


def test_sixty_four_positions_are_drawn_exactly_and_one_more_is_pooled():
    exact, pooled = cells(causal().draw(64)), cells(causal().draw(65))
    assert len(exact) == len(exact[0]) == 64
    assert {cell for row in exact for cell in row} == {"██", " ·"}
    assert len(pooled) == len(pooled[0]) == 33
    assert {cell for row in pooled for cell in row} == {"██", "  ", "▓▓"}


def test_the_longer_side_decides_how_much_a_cell_holds():
    wide = cells(causal().draw(5, 130))
    assert (len(wide), len(wide[0])) == (2, 44)
    tall = cells(prefix(3).draw(130, 5, positions=Positions(0)))
    assert (len(tall), len(tall[0])) == (44, 2)
    assert tall[0] == ["██", "  "]


def test_the_last_cells_are_shares_of_what_they_hold():
    """130 positions make 43 cells of three and one of one: a full one is solid there too."""
    picture = cells(full().draw(130))
    assert {cell for row in picture for cell in row} == {"██"}
    last = Mask.of("last key", lambda i, j: j == 129)
    assert [row[-1] for row in cells(last.draw(130))] == ["██"] * 44
    assert {cell for row in cells(last.draw(130)) for cell in row[:-1]} == {"  "}


@pytest.mark.parametrize(
    ("share", "shade"),
    [(0, " "), (1e-6, "░"), (0.33, "░"), (0.34, "▒"), (0.66, "▒"), (0.67, "▓"), (1 - 1e-6, "▓"), (1, "█")],
)
def test_only_an_empty_cell_is_blank_and_only_a_full_one_solid(share, shade):
    assert _cell(share, exact=False) == shade * 2


def test_shades_follow_the_share():
    """Cells of 4 x 4 pairs, in which 1, 4, 8, 15 and 16 are visible."""
    shown = [1, 4, 8, 15, 16]
    mask = Mask.of("some", lambda i, j: (i % 4) * 4 + j % 4 < torch.tensor([*shown, 0])[(j // 4).clamp(max=5)])
    assert cells(mask.draw(256))[0][:6] == ["░░", "░░", "▒▒", "▓▓", "██", "  "]


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (0, 100)])
def test_no_queries_are_no_rows(queries, keys):
    assert causal().draw(queries, keys) == ""


@pytest.mark.parametrize("queries", [3, 100])
def test_no_keys_are_empty_rows(queries):
    assert set(causal().draw(queries, 0)) <= {"\n"}


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def test_a_mask_is_drawn_on_an_axis(ax):
    mask = causal() & window(before=2)
    text = mask.draw(5, 7, ax=ax)
    assert text == mask.draw(5, 7)
    assert ax.get_title() == "causal() & window(before=2)"
    assert ax.get_xlabel() == "key position j"
    assert ax.get_ylabel() == "query position i"
    (image,) = ax.get_images()
    assert torch.equal(torch.from_numpy(image.get_array().data).bool(), mask.dense(5, 7))


def test_the_axis_gets_every_pair_where_the_text_is_pooled(ax):
    draw(causal(), 130, ax=ax)
    assert ax.get_images()[0].get_array().shape == (130, 130)


def test_one_sequence_is_drawn_on_an_axis(ax):
    padding([1, 3]).draw(2, 3, ax=ax)
    assert ax.get_images()[0].get_array().tolist() == [[True, False, False]] * 2


def test_the_axis_counts_in_positions(ax):
    """Two queries from position 4 on, three keys from position 2 on."""
    causal().draw(2, 3, positions=Positions(4, 2), ax=ax)
    left, right, bottom, top = ax.get_images()[0].get_extent()
    assert (left, right) == (1.5, 4.5)
    assert (bottom, top) == (5.5, 3.5)
