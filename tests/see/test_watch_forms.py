"""Forms of attention in foreign code: any number of axes, functions by other names, masks by any number."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.see.heads import measure_heads
from regard.see.leading_axes import HeadCount, read_leading_axes
from regard.see.watch import watch
from tests.peers import import_timm
from tests.see.watch_helpers import CallModule, assert_statistics_match, no_hooks_left, seen_of

SCALE = 8**-0.5


class FiveAxes(nn.Module):
    """Attention over (b, heads, blocks, n, c)."""

    def __init__(self, by_hand: bool, heads: int | None) -> None:
        super().__init__()
        self.by_hand = by_hand
        if heads is not None:
            self.num_heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_hand:
            return (q @ k.mT * SCALE).softmax(-1) @ v
        return functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("by_hand", [True, False])
def test_five_axes_are_read_by_the_head_count_of_the_module(by_hand: bool) -> None:
    q, k, v = (torch.randn(2, 3, 7, 5, c) for c in (8, 8, 11))
    model = FiveAxes(by_hand, 3)
    v.requires_grad_()
    with watch(model) as seen:
        out = model(q, k, v)
    record = seen["FiveAxes"]
    assert record.q.shape == (14, 3, 5, 8)
    assert record.note == "heads read from num_heads=3 of its module"
    weights = (q @ k.mT * SCALE).softmax(-1)
    assert_statistics_match(record, weights.transpose(1, 2).flatten(0, 1))
    wanted = torch.randn_like(out)
    (out * wanted).sum().backward()
    assert record.gradient is not None
    torch.testing.assert_close(record.gradient, wanted.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("by_hand", [True, False])
def test_an_unknown_number_of_heads_is_noted(by_hand: bool) -> None:
    q = torch.randn(2, 3, 7, 5, 8)
    model = FiveAxes(by_hand, None)
    with watch(model) as seen:
        model(q, q, q)
    assert seen["FiveAxes"].q.shape == (6, 7, 5, 8)
    assert "number of heads is unknown: of the axes (2, 3, 7) before positions the last" in seen["FiveAxes"].note


def test_leading_axes_of_any_kind() -> None:
    count = HeadCount(6, "known")
    for sizes, number, expected in [
        ((), None, (1, 1)),
        ((5,), None, (5, 1)),
        ((12,), count, (2, 6)),
        ((11,), count, (11, 1)),
        ((2, 5), count, (2, 5)),
        ((2, 6, 5), count, (10, 6)),
        ((6, 6, 5), count, (30, 6)),
        ((5, 2, 6), count, (10, 6)),
        ((5, 2, 3), count, (5, 6)),
        ((5, 2, 7), count, (10, 7)),
    ]:
        axes = read_leading_axes(sizes, number)
        x = torch.randn(*sizes, 4, 9)
        assert axes.to_heads(x).shape == (*expected, 4, 9)
        assert torch.equal(axes.from_heads(axes.to_heads(x)), x)
    assert "several ways" in read_leading_axes((6, 6, 5), count).note


def timm_attention(name: str) -> tuple[nn.Module, Tensor]:
    import_timm()
    from timm.models import hiera, nest, volo

    if name == "nest":
        return nest.Attention(24, num_heads=3), torch.randn(2, 5, 7, 24)
    if name == "hiera":
        layer = hiera.MaskUnitAttention(24, 24, heads=3, q_stride=1, window_size=4, use_mask_unit_attn=True)
        return layer, torch.randn(2, 20, 24)
    return volo.OutlookAttention(24, num_heads=3), torch.randn(2, 6, 5, 24)


@pytest.mark.parametrize("name", ["nest", "hiera", "volo"])
def test_timm_layers_with_five_axes_have_their_own_heads(name: str) -> None:
    layer, x = timm_attention(name)
    with torch.no_grad(), watch(layer) as seen:
        layer(x)
    assert not seen.left_out
    (record,) = seen.values()
    assert record.q.shape[1] == 3
    assert "heads=3 of its module" in record.note


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)


TWO_AXES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k, v: (q @ k.T * SCALE).softmax(-1) @ v,
    "mm": lambda q, k, v: torch.mm((torch.mm(q, k.T) * SCALE).softmax(-1), v),
    "inner": lambda q, k, v: (torch.inner(q, k) * SCALE).softmax(-1) @ v,
    "linear": lambda q, k, v: (functional.linear(q, k) * SCALE).softmax(-1) @ v,
    "addmm": lambda q, k, v: torch.addmm(
        torch.zeros(3), torch.addmm(torch.zeros(7), q, k.T, alpha=SCALE).softmax(-1), v, beta=0
    ),
    "tensordot": lambda q, k, v: torch.tensordot((torch.tensordot(q, k, ([1], [1])) * SCALE).softmax(-1), v, dims=1),
    "einsum": lambda q, k, v: torch.einsum("ij,je->ie", (torch.einsum("ic,jc->ij", q, k) * SCALE).softmax(-1), v),
    "multi_dot": lambda q, k, v: torch.linalg.multi_dot([(q @ k.T * SCALE).softmax(-1), v]),
    "masked": lambda q, k, v: (q @ k.T * SCALE).masked_fill(torch.ones(5, 7).triu(3).bool(), -math.inf).softmax(-1) @ v,
    "sdpa": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
}


@pytest.mark.parametrize("form", TWO_AXES)
def test_two_axes_are_one_sequence_with_one_head(form: str) -> None:
    q, k, v = matrices()
    record, out = seen_of(TWO_AXES[form], q, k, v)
    assert record.q.shape == (1, 1, 5, 8)
    torch.testing.assert_close(record.weights()[0, 0] @ v, out)
    torch.testing.assert_close(record.q[0, 0], q)
    torch.testing.assert_close(record.k[0, 0], k)


OTHER_NAMES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch.special.softmax": lambda q, k, v: torch.special.softmax(q @ k.mT * SCALE, -1) @ v,
    "matmul by name": lambda q, k, v: torch.matmul(
        input=(torch.matmul(input=q, other=k.mT) * SCALE).softmax(-1), other=v
    ),
    "a method by name": lambda q, k, v: (q.matmul(other=k.mT) * SCALE).softmax(dim=-1).matmul(other=v),
    "bmm by name": lambda q, k, v: torch.bmm(
        (torch.bmm(q.flatten(0, 1), mat2=k.flatten(0, 1).mT) * SCALE).softmax(-1), mat2=v.flatten(0, 1)
    ).unflatten(0, (2, 6)),
    "torch.linalg.matmul": lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.mT).mul(SCALE).softmax(-1), v),
    "aten.matmul": lambda q, k, v: torch.ops.aten.matmul(
        torch.ops.aten.softmax.int(torch.ops.aten.matmul(q, k.mT) * SCALE, -1), v
    ),
    "aten.scaled_dot_product_attention": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "its overload": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v),
}


@pytest.mark.parametrize("form", OTHER_NAMES)
def test_functions_by_other_names_are_recorded(form: str) -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 7, 8), torch.randn(2, 6, 7, 3)
    record, _ = seen_of(OTHER_NAMES[form], q, k, v)
    weights = (q @ k.mT * SCALE).softmax(-1)
    torch.testing.assert_close(record.weights().reshape(weights.shape), weights)


ONE_QUERY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k, v: torch.softmax(k @ q[0] * SCALE, 0) @ v,
    "mv": lambda q, k, v: torch.mv(v.T, torch.mv(k, q[0]).div(3).softmax(-1)),
    "by name": lambda q, k, v: torch.matmul(torch.softmax(input=q[0] @ k.T + 1, dim=0), other=v),
}


@pytest.mark.parametrize("form", ONE_QUERY)
def test_a_single_query_without_an_axis_is_listed(form: str) -> None:
    with watch() as seen:
        ONE_QUERY[form](*matrices())
    assert not len(seen)
    (reason,) = seen.left_out
    assert "one query without an axis: pass queries (1, c), as q[None]" in reason


def test_products_of_vectors_and_class_probabilities_are_no_attention() -> None:
    layer, x, experts = nn.Linear(5, 7), torch.randn(5), torch.randn(7, 4)
    with watch() as seen:
        torch.softmax(layer.weight @ x, 0) @ experts  # a router of experts
        torch.randn(3, 7) @ (torch.randn(7, 5) @ x)
        torch.softmax(torch.randn(7), 0) @ experts
    assert not len(seen)
    assert not seen.left_out


def test_other_weights_and_values_of_matrices_are_listed() -> None:
    q, k, v = matrices()
    with watch() as seen:
        (q @ k.T).softmax(-1) @ v[:, 0]
        functional.softmin(-(q @ k.T), -1) @ v
        powers = (q @ k.T).exp()
        (powers / powers.sum(-1, keepdim=True)) @ v
        (q @ k.T).relu() @ v  # may be a layer whose weights are no parameters
    reasons = [reason.partition(", which")[0] for reason in seen.left_out]
    times = "values were multiplied by"
    assert reasons == [
        "values had one axis, that of keys",
        f"{times} softmin of a product",
        f"{times} exp of a product",
    ]
    with watch() as recorded:
        torch.ops.aten._safe_softmax(q @ k.T, -1) @ v
    assert len(recorded) == 1


def test_a_fused_operator_that_is_called_directly_is_listed() -> None:
    q = torch.randn(2, 6, 5, 8)
    with watch() as seen:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert not seen
    ((reason, count),) = seen.left_out.items()
    assert "flash_attention_for_cpu was called directly" in reason
    assert count == 1


def deformable(x: Tensor, sampled: Tensor) -> Tensor:
    """The sum over sampled points of multi-scale deformable attention, as Hugging Face writes it."""
    b, n, h, points = x.shape
    weights = x.softmax(-1).view(b, n, h, 2, points // 2)
    weights = weights.transpose(1, 2).reshape(b * h, 1, n, points)
    return (sampled * weights).sum(-1)


def test_deformable_attention_is_listed() -> None:
    with watch() as seen:
        deformable(torch.randn(2, 7, 3, 8), torch.randn(6, 5, 7, 8))
    assert not seen
    ((reason, _),) = seen.left_out.items()
    assert "softmax" in reason


POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda w, x: torch.bmm(w.unsqueeze(1), x),
    "getitem": lambda w, x: w[:, None] @ x,
    "values first": lambda w, x: x.mT @ functional.dropout(w, 0.1)[..., None],
    "einsum": lambda w, x: torch.einsum("bj,bje->be", w, x),
}


@pytest.mark.parametrize("form", POOLED)
def test_one_row_of_weights_for_each_sequence_is_listed(form: str) -> None:
    query, keys = torch.randn(2, 8), torch.randn(2, 7, 8)
    with watch() as seen:
        scores = torch.bmm(keys, query.unsqueeze(2)).squeeze(2)  # Luong, Pham and Manning 2015
        POOLED[form](scores.softmax(1), keys)
    assert not seen
    (reason,) = seen.left_out
    assert reason.startswith("values were multiplied by a softmax with one row for each sequence")


def test_attention_between_the_nodes_of_a_graph_is_listed() -> None:
    nodes, links = torch.randn(7, 5), torch.rand(7, 7) > 0.5
    left, right = torch.randn(2, 5, 1)
    with watch() as seen:
        scores = functional.leaky_relu(nodes @ left + (nodes @ right).T)  # Velickovic et al. 2018
        torch.where(links, scores, -9e15).softmax(1) @ nodes
    assert not seen
    (reason,) = seen.left_out
    assert "softmax of a square matrix" in reason


def test_class_probabilities_and_mixtures_of_experts_are_no_attention() -> None:
    gates, classes = torch.randn(7, 3).softmax(-1), nn.Parameter(torch.randn(1, 3, 4))
    with watch() as seen:
        shares = gates.softmax(-1)
        (shares[..., None] * torch.randn(7, 3, 4)).sum(1)
        (shares[:, None] * torch.randn(7, 4, 3)).sum(-1)
        shares[:, None] @ classes
        torch.einsum("be,ed->bd", shares, torch.randn(3, 4))
        shares @ torch.randn(3, 4)
    assert repr(seen) == "nothing recorded"


@pytest.mark.parametrize("form", ["topk", "gather"])
def test_a_softmax_of_selected_scores_is_listed(form: str) -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 5).unbind()
    with watch() as seen:
        scores = q @ k.mT
        best, chosen = scores.topk(4, -1)
        best = best if form == "topk" else scores.gather(-1, chosen)
        values = v[:, :, None].expand(2, 3, 7, 7, 5).gather(3, chosen[..., None].expand(2, 3, 7, 4, 5))
        (best.softmax(-1)[..., None] * values).sum(-2)
    assert not seen
    (reason,) = seen.left_out
    assert f"a softmax of {form} of scores" in reason


def test_a_custom_operator_for_attention_is_listed() -> None:
    @torch.library.custom_op("regard_tests::tiled_attn", mutates_args=())
    def tiled_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) @ v).clone()

    q = torch.randn(2, 3, 7, 5)
    with watch() as seen:
        torch.ops.regard_tests.tiled_attn(q, q, q)
        torch.ops.regard_tests.tiled_attn.default(q, q, q)
    assert not seen
    assert seen.left_out == {"the custom operator regard_tests::tiled_attn was called; it may be attention": 2}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_listed() -> None:
    q = torch.nested.nested_tensor_from_jagged(torch.randn(11, 3, 5), torch.tensor([0, 7, 11])).transpose(1, 2)
    with watch() as seen:
        functional.scaled_dot_product_attention(q, q, q)
    assert not seen
    assert seen.left_out == {"calls on nested tensors; pad them with torch.nested.to_padded_tensor": 1}


def test_separable_and_factorised_attention_are_listed() -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 5).unbind()
    with watch() as seen:
        (k.mT * torch.randn(2, 3, 1, 7).softmax(-1)).sum(-1, keepdim=True)  # as in MobileViT v2
    assert sum(seen.left_out.values()) == 1
    with watch() as seen:
        q @ (k.softmax(2).mT @ v)  # as in CoaT
    assert "softmax over another axis" in next(iter(seen.left_out))


def test_a_router_of_experts_is_not_taken_for_attention() -> None:
    with watch() as seen:
        gates = functional.linear(torch.randn(2, 7, 8), nn.Parameter(torch.randn(5, 8))).softmax(-1)
        best, _ = gates.topk(2, -1)
        (best[..., None] * torch.randn(2, 7, 2, 11)).sum(-2)
        gates @ torch.randn(5)  # an expectation
    assert not seen
    assert not seen.left_out


def test_calls_of_other_threads_are_listed() -> None:
    model = FiveAxes(False, 3)
    q = torch.randn(2, 3, 7, 5, 8)
    with watch(model) as seen:
        for _ in range(2):
            thread = threading.Thread(target=lambda: [model(q, q, q) for _ in range(3)])
            thread.start()
            thread.join()
    assert not seen
    assert list(seen.left_out) == ["another thread called FiveAxes: only the thread that opened the block is recorded"]
    assert no_hooks_left()


MASKED: dict[str, Callable[..., Tensor]] = {
    "sdpa": lambda q, k, v, low: functional.scaled_dot_product_attention(q, k, v, low),
    "added by hand": lambda q, k, v, low: (q @ k.mT * SCALE + low).softmax(-1) @ v,
    "filled by hand": lambda q, k, v, low: (q @ k.mT * SCALE).masked_fill(low < 0, float(low.min())).softmax(-1) @ v,
    "mixed by hand": lambda q, k, v, low: (
        ((q @ k.mT * SCALE) * (low == 0) + float(low.clamp(min=-1e30).min()) * (low < 0)).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("form", MASKED)
@pytest.mark.parametrize("constant", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4, -300.0])
def test_spread_does_not_depend_on_the_constant_of_a_mask(form: str, constant: float) -> None:
    if form == "mixed by hand" and (constant > -5000 or constant == -math.inf):
        pytest.skip("measured scores are taken for a mask from -5000 on; 0 * -inf is NaN")
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    hidden = torch.ones(9, 9).triu(1).bool()
    low = torch.zeros(9, 9).masked_fill(hidden, constant)
    record, out = seen_of(lambda q, k, v: MASKED[form](q, k, v, low), q, k, v)
    truth = regard.see.statistics(q, k, mask=regard.causal())
    assert repr(record.mask) == "causal()"
    torch.testing.assert_close(record.weights(), truth.weights(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(record.weights() @ v, out)
    expected = regard.see.heads.spread(record)
    counts = torch.arange(1, 10).log()
    torch.testing.assert_close(expected[:, :, 1:], truth.entropy[:, :, 1:] / counts[1:], atol=1e-5, rtol=1e-4)


def test_low_numbers_that_scores_can_outweigh_are_no_mask() -> None:
    q, k, v = (6 * torch.randn(2, 3, 9, 8) for _ in range(3))
    low = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -100.0)
    record, out = seen_of(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, low), q, k, v)
    assert repr(record.mask) == "full()"
    torch.testing.assert_close(record.weights() @ v, out, atol=1e-4, rtol=1e-4)


def test_a_bias_that_falls_gradually_is_no_mask() -> None:
    q = torch.randn(1, 2, 300, 8)
    bias = -(torch.arange(300)[:, None] - torch.arange(300)).abs().float()
    record, _ = seen_of(lambda q: functional.scaled_dot_product_attention(q, q, q, bias), q)
    assert repr(record.mask) == "full()"
    assert (record.weights()[0, 0] - (q @ q.mT * SCALE + bias).softmax(-1)[0, 0]).abs().max() < 1e-6


@pytest.mark.parametrize("constant", [-1e9, -1e4])
def test_a_row_that_a_finite_number_hides_as_a_whole_keeps_its_weights(constant: float) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    low = torch.zeros(5, 5)
    low[2] = constant
    low[3, 1] = constant
    record, out = seen_of(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, low), q, k, v)
    torch.testing.assert_close(record.weights() @ v, out, atol=3e-3, rtol=1e-3)
    truth = (q @ k.mT * SCALE + low).softmax(-1)
    torch.testing.assert_close(record.weights(), truth, atol=3e-3, rtol=1e-3)


def test_unrelated_positions_have_no_distance() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    padding = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    padding[0, ..., 7:] = False
    for call in (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),  # cross attention, or a chunk of queries
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, padding),
        lambda q, k, v: functional.scaled_dot_product_attention(q[:, :, :1], k, v),  # one step of a rolled cache
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    ):
        record, _ = seen_of(call, q, k, v)
        (head, *_) = measure_heads(record)
        assert record.distance is head.distance is head.previous is head.first is None
        assert "positions of its queries are unknown" in record.note
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    record, _ = seen_of(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, mask), q, k, v)
    assert record.distance is not None


def test_cross_attention_of_torch_has_no_distance() -> None:
    layer = nn.TransformerDecoderLayer(24, 3, 32, batch_first=True).eval()
    x, memory = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    with torch.no_grad(), watch(layer) as seen:
        layer(x, memory)
    assert seen["self_attn"].distance is not None
    assert seen["multihead_attn"].distance is None
    assert "queries and keys are different sequences" in seen["multihead_attn"].note


def test_channel_attention_is_labelled() -> None:
    import_timm()
    from timm.models.xcit import XCA

    layer = XCA(24, num_heads=3)
    with torch.no_grad(), watch(layer) as seen:
        layer(torch.randn(2, 31, 24))
    (record,) = seen.values()
    assert record.over_channels
    assert "i=8 j=8 over channels" in repr(record)
    assert record.distance is None
    model = regard.build("davit-ti").eval() if "davit-ti" in regard.list_models() else None
    if model is not None:
        with torch.no_grad(), watch(model) as seen:
            model(*model.example_inputs())
        assert {name for name, each in seen.items() if each.over_channels} == {n for n in seen if "channel" in n}


class Unrecorded(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x @ x.mT).sigmoid() @ x


def test_reasons_are_kept_when_nothing_is_recorded() -> None:
    model = CallModule(Unrecorded())
    with watch(model) as seen:
        model(torch.randn(2, 3, 5, 8))
    assert not seen
    assert "sigmoid of a product" in next(iter(seen.left_out))
