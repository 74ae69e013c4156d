"""Functions of Hugging Face's registry are traced inside, or recorded by their arguments."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.see.row_statistics import statistics
from regard.see.watch import watch
from tests.see.model_cases import CASES, Case, ids, real
from tests.see.watch_helpers import LOW, assert_statistics_match, qkv, softmax_weights

pytestmark = [
    pytest.mark.usefixtures("check_hooks_removed"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor"),
]


def test_a_registered_function_is_recorded_with_its_mask() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    calls = []

    def out_of_sight(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any) -> Any:
        calls.append(mask)
        weights = softmax_weights(q, k, rest["scaling"], None if mask is None else torch.where(mask, 0.0, -math.inf))
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (weights.nan_to_num(0.0) @ v).transpose(1, 2), None

    AttentionInterface.register("out_of_sight", out_of_sight)
    AttentionMaskInterface.register("out_of_sight", sdpa_mask)
    try:
        case = CASES["llama sdpa"]()
        with torch.no_grad(), watch(case.model) as usual:
            case.run(case.model)
        case.model.set_attn_implementation("out_of_sight")
        with torch.no_grad():
            plain = case.run(case.model)
            with watch(case.model) as seen:
                out = case.run(case.model)
    finally:
        AttentionInterface._global_mapping.pop("out_of_sight")
        AttentionMaskInterface._global_mapping.pop("out_of_sight")
    assert torch.equal(plain, out)
    assert len(calls) == 4
    for name in case.names:
        assert seen[name].route == "hugging face out_of_sight"
        torch.testing.assert_close(seen[name].weights(), usual[name].weights(), atol=1e-5, rtol=1e-4)


Masked = Tensor | None


@contextmanager
def registered(function: Any, mask: Any = None) -> Iterator[Case]:
    """A small llama with grouped heads with a custom attention function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("own", function)
    if mask is not None:
        AttentionMaskInterface.register("own", mask)
    try:
        case = CASES["llama sdpa"]()
        case.model.set_attn_implementation("own")
        yield case
    finally:
        AttentionInterface._global_mapping.pop("own")
        if mask is not None:
            AttentionMaskInterface._global_mapping.pop("own")


def make_scaled_attention(times: float, slope: float) -> Any:
    """Attention that adds its mask argument, with its own scale and bias of keys."""

    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * scaling * times + slope * torch.arange(k.shape[2])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    return own


def grouped(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
    """Heads as (groups, in each group), so that nothing is repeated."""
    q = q.unflatten(1, (k.shape[1], -1))
    weights = (q @ k[:, :, None].mT * scaling).softmax(-1)
    return (weights @ v[:, :, None]).flatten(1, 2).transpose(1, 2), weights.flatten(1, 2)


def folded(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
    """Sequences and heads in one axis."""
    b, h = q.shape[:2]
    q, k, v = (x.repeat_interleave(h // x.shape[1], 1).flatten(0, 1) for x in (q, k, v))
    weights = torch.bmm(q, k.mT).mul(scaling).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (b, h)).transpose(1, 2), weights.unflatten(0, (b, h))


REGISTERED: dict[str, tuple[Any, bool]] = {
    "no mask, so the future is seen": (make_scaled_attention(1.0, 0.0), False),
    "scores nine times as large": (make_scaled_attention(9.0, 0.0), True),
    "a bias on keys": (make_scaled_attention(1.0, 0.5), True),
    "groups of heads": (grouped, False),
    "sequences and heads in one axis": (folded, False),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_operations_inside_a_registered_function_are_traced(name: str) -> None:
    from transformers.masking_utils import eager_mask

    function, masked = REGISTERED[name]
    with registered(function, eager_mask if masked else None) as case, torch.no_grad():
        weights = case.model(ids(), use_cache=False, output_attentions=True).attentions
        plain = case.run(case.model)
        with watch(case.model) as seen:
            case.model(ids(), use_cache=False)
        with watch(case.model):
            assert torch.equal(case.run(case.model), plain)
    assert tuple(seen) == case.names
    assert not seen.left_out
    for record, expected in zip(seen.values(), weights, strict=True):
        assert_statistics_match(record, expected)
        assert record.route == "hugging face own"
        assert (record.weights().triu(1).count_nonzero() == 0) == masked


def test_sdpa_inside_a_registered_function_is_recorded_with_groups_and_scale() -> None:
    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=3 * scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    with registered(own) as case, torch.no_grad(), watch(case.model) as seen:
        case.run(case.model)
    record = seen[case.names[0]]
    assert (record.q.shape[1], record.k.shape[1]) == (6, 2)
    assert record.beta == pytest.approx(3 * 4**-0.5)
    assert record.note == ""


@torch.library.custom_op("regard_tests::opaque", mutates_args=())
def opaque(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention in numpy, where no hook can intercept it."""
    a, b, c = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double().numpy() for x in (q, k, v))
    scores = np.einsum("bhic,bhjc->bhij", a, b) * scale
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return torch.from_numpy(np.einsum("bhij,bhje->bihe", weights / weights.sum(-1, keepdims=True), c)).to(q)


@pytest.mark.parametrize("late_hidden", [True, False])
def test_a_custom_operator_is_recorded_by_its_arguments_if_its_output_agrees(
    late_hidden: bool,
) -> None:
    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
        return torch.ops.regard_tests.opaque(q, k, v, scaling, late_hidden), None

    with registered(own) as case, torch.no_grad():
        plain = case.model(ids(), use_cache=False).logits
        with watch(case.model) as seen:
            assert torch.equal(case.model(ids(), use_cache=False).logits, plain)
        case.model.train()
        for module in case.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        with watch(case.model) as dropped:
            case.model(ids(), use_cache=False)
    assert len(dropped) == 0
    assert "dropout changed its output" in repr(dropped)
    if late_hidden:
        assert [repr(record.mask) for record in seen.values()] == ["causal()"] * 2
        assert (
            seen[case.names[0]].note
            == "recorded by its arguments, not by the operations inside; 8 rows of its output agree"
        )
        assert not seen.left_out
    else:
        assert len(seen) == 0
        assert "left out 2: " in repr(seen)
        assert "its output is not that of its arguments: it has its own mask, scale or bias" in repr(seen)


def test_a_registered_function_without_a_mask_takes_causality_from_its_module() -> None:
    from regard.see.huggingface import build_interface_record

    q, k, v = qkv(i=7, j=7, g=2)
    bias = torch.randn(1, 6, 7, 7)
    sinks = torch.randn(6)
    record = build_interface_record(
        "own", nn.Module(), q, k, v, None, is_causal=True, softcap=3.0, position_bias=bias, s_aux=sinks
    )
    assert repr(record.mask) == "causal()"
    assert [t.name for t in record.terms] == ["softcap", "additive", "sink"]
    record = build_interface_record(
        "flash_attention_2", nn.Module(), q, k, v, real(2, 7), sliding_window=3, is_causal=True
    )
    dense = record.mask.dense(7, 7)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    assert torch.equal(dense[1, 0], (i >= j) & (i - j < 3))
    assert torch.equal(dense[0, 0], (i >= j) & (i - j < 3) & (j >= 2))


def test_a_fully_masked_row_of_a_registered_function_ignores_the_bias() -> None:
    from regard.see.huggingface import build_interface_record

    q, k, v = qkv(i=7, j=7)
    bias, mask = torch.randn(1, 6, 7, 7), torch.zeros(2, 1, 7, 7)
    mask[1, 0, 3] = LOW
    record = build_interface_record("own", nn.Module(), q, k, v, mask, position_bias=bias)
    found = statistics(
        record.q, record.k, mask=record.mask, scores=record.terms, beta=record.beta, positions=record.positions
    )
    torch.testing.assert_close(found.weights(), softmax_weights(q, k, added=bias + mask))


def test_a_hugging_face_block_mask_is_read() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from regard.see.huggingface import build_interface_record

    q, k, v = qkv(i=7, j=7, g=2)
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 2 + b), 2, None, 7, 7, device="cpu")
    record = build_interface_record("flex_attention", nn.Module(), q, k, v, blocks, scaling=0.3)
    assert record.beta == 0.3
    assert record.k.shape[1] == 2
    i, j = torch.arange(7)[:, None], torch.arange(7)
    seen = statistics(record.q, record.k, mask=record.mask, positions=record.positions).weights() > 0
    for b in range(2):
        assert torch.equal(seen[b, 0], (i >= j) & (i - j < 2 + b))
