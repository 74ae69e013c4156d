"""Watching any model: the numbers are those of eager attention, no bit changes, nothing stays behind."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.base.errors import ConfigError, ShapeError, UnknownNameError
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.masks import causal, padding, window
from regard.core.masks.data import DenseMask
from regard.core.masks.forms.causal import Causal
from regard.core.scores import alibi
from regard.nn.attention import Attention
from regard.see.heads import measure_heads
from regard.see.record import Record, Seen
from regard.see.relevance import rollout
from regard.see.watch import watch
from tests.see.model_cases import CASES, Case, ids
from tests.see.watch_helpers import (
    CallModule,
    OneHead,
    assert_statistics_match,
    no_hooks_left,
    qkv,
    seen_of,
    softmax_weights,
)

pytestmark = [
    pytest.mark.usefixtures("check_hooks_removed"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor"),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


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
            expected = expected * (record.lse > -math.inf)[..., None]  # empty rows are zero in sdpa, uniform in eager
        assert_statistics_match(record, expected)
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


def test_gradients_are_recorded_when_backward_follows_the_block(case: Case) -> None:
    with watch(case.model) as seen:
        out = case.run(case.model)
    assert all(record.gradient is None for record in seen.values())
    out.square().sum().backward()
    for record in seen.values():
        assert record.gradient is not None
        assert record.v is not None
        assert record.gradient.shape == (*record.q.shape[:3], record.v.shape[-1])
        assert record.gradient.abs().sum() > 0


def test_all_hooks_are_removed_after_an_error(case: Case) -> None:

    def body() -> None:
        with watch(case.model):
            case.run(case.model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert no_hooks_left()
    assert not any("forward" in vars(module) for module in case.model.modules())


def test_sdpa_counts_causality_from_the_top_left_corner() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        record.weights(), softmax_weights(q, k, added=torch.zeros(5, 7).masked_fill(hidden, -math.inf))
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
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, 0.7))
    torch.testing.assert_close(record.out, out)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_sdpa_takes_any_number_of_axes(axes: int) -> None:
    lead = (3, 2, 4)[: axes - 2]
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 3)
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v)
    expected = (q @ k.mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(record.weights().reshape(expected.shape), expected)


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
def test_merged_batch_and_heads_are_split_by_the_head_count_of_the_module(by_hand: bool) -> None:
    q, k, v = qkv(h=3, g=3)
    bias = torch.randn(2, 3, 5, 7)
    model = Folded(by_hand)
    with watch(model) as seen:
        model(q, k, v, bias)
    record = seen["Folded"]
    assert torch.equal(record.q, q)
    assert record.note.startswith("heads read from num_heads=3 of its module")
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, added=bias))
    model.num_heads = 5  # which six are no multiple of
    with watch(model) as seen:
        model(q, k, v, bias)
    assert seen["Folded"].q.shape == (6, 1, 5, 8)
    assert "heads" not in seen["Folded"].note


def test_heads_merged_for_the_softmax_are_read_from_the_product() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: (q @ k.mT).flatten(0, 1).softmax(-1).unflatten(0, (2, 6)) @ v, q, k, v)
    assert record.q.shape[:2] == (2, 6)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, 1.0))


def test_a_boolean_mask_means_visible_and_numbers_are_added() -> None:
    q, k, v = qkv()
    visible = torch.rand(2, 1, 5, 7) > 0.4
    visible[..., 0] = True
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=visible), q, k, v)
    low = torch.zeros(2, 1, 5, 7).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, added=low))
    bias = torch.randn(6, 5, 7)
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=bias), q, k, v)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, added=bias))
    assert [term.name for term in record.terms] == ["additive"]


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_an_additive_mask_without_other_numbers_becomes_a_mask(lowest: float) -> None:
    q, k, v = qkv()
    visible = torch.rand(5, 7) > 0.4
    visible[:, 0] = True
    numbers = torch.zeros(5, 7).masked_fill(~visible, lowest)
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=numbers), q, k, v)
    assert isinstance(record.mask, DenseMask)
    assert not record.terms
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, added=numbers))


def test_a_row_filled_with_the_lowest_number_is_uniform() -> None:
    q, k, v = qkv()
    numbers = torch.zeros(2, 1, 5, 7)
    numbers[0, 0, 2] = torch.finfo(torch.float32).min
    numbers[1, 0, 3, 4:] = torch.finfo(torch.float32).min
    record, _ = seen_of(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=numbers), q, k, v)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, added=numbers))
    torch.testing.assert_close(record.entropy[0, :, 2], torch.full((6,), math.log(7)))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_recorded_with_its_functions() -> None:
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
    assert_statistics_match(record, softmax_weights(q, k, 0.4, added))
    torch.testing.assert_close(record.out, out)
    with watch(heads=[4], rows=[12, 3]) as seen:
        call(q, k, v)
    torch.testing.assert_close(seen["attention"].weights(), softmax_weights(q, k, 0.4, added)[:, [4]][:, :, [12, 3]])


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
def test_nn_multiheadattention_is_recorded_with_its_weights(name: str, masked: str, need_weights: bool) -> None:
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
    heads = record.out.transpose(1, 2).flatten(2)
    again = functional.linear(heads, layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(
        again if settings.get("batch_first") else again.transpose(0, 1), out, atol=1e-5, rtol=1e-4
    )


def test_unbatched_input_and_the_functional_form_are_recorded() -> None:
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
    heads = record.out.clone().requires_grad_()
    out = functional.linear(heads.transpose(1, 2).flatten(2), layer.out_proj.weight.detach())
    (out * towards).sum().backward()
    assert record.gradient is not None
    torch.testing.assert_close(record.gradient, heads.grad)


def test_a_torch_decoder_is_recorded_with_its_cross_attention() -> None:
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


def test_attend_is_recorded_once_with_its_mask() -> None:
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
        record.out,
        attend(record.q, record.k, record.v, mask=mask, scores=alibi(heads=6)),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "blocked", "reference"])
def test_calls_inside_our_kernels_are_not_recorded_again(kernel: str) -> None:
    q, k, v = qkv(i=9, j=9)
    with watch() as seen:
        attend(q, k, v, mask=window(before=2), kernel=kernel)
    assert list(seen) == ["attention"]
    assert seen["attention"].route == f"attend, {kernel}"


def test_only_selected_layers_heads_and_rows_are_recorded() -> None:
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
        assert (full.distance is None) == (name == "t5 eager")  # its last layer is cross attention
        if full.distance is not None:
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


def test_options_values_and_device() -> None:
    case = CASES["llama eager"]()
    with torch.no_grad(), watch(case.model, values=False, device="cpu") as seen:
        case.run(case.model)
    assert all(record.v is None and record.q.device.type == "cpu" for record in seen.values())


def test_records_are_copies() -> None:
    q, k, v = qkv()
    bias = torch.randn(5, 7)
    with watch() as seen:
        functional.scaled_dot_product_attention(q, k, v, bias)
    expected = softmax_weights(q, k, added=bias)
    for x in (q, k, v, bias):
        x.zero_()
    torch.testing.assert_close(seen["attention"].weights(), expected)


@pytest.mark.parametrize("options", [{}, {"heads": [1], "rows": [0, 2]}], ids=["whole", "selected"])
def test_records_and_models_are_freed_without_the_garbage_collector(options: dict[str, Any]) -> None:
    """Otherwise a GPU runs out of memory: the collector does not see how large tensors are."""
    model = nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12)

    def use_both() -> list[Any]:
        with torch.no_grad(), watch(model, **options) as seen:
            model(x)
        record = seen.records[0]
        assert record.entropy.isfinite().all()
        with torch.no_grad(), regard.intervene(model) as edit:
            edit.patch(0, source=seen) if not options else edit.ablate(0)
            edit.hide(0, keys=[1])
            model(x)
        return [weakref.ref(each) for each in (seen, record, record.q, edit)]

    use_both()  # what is made once, such as caches, is not counted
    gc.collect()
    gc.disable()
    try:
        alive = use_both()
        assert [each() for each in alive] == [None] * len(alive)
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_repeated_calls_are_numbered_and_generation_is_recorded() -> None:
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
def test_query_positions_do_not_depend_on_the_cache() -> None:
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
            assert record.positions == plain.positions
            for column in ("distance", "previous", "first"):
                found, expected = ([getattr(head, column) for head in measure_heads(each)] for each in (record, plain))
                assert found == pytest.approx(expected, abs=1e-5), (implementation, column)


def test_unknown_query_positions_give_no_distance_and_a_note(tmp_path: Path) -> None:
    q, k, v = qkv(i=1, j=9)
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, (torch.arange(9) < 7)[None])
    assert record.distance is None
    unknown = "the positions of its queries are unknown: i=1 queries, j=9 keys, and the mask has no diagonal"
    assert record.note == unknown
    (head, *_) = measure_heads(record, torch.arange(9).expand(2, -1))
    assert (head.distance, head.previous, head.first, head.induction) == (None, None, None, None)
    assert str(Seen([record]).table()).splitlines()[1].split()[-4:] == ["-", "-", "-", "-"]
    Seen([record]).save(tmp_path / "seen.safetensors")
    assert Seen.load(tmp_path / "seen.safetensors")[record.name].distance is None


def test_query_positions_are_read_from_a_mask_with_a_diagonal() -> None:
    q, k, v = qkv(i=3, j=9)
    seen = torch.arange(9) <= torch.arange(3)[:, None] + 4
    record, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, seen)
    assert record.query_positions.tolist() == [4, 5, 6]
    padded, _ = seen_of(functional.scaled_dot_product_attention, q, k, v, (torch.arange(9) > 1).expand(3, -1))
    assert padded.query_positions.tolist() == [6, 7, 8]


def test_calls_outside_the_model_are_not_recorded() -> None:
    q, k, v = qkv()
    model = CallModule(functional.scaled_dot_product_attention)
    with watch(model) as seen:
        functional.scaled_dot_product_attention(q, k, v)
        model(q, k, v)
    assert list(seen) == ["CallModule"]


def test_nested_watchers_record_the_same() -> None:
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
def test_checkpointed_blocks_are_recorded_once(name: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    call = CHECKPOINTED[name]
    model = CallModule((lambda x: call(x, x, x)[0]) if isinstance(call, nn.Module) else call)
    x = torch.randn(2, 5, 24, requires_grad=True)
    with watch(model) as seen:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert list(seen) == ["CallModule"]


def test_checkpointed_hugging_face_models_are_recorded_once() -> None:
    case = CASES["llama eager"]()
    case.model.train()
    case.model.gradient_checkpointing_enable()
    with watch(case.model) as seen:
        case.run(case.model).sum().backward()
    assert tuple(seen) == case.names
    assert all(record.gradient is not None for record in seen.values())


def test_inference_mode_and_autocast() -> None:
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


def test_calls_that_cannot_be_recorded_are_counted() -> None:
    q, k, v = qkv()
    with watch() as seen:
        torch.vmap(functional.scaled_dot_product_attention)(q, k, v)
        functional.scaled_dot_product_attention(q.to("meta"), k.to("meta"), v.to("meta"))
    assert len(seen) == 0
    assert sum(seen.left_out.values()) == 2
    assert "left out 1: calls inside a transform" in repr(seen)
    assert "meta or fake tensors" in repr(seen)


BAD_CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "half a row": ({"rows": [1.5]}, r"each of rows takes a whole number, not 1\.5"),
    "a truth": ({"heads": [True]}, "each of heads takes a whole number, not True"),
    "one row": ({"rows": 3}, r"rows takes a list of whole numbers such as \[0, -1\], or None for all, not 3"),
    "a text": ({"heads": "0"}, "heads takes a list of whole numbers such as .*, not '0'"),
    "two axes": ({"rows": torch.zeros(2, 3, dtype=torch.long)}, "rows takes a list of whole numbers"),
    "no such device": ({"device": "gpu"}, "device='gpu' cannot be used here: .*; 'cpu' always can"),
    "no numbers": ({"device": "meta"}, "device='meta' holds no numbers"),
    "a number for a layer": ({"layers": 3}, "layers takes names or patterns of modules, such as .*, not 3"),
    "numbers for layers": ({"layers": ["first", 5]}, "layers takes names or patterns of modules, such as .*, not 5"),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_invalid_options_are_errors_before_the_model_runs(name: str) -> None:
    choice, words = BAD_CHOICES[name]
    with pytest.raises(ConfigError, match=words):
        watch(CASES["by hand"]().model, **choice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda can be used here")
def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used here: .*; 'cpu' always can"):
        watch(CASES["by hand"]().model, device="cuda")


def test_indices_may_be_a_tensor_or_a_range() -> None:
    q, k, v = qkv()
    with watch(rows=torch.tensor([3, -1]), heads=range(1, 3)) as seen:
        functional.scaled_dot_product_attention(q, k, v)
    assert (seen["attention"].rows_kept, seen["attention"].heads) == ((3, 4), (1, 2))


def test_errors_of_layers_heads_and_names() -> None:
    model = CASES["by hand"]().model
    with pytest.raises(ConfigError, match=r"layers='third' matches no module of the model; it has first, first\.qkv"):
        watch(model, layers="third")
    with (
        pytest.raises(ShapeError, match="heads has index 3, but first has 3 heads; choose from 0 to 2"),
        watch(model, heads=[3]),
    ):
        model(torch.randn(1, 5, 24))
    with pytest.raises(ConfigError, match="watch takes a model, a function or None, not int"), watch(3):
        pass
    with watch(model) as seen:
        with pytest.raises(UnknownNameError, match="no attention was recorded; run the model inside"):
            seen["first"]
        model(torch.randn(1, 5, 24))
    with pytest.raises(
        UnknownNameError, match=r"there is no record of 'frist'; did you mean 'first'\? \(recorded: first, se"
    ):
        seen["frist"]
    assert seen.get("frist") is None
    assert "first" in seen
    assert len(seen) == 2


def test_a_call_with_offsets_of_each_sequence_is_left_out_with_the_reason() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    module = torch.nn.Identity()
    with watch(module) as seen:
        attend(q, k, v, mask=causal(), positions=Positions(0, offsets=torch.tensor([1, 2])))
    assert "positions differ between sequences (Positions.offsets)" in seen.left_out
