"""Watching any model: the numbers are those of eager attention, no bit changes, nothing stays behind."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError, UnknownNameError
from regard.core import kernels
from regard.core.attend import attend
from regard.core.given import Matrix
from regard.core.masks import causal, padding, window
from regard.core.rules import Causal
from regard.core.scores import alibi
from regard.layers.attention import Attention
from regard.see.heads import heads_of
from regard.see.records import Record, Seen
from regard.see.relevance import rollout
from regard.see.statistics import statistics
from regard.see.watch import watch
from regard.see.zeroing import value_zeroing
from tests.see.zoo import CASES, Case, ids, real

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
FORWARDS = {kind: kind.forward for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)}


def nothing_left() -> bool:
    import transformers

    interface = transformers.modeling_utils.AttentionInterface
    return (
        torch._C._len_torch_function_stack() == 0
        and kernels._observers == []
        and all(kind.forward is forward for kind, forward in FORWARDS.items())
        and interface.get_interface.__qualname__ == "AttentionInterface.get_interface"
        and not hasattr(interface.get_interface, "__wrapped__")
        and not hasattr(torch._dynamo.eval_frame._callback_from_stance, "__wrapped__")
        and not hasattr(torch.compile, "__wrapped__")
        and "__call__" not in vars(torch.jit.ScriptModule)
    )


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert nothing_left()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def agrees(record: Record, weights: Tensor, places: int | None = None) -> None:
    """All statistics of a record are those of a matrix of weights."""
    weights = weights.nan_to_num(0.0)  # rows that see nothing
    i, j = weights.shape[-2:]
    far = (record.query_positions[:, None] - torch.arange(j)).abs()
    close = {"atol": 2e-5, "rtol": 2e-4}
    torch.testing.assert_close(record.weights(), weights, **close)
    torch.testing.assert_close(record.entropy, torch.special.entr(weights).sum(-1), **close)
    torch.testing.assert_close(record.largest, weights.amax(-1), **close)
    torch.testing.assert_close(record.received, weights.sum(-2), **close)
    assert (record.distance is None) == ("not known where" in record.note)
    if record.distance is not None:
        torch.testing.assert_close(record.distance, (weights * far).sum(-1), **close)
    torch.testing.assert_close(record.rows([i - 1]), weights[:, :, -1:], **close)


def test_statistics_are_those_of_eager_weights_and_no_bit_changes(case: Case) -> None:
    with torch.no_grad():
        plain = case.run(case.model)
        with watch(case.model) as seen:
            watched = case.run(case.model)
    assert torch.equal(plain, watched)
    assert tuple(seen.keys()) == case.names
    weights = case.weights()
    for record, expected in zip(seen.values(), weights, strict=True):
        if "encoder" in type(case.model).__name__.lower():
            expected = expected * (record.lse > -math.inf)[..., None]  # nested tensors have no padded rows
        if record.route == "hugging face sdpa":
            expected = expected * (record.lse > -math.inf)[..., None]  # sdpa's blind rows are zero, eager's the mean
        agrees(record, expected)
    assert not seen.left_out


def test_training_gives_the_same_bits_and_gradients(case: Case) -> None:
    case.model.train()

    def step(watching: bool) -> list[Tensor]:
        case.model.zero_grad()
        torch.manual_seed(5)
        if watching:
            with watch(case.model):
                out = case.run(case.model)
                out.square().mean().backward()
        else:
            out = case.run(case.model)
            out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in case.model.parameters() if p.grad is not None)]

    plain, watched = step(False), step(True)
    assert len(plain) == len(watched) > 3
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_an_output_gradient_is_kept_also_when_backward_comes_after_the_block(case: Case) -> None:
    with watch(case.model) as seen:
        out = case.run(case.model)
    assert all(record.gradient is None for record in seen.values())
    out.square().sum().backward()
    for record in seen.values():
        assert record.gradient is not None
        assert record.v is not None
        assert record.gradient.shape == (*record.q.shape[:3], record.v.shape[-1])
        assert record.gradient.abs().sum() > 0


def test_everything_is_put_back_after_an_error(case: Case) -> None:

    def body() -> None:
        with watch(case.model):
            case.run(case.model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert nothing_left()
    assert not any("forward" in vars(module) for module in case.model.modules())


class Calls(nn.Module):
    """A module that makes one call."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def seen_of(call: Any, *args: Tensor) -> tuple[Record, Tensor]:
    """The one record of a call."""
    plain = call(*args)
    model = Calls(call)
    with watch(model) as seen:
        out = model(*args)
    first, second = (x[0] if isinstance(x, tuple) else x for x in (plain, out))
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    (record,) = seen.values()
    assert not seen.left_out
    return record, second


def qkv(i: int = 5, j: int = 7, h: int = 6, g: int = 6, c: int = 8, e: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, h, i, c), torch.randn(2, g, j, c), torch.randn(2, g, j, e)


def softmaxed(q: Tensor, k: Tensor, beta: float | None = None, added: Tensor | None = None) -> Tensor:
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if beta is None else beta)
    return (scores if added is None else scores + added).softmax(-1)


def test_sdpa_counts_causality_from_the_top_left_corner() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        record.weights(), softmaxed(q, k, added=torch.zeros(5, 7).masked_fill(hidden, -math.inf))
    )
    assert isinstance(record.mask, Causal)
    assert record.weights()[..., 5:].count_nonzero() == 0


def test_sdpa_repeats_key_heads_and_takes_a_scale() -> None:
    q, k, v = qkv(g=2)
    record, out = seen_of(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True), q, k, v
    )
    assert record.beta == 0.7
    assert record.k.shape[1] == 2
    torch.testing.assert_close(record.weights(), softmaxed(q, k, 0.7))
    torch.testing.assert_close(record.statistics.out, out)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_sdpa_takes_any_number_of_axes(axes: int) -> None:
    lead = (3, 2, 4)[: axes - 2]
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 3)
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v)
    expected = (q @ k.mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(record.weights().reshape(expected.shape), expected)


class OneHead(nn.Module):
    """Attention without an axis for heads."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.qkv = by_hand, nn.Linear(24, 72)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v, mask)
        return ((q @ k.mT / 24**0.5).masked_fill(~mask, -math.inf)).softmax(-1) @ v


@pytest.mark.parametrize("mask_axes", [2, 3])
@pytest.mark.parametrize("by_hand", [True, False])
def test_three_axes_are_sequences_with_one_head_each(by_hand: bool, mask_axes: int) -> None:
    model, x = OneHead(by_hand), torch.randn(2, 9, 24)
    mask = torch.rand(2, 9, 9) > 0.5
    mask = (mask | torch.eye(9, dtype=torch.bool))[(0,) * (3 - mask_axes)]
    with watch(model) as both:
        model(x, mask).square().sum().backward()
    with watch(model) as second:
        model(x[1:], mask[1:] if mask_axes == 3 else mask).square().sum().backward()
    record = both["OneHead"]
    assert record.q.shape == (2, 1, 9, 24)
    assert record.note == ""
    torch.testing.assert_close(record.weights()[1:], second["OneHead"].weights())
    torch.testing.assert_close(record.gradient[1:], second["OneHead"].gradient)
    tokens = torch.randint(0, 3, (2, 9))
    assert len(both.table(tokens)) == 1
    torch.testing.assert_close(rollout(both)[1:], rollout(second))
    with watch(model, heads=[0]) as chosen:
        model(x, mask)
    assert chosen["OneHead"].q.shape == (2, 1, 9, 24)


class Folded(nn.Module):
    """Attention whose sequences and heads share the first axis, as older code has it."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.num_heads = by_hand, 3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v, bias = (x.flatten(0, 1) for x in (q, k, v, bias))
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v, bias)
        return torch.bmm(torch.baddbmm(bias, q, k.mT, alpha=8**-0.5).softmax(-1), v)


@pytest.mark.parametrize("by_hand", [True, False])
def test_sequences_and_heads_in_one_axis_are_told_apart_by_what_the_module_says(by_hand: bool) -> None:
    q, k, v = qkv(h=3, g=3)
    bias = torch.randn(2, 3, 5, 7)
    model = Folded(by_hand)
    with watch(model) as seen:
        model(q, k, v, bias)
    record = seen["Folded"]
    assert torch.equal(record.q, q)
    assert record.note == "heads read from num_heads=3 of its module"
    torch.testing.assert_close(record.weights(), softmaxed(q, k, added=bias))
    model.num_heads = 5  # which six are no multiple of
    with watch(model) as seen:
        model(q, k, v, bias)
    assert seen["Folded"].q.shape == (6, 1, 5, 8)
    assert seen["Folded"].note == ""


def test_weights_folded_for_their_softmax_alone_show_their_heads_in_the_product() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: (q @ k.mT).flatten(0, 1).softmax(-1).unflatten(0, (2, 6)) @ v, q, k, v)
    assert record.note == ""
    torch.testing.assert_close(record.weights(), softmaxed(q, k, 1.0))


def test_a_boolean_mask_means_visible_and_numbers_are_added() -> None:
    q, k, v = qkv()
    visible = torch.rand(2, 1, 5, 7) > 0.4
    visible[..., 0] = True
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=visible), q, k, v)
    low = torch.zeros(2, 1, 5, 7).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(record.weights(), softmaxed(q, k, added=low))
    bias = torch.randn(6, 5, 7)
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=bias), q, k, v)
    torch.testing.assert_close(record.weights(), softmaxed(q, k, added=bias))
    assert [term.name for term in record.terms] == ["additive"]


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_numbers_that_only_hide_become_a_mask(lowest: float) -> None:
    q, k, v = qkv()
    visible = torch.rand(5, 7) > 0.4
    visible[:, 0] = True
    numbers = torch.zeros(5, 7).masked_fill(~visible, lowest)
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=numbers), q, k, v)
    assert isinstance(record.mask, Matrix)
    assert not record.terms
    torch.testing.assert_close(record.weights(), softmaxed(q, k, added=numbers))


def test_a_row_with_only_the_lowest_number_is_the_mean_of_all() -> None:
    q, k, v = qkv()
    numbers = torch.zeros(2, 1, 5, 7)
    numbers[0, 0, 2] = torch.finfo(torch.float32).min
    numbers[1, 0, 3, 4:] = torch.finfo(torch.float32).min
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=numbers), q, k, v)
    torch.testing.assert_close(record.weights(), softmaxed(q, k, added=numbers))
    torch.testing.assert_close(record.entropy[0, :, 2], torch.full((6,), math.log(7)))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_seen_with_its_functions() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.repeat(1, 1, 4, 1)[:, :, :13] for x in qkv(i=13, j=13, e=8, g=3))
    slopes = torch.rand(6)
    blocks = create_block_mask(lambda b, h, i, j: (i - j >= 0) & (i - j < 4 + b), 2, None, 13, 13, device="cpu")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), blocks, scale=0.4, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    record, out = seen_of(call, q, k, v)
    i, j = torch.arange(13)[:, None], torch.arange(13)
    added = (-slopes[:, None, None] * (i - j)).expand(2, -1, -1, -1)
    reach = torch.tensor([4, 5])[:, None, None, None]
    added = added.masked_fill((i < j) | (i - j >= reach), -math.inf)
    agrees(record, softmaxed(q, k, 0.4, added))
    torch.testing.assert_close(record.statistics.out, out)
    with watch(heads=[4], rows=[12, 3]) as seen:
        call(q, k, v)
    torch.testing.assert_close(seen["attention"].weights(), softmaxed(q, k, 0.4, added)[:, [4]][:, :, [12, 3]])


LAYERS: dict[str, dict[str, Any]] = {
    "plain, fast": {"batch_first": True},
    "an odd number of heads": {"batch_first": True, "num_heads": 3},
    "sequence first": {},
    "own widths for keys and values": {"kdim": 7, "vdim": 11, "batch_first": True},
    "a learned key and a zero one": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False, "batch_first": True},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["nothing", "padding", "a matrix", "numbers for each head", "both"])
@pytest.mark.parametrize("name", LAYERS)
def test_nn_multiheadattention_is_seen_as_it_weighs(name: str, masked: str, need_weights: bool) -> None:
    settings = {"embed_dim": 24, "num_heads": 4} | LAYERS[name]
    layer = nn.MultiheadAttention(**settings).eval()
    b, i, j = 2, 5, 7
    own = "kdim" not in settings
    j = i if own else j
    widths = (24, 24, 24) if own else (24, 7, 11)
    q, k, v = (torch.randn(b, n, width) for n, width in zip((i, j, j), widths, strict=True))
    if own:
        k = v = q
    if not settings.get("batch_first"):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k = v = q
    late = torch.rand(i, j) > 0.6
    late[:, 0] = False
    filling = torch.zeros(b, j, dtype=torch.bool)
    filling[1, 4:] = True
    given: dict[str, Any] = {}
    if masked in ("padding", "both"):
        given["key_padding_mask"] = filling
    if masked in ("a matrix", "both"):
        given["attn_mask"] = late
    if masked == "numbers for each head":
        given["attn_mask"] = torch.randn(b * settings["num_heads"], i, j)
    with torch.no_grad():
        plain = layer(q, k, v, need_weights=need_weights, **given)[0]
        expected = layer(q, k, v, need_weights=True, average_attn_weights=False, **given)[1]
        with watch(layer) as seen:
            out = layer(q, k, v, need_weights=need_weights, **given)[0]
    assert torch.equal(plain, out)
    (record,) = seen.values()
    assert record.route == "nn.MultiheadAttention"
    assert record.name == "MultiheadAttention"
    torch.testing.assert_close(record.weights(), expected, atol=1e-5, rtol=1e-4)
    # what the layer gives is the projection of what the record says
    heads = record.statistics.out.transpose(1, 2).flatten(2)
    again = functional.linear(heads, layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(
        again if settings.get("batch_first") else again.transpose(0, 1), out, atol=1e-5, rtol=1e-4
    )


def test_one_sequence_without_a_batch_and_the_function_itself_are_seen() -> None:
    layer = nn.MultiheadAttention(24, 3).eval()
    x = torch.randn(5, 24)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected = layer(x, x, x, attn_mask=hidden, average_attn_weights=False)[1]
        with watch(layer) as seen:
            layer(x, x, x, attn_mask=hidden, need_weights=False, is_causal=True)
    torch.testing.assert_close(seen["MultiheadAttention"].weights()[0], expected)
    y = x[:, None]
    with torch.no_grad(), watch() as seen:
        functional.multi_head_attention_forward(
            y, y, y, 24, 3, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
            layer.out_proj.weight, layer.out_proj.bias, training=False, attn_mask=hidden,
        )  # fmt: skip
    torch.testing.assert_close(seen["attention"].weights()[0], expected)


def test_the_gradient_of_multihead_attention_is_that_of_its_heads() -> None:
    layer = nn.MultiheadAttention(24, 3, batch_first=True).eval()
    x, towards = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    with watch(layer) as seen:
        (layer(x, x, x)[0] * towards).sum().backward()
    record = seen["MultiheadAttention"]
    heads = record.statistics.out.clone().requires_grad_()
    out = functional.linear(heads.transpose(1, 2).flatten(2), layer.out_proj.weight.detach())
    (out * towards).sum().backward()
    assert record.gradient is not None
    torch.testing.assert_close(record.gradient, heads.grad)


def test_a_decoder_of_torch_is_seen_with_its_cross_attention() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 3, 20, batch_first=True), 2).eval()
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        plain = model(x, memory, tgt_mask=mask, tgt_is_causal=True)
        with watch(model) as seen:
            out = model(x, memory, tgt_mask=mask, tgt_is_causal=True)
    assert torch.equal(plain, out)
    assert list(seen) == [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("self_attn", "multihead_attn")]
    assert seen["layers.1.multihead_attn"].weights().shape == (2, 3, 5, 7)
    assert isinstance(seen["layers.0.self_attn"].mask, Causal)


def test_an_encoder_with_layers_of_ones_own_is_seen() -> None:
    class Own(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            heads = x.unflatten(-1, (3, -1)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    model = nn.TransformerEncoder(Own(24, 3, 20, batch_first=True), 2).eval()
    with watch(model) as seen:
        model(torch.randn(2, 5, 24).requires_grad_())
    assert list(seen) == ["layers.0", "layers.1"]
    assert seen["layers.0"].route == "sdpa"


def causal_low(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


WRITTEN: dict[str, Any] = {
    "matmul": lambda q, k, v: (torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhje->bhie", (torch.einsum("bhic,bhjc->bhij", q, k) * 8**-0.5).softmax(-1), v
    ),
    "einsum with sequence first": lambda q, k, v: torch.einsum(
        "bhqk,bkhe->bqhe",
        (torch.einsum("bqhc,bkhc->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * 8**-0.5).softmax(-1),
        v.transpose(1, 2),
    ),
    "heads in the batch": lambda q, k, v: torch.bmm(
        functional.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 8**-0.5, dim=-1), v.flatten(0, 1)
    ),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.baddbmm(torch.zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=8**-0.5).view(2, 6, 5, 7)
        .softmax(-1).view(12, 5, 7),
        v.flatten(0, 1),
    ),
    "scaled before": lambda q, k, v: (q * 8**-0.5 @ k.mT).softmax(-1) @ v,
    "in place": lambda q, k, v: (q @ k.mT).mul_(8**-0.5).softmax(-1) @ v,
    "through half": lambda q, k, v: ((q @ k.mT).mul(torch.tensor(8**-0.5)).float().softmax(-1).to(v.dtype)) @ v,
    "einsum with dots": lambda q, k, v: torch.einsum(
        "...ij,...je->...ie", (torch.einsum("...ic,...jc", q, k) * 8**-0.5).softmax(-1), v
    ),
    "einsum with values first": lambda q, k, v: torch.einsum("bhje,bhij->bhie", v, softmaxed(q, k)),
    "einsum with numbers for letters": lambda q, k, v: torch.einsum(
        softmaxed(q, k), [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]
    ),
    "einsum of a list": lambda q, k, v: torch.einsum("bhij,bhje->bhie", [softmaxed(q, k), v]),
    "a product and a sum": lambda q, k, v: (softmaxed(q, k).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2),
    "values first, a product and a sum": lambda q, k, v: torch.sum(v[:, :, None] * softmaxed(q, k)[..., None], dim=3),
    "scores by a product and a sum": lambda q, k, v: (
        (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1).mul(8**-0.5).softmax(-1) @ v
    ),
    "keys first, a product and a sum": lambda q, k, v: (
        torch.sum(k[:, :, None] * q[:, :, :, None], -1).mul(8**-0.5).softmax(-1) @ v
    ),
    "axes added and taken away": lambda q, k, v: (softmaxed(q, k)[None].detach()[0][:, :, :, :] @ v[None])[0],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_written_by_hand_is_seen(name: str) -> None:
    q, k, v = qkv()
    record, _ = seen_of(WRITTEN[name], q, k, v)
    assert record.route == "softmax"
    assert not record.terms
    expected = softmaxed(q, k)
    torch.testing.assert_close(record.weights().reshape(expected.shape), expected)
    torch.testing.assert_close(record.statistics.out.reshape(2, 6, 5, 3), expected @ v)


MULTIPLIED: dict[str, Any] = {
    "projected": ("bhij,bhje,hed->bid", (6, 3, 11)),
    "with the projection first": ("hed,bhij,bhje->bid", (6, 3, 11)),
    "gated": ("bhij,bhje,bhie->bhie", (2, 6, 5, 3)),
    "gated and projected": ("bhij,bhje,bhi,hed->bid", (2, 6, 5), (6, 3, 11)),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_an_einsum_of_weights_values_and_more_is_seen_and_its_gradient_comes_back(name: str) -> None:
    equation, *shapes = MULTIPLIED[name]
    q, k, v = qkv()
    factors = [torch.randn(shape) for shape in shapes]
    weights = softmaxed(q, k)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, more = {"bhij": softmaxed(q, k), "bhje": v}, iter(factors)
        return torch.einsum(equation, *(own[part] if part in own else next(more) for part in _in(equation)))

    record, _ = seen_of(call, q, k, v)
    torch.testing.assert_close(record.weights(), weights)
    torch.testing.assert_close(record.v, v)

    model = Calls(call)
    with watch(model) as seen:
        out = model(q.requires_grad_(), k, v)
    wanted = torch.randn_like(out)
    (out * wanted).sum().backward()
    heads = (weights @ v).requires_grad_()
    rest = [part for part in _in(equation) if part not in ("bhij", "bhje")]
    onward = torch.einsum(f"bhie,{','.join(rest)}->{equation.partition('->')[2]}", heads, *factors)
    (expected,) = torch.autograd.grad((onward * wanted).sum(), heads)
    torch.testing.assert_close(seen["Calls"].gradient, expected)


def _in(equation: str) -> list[str]:
    return equation.partition("->")[0].split(",")


def test_values_are_zeroed_through_an_einsum_with_its_projection() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Parameter(torch.randn(6, 3, 11))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("bhij,bhje,hed->bid", softmaxed(q, k), v, self.out)

    q, k, v = qkv()
    model, without = Layer(), v.clone()
    without[:, :, 4] = 0
    changed = value_zeroing(model, lambda: model(q, k, v), "Layer", keys=[4], block="")
    expected = 1 - torch.cosine_similarity(model(q, k, v), model(q, k, without), dim=-1)
    torch.testing.assert_close(changed[..., 0], expected, atol=1e-5, rtol=1e-4)


def test_scores_of_an_einsum_with_a_matrix_between_are_followed() -> None:
    q, k, v = qkv()
    between, bias = torch.randn(6, 8, 8), torch.randn(5, 7)
    record, _ = seen_of(
        lambda q, k, v: (torch.einsum("bhic,hcd,bhjd->bhij", q, between, k) * 0.2 + bias).softmax(-1) @ v, q, k, v
    )
    expected = (q @ between @ k.mT * 0.2 + bias).softmax(-1)
    torch.testing.assert_close(record.weights(), expected)
    torch.testing.assert_close(record.q, q @ between)
    assert [term.name for term in record.terms] == ["additive"]


def test_one_map_for_the_values_of_several_heads_is_theirs() -> None:
    q, k, v = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 7, 8), torch.randn(2, 6, 7, 3)
    for call in (
        lambda q, k, v: softmaxed(q, k) @ v,
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", softmaxed(q, k).clamp(max=2), v),
        lambda q, k, v: (q @ k.mT).clamp(max=0.4).softmax(-1) @ v,
    ):
        record, out = seen_of(call, q, k, v)
        assert record.weights().shape == (2, 6, 5, 7)
        torch.testing.assert_close(record.statistics.out, out)


def test_dots_stand_for_the_last_of_the_axes_that_have_no_letter() -> None:
    q, k, v = qkv()
    record, out = seen_of(lambda q, k, v: torch.einsum("...ij,...je->...ie", softmaxed(q, k), v[1]), q, k, v)
    torch.testing.assert_close(record.v, v[1].expand(2, -1, -1, -1))
    torch.testing.assert_close(record.statistics.out, out)


LOW = torch.finfo(torch.float32).min
CHANGED: dict[str, Any] = {
    "masked_fill with the lowest": lambda s, m: s.masked_fill(m, LOW),
    "where": lambda s, m: torch.where(m, torch.tensor(-math.inf), s),
    "where, the other way": lambda s, m: torch.where(~m, s, -math.inf),
    "added": lambda s, m: s + torch.zeros(5, 7).masked_fill(m, -math.inf),
    "a bias, scaled after": lambda s, m: (s + m * 0.3) * 1.7 - 0.5,
    "minus ten thousand": lambda s, m: s.masked_fill(m, -1e4),
    "capped": lambda s, m: torch.tanh(s / 2) * 2,
    "written into": lambda s, m: _written_into(s, m),
    "clamped": lambda s, m: s.clamp(max=0.3),
    "divided and rounded": lambda s, m: torch.div(s, 2, rounding_mode="floor"),
    "divided and cut, in place": lambda s, m: s.div_(0.7, rounding_mode="trunc"),
    "added some of": lambda s, m: torch.add(s, m * 0.3, alpha=2),
}
KEPT = ("minus ten thousand", "capped", "written into", "clamped", "divided and rounded", "divided and cut, in place",
        "added some of")  # fmt: skip


def _written_into(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[..., hidden] = -math.inf
    return scores


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_is_done_to_scores_is_followed_or_kept(name: str) -> None:
    q, k, v = qkv()
    hidden = torch.rand(5, 7) > 0.6
    hidden[:, 0] = False

    def scores(q: Tensor, k: Tensor) -> Tensor:
        out: Tensor = CHANGED[name](q @ k.mT, hidden)
        return out

    record, _ = seen_of(lambda q, k, v: scores(q, k).softmax(-1) @ v, q, k, v)
    torch.testing.assert_close(record.weights(), scores(q, k).softmax(-1))
    given = [term.name for term in record.terms] == ["given"]
    assert given == (name in KEPT)
    with torch.inference_mode():  # where no tensor counts how often it was written into
        record, _ = seen_of(lambda q, k, v: scores(q, k).softmax(-1) @ v, q, k, v)
    torch.testing.assert_close(record.weights(), scores(q, k).softmax(-1))


def _low(hidden: Tensor, value: float = LOW) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, value)


TWICE_HIDDEN: dict[str, Any] = {
    "filled, then added": lambda s, a, b: s.masked_fill(a, LOW) + _low(b),
    "added, then filled": lambda s, a, b: (s + _low(b)).masked_fill(a, LOW),
    "filled twice": lambda s, a, b: s.masked_fill(a, LOW).masked_fill(b, LOW),
    "added twice": lambda s, a, b: s + _low(a) + _low(b),
    "nothing, then the lowest": lambda s, a, b: s.masked_fill(a, -math.inf).masked_fill(b, LOW),
    "the lowest, then nothing": lambda s, a, b: s.masked_fill(a, LOW).masked_fill(b, -math.inf),
    "two low numbers": lambda s, a, b: s.masked_fill(a, LOW).masked_fill(b, LOW * 0.75),
    "with a bias before and after": lambda s, a, b: (s + torch.arange(7.0)).masked_fill(a, LOW) + _low(b) + b * 0.7,
    "and then capped": lambda s, a, b: (s.masked_fill(a, LOW) + _low(b)).clamp(max=0.3),
}


@pytest.mark.parametrize("name", TWICE_HIDDEN)
def test_a_row_of_nothing_but_fills_weighs_as_it_does_in_eager(name: str) -> None:
    q, k, v = qkv()
    far = torch.ones(5, 7, dtype=torch.bool).triu(2) | torch.ones(5, 7, dtype=torch.bool).tril(-2)
    filling = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    filling[0, ..., :4] = True  # rows 0 to 2 of the first sequence have nothing else within reach
    filling[1] = True

    def scores(q: Tensor, k: Tensor) -> Tensor:
        out: Tensor = TWICE_HIDDEN[name](q @ k.mT, far, filling)
        return out

    expected = scores(q, k).softmax(-1).nan_to_num(0.0)  # rows of -inf alone
    record, _ = seen_of(lambda q, k, v: scores(q, k).softmax(-1) @ v, q, k, v)
    agrees(record, expected)
    assert torch.equal(record.lse > -math.inf, expected.sum(-1) > 0.5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_local_attention_with_padding_is_seen_as_it_weighs(side: str) -> None:
    import transformers

    config = transformers.GPTNeoConfig(
        vocab_size=37, hidden_size=24, num_layers=2, num_heads=3, attention_types=[[["global", "local"], 1]],
        window_size=3, intermediate_size=20, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPTNeoForCausalLM(config).eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask, output_attentions=True).attentions
        with watch(model) as seen:
            model(ids(), attention_mask=mask)
    assert not seen.left_out
    assert len(seen) == 2
    for record, weights in zip(seen.values(), expected, strict=True):
        agrees(record, weights)


UNTOLD: dict[str, tuple[Any, str]] = {
    "values first": (lambda q, k, v: v.mT @ (k @ q.mT).softmax(-2), "a softmax over another axis than the last"),
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "a softmax over another axis than the last"),
    "values before the weights": (lambda q, k, v: v.mT @ (k @ q.mT).softmax(-1), "values stood before the weights"),
    "weights turned": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT, "by mT of the weights of a softmax, not by"),
    "log_softmax": (lambda q, k, v: functional.log_softmax(q @ k.mT, -1).exp() @ v, "by log_softmax of a product"),
    "exp and a sum": (lambda q, k, v: _by_sum((q @ k.mT * 0.3).exp()) @ v, "mixed by exp of a product, attention or"),
    "centred": (lambda q, k, v: _by_sum(_centred(q @ k.mT).exp_()) @ v, "mixed by exp of a product, attention or"),
    "divided at the end": (lambda q, k, v: ((q @ k.mT).exp() @ v) / (q @ k.mT).exp().sum(-1, True), "by exp of a"),
    "einsum": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhic,bhjc->bhij", q, k).exp(), v),
        "mixed by exp of a product",
    ),
    "einsum with weights for keys": (
        lambda q, k, v: torch.einsum("bhij,bhj,bhje->bhie", softmaxed(q, k), k[..., 0], v),
        "by einsum('bhij,bhj,bhje->bhie'), which has another form",
    ),
    "einsum with weights for keys at its end": (
        lambda q, k, v: torch.einsum("bhij,bhje,bhj->bhie", softmaxed(q, k), v, k[..., 0]),
        "by einsum('bhij,bhje,bhj->bhie'), which has another form",
    ),
    "einsum that sums over heads and projects": (
        lambda q, k, v: torch.einsum("bhij,bhje,ed->bid", softmaxed(q, k), v, q[0, 0, :3, :]),
        "by einsum('bhij,bhje,ed->bid'), which has another form",
    ),
    "einsum that sums over heads": (
        lambda q, k, v: torch.einsum("bhij,bhje->bie", softmaxed(q, k), v),
        "by einsum('bhij,bhje->bie'), which has another form",
    ),
    "einsum of two softmaxes": (
        lambda q, k, v: torch.einsum("bhij,bhij,bhje->bhie", softmaxed(q, k), softmaxed(q, 2 * k), v),
        "multiplied the weights of two softmaxes",
    ),
    "one softmax less another": (
        lambda q, k, v: (softmaxed(q, k) - 0.3 * softmaxed(q, 2 * k)) @ v,
        "by sub of the weights of two softmaxes",
    ),
    "the mean of heads": (lambda q, k, v: softmaxed(q, k).mean(1, keepdim=True) @ v, "by mean of the weights of a"),
    "keys left out": (lambda q, k, v: softmaxed(q, k)[..., 1:] @ v[..., 1:, :], "by getitem of the weights of a soft"),
    "other rows": (
        lambda q, k, v: softmaxed(q, k)[:, :, torch.tensor([4, 3, 2, 1, 0])] @ v,
        "by getitem of the weights of a soft",
    ),
    "padded and cut again": (
        lambda q, k, v: functional.pad(softmaxed(q, k).transpose(0, 1), (0, 2))[..., :7].transpose(0, 1) @ v,
        "by transpose of the weights of a softmax, not by",
    ),
    "joined with others": (
        lambda q, k, v: torch.cat([softmaxed(q, k), q[..., :2]], -1) @ torch.cat([v, v[..., :2, :]], -2),
        "by cat of the weights of a softmax, not by",
    ),
    "through a linear layer": (
        lambda q, k, v: functional.linear(softmaxed(q, k), v[0, 0].mT),
        "went into linear, which is not followed",
    ),
    "learned queries": (
        lambda q, k, v: (nn.Parameter(q) @ k.mT).sigmoid() @ v,
        "by sigmoid of a product, attention or not",
    ),
    "rows as a batch": (
        lambda q, k, v: softmaxed(q, k).flatten(0, 2) @ v[0, 0],
        "weights (2, 6, 5, 7) of a softmax were mixed with values as (60, 7)",
    ),
    "sigmoid": (
        lambda q, k, v: (q @ k.mT * 0.3).sigmoid() @ v,
        "by sigmoid of a product, attention or not: it is no softmax, so log-sum-exp and entropy do not apply",
    ),
    "relu, divided by a sum": (
        lambda q, k, v: _by_sum((q @ k.mT).relu() + 0.01) @ v,
        "by relu of a product, attention or not",
    ),
    "relu, masked": (lambda q, k, v: (functional.relu(q @ k.mT) * torch.ones(5, 7).tril()) @ v, "by relu of a product"),
    "relu, squared": (lambda q, k, v: functional.relu(q @ k.mT).square() @ v, "by square of a product, attention or"),
    "sigmoid in an einsum": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhic,bhjc->bhij", q, k).sigmoid(), v),
        "by sigmoid of a product, attention or not",
    ),
    "sigmoid, a product and a sum": (
        lambda q, k, v: ((q @ k.mT).sigmoid()[..., None] * v[:, :, None]).sum(-2),
        "by sigmoid of a product, attention",
    ),
    "exp, a product and a sum": (
        lambda q, k, v: ((q @ k.mT).exp()[..., None] * v[:, :, None]).sum(-2),
        "by exp of a product, attention or not",
    ),
    "other values for each query": (
        lambda q, k, v: (softmaxed(q, k)[..., None] * (v[:, :, None] + q[:, :, :, None, :3])).sum(-2),
        "multiplied by other values for each query",
    ),
    "no value for each key": (
        lambda q, k, v: (softmaxed(q, k)[..., None] * v[:, :, :1, None]).sum(-2),
        "not one vector for each key",
    ),
    "the mean over keys": (
        lambda q, k, v: (softmaxed(q, k)[..., None] * v[:, :, None]).mean(-2),
        "and then mean was no sum over keys alone",
    ),
    "the sum over queries": (
        lambda q, k, v: (softmaxed(q, k)[..., None] * v[:, :, None]).sum(2),
        "and then sum was no sum over keys alone",
    ),
    "einsum with values of two axes": (
        lambda q, k, v: torch.einsum("bhij,bhjef->bhief", (q @ k.mT).softmax(-1), v[..., None]),
        "by einsum('bhij,bhjef->bhief'), which has another form",
    ),
}


def _by_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _centred(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


@pytest.mark.parametrize("name", UNTOLD)
def test_attention_that_cannot_be_told_is_left_out_with_its_reason(name: str) -> None:
    call, words = UNTOLD[name]
    model, (q, k, v) = Calls(call), qkv()
    plain = call(q, k, v)
    with watch(model) as seen:
        out = model(q, k, v)
    assert torch.equal(plain, out)
    assert len(seen) == 0
    ((reason, count),) = seen.left_out.items()
    assert count == 1
    assert words in reason


IN_PARTS: dict[str, tuple[Any, int]] = {
    "rows": (lambda w, v: torch.cat([w[..., :3, :] @ v, w[..., 3:, :] @ v], 2), 2),
    "heads": (lambda w, v: torch.stack([w[:, h] @ v[:, h] for h in range(6)], 1), 6),
    "heads as a loop": (lambda w, v: torch.stack([a @ b for a, b in zip(w.unbind(1), v.unbind(1), strict=True)], 1), 6),
    "chunks of rows": (lambda w, v: torch.cat([part @ v for part in w.chunk(2, 2)], 2), 2),
    "keys": (lambda w, v: sum(a @ b for a, b in zip(w.split(4, -1), v.split(4, -2), strict=True)), 2),
    "sequences": (lambda w, v: torch.stack([w.select(0, b) @ v[b] for b in range(2)]), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("b", [1, 2])
def test_parts_of_weights_are_left_out_and_never_taken_for_the_whole(name: str, b: int) -> None:
    mixed, count = IN_PARTS[name]
    q, k, v = (x[:b] for x in qkv())
    if name == "sequences" and b == 1:
        mixed, count = (lambda w, v: (w.select(0, 0) @ v[0])[None]), 1
    model = Calls(lambda q, k, v: mixed(softmaxed(q, k), v))
    with watch(model) as seen:
        out = model(q, k, v)
    torch.testing.assert_close(out, softmaxed(q, k) @ v)
    assert len(seen) == 0
    ((reason, times),) = seen.left_out.items()
    assert times == count
    assert "of the weights of a softmax, not by the weights themselves" in reason


def test_the_only_head_or_sequence_may_be_picked_out() -> None:
    q, k, v = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8), torch.randn(1, 1, 7, 3)
    record, _ = seen_of(lambda q, k, v: softmaxed(q, k)[0, 0][None] @ v[0], q, k, v)
    torch.testing.assert_close(record.weights(), softmaxed(q, k))


def test_feed_forward_parts_of_experts_are_no_attention() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((3, 8, 11), (3, 11, 8)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.bmm(torch.bmm(x, self.up).relu(), self.down * 0.5)
            return torch.einsum("enf,efd->end", torch.einsum("end,edf->enf", x, self.up).sigmoid(), self.down)

    model = Experts()
    with watch(model) as seen:
        model(torch.randn(3, 5, 8))
    assert repr(seen) == "nothing seen"


def test_the_weights_of_a_router_are_no_attention() -> None:
    x, experts = torch.randn(2, 7, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    router = nn.Linear(8, 3)
    with watch() as seen:
        shares = router(x).softmax(-1)
        x = x + sum(shares[..., number, None] * expert(x) for number, expert in enumerate(experts))
        x = x + (shares[..., None] * torch.stack([expert(x) for expert in experts], -2)).sum(-2)
        best, _ = shares.topk(2, -1)
        x = x * best.sum(-1, keepdim=True)
        (x @ x.mT).softmax(-1) @ x
    assert len(seen) == 1
    assert not seen.left_out


def test_layers_of_a_graph_are_no_attention() -> None:
    links, x, weight = torch.rand(2, 7, 7), torch.randn(2, 7, 3), torch.randn(3, 3)
    with watch() as seen:
        x = torch.relu(links @ x) @ weight
        torch.relu(links @ x)
    assert repr(seen) == "nothing seen"


def test_keys_changed_before_the_softmax_do_not_deceive() -> None:
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        scores = q @ k.mT
        k.zero_()
        return scores.softmax(-1) @ v

    record, _ = seen_of(call, q, k, v)
    torch.testing.assert_close(record.weights(), softmaxed(q, k, 1.0))


def test_mixing_that_may_not_be_attention_is_told_but_not_recorded() -> None:
    q, k, v = qkv()
    with watch() as seen:
        torch.matmul(q.softmax(-1), k.softmax(-2).mT @ v)  # efficient attention: its softmax is over features
        scores = torch.cat([q @ k.mT, torch.zeros(2, 6, 5, 1)], -1)
        torch.matmul(scores.softmax(-1)[..., :-1], v)
    assert len(seen) == 0
    assert "by a softmax of numbers that are no product of queries and keys, or none that was seen" in repr(seen)
    assert "by getitem of the weights of a softmax, not by the weights themselves" in repr(seen)


def test_a_sink_of_hugging_face_is_seen() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=20, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(ids(), attention_mask=real(), output_attentions=True).attentions
        with watch(model) as seen:
            model(ids(), attention_mask=real())
    assert not seen.left_out
    for record, weights in zip(seen.values(), expected, strict=True):
        assert record.terms[-1].name == "sink"
        torch.testing.assert_close(record.weights(), weights, atol=1e-5, rtol=1e-4)


def test_scores_from_out_of_sight_are_kept_as_they_are() -> None:
    q, k, v = qkv(i=7, j=7)

    def unseen(q: Tensor, k: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return q @ k.mT * 0.4

    record, out = seen_of(lambda q, k, v: unseen(q, k).softmax(-1) @ v, q, k, v)
    assert record.note == "its scores are no product that was seen, so queries and keys are not known"
    torch.testing.assert_close(record.weights(), softmaxed(q, k, 0.4))
    torch.testing.assert_close(record.statistics.out, out)


def test_additive_attention_is_told_as_what_it_is() -> None:
    class Additive(nn.Module):
        """Bahdanau, Cho and Bengio 2014."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.score = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.score(torch.tanh(self.q(x)[:, :, None] + self.k(y)[:, None])).squeeze(-1)
            return scores.softmax(-1) @ y

    model, x, y = Additive(), torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    with watch(model) as seen:
        model(x, y)
    assert len(seen) == 0
    assert "no product of queries and keys, or none that was seen, as additive attention has them" in repr(seen)
    with watch(model) as seen:
        model(x, x)
    assert seen["Additive"].q.shape == (2, 1, 5, 1)
    assert seen["Additive"].note.startswith("its scores are no product that was seen")


def test_scores_overwritten_after_their_softmax_are_left_out() -> None:
    q, k, v = qkv()
    with watch() as seen:
        scores = (q @ k.mT).clamp(max=0.3)
        weights = scores.softmax(-1)
        scores.zero_()
        torch.matmul(weights, v)
    assert len(seen) == 0
    assert "left out 1: calls that could not be told: RuntimeError: scores were written into" in repr(seen)


def test_what_happens_to_weights_afterwards_is_told() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, q, k, v)
    assert "mul" in record.note
    torch.testing.assert_close(record.weights(), softmaxed(q, k, 1.0))


def test_a_softmax_or_an_exponential_without_values_is_no_attention() -> None:
    q, k, v = qkv()
    with watch() as seen:
        (q @ k.mT).softmax(-1)
        functional.log_softmax(q @ k.mT, -1).sum()
        (q @ k.mT).exp().sum(-1, keepdim=True) * v[..., :1, :]
        (q @ k.mT).exp().amax(-1, keepdim=True) @ v[..., :1, :]
        torch.matmul(k.exp().mT, v)
        torch.randn(3, 5).softmax(-1) @ torch.randn(5, 2)
    assert repr(seen) == "nothing seen"


def test_our_own_attention_is_seen_once_with_its_rules() -> None:
    model = Attention(24, 6, kv_heads=2, scores=alibi(heads=6)).eval()
    x = torch.randn(2, 9, 24)
    mask = causal() & window(before=3) & padding([9, 6])
    plain = model(x, mask=mask)
    with watch(model) as seen:
        out = model(x, mask=mask)
    assert torch.equal(plain, out)
    (record,) = seen.values()
    assert record.name == "Attention"
    assert record.route.startswith("attend, ")
    assert "padding" in repr(record.mask)
    assert record.terms[0].name == "alibi"
    torch.testing.assert_close(
        record.statistics.out,
        attend(record.q, record.k, record.v, mask=mask, scores=alibi(heads=6)),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "blocked", "reference"])
def test_what_our_kernels_call_is_not_counted_again(kernel: str) -> None:
    q, k, v = qkv(i=9, j=9)
    with watch() as seen:
        attend(q, k, v, mask=window(before=2), kernel=kernel)
    assert list(seen) == ["attention"]
    assert seen["attention"].route == f"attend, {kernel}"


def test_only_chosen_layers_heads_and_rows_are_kept() -> None:
    for name in ("gpt2 sdpa", "t5 eager", "llama sdpa", "bert eager"):
        case = CASES[name]()
        with torch.no_grad(), watch(case.model) as whole:
            case.run(case.model)
        with torch.no_grad(), watch(case.model, layers=case.names[-1], heads=[2, 0], rows=[-1, 1]) as seen:
            case.run(case.model)
        assert list(seen) == [case.names[-1]]
        record, full = seen[case.names[-1]], whole[case.names[-1]]
        i = full.q.shape[2]
        torch.testing.assert_close(record.weights(), full.weights()[:, [2, 0]][:, :, [i - 1, 1]])
        torch.testing.assert_close(record.distance, full.distance[:, [2, 0]][:, :, [i - 1, 1]])
        assert record.heads == (2, 0)
        assert record.rows_kept == (i - 1, 1)
        assert record.q.shape[1:3] == (2, 2)
        assert record.k.shape[1] == 2


def test_gradients_are_cut_to_the_chosen_heads_and_rows() -> None:
    case = CASES["gpt2 eager"]()
    with watch(case.model) as whole:
        case.run(case.model).square().sum().backward()
    with watch(case.model, heads=[1], rows=[4, 2]) as seen:
        case.run(case.model).square().sum().backward()
    for name in seen:
        full, few = whole[name].gradient, seen[name].gradient
        assert full is not None
        assert few is not None
        torch.testing.assert_close(few, full[:, [1]][:, :, [4, 2]])


def test_chosen_heads_of_our_terms_keep_their_own_slopes() -> None:
    q, k, v = qkv(i=9, j=9, g=2)
    term = alibi(heads=6)
    with watch() as whole:
        attend(q, k, v, mask=causal(), scores=[term, torch.randn(6, 9, 9)])
    torch.manual_seed(1)
    bias = whole["attention"].terms[1].tensors()[0]
    with watch(heads=[5, 3], rows=[8, 0]) as seen:
        attend(q, k, v, mask=causal(), scores=[term, bias])
    torch.testing.assert_close(seen["attention"].weights(), whole["attention"].weights()[:, [5, 3]][:, :, [8, 0]])


def test_patterns_choose_modules_and_all_inside_them() -> None:
    case = CASES["t5 sdpa"]()
    with torch.no_grad(), watch(case.model, layers=["*.EncDecAttention", "encoder.block.1"]) as seen:
        case.run(case.model)
    assert list(seen) == [case.names[1], case.names[3], case.names[5]]


def test_values_are_left_out_and_tensors_go_elsewhere_on_request() -> None:
    case = CASES["llama eager"]()
    with torch.no_grad(), watch(case.model, values=False, device="cpu") as seen:
        case.run(case.model)
    assert all(record.v is None and record.q.device.type == "cpu" for record in seen.values())


def test_what_was_seen_does_not_change_with_the_model() -> None:
    q, k, v = qkv()
    bias = torch.randn(5, 7)
    with watch() as seen:
        functional.scaled_dot_product_attention(q, k, v, bias)
    expected = softmaxed(q, k, added=bias)
    for x in (q, k, v, bias):
        x.zero_()
    torch.testing.assert_close(seen["attention"].weights(), expected)


def test_calls_of_one_module_are_numbered_and_generation_is_seen() -> None:
    case = CASES["llama sdpa"]()
    with torch.no_grad(), watch(case.model.generate) as seen:
        case.model.generate(ids(1, 5), max_new_tokens=3, do_sample=False, pad_token_id=0)
    first = case.names[0]
    assert [record.name for record in seen.calls(first)] == [first, f"{first}:2", f"{first}:3"]
    last = seen[f"{first}:3"]
    assert last.q.shape[2] == 1
    assert last.k.shape[2] == 7
    assert int(last.query_positions[0]) == 6


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask", "ignore:flex_attention called without")
def test_queries_stand_where_they_do_whatever_the_cache() -> None:
    model, prompt = CASES["llama sdpa"]().model, torch.tensor([[5, 9, 7, 5, 8]])

    def generated(implementation: str, cache: str | None) -> list[Record]:
        model.set_attn_implementation(implementation)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), watch(model) as seen:
            model.generate(prompt, cache_implementation=cache, **settings)
        return seen.records

    grown = generated("sdpa", None)
    for implementation, cache in (("sdpa", "static"), ("eager", "static"), ("flex_attention", None)):
        for record, plain in zip(generated(implementation, cache), grown, strict=True):
            assert record.places == plain.places
            for column in ("distance", "previous", "first"):
                found, expected = ([getattr(head, column) for head in heads_of(each)] for each in (record, plain))
                assert found == pytest.approx(expected, abs=1e-5), (implementation, column)


def test_a_query_that_may_stand_anywhere_has_no_distance_and_says_why(tmp_path: Path) -> None:
    q, k, v = qkv(i=1, j=9)
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, (torch.arange(9) < 7)[None])
    assert record.distance is None
    assert record.note == "not known where its queries stand: the mask hides the last key and shows no diagonal"
    (head, *_) = heads_of(record, torch.arange(9).expand(2, -1))
    assert (head.distance, head.previous, head.first, head.induction) == (None, None, None, None)
    assert str(Seen([record]).table()).splitlines()[1].split()[-4:] == ["-", "-", "-", "-"]
    Seen([record]).save(tmp_path / "seen.safetensors")
    assert Seen.load(tmp_path / "seen.safetensors")[record.name].distance is None


def test_a_mask_with_a_diagonal_says_where_queries_stand() -> None:
    q, k, v = qkv(i=3, j=9)
    seen = torch.arange(9) <= torch.arange(3)[:, None] + 4
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, seen)
    assert record.query_positions.tolist() == [4, 5, 6]
    padded, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, (torch.arange(9) > 1).expand(3, -1))
    assert padded.query_positions.tolist() == [6, 7, 8]


def test_calls_outside_the_model_are_not_its_own() -> None:
    q, k, v = qkv()
    model = Calls(functional.scaled_dot_product_attention)
    with watch(model) as seen:
        functional.scaled_dot_product_attention(q, k, v)
        model(q, k, v)
    assert list(seen) == ["Calls"]


def test_one_watch_is_one_block() -> None:
    model = OneHead(True)
    watching = watch(model)
    with watching as seen:
        model(torch.randn(2, 5, 24), torch.ones(5, 5, dtype=torch.bool))
        with pytest.raises(ConfigError, match="this watch was entered before"), watching:
            pass
    with (
        pytest.raises(
            ConfigError, match=r"this watch was entered before.*: write `with watch\(\.\.\.\) as seen:` anew"
        ),
        watching,
    ):
        pass
    assert len(seen) == 1


def test_watching_inside_watching_sees_the_same() -> None:
    case = CASES["torch encoder"]()
    with torch.no_grad():
        plain = case.run(case.model)
        with watch(case.model) as outer, watch(case.model) as inner:
            out = case.run(case.model)
    assert torch.equal(plain, out)
    assert list(outer) == list(inner) == list(case.names)


CHECKPOINTED: dict[str, Any] = {
    "sdpa": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "by hand": lambda x: (x @ x.mT).softmax(-1) @ x,
    "attend": lambda x: attend(x[:, None], x[:, None], x[:, None]),
    "a layer of torch": nn.MultiheadAttention(24, 3, batch_first=True),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_blocks_are_seen_once(name: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    call = CHECKPOINTED[name]
    model = Calls((lambda x: call(x, x, x)[0]) if isinstance(call, nn.Module) else call)
    x = torch.randn(2, 5, 24, requires_grad=True)
    with watch(model) as seen:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert list(seen) == ["Calls"]


def test_checkpointed_models_of_hugging_face_are_seen_once() -> None:
    case = CASES["llama eager"]()
    case.model.train()
    case.model.gradient_checkpointing_enable()
    with watch(case.model) as seen:
        case.run(case.model).sum().backward()
    assert tuple(seen) == case.names
    assert all(record.gradient is not None for record in seen.values())


def test_inference_mode_and_autocast_are_welcome() -> None:
    case = CASES["llama sdpa"]()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        plain = case.run(case.model)
        with watch(case.model) as seen:
            out = case.run(case.model)
    assert torch.equal(plain, out)
    record = seen[case.names[0]]
    assert record.q.dtype == torch.bfloat16
    assert not record.q.is_inference()
    assert record.entropy.dtype == torch.float32


def test_a_function_registered_with_hugging_face_is_seen_with_its_mask() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    calls = []

    def out_of_sight(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any) -> Any:
        calls.append(mask)
        weights = softmaxed(q, k, rest["scaling"], None if mask is None else torch.where(mask, 0.0, -math.inf))
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
    """A small llama with grouped heads that runs on a function of one's own."""
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


def written(times: float, slope: float) -> Any:
    """Attention that adds the mask it is handed, if any, and has a scale and a bias on keys of its own."""

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
    "no mask, so the future is seen": (written(1.0, 0.0), False),
    "scores nine times as large": (written(9.0, 0.0), True),
    "a bias on keys": (written(1.0, 0.5), True),
    "groups of heads": (grouped, False),
    "sequences and heads in one axis": (folded, False),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_function_is_followed_inside_and_not_told_by_its_arguments(name: str) -> None:
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
        agrees(record, expected)
        assert record.route == "hugging face own"
        assert (record.weights().triu(1).count_nonzero() == 0) == masked


def test_a_registered_function_that_calls_sdpa_is_seen_with_its_groups_and_scale() -> None:
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
    """Attention that no ear reaches: in numpy."""
    a, b, c = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double().numpy() for x in (q, k, v))
    scores = np.einsum("bhic,bhjc->bhij", a, b) * scale
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return torch.from_numpy(np.einsum("bhij,bhje->bihe", weights / weights.sum(-1, keepdims=True), c)).to(q)


@pytest.mark.parametrize("late_hidden", [True, False])
def test_an_operator_in_which_nothing_is_heard_is_told_by_its_arguments_where_its_output_agrees(
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
    assert "output dropout changed" in repr(dropped)
    if late_hidden:
        assert [repr(record.mask) for record in seen.values()] == ["causal()"] * 2
        assert (
            seen[case.names[0]].note == "told by its arguments, not by what happens inside; 8 rows of its output agree"
        )
        assert not seen.left_out
    else:
        assert len(seen) == 0
        assert "left out 2: " in repr(seen)
        assert "whose output is not what its arguments mean: it has a mask, scale or bias of its own" in repr(seen)


def test_a_registered_function_without_a_mask_is_causal_as_its_module_says() -> None:
    from regard.see.hugging import from_interface

    q, k, v = qkv(i=7, j=7, g=2)
    bias = torch.randn(1, 6, 7, 7)
    sinks = torch.randn(6)
    heard = from_interface(
        "own", nn.Module(), q, k, v, None, is_causal=True, softcap=3.0, position_bias=bias, s_aux=sinks
    )
    assert repr(heard.mask) == "causal()"
    assert [t.name for t in heard.terms] == ["softcap", "additive", "sink"]
    heard = from_interface("flash_attention_2", nn.Module(), q, k, v, real(2, 7), sliding_window=3, is_causal=True)
    dense = heard.mask.dense(7, 7)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    assert torch.equal(dense[1, 0], (i >= j) & (i - j < 3))
    assert torch.equal(dense[0, 0], (i >= j) & (i - j < 3) & (j >= 2))


def test_a_registered_function_that_hides_a_whole_row_hides_its_bias_too() -> None:
    from regard.see.hugging import from_interface

    q, k, v = qkv(i=7, j=7)
    bias, mask = torch.randn(1, 6, 7, 7), torch.zeros(2, 1, 7, 7)
    mask[1, 0, 3] = LOW
    heard = from_interface("own", nn.Module(), q, k, v, mask, position_bias=bias)
    found = statistics(heard.q, heard.k, mask=heard.mask, scores=heard.terms, beta=heard.beta, places=heard.places)
    torch.testing.assert_close(found.weights(), softmaxed(q, k, added=bias + mask))


def test_a_block_mask_of_hugging_face_is_read_as_its_function() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from regard.see.hugging import from_interface

    q, k, v = qkv(i=7, j=7, g=2)
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 2 + b), 2, None, 7, 7, device="cpu")
    heard = from_interface("flex_attention", nn.Module(), q, k, v, blocks, scaling=0.3)
    assert heard.beta == 0.3
    assert heard.k.shape[1] == 2
    i, j = torch.arange(7)[:, None], torch.arange(7)
    seen = statistics(heard.q, heard.k, mask=heard.mask, places=heard.places).weights() > 0
    for b in range(2):
        assert torch.equal(seen[b, 0], (i >= j) & (i - j < 2 + b))


def test_compiled_models_are_refused_with_the_way_out() -> None:
    class Fake(nn.Module):
        pass

    Fake.__name__ = "OptimizedModule"
    with pytest.raises(ConfigError, match="watch the module that was given to"), watch(Fake()):
        pass
    compiled = torch.compile(nn.Linear(3, 5), backend="eager")
    with pytest.raises(ConfigError, match=r"the model is compiled.*out of sight"), watch(compiled):
        pass
    model = nn.Sequential(nn.Linear(3, 5))
    model[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"'0' of the model is compiled"), watch(model):
        pass


def nearest(x: Tensor) -> Tensor:
    """Attention of a sequence to itself."""
    return functional.scaled_dot_product_attention(x, x, x) + 1


class Nearest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nearest(x)


UNHEARD = "ran compiled, where nothing can be heard; call it uncompiled, or under torch.compiler.set_stance"


@pytest.mark.parametrize("watched", ["the model", "a part", "nothing", "another model"])
def test_a_compiled_model_runs_as_ever_and_that_it_cannot_be_heard_is_told(watched: str) -> None:
    model, other = nn.Sequential(Nearest()), OneHead(True)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 3, 5, 8)
    plain = compiled(x)
    with watch({"the model": model, "a part": model[0], "nothing": None, "another model": other}[watched]) as seen:
        assert torch.equal(compiled(x), plain)
        assert torch.equal(compiled(x), plain)
    assert len(seen) == 0
    if watched == "another model":
        assert not seen.left_out
    else:
        ((reason, count),) = seen.left_out.items()
        assert (reason.partition("(")[0], count) == (f"Sequential {UNHEARD}", 2)
    if watched != "another model":
        with torch.compiler.set_stance("force_eager"), watch(model) as seen:
            compiled(x)
        assert list(seen) == ["0"]
        assert not seen.left_out


def test_a_compiled_function_inside_a_model_is_told_also_to_a_watcher_around() -> None:
    inner = torch.compile(nearest, backend="aot_eager")
    model = Calls(inner)
    x = torch.randn(2, 3, 5, 8)
    with watch() as outer, watch(model) as seen:
        out = model(x)
    assert torch.equal(out, nearest(x))
    assert [reason.partition("(")[0] for reason in seen.left_out] == [f"nearest {UNHEARD}"]
    assert outer.left_out == seen.left_out
    with pytest.raises(TypeError, match="takes 1 positional argument"), watch(model):
        model(x, x)
    assert nothing_left()


def test_a_watcher_steps_aside_for_compiled_code_and_listens_again_after_it() -> None:
    def split(x: Tensor) -> Tensor:
        return nearest(x.unflatten(-1, (3, 8)).transpose(1, 2))  # which no compiler takes with a watcher around it

    made = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    compiled = torch.compile(split, backend=backend, fullgraph=True)
    x = torch.randn(2, 5, 24)
    plain = compiled(x)
    with watch() as outer, watch() as inner:
        assert torch.equal(compiled(x), plain)
        with pytest.raises(Exception, match="unflatten"):
            compiled(x[..., :23])
        assert [type(torch._C._get_function_stack_at(at)).__name__ for at in range(2)] == ["Watcher"] * 2
        split(x)
    assert len(outer) == len(inner) == 1
    assert list(inner.left_out.values()) == list(outer.left_out.values()) == [2]
    assert len(made) == 1  # nothing was compiled again


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_heard_where_it_is_not_compiled_and_told_where_it_is() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = qkv(13, 13)
    masking = torch.compile(create_block_mask, backend="aot_eager")
    with watch() as seen:
        masking(lambda b, h, i, j: i >= j, None, None, 13, 13, device="cpu")
        flex_attention(q, k, v)
    assert len(seen) == 1
    assert not seen.left_out
    compiled = torch.compile(flex_attention, backend="aot_eager")
    plain = compiled(q, k, v)
    with watch() as seen:
        assert torch.equal(compiled(q, k, v), plain)
    assert [reason.partition("(")[0] for reason in seen.left_out] == [f"flex_attention {UNHEARD}"]
    with torch.compiler.set_stance("force_eager"), watch() as seen:
        compiled(q, k, v)
    assert len(seen) == 1


def test_code_compiled_for_the_first_time_inside_the_block_is_told() -> None:
    """In a process of its own, where nothing has loaded the compiler yet."""
    script = """
import sys, torch
from regard.see.watch import watch
assert "torch._dynamo.eval_frame" not in sys.modules
original = torch.compile
with watch() as seen:
    f = torch.compile(lambda x: x.softmax(-1) @ x, backend="eager")
    f(torch.ones(1, 5, 5))
    f(torch.ones(1, 5, 5))
assert list(seen.left_out.values()) == [2], seen
assert torch.compile is original
assert not hasattr(torch._dynamo.eval_frame._callback_from_stance, "__wrapped__")
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning:regard", "-c", script], check=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_told_whether_it_is_in_the_model_or_made_of_it() -> None:
    model = nn.Sequential(Nearest())
    x = torch.randn(2, 3, 5, 8)
    traced = torch.jit.trace(model, (x,))
    with watch(model) as seen:
        assert torch.equal(traced(x), model(x))
    assert list(seen) == ["0"]
    (reason,) = seen.left_out
    assert reason.endswith("ran as TorchScript, where nothing can be heard; call the module it was made of")
    outer = nn.ModuleDict({"part": traced})
    with watch(outer) as seen:
        outer["part"](x)
    (reason,) = seen.left_out
    assert reason.startswith("part ran as TorchScript")


def test_calls_that_cannot_be_kept_are_counted() -> None:
    q, k, v = qkv()
    with watch() as seen:
        torch.vmap(functional.scaled_dot_product_attention)(q, k, v)
        functional.scaled_dot_product_attention(q.to("meta"), k.to("meta"), v.to("meta"))
    assert len(seen) == 0
    assert sum(seen.left_out.values()) == 2
    assert "left out 1: calls inside a transform" in repr(seen)
    assert "tensors without numbers" in repr(seen)


BAD_CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "half a row": ({"rows": [1.5]}, r"each of rows takes a whole number, not 1\.5"),
    "a truth": ({"heads": [True]}, "each of heads takes a whole number, not True"),
    "one row": ({"rows": 3}, r"rows takes a list of whole numbers such as \[0, -1\], or None for all, not 3"),
    "a text": ({"heads": "0"}, "heads takes a list of whole numbers such as .*, not '0'"),
    "two axes": ({"rows": torch.zeros(2, 3, dtype=torch.long)}, "rows takes a list of whole numbers"),
    "no such device": ({"device": "gpu"}, "device='gpu' cannot be used here: .*; 'cpu' always can"),
    "no numbers": ({"device": "meta"}, "device='meta' keeps no numbers, so nothing could be seen"),
    "a number for a layer": ({"layers": 3}, "layers takes names or patterns of modules, such as .*, not 3"),
    "numbers for layers": ({"layers": ["first", 5]}, "layers takes names or patterns of modules, such as .*, not 5"),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_a_bad_choice_is_refused_before_the_model_runs(name: str) -> None:
    choice, words = BAD_CHOICES[name]
    with pytest.raises(ConfigError, match=words):
        watch(CASES["by hand"]().model, **choice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda can be used here")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used here: .*; 'cpu' always can"):
        watch(CASES["by hand"]().model, device="cuda")


def test_whole_numbers_of_any_kind_choose_rows() -> None:
    q, k, v = qkv()
    with watch(rows=torch.tensor([3, -1]), heads=range(1, 3)) as seen:  # type: ignore[arg-type]
        functional.scaled_dot_product_attention(q, k, v)
    assert (seen["attention"].rows_kept, seen["attention"].heads) == ((3, 4), (1, 2))


def test_errors_say_what_there_is() -> None:
    model = CASES["by hand"]().model
    with pytest.raises(ConfigError, match=r"layers='third' is no module of the model; it has first, first\.qkv"):
        watch(model, layers="third")
    with (
        pytest.raises(ShapeError, match="heads asks for 3, but first has 3 of them; choose from 0 to 2"),
        watch(model, heads=[3]),
    ):
        model(torch.randn(1, 5, 24))
    with pytest.raises(ConfigError, match="watch takes a model, a function or nothing, not int"), watch(3):  # type: ignore[arg-type]
        pass
    with watch(model) as seen:
        with pytest.raises(UnknownNameError, match="no attention was; run the model inside"):
            seen["first"]
        model(torch.randn(1, 5, 24))
    with pytest.raises(
        UnknownNameError, match=r"no layer 'frist' was seen; did you mean 'first'\? \(there are: first, se"
    ):
        seen["frist"]
    assert seen.get("frist") is None
    assert "first" in seen
    assert len(seen) == 2
