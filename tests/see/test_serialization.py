"""What was seen comes back from disk as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from regard.base.errors import CheckpointError
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.masks import (
    blocks,
    causal,
    chunks,
    dilated,
    documents,
    full,
    global_tokens,
    padding,
    prefix,
    random_links,
    window,
)
from regard.core.masks.algebra import Mask
from regard.core.scores import alibi, shaw, sink, softcap, t5_buckets
from regard.see import serialization
from regard.see.record import Seen
from regard.see.watch import watch
from tests.see.model_cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")


def same(first: Seen, second: Seen) -> None:
    assert list(first) == list(second)
    assert repr(first) == repr(second)
    for a, b in zip(first.values(), second.values(), strict=True):
        for name in ("entropy", "lse", "largest", "where", "distance", "received"):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None), name
            assert one is None or torch.equal(one, other), name
        assert torch.equal(a.q, b.q)
        assert torch.equal(a.weights(), b.weights())
        assert (a.v is None) == (b.v is None)
        assert (a.gradient is None) == (b.gradient is None)
        assert (a.beta, a.dropout, a.heads, a.rows_kept) == (b.beta, b.dropout, b.heads, b.rows_kept)


@pytest.mark.parametrize("name", ["gpt2 eager", "t5 sdpa", "torch encoder", "by hand"])
def test_records_of_models_round_trip(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    with watch(case.model) as seen:
        case.run(case.model).square().sum().backward()
    seen.save(tmp_path / "seen.safetensors")
    same(seen, Seen.load(tmp_path / "seen.safetensors"))
    assert [file.name for file in tmp_path.iterdir()] == ["seen.safetensors"]


MASKS: dict[str, Mask] = {
    "rules": causal() & (window(before=3) | global_tokens(2)) & ~dilated(3),
    "more rules": blocks(4) | chunks(3, before=None) | prefix(2) | random_links(2, seed=5) | full() & causal(),
    "data": padding([9, 6]) & documents([0, 0, 0, 1, 1, 1, 2, 2, 2]) | (torch.rand(2, 6, 9, 9) > 0.5),
    "a function": Mask.of("near", lambda i, j: (i - j).abs() < 3),
}
TERMS: dict[str, Any] = {
    "all": [
        alibi(heads=6), shaw(torch.randn(5, 8)), softcap(3.0), t5_buckets(torch.randn(8, 6)), torch.randn(6, 9, 9),
        sink(torch.randn(6)),
    ],
    "none": None,
}  # fmt: skip


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_terms_round_trip(mask: str, terms: str, tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    with watch() as seen:
        attend(q, k, v, mask=MASKS[mask], scores=TERMS[terms])
    seen.save(tmp_path / "seen.safetensors")
    again = Seen.load(tmp_path / "seen.safetensors")
    assert torch.equal(seen["attention"].weights(), again["attention"].weights())
    if mask != "a function":
        assert repr(again) == repr(seen)


def test_selections_and_positions_round_trip(tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 6, 7, 8), torch.randn(2, 6, 7, 5)
    with watch(heads=[4, 1], rows=[2, 0], values=False) as seen:
        attend(q, k, v, mask=causal(), positions=Positions(4, torch.tensor([6, 5, 4, 3, 2, 1, 0])))
    seen.left_out["for a reason"] = 3
    seen.save(tmp_path / "seen.safetensors")
    again = Seen.load(tmp_path / "seen.safetensors")
    same(seen, again)
    assert again.left_out == {"for a reason": 3}


def test_a_mask_function_that_is_too_large_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(2, 6, 9, 8)
    with watch() as seen:
        attend(q, q, q, mask=MASKS["a function"])
    monkeypatch.setattr(serialization, "LARGEST_MASK", 80)
    with pytest.raises(CheckpointError, match=r"is a function, and its matrix of 81 entries is too large to save"):
        seen.save(tmp_path / "seen.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_mask_mod_is_saved_as_a_matrix(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(2, 3, 13, 8)
    mask = create_block_mask(lambda b, h, i, j: i - j >= h, None, 3, 13, 13, device="cpu")
    with watch() as seen:
        flex_attention(q, q, q, None, mask)
    seen.save(tmp_path / "seen.safetensors")
    again = Seen.load(tmp_path / "seen.safetensors")
    assert torch.equal(seen["attention"].weights(), again["attention"].weights())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_other_records_are_saved_if_one_cannot_be(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 2, 3, 13, 8)
    with watch() as seen:
        flex_attention(q, k, v, lambda s, b, h, i, j: s * 2)
    with pytest.raises(CheckpointError, match=r"score_mod of attention is a function and cannot be saved"):
        seen.save(tmp_path / "seen.safetensors")
    assert list(tmp_path.iterdir()) == []
    with watch() as seen:
        flex_attention(q, k, v, lambda s, b, h, i, j: s * 2)
        attend(q, q, q)
    for _ in range(2):
        seen.save(tmp_path / "seen.safetensors")
    again = Seen.load(tmp_path / "seen.safetensors")
    assert list(again) == ["attention:2"]
    assert torch.equal(again["attention:2"].weights(), seen["attention:2"].weights())
    assert again.left_out == seen.left_out
    ((reason, count),) = again.left_out.items()
    assert reason.startswith("not saved: the score_mod of attention is a function")
    assert count == 1


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 6, 9, 8)
    with watch() as seen:
        attend(q, q, q)
    seen.save(tmp_path / "seen.safetensors")
    monkeypatch.setattr(serialization, "save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        seen.save(tmp_path / "seen.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["seen.safetensors"]
    same(seen, Seen.load(tmp_path / "seen.safetensors"))


def test_errors_of_other_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: there is no folder .*none; create it first"):
        Seen().save(tmp_path / "none" / "seen.safetensors")
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match=r"there is no file .*nothing; seen\.save\(path\) writes one"):
        Seen.load(tmp_path / "nothing")
    (tmp_path / "broken").write_bytes(b"\x05")
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        Seen.load(tmp_path / "broken")
    save_file(nn.Linear(3, 5).state_dict(), tmp_path / "weights")
    with pytest.raises(CheckpointError, match="has no attention records: its format is None"):
        Seen.load(tmp_path / "weights")
