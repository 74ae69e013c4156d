"""`regard.show`, and what objects show of themselves in a notebook."""

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import Mask, Positions, causal, documents, key_padding, padding, show, window
from regard.base.errors import ConfigError, ShapeError
from regard.integrations.huggingface import ModelMask, build_mask
from regard.integrations.notebook import MaskComparison, MaskPicture

N = 7
TRIL = torch.ones(N, N).tril().bool()


def compare(mask: Any, against: Any, **sizes: int) -> MaskComparison:
    found = show(mask, against, **sizes)
    assert isinstance(found, MaskComparison)
    return found


EQUAL: dict[str, Any] = {
    "boolean": TRIL,
    "additive": torch.zeros(N, N).masked_fill(~TRIL, -torch.inf),
    "additive with the lowest number": torch.zeros(1, 1, N, N).masked_fill(~TRIL, torch.finfo(torch.float32).min),
    "additive with -1e9": torch.zeros(N, N).masked_fill(~TRIL, -1e9),
    "mask_mod": lambda b, h, q, kv: q >= kv,
    "BlockMask": create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, N, N, device="cpu"),
    "Hugging Face": build_mask(1, N, N),
    "another rule": window(before=None, after=0),
}


@pytest.mark.parametrize("name", EQUAL)
def test_masks_of_every_kind_are_compared_on_either_side(name: str) -> None:
    for pair in ((causal(), EQUAL[name]), (EQUAL[name], causal())):
        found = compare(*pair, queries=N)
        assert found.equal
        assert found.first_difference is None
        assert found.summary == "equal: 28 of 49 pairs visible (57.1%)"


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "inverted": (causal(), ~TRIL, "were inverted"),
    "transposed": (causal(), TRIL.T, "were transposed"),
    "top-left": (causal(), torch.ones(4, N).tril().bool(), "(top-left) instead of to the last (bottom-right)"),
    "window of one more": (causal() & window(before=2), TRIL & ~TRIL.tril(-4), "were one larger"),
    "window of one less": (causal() & window(before=3), TRIL & ~TRIL.tril(-3), "were one smaller"),
    "window of one more on one side": (
        window(before=2, after=1),
        window(before=2, after=2),
        "were one larger after the",
    ),
    "own key": (causal(), TRIL.tril(-1), "hid the query's own key"),
    "next key": (lambda b, h, q, kv: q >= kv, torch.ones(N, N).tril(1).bool(), "showed the key after"),
    "multiplied": (causal(), TRIL.float(), "factors (1 visible, 0 hidden) instead of numbers to add"),
    "flags": (causal(), (~TRIL).float(), "flags (1 hidden, 0 visible) instead of numbers to add"),
    "integers": (causal(), TRIL.long(), "factors (1 visible, 0 hidden) instead of numbers for each key"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_convention_that_would_make_them_equal_is_named(name: str) -> None:
    mask, against, words = DIFFERENT[name]
    for pair in ((mask, against), (against, mask)):
        found = compare(*pair)
        assert not found.equal
        assert any(words in each for each in found.conventions), found.summary
        assert "they would be equal if" in str(found)


def test_the_first_differing_cell_is_named_with_its_sequence() -> None:
    real = torch.ones(2, 1, N, N, dtype=torch.bool)
    real[1, 0, 3, 5] = False
    found = compare(real, regard.full())
    assert found.first_difference == (1, 0, 3, 5)
    assert found.summary.splitlines() == [
        "1 cells differ; the first is query 3, key 5 of sequence 1, head 0: "
        "visible in full(), hidden in boolean (2, 1, 7, 7)",
        "no usual convention explains the difference",
    ]
    assert " +" in str(found)


def test_the_attention_mask_of_a_tokenizer_is_a_row_of_real_keys() -> None:
    row = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert compare(row, key_padding(row)).equal
    assert not compare(row, padding([3, 4])).equal


def test_one_mask_is_drawn() -> None:
    found = show(causal(), queries=3)
    assert isinstance(found, MaskPicture)
    assert str(found) == "causal(): 6 of 9 pairs visible (66.7%)\n██ · ·\n████ ·\n██████"


def test_what_is_no_mask_raises_what_was_expected() -> None:
    with pytest.raises(ConfigError, match="show takes a mask, a tensor, a mask_mod or a BlockMask, not int"):
        show(5)
    with pytest.raises(ShapeError, match="compared for 7 queries and 7 keys"):
        show(TRIL, torch.ones(5, 5).bool())
    with pytest.raises(ShapeError, match="the attention_mask of a tokenizer"):
        show(torch.ones(2, 3, 3).long())


class Attention(nn.Module):
    """One attention call inside a module."""

    def forward(self, x: Tensor) -> Tensor:
        return regard.attend(x, x, x, mask=causal())


def displayed() -> dict[str, Any]:
    from regard.lab.claim import claims
    from regard.work.files import parse_matrix
    from regard.work.problem import build_problem
    from regard.work.solution import solve

    model, x = nn.Sequential(Attention()), torch.randn(1, 2, 5, 8)
    with regard.watch(model) as seen:
        model(x)
    matrices = {name: (parse_matrix("1;2", name),) for name in "qkv"}
    return {
        "mask": causal() & window(before=3),
        "mask with data": documents([0, 0, 1]) | TRIL[:3, :3],
        "mask_mod": Mask.from_mask_mod(lambda b, h, q, kv: (q + kv) % 2 == 0),
        "explanation": regard.explain(x, x, x),
        "explanation of a model": regard.explain(model, x),
        "seen": seen,
        "record": seen["0"],
        "table of heads": seen.table(),
        "report of check": regard.Report("mine", "function", (), ()),
        "solution": solve(build_problem("example", matrices)),
        "claim": claims()["beta"],
        "comparison": show(causal(), ~TRIL),
        "picture": show(causal()),
    }


def test_objects_show_themselves_in_a_notebook_and_print_as_text() -> None:
    for name, thing in displayed().items():
        page = thing._repr_html_()
        ElementTree.fromstring(f"<div>{page}</div>")  # well-formed
        assert "<svg" in page or "<pre>" in page or "srcdoc=" in page, name
        assert "<script" not in page, name
        assert str(thing), name
    assert "causal() &amp; window(before=3)" in displayed()["mask"]._repr_html_()


def test_a_mask_mod_with_a_table_of_another_length_says_so() -> None:
    table = torch.ones(9, 9).bool()
    with pytest.raises(ShapeError, match=r"for 12 queries and 12 keys .* pass queries= and keys="):
        show(lambda b, h, q, kv: table[q, kv])
    assert show(lambda b, h, q, kv: table[q, kv], against=table, keys=9, queries=9).equal  # type: ignore[union-attr]


BAND = causal() & window(before=3)
WRONG = {
    "they would be equal if the window of {0} were one smaller": causal() & window(before=2),
    "they would be equal if the window of {0} were one larger": causal() & window(before=4),
    "they would be equal if {0} hid the query's own key": ~window(before=0, after=None) & window(before=3, after=None),
    "they would be equal if {1} were inverted: True hides in one of them": ~BAND,
}


def as_every_kind(mask: Mask, n: int) -> dict[str, Any]:
    """A mask as what each library would pass, without a rule of ours."""
    visible = mask.dense(n, n)
    return {
        "boolean": visible,
        "additive": torch.zeros(2, 1, n, n).masked_fill(~visible, torch.finfo(torch.float32).min),
        "mask_mod": lambda b, h, q, kv: visible[q, kv],
        "BlockMask": create_block_mask(
            lambda b, h, q, kv: visible[q, kv], None, None, n, n, device="cpu", BLOCK_SIZE=4
        ),
        "Hugging Face": ModelMask(mask, Positions(0, 0), 1, n, n, torch.device("cpu")),
    }


@pytest.mark.parametrize("words", WRONG)
def test_the_convention_is_named_for_every_pair_of_kinds(words: str) -> None:
    n = 9
    for kind, first in as_every_kind(BAND, n).items():
        for other_kind, second in as_every_kind(WRONG[words], n).items():
            found = show(first, against=second, queries=n, keys=n)
            assert isinstance(found, MaskComparison)
            line = found.summary.splitlines()[1]
            assert line == words.format(*found.names), (kind, other_kind, found.summary)


def test_top_left_and_padded_bands_of_tensors_are_named() -> None:
    first, second = torch.ones(5, 9).tril(4).bool(), torch.ones(5, 9).tril().bool()
    assert "top-left" in show(first, against=second).summary  # type: ignore[union-attr]
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    padded = [(BAND & key_padding(real)).dense(9, 9), (causal() & window(before=2) & key_padding(real)).dense(9, 9)]
    assert "one smaller" in show(padded[0], against=padded[1]).summary  # type: ignore[union-attr]
