"""Attention written by hand is recorded with its weights, or left out with the reason."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.see.value_zeroing import value_zeroing
from regard.see.watch import watch
from tests.see.model_cases import ids, real
from tests.see.watch_helpers import LOW, CallModule, assert_statistics_match, qkv, seen_of, softmax_weights

pytestmark = [
    pytest.mark.usefixtures("check_hooks_removed"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor"),
]


def test_an_encoder_with_custom_layers_is_recorded() -> None:
    class Own(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            heads = x.unflatten(-1, (3, -1)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    model = nn.TransformerEncoder(Own(24, 3, 20, batch_first=True), 2).eval()
    with watch(model) as seen:
        model(torch.randn(2, 5, 24).requires_grad_())
    assert list(seen) == ["layers.0", "layers.1"]
    assert seen["layers.0"].route == "sdpa"


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
    "einsum with values first": lambda q, k, v: torch.einsum("bhje,bhij->bhie", v, softmax_weights(q, k)),
    "einsum with numbers for letters": lambda q, k, v: torch.einsum(
        softmax_weights(q, k), [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]
    ),
    "einsum of a list": lambda q, k, v: torch.einsum("bhij,bhje->bhie", [softmax_weights(q, k), v]),
    "a product and a sum": lambda q, k, v: (softmax_weights(q, k).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2),
    "values first, a product and a sum": lambda q, k, v: (
        torch.sum(v[:, :, None] * softmax_weights(q, k)[..., None], dim=3)
    ),
    "scores by a product and a sum": lambda q, k, v: (
        (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1).mul(8**-0.5).softmax(-1) @ v
    ),
    "keys first, a product and a sum": lambda q, k, v: (
        torch.sum(k[:, :, None] * q[:, :, :, None], -1).mul(8**-0.5).softmax(-1) @ v
    ),
    "axes added and taken away": lambda q, k, v: (softmax_weights(q, k)[None].detach()[0][:, :, :, :] @ v[None])[0],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_written_by_hand_is_recorded(name: str) -> None:
    q, k, v = qkv()
    record, _ = seen_of(WRITTEN[name], q, k, v)
    assert record.route == "softmax"
    assert not record.terms
    expected = softmax_weights(q, k)
    torch.testing.assert_close(record.weights().reshape(expected.shape), expected)
    torch.testing.assert_close(record.out.reshape(2, 6, 5, 3), expected @ v)


MULTIPLIED: dict[str, Any] = {
    "projected": ("bhij,bhje,hed->bid", (6, 3, 11)),
    "with the projection first": ("hed,bhij,bhje->bid", (6, 3, 11)),
    "gated": ("bhij,bhje,bhie->bhie", (2, 6, 5, 3)),
    "gated and projected": ("bhij,bhje,bhi,hed->bid", (2, 6, 5), (6, 3, 11)),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_an_einsum_of_weights_values_and_other_factors_is_recorded_with_its_gradient(name: str) -> None:
    equation, *shapes = MULTIPLIED[name]
    q, k, v = qkv()
    factors = [torch.randn(shape) for shape in shapes]
    weights = softmax_weights(q, k)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, more = {"bhij": softmax_weights(q, k), "bhje": v}, iter(factors)
        return torch.einsum(equation, *(own[part] if part in own else next(more) for part in _in(equation)))

    record, _ = seen_of(call, q, k, v)
    torch.testing.assert_close(record.weights(), weights)
    torch.testing.assert_close(record.v, v)

    model = CallModule(call)
    with watch(model) as seen:
        out = model(q.requires_grad_(), k, v)
    wanted = torch.randn_like(out)
    (out * wanted).sum().backward()
    heads = (weights @ v).requires_grad_()
    rest = [part for part in _in(equation) if part not in ("bhij", "bhje")]
    onward = torch.einsum(f"bhie,{','.join(rest)}->{equation.partition('->')[2]}", heads, *factors)
    (expected,) = torch.autograd.grad((onward * wanted).sum(), heads)
    torch.testing.assert_close(seen["CallModule"].gradient, expected)


def _in(equation: str) -> list[str]:
    return equation.partition("->")[0].split(",")


def test_values_are_zeroed_through_an_einsum_with_its_projection() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Parameter(torch.randn(6, 3, 11))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("bhij,bhje,hed->bid", softmax_weights(q, k), v, self.out)

    q, k, v = qkv()
    model, without = Layer(), v.clone()
    without[:, :, 4] = 0
    changed = value_zeroing(model, lambda: model(q, k, v), "Layer", keys=[4], block="")
    expected = 1 - torch.cosine_similarity(model(q, k, v), model(q, k, without), dim=-1)
    torch.testing.assert_close(changed[..., 0], expected, atol=1e-5, rtol=1e-4)


def test_scores_of_a_bilinear_einsum_are_traced() -> None:
    q, k, v = qkv()
    between, bias = torch.randn(6, 8, 8), torch.randn(5, 7)
    record, _ = seen_of(
        lambda q, k, v: (torch.einsum("bhic,hcd,bhjd->bhij", q, between, k) * 0.2 + bias).softmax(-1) @ v, q, k, v
    )
    expected = (q @ between @ k.mT * 0.2 + bias).softmax(-1)
    torch.testing.assert_close(record.weights(), expected)
    torch.testing.assert_close(record.q, q @ between)
    assert [term.name for term in record.terms] == ["additive"]


def test_one_map_shared_by_several_heads_of_values() -> None:
    q, k, v = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 7, 8), torch.randn(2, 6, 7, 3)
    for call in (
        lambda q, k, v: softmax_weights(q, k) @ v,
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", softmax_weights(q, k).clamp(max=2), v),
        lambda q, k, v: (q @ k.mT).clamp(max=0.4).softmax(-1) @ v,
    ):
        record, out = seen_of(call, q, k, v)
        assert record.weights().shape == (2, 6, 5, 7)
        torch.testing.assert_close(record.out, out)


def test_einsum_dots_are_the_last_unnamed_axes() -> None:
    q, k, v = qkv()
    record, out = seen_of(lambda q, k, v: torch.einsum("...ij,...je->...ie", softmax_weights(q, k), v[1]), q, k, v)
    torch.testing.assert_close(record.v, v[1].expand(2, -1, -1, -1))
    torch.testing.assert_close(record.out, out)


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


KEPT = ("capped", "written into", "clamped", "divided and rounded", "divided and cut, in place",
        "added some of")  # fmt: skip


def _written_into(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[..., hidden] = -math.inf
    return scores


@pytest.mark.parametrize("name", CHANGED)
def test_operations_on_scores_are_traced_or_the_scores_kept(name: str) -> None:
    q, k, v = qkv()
    hidden = torch.rand(5, 7) > 0.6
    hidden[:, 0] = False

    def scores(q: Tensor, k: Tensor) -> Tensor:
        out: Tensor = CHANGED[name](q @ k.mT, hidden)
        return out

    record, _ = seen_of(lambda q, k, v: scores(q, k).softmax(-1) @ v, q, k, v)
    torch.testing.assert_close(record.weights(), scores(q, k).softmax(-1))
    given = [term.name for term in record.terms] == ["measured"]
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
def test_fully_masked_rows_have_the_weights_of_eager_code(name: str) -> None:
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
    assert_statistics_match(record, expected)
    assert torch.equal(record.lse > -math.inf, expected.sum(-1) > 0.5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_local_attention_with_padding_is_recorded(side: str) -> None:
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
        assert_statistics_match(record, weights)


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "values first": (lambda q, k, v: v.mT @ (k @ q.mT).softmax(-2), "by a softmax over another axis"),
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "by a softmax over another axis"),
    "values before the weights": (
        lambda q, k, v: v.mT @ (k @ q.mT).softmax(-1),
        "values were the left factor of a product with softmax weights",
    ),
    "weights turned": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT, "by mT of softmax weights, not by"),
    "log_softmax": (lambda q, k, v: functional.log_softmax(q @ k.mT, -1).exp() @ v, "by exp of a product"),
    "exp and a sum": (
        lambda q, k, v: _by_sum((q @ k.mT * 0.3).exp()) @ v,
        "multiplied by exp of a product, which is not a softmax",
    ),
    "centred": (
        lambda q, k, v: _by_sum(_centred(q @ k.mT).exp_()) @ v,
        "multiplied by exp of a product, which is not a softmax",
    ),
    "divided at the end": (lambda q, k, v: ((q @ k.mT).exp() @ v) / (q @ k.mT).exp().sum(-1, True), "by exp of a"),
    "einsum": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhic,bhjc->bhij", q, k).exp(), v),
        "multiplied by exp of a product",
    ),
    "einsum with weights for keys": (
        lambda q, k, v: torch.einsum("bhij,bhj,bhje->bhie", softmax_weights(q, k), k[..., 0], v),
        "einsum('bhij,bhj,bhje->bhie') of weights and values is not supported",
    ),
    "einsum with weights for keys at its end": (
        lambda q, k, v: torch.einsum("bhij,bhje,bhj->bhie", softmax_weights(q, k), v, k[..., 0]),
        "einsum('bhij,bhje,bhj->bhie') of weights and values is not supported",
    ),
    "einsum that sums over heads and projects": (
        lambda q, k, v: torch.einsum("bhij,bhje,ed->bid", softmax_weights(q, k), v, q[0, 0, :3, :]),
        "einsum('bhij,bhje,ed->bid') of weights and values is not supported",
    ),
    "einsum that sums over heads": (
        lambda q, k, v: torch.einsum("bhij,bhje->bie", softmax_weights(q, k), v),
        "einsum('bhij,bhje->bie') of weights and values is not supported",
    ),
    "einsum of two softmaxes": (
        lambda q, k, v: torch.einsum("bhij,bhij,bhje->bhie", softmax_weights(q, k), softmax_weights(q, 2 * k), v),
        "multiplied the weights of two softmaxes",
    ),
    "one softmax less another": (
        lambda q, k, v: (softmax_weights(q, k) - 0.3 * softmax_weights(q, 2 * k)) @ v,
        "by sub of two softmaxes",
    ),
    "the mean of heads": (
        lambda q, k, v: softmax_weights(q, k).mean(1, keepdim=True) @ v,
        "by mean of softmax weights",
    ),
    "keys left out": (lambda q, k, v: softmax_weights(q, k)[..., 1:] @ v[..., 1:, :], "by getitem of softmax weights"),
    "other rows": (
        lambda q, k, v: softmax_weights(q, k)[:, :, torch.tensor([4, 3, 2, 1, 0])] @ v,
        "by getitem of softmax weights",
    ),
    "padded and cut again": (
        lambda q, k, v: functional.pad(softmax_weights(q, k).transpose(0, 1), (0, 2))[..., :7].transpose(0, 1) @ v,
        "by transpose of softmax weights, not by",
    ),
    "joined with others": (
        lambda q, k, v: torch.cat([softmax_weights(q, k), q[..., :2]], -1) @ torch.cat([v, v[..., :2, :]], -2),
        "by cat of softmax weights, not by",
    ),
    "through a linear layer with a bias": (
        lambda q, k, v: functional.linear(softmax_weights(q, k), v[0, 0].mT, v[0, 0, 0]),
        "a factor or a bias was applied in the same call",
    ),
    "with a residual": (
        lambda q, k, v: torch.baddbmm(q[:, 0], (q[:, 0] @ k[:, 0].mT).softmax(-1), k[:, 0]),
        "a factor or a bias was applied in the same call",
    ),
    "learned queries": (
        lambda q, k, v: (nn.Parameter(q) @ k.mT).sigmoid() @ v,
        "by sigmoid of a product, which is not a softmax",
    ),
    "rows as a batch": (
        lambda q, k, v: softmax_weights(q, k).flatten(0, 2) @ v[0, 0],
        "softmax weights (2, 6, 5, 7) were multiplied with values as (60, 7)",
    ),
    "sigmoid": (
        lambda q, k, v: (q @ k.mT * 0.3).sigmoid() @ v,
        "by sigmoid of a product, which is not a softmax over the last axis; it may be attention",
    ),
    "relu, divided by a sum": (
        lambda q, k, v: _by_sum((q @ k.mT).relu() + 0.01) @ v,
        "by relu of a product, which is not a softmax",
    ),
    "relu, masked": (lambda q, k, v: (functional.relu(q @ k.mT) * torch.ones(5, 7).tril()) @ v, "by relu of a product"),
    "relu, squared": (
        lambda q, k, v: functional.relu(q @ k.mT).square() @ v,
        "by square of a product, which is not a softmax",
    ),
    "sigmoid in an einsum": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhic,bhjc->bhij", q, k).sigmoid(), v),
        "by sigmoid of a product, which is not a softmax",
    ),
    "sigmoid, a product and a sum": (
        lambda q, k, v: ((q @ k.mT).sigmoid()[..., None] * v[:, :, None]).sum(-2),
        "by sigmoid of a product, which is not a softmax",
    ),
    "exp, a product and a sum": (
        lambda q, k, v: ((q @ k.mT).exp()[..., None] * v[:, :, None]).sum(-2),
        "by exp of a product, which is not a softmax",
    ),
    "other values for each query": (
        lambda q, k, v: (softmax_weights(q, k)[..., None] * (v[:, :, None] + q[:, :, :, None, :3])).sum(-2),
        "values that are not one vector for each key",
    ),
    "no value for each key": (
        lambda q, k, v: (softmax_weights(q, k)[..., None] * v[:, :, :1, None]).sum(-2),
        "values that are not one vector for each key",
    ),
    "the mean over keys": (
        lambda q, k, v: (softmax_weights(q, k)[..., None] * v[:, :, None]).mean(-2),
        "mean of weights times values is not a sum over keys alone",
    ),
    "the sum over queries": (
        lambda q, k, v: (softmax_weights(q, k)[..., None] * v[:, :, None]).sum(2),
        "sum of weights times values is not a sum over keys alone",
    ),
    "einsum with values of two axes": (
        lambda q, k, v: torch.einsum("bhij,bhjef->bhief", (q @ k.mT).softmax(-1), v[..., None]),
        "einsum('bhij,bhjef->bhief') of weights and values is not supported",
    ),
}


def _by_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _centred(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_attention_is_left_out_with_its_reason(name: str) -> None:
    call, words = UNSUPPORTED[name]
    model, (q, k, v) = CallModule(call), qkv()
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
def test_parts_of_the_weights_are_left_out(name: str, b: int) -> None:
    mixed, count = IN_PARTS[name]
    q, k, v = (x[:b] for x in qkv())
    if name == "sequences" and b == 1:
        mixed, count = (lambda w, v: (w.select(0, 0) @ v[0])[None]), 1
    model = CallModule(lambda q, k, v: mixed(softmax_weights(q, k), v))
    with watch(model) as seen:
        out = model(q, k, v)
    torch.testing.assert_close(out, softmax_weights(q, k) @ v)
    assert len(seen) == 0
    ((reason, times),) = seen.left_out.items()
    assert times == count
    assert "of softmax weights, not by the weights themselves" in reason


def test_indexing_the_only_head_or_sequence_is_supported() -> None:
    q, k, v = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8), torch.randn(1, 1, 7, 3)
    record, _ = seen_of(lambda q, k, v: softmax_weights(q, k)[0, 0][None] @ v[0], q, k, v)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k))


def test_experts_are_not_attention() -> None:
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
    assert repr(seen) == "nothing recorded"


def test_a_router_is_not_attention() -> None:
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


def test_graph_layers_are_not_attention() -> None:
    links, x, weight = torch.rand(2, 7, 7), torch.randn(2, 7, 3), torch.randn(3, 3)
    with watch() as seen:
        x = torch.relu(links @ x) @ weight
        torch.relu(links @ x)
    assert repr(seen) == "nothing recorded"


def test_keys_overwritten_before_the_softmax_do_not_change_the_record() -> None:
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        scores = q @ k.mT
        k.zero_()
        return scores.softmax(-1) @ v

    record, _ = seen_of(call, q, k, v)
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, 1.0))


def test_products_that_may_be_attention_are_left_out_with_a_reason() -> None:
    q, k, v = qkv()
    with watch() as seen:
        torch.matmul(q.softmax(-1), k.softmax(-2).mT @ v)  # efficient attention: its softmax is over features
        scores = torch.cat([q @ k.mT, torch.zeros(2, 6, 5, 1)], -1)
        torch.matmul(scores.softmax(-1)[..., :-1], v)
    assert len(seen) == 0
    assert "by a softmax of numbers that are not a traced product of queries and keys" in repr(seen)
    assert "by getitem of softmax weights, not by the weights themselves" in repr(seen)


def test_a_hugging_face_sink_is_recorded() -> None:
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


def test_untraced_scores_are_kept() -> None:
    q, k, v = qkv(i=7, j=7)

    def unseen(q: Tensor, k: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return q @ k.mT * 0.4

    record, out = seen_of(lambda q, k, v: unseen(q, k).softmax(-1) @ v, q, k, v)
    assert record.note == "its scores are not a traced product, so queries and keys are unknown"
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, 0.4))
    torch.testing.assert_close(record.out, out)


def test_additive_attention_is_recorded_if_square() -> None:
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
    assert "not a traced product of queries and keys, as in additive attention" in repr(seen)
    with watch(model) as seen:
        model(x, x)
    assert seen["Additive"].q.shape == (2, 1, 5, 1)
    assert seen["Additive"].note.startswith("its scores are not a traced product")


def test_scores_overwritten_after_their_softmax_are_left_out() -> None:
    q, k, v = qkv()
    with watch() as seen:
        scores = (q @ k.mT).clamp(max=0.3)
        weights = scores.softmax(-1)
        scores.zero_()
        torch.matmul(weights, v)
    assert len(seen) == 0
    assert "left out 1: scores were written into" in repr(seen)


def test_operations_on_weights_are_noted() -> None:
    q, k, v = qkv()
    record, _ = seen_of(lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, q, k, v)
    assert "mul" in record.note
    torch.testing.assert_close(record.weights(), softmax_weights(q, k, 1.0))


def test_a_softmax_without_values_is_not_attention() -> None:
    q, k, v = qkv()
    with watch() as seen:
        (q @ k.mT).softmax(-1)
        functional.log_softmax(q @ k.mT, -1).sum()
        (q @ k.mT).exp().sum(-1, keepdim=True) * v[..., :1, :]
        (q @ k.mT).exp().amax(-1, keepdim=True) @ v[..., :1, :]
        torch.matmul(k.exp().mT, v)
        torch.randn(3, 5).softmax(-1) @ torch.randn(5, 2)
    assert repr(seen) == "nothing recorded"
