"""Masks of the page, compared with the masks of regard cell by cell."""

import pytest
import torch

from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, examples
from tests.explorer.node import needs_node, run_node

pytestmark = needs_node

# random_links draws with torch's integer arithmetic and stays with Python
EXPRESSIONS = [text for name in FORMS if name != "random_links" for text in examples(name, 13)]
COMBINED = [
    "causal() & window(before=3) | global_tokens(1)", "~causal()", "~(causal() | prefix(2)) & dilated(3)",
    "causal() & ~window()", "blocks(4) | ~chunks(3, before=1)", "(full())",
]  # fmt: skip


def test_every_form_is_equal_cell_by_cell() -> None:
    cases = [(text, queries, 13) for text in EXPRESSIONS + COMBINED for queries in (13, 5)]
    for (text, queries, keys), found in zip(cases, run_node("mask_golden.mjs", cases), strict=True):
        wanted = parse_mask(text).dense(queries, keys)
        wanted = wanted.reshape(-1, queries, keys)[0]  # the first sequence
        assert "error" not in found, (text, found)
        assert torch.equal(torch.tensor(found["dense"]).bool(), wanted), text
        assert found["count"] == int(wanted.sum()), text
        assert sum(map(sum, found["blocks"])) == int(wanted.sum()), text
        tiles = [tile for rows in wanted.split(4) for tile in rows.split(4, 1)]
        counts = {"full": sum(bool(tile.all()) for tile in tiles), "empty": sum(not tile.any() for tile in tiles)}
        assert {"full": found["table"]["full"], "empty": found["table"]["empty"]} == counts, text
        assert sum(found["table"][kind] for kind in ("full", "partial", "empty")) == len(tiles)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl()", "there is no mask causl; did you mean causal?"),
        ("window(before=1, before=2)", "window is given before twice"),
        ("causal() and full()", "masks combine with & | ~"),
        ("causal", "causal is a function that makes a mask; write causal(...)"),
        ("window(before=-1)", "window(before) needs a whole number of neighbours, at least 0, or None, not -1"),
        ("blocks()", "blocks needs size: blocks(size=...)"),
        ("causal() +", '"+" is not part of a mask expression'),
        ("", "write a mask, for instance causal() & window(before=3)"),
        ("(" * 5000, "the expression nests deeper than 100 levels"),
        ("causal(", '")" is missing at the end'),
        ("window(before=3", '")" is missing at the end'),
        ("(causal()", '")" is missing at the end'),
        ("global_tokens([0", '"]" is missing at the end'),
        ("causal(3)", "causal takes no settings"),
        ("constructor()", "there is no mask constructor"),
    ],
)
def test_a_wrong_expression_says_what_is_wrong(text: str, message: str) -> None:
    (found,) = run_node("mask_golden.mjs", [[text, 5, 5]])
    assert found["error"] == message
