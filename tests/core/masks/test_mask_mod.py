"""Masks from and to FlexAttention's mask_mod and BlockMask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from regard import Mask, Positions, attend, causal, documents, explain, padding, window
from regard.base.errors import ConfigError, ShapeError

N = 11
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3])
REAL = torch.tensor([[True] * 8 + [False] * 3, [False] * 2 + [True] * 9])
TABLE = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.5
NUMBERS = IDS * 0.5
READABLE: dict[str, Callable[..., Any]] = {
    "causal()": lambda b, h, q, kv: q >= kv,
    "causal() ": lambda b, h, q, kv: kv <= q,
    "full()": lambda b, h, q, kv: q >= 0,
    "~window(before=0, after=None)": lambda b, h, q, kv: kv < q,
    "causal() & window(before=3, after=None)": lambda b, h, q, kv: (q >= kv) & (q - kv <= 3),
    "causal() & window(before=3, after=None) ": lambda b, h, q, kv: (kv <= q) & (kv > q - 4),
    "window(before=2, after=2)": lambda b, h, q, kv: abs(q - kv) < 3,
    "window(before=2, after=2) ": lambda b, h, q, kv: (q - kv).abs() <= 2,
    "window(before=2, after=2)  ": lambda b, h, q, kv: torch.abs(kv - q) <= 2,
    "window(before=None, after=2)": lambda b, h, q, kv: kv + 1 <= q + 3,
    "~window(before=None, after=1)": lambda b, h, q, kv: kv - q >= 2,
    "window(before=0)": lambda b, h, q, kv: q == kv,
    "causal() | prefix(3)": lambda b, h, q, kv: (kv <= q) | (kv < 3),
    "~prefix(2)": lambda b, h, q, kv: kv >= 2,
    "dilated(3)": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "blocks(3)": lambda b, h, q, kv: q // 3 == kv // 3,
    "chunks(3, before=None, after=0)": lambda b, h, q, kv: kv // 3 <= q // 3,
    "documents([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3])": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "~causal()": lambda b, h, q, kv: ~(q >= kv),
    "~causal() ": lambda b, h, q, kv: kv > q,
    "~full()": lambda b, h, q, kv: q < 0,
    "causal()  ": lambda b, h, q, kv: q.new_ones((), dtype=torch.bool) & (q >= kv),
    "causal()   ": lambda b, h, q, kv: q.new_zeros((), dtype=torch.bool) | (q - kv + 1 > 0),
    "window(before=0, after=None) & causal()": lambda b, h, q, kv: q - kv == 0,
    "chunks(3, before=0, after=None)": lambda b, h, q, kv: kv // 3 >= q // 3,
}
UNREADABLE: dict[str, Callable[..., Any]] = {
    "a table of pairs": lambda b, h, q, kv: TABLE[q, kv],
    "queries alone": lambda b, h, q, kv: (q < 2) | (kv == q),
    "where": lambda b, h, q, kv: torch.where(q % 2 == 0, q >= kv, q <= kv),
    "shifted chunks": lambda b, h, q, kv: (q + 1) // 3 == kv // 3,
    "chunks of two sizes": lambda b, h, q, kv: q // 3 == kv // 2,
    "one key": lambda b, h, q, kv: kv == 2,
    "two queries": lambda b, h, q, kv: q == q,
    "a shifted distance without its sign": lambda b, h, q, kv: abs(q - kv - 1) < 3,
    "the remainder of a shifted distance": lambda b, h, q, kv: (q - kv + 1) % 3 == 0,
    "another remainder": lambda b, h, q, kv: (q - kv) % 3 == 1,
    "a function of a distance": lambda b, h, q, kv: torch.square(q - kv) < 5,
    "a function of a position": lambda b, h, q, kv: torch.sin(q) > torch.sin(kv),
    "a floating-point number": lambda b, h, q, kv: kv - q < 1.5,
    "a lookup at a shifted position": lambda b, h, q, kv: IDS[(kv + 1) % N] == IDS[q],
    "one padding mask for all sequences": lambda b, h, q, kv: REAL[0][kv],
    "two tables": lambda b, h, q, kv: IDS[q] == REAL[0].long()[kv],
    "a table of floating-point numbers": lambda b, h, q, kv: NUMBERS[q] == NUMBERS[kv],
}


def dense(mask: Mask) -> Tensor:
    return mask.dense(N).reshape(-1, N, N)[0]


@pytest.mark.parametrize("name", READABLE)
def test_a_usual_mask_mod_is_read_as_the_mask_it_means(name: str) -> None:
    function = READABLE[name]
    mask = Mask.from_mask_mod(function)
    assert repr(mask) == name.strip()
    assert torch.equal(dense(mask), create_mask(function, 1, 1, N, N, device="cpu")[0, 0])


@pytest.mark.parametrize("name", UNREADABLE)
def test_any_other_mask_mod_is_evaluated_on_every_pair(name: str) -> None:
    function = UNREADABLE[name]
    mask = Mask.from_mask_mod(function)
    assert repr(mask).startswith("Mask.from_mask_mod(")
    true = create_mask(function, 1, 1, N, N, device="cpu")[0, 0]
    assert torch.equal(dense(mask), true)
    q, k, v = torch.randn(3, 2, 3, N, 8)
    for kernel in ("sdpa", "eager", "blocked"):
        torch.testing.assert_close(attend(q, k, v, mask=mask, kernel=kernel), attend(q, k, v, mask=true))


def test_a_mask_mod_of_padding_is_read_for_each_sequence() -> None:
    mask = Mask.from_mask_mod(lambda b, h, q, kv: REAL[b, kv] & (q >= kv))
    assert repr(mask) == "key_padding(<2 x 11>) & causal()"
    assert torch.equal(mask.dense(N), (REAL[:, None, None] & causal().dense(N)))


def test_a_mask_mod_that_differs_between_heads_and_sequences() -> None:
    function = lambda b, h, q, kv: (q >= kv) & (kv != h) & (q != b)  # noqa: E731 (a name for an argument)
    mask, true = Mask.from_mask_mod(function, batch=2, heads=3), create_mask(function, 2, 3, N, N, device="cpu")
    assert torch.equal(mask.dense(N), true)
    assert mask.count(N) == true.sum()
    q, k, v = torch.randn(3, 2, 3, N, 8)
    torch.testing.assert_close(attend(q, k, v, mask=mask), attend(q, k, v, mask=true))


@pytest.mark.parametrize("name", [*READABLE, *UNREADABLE])
def test_a_block_mask_becomes_a_mask_and_back(name: str) -> None:
    function = (READABLE | UNREADABLE)[name]
    true = create_mask(function, 1, 1, N, N, device="cpu")[0, 0]
    assert torch.equal(dense(Mask.from_block_mask(create_block_mask(function, 1, 1, N, N, "cpu", 4))), true)
    assert torch.equal(dense(Mask.from_block_mask(Mask.from_mask_mod(function).to_block_mask(N, size=4))), true)


def test_the_blocks_are_those_of_torch() -> None:
    mask = causal() & window(before=5) & documents(IDS)
    ours = mask.to_block_mask(N, size=4)
    theirs = create_block_mask(mask.mask_mod, None, None, N, N, "cpu", 4)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)


def test_blocks_that_a_block_mask_leaves_out_stay_hidden() -> None:
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 8, 8, "cpu", 4)
    blocks.kv_num_blocks[0, 0, 0] = 0
    expected = torch.ones(8, 8).bool().tril()
    expected[:4, :4] = False
    assert torch.equal(Mask.from_block_mask(blocks).dense(8).reshape(8, 8), expected)


def test_positions_and_batches_reach_the_block_mask() -> None:
    mask = causal() & padding([9, 4])
    blocks = mask.to_block_mask(3, 9, positions=Positions(5), size=4)
    assert blocks.shape == (2, 1, 3, 9)
    assert torch.equal(Mask.from_block_mask(blocks).dense(3, 9), mask.dense(3, 9, positions=Positions(5)))


TRUTH_VALUES: dict[str, Callable[..., Any]] = {
    "and": lambda b, h, q, kv: q >= kv and q - kv <= 3,
    "or": lambda b, h, q, kv: kv < 3 or q >= kv,
    "not": lambda b, h, q, kv: not q < kv,
    "two comparisons": lambda b, h, q, kv: 0 <= q - kv <= 3,
    "if": lambda b, h, q, kv: q >= kv if q - kv else kv < 3,
    "a remainder": lambda b, h, q, kv: (q - kv) % 3 and q >= kv,
    "a chunk": lambda b, h, q, kv: q // 3 and q >= kv,
    "an index": lambda b, h, q, kv: q and q >= kv,
}


@pytest.mark.parametrize("name", TRUTH_VALUES)
def test_truth_values_in_a_mask_mod_raise_what_to_use_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=r"use & for and, \| for or"):
        Mask.from_mask_mod(TRUTH_VALUES[name])


def test_wrong_arguments_raise_what_was_expected() -> None:
    with pytest.raises(ConfigError, match="a function of batch, head, query and key"):
        Mask.from_mask_mod(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not function; a function goes to Mask\.from_mask_mod"):
        Mask.from_block_mask(READABLE["causal()"])  # type: ignore[arg-type]
    blocks = causal().to_block_mask(9)
    with pytest.raises(ShapeError, match=r"made for \(i, j\) = \(9, 9\), but this call has \(5, 5\)"):
        Mask.from_block_mask(blocks).dense(5)
    with pytest.raises(ConfigError, match="must return booleans"):
        Mask.from_mask_mod(lambda b, h, q, kv: (q - kv) * 1.5).dense(5)
    with pytest.raises(ConfigError, match="differs between heads"):
        Mask.from_mask_mod(lambda b, h, q, kv: kv != h, heads=3).to_block_mask(9)


def test_a_kernel_that_refuses_names_the_part_without_blocks():
    q = torch.randn(1, 2, N, 4)
    by_head = Mask.from_mask_mod(lambda b, h, i, j: (j + h) % 2 == 0, heads=2)
    for mask, part in ((Mask.from_block_mask(causal().to_block_mask(N)), "a BlockMask"), (by_head, "a mask_mod")):
        answers = {answer.kernel: answer.reasons for answer in explain(q, q, q, mask=mask).answers}
        assert any(reason.startswith(part) for reason in answers["blocked"]), answers["blocked"]
