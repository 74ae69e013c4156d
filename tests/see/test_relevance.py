"""Rollout, flow, gradient relevance and value zeroing, compared with their definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError, UnknownNameError
from regard.core.attend import attend
from regard.core.masks import causal
from regard.core.scores import sink
from regard.nn.attention import Attention
from regard.see.record import Record, Seen
from regard.see.relevance import (
    Roles,
    assign_roles,
    encoder_decoder_gradient_relevance,
    encoder_decoder_rollout,
    flow,
    gradient_relevance,
    normalise_off_identity,
    patch_map,
    rollout,
    value_weighted,
)
from regard.see.value_zeroing import value_zeroing
from regard.see.watch import watch
from tests.see.model_cases import CASES, ByHandModel, by_hand, ids, real

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
SQUARE = ["gpt2 eager", "bert sdpa", "vit eager", "llama sdpa", "timm vit", "by hand"]


def maps(layers: int = 3, n: int = 7) -> list[Tensor]:
    return [torch.randn(2, 5, n, n).mul(2).softmax(-1) for _ in range(layers)]


def watched(name: str) -> Seen:
    case = CASES[name]()
    with torch.no_grad(), watch(case.model) as seen:
        case.run(case.model)
    return seen


@pytest.mark.parametrize("name", SQUARE)
def test_rollout_rows_sum_to_one(name: str) -> None:
    seen = watched(name)
    nonempty = (seen.records[0].lse > -math.inf)[:, 0]
    total = rollout(seen).sum(-1)
    torch.testing.assert_close(total[nonempty], torch.ones_like(total[nonempty]))


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_rollout_rows_sum_to_one_however_heads_are_fused(heads: str) -> None:
    torch.testing.assert_close(rollout(maps(), heads=heads).sum(-1), torch.ones(2, 7))  # type: ignore[arg-type]


def test_rollout_without_and_with_only_the_residual() -> None:
    layers = maps()
    assert torch.equal(rollout(layers, residual=1), torch.eye(7).expand(2, 7, 7))
    torch.testing.assert_close(rollout(layers[:1], residual=0), layers[0].mean(1))
    torch.testing.assert_close(rollout(layers, residual=0.0), layers[2].mean(1) @ layers[1].mean(1) @ layers[0].mean(1))


def test_rollout_multiplies_by_the_last_layer_from_the_left() -> None:
    # layer 1 moves token 0 to position 1, layer 2 moves position 1 to position 2, so output 2 depends on input 0 alone
    first, second = torch.eye(3)[[0, 0, 2]], torch.eye(3)[[0, 1, 1]]
    found = rollout([first[None, None], second[None, None]], residual=0)
    assert torch.equal(found[0], torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0]]))
    turned = rollout([second[None, None], first[None, None]], residual=0)
    assert not torch.equal(turned, found)


def test_rollout_of_a_causal_model_has_no_relevance_of_later_tokens() -> None:
    assert rollout(watched("by hand")).triu(1).count_nonzero() == 0


@pytest.mark.parametrize("name", SQUARE)
def test_rows_of_a_rollout_are_computed_without_a_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(name)
    whole = rollout(seen, residual=0.3)
    monkeypatch.setattr(Record, "weights", lambda self: pytest.fail("a matrix was built"))
    torch.testing.assert_close(rollout(seen, residual=0.3, rows=[4, 0]), whole[:, [4, 0]])


@pytest.mark.parametrize("ask", [rollout, flow, gradient_relevance])
def test_invalid_rows_are_errors(ask: Callable[..., Tensor]) -> None:
    model = by_hand().model
    with watch(model) as seen:
        model(torch.randn(1, 9, 24)).sum().backward()
    with pytest.raises(ShapeError, match="rows has index 99, but the last layer has 9 rows; choose from 0 to 8"):
        ask(seen, rows=[99])
    with pytest.raises(ConfigError, match=r"each of rows takes a whole number, not 1\.5"):
        ask(seen, rows=[1.5])
    with pytest.raises(ConfigError, match=r"rows takes a list of whole numbers such as \[0, -1\]"):
        ask(seen, rows=3)
    torch.testing.assert_close(ask(seen, rows=[-1, 2]), ask(seen, rows=[8, 2]))


def test_chosen_rows_of_plain_maps_are_the_same_rows() -> None:
    layers = maps()
    for heads in ("mean", "max"):
        torch.testing.assert_close(
            rollout(layers, rows=[5, 2], heads=heads),
            rollout(layers, heads=heads)[:, [5, 2]],  # type: ignore[arg-type]
        )


def test_a_sink_reduces_the_row_sums_of_a_rollout() -> None:
    q = torch.randn(2, 3, 7, 5)
    with watch() as seen:
        attend(q, q, q, scores=sink(torch.ones(3)))
    assert bool((rollout(seen).sum(-1) < 1).all())


@pytest.mark.parametrize("name", ["t5 eager", "torch encoder-decoder"])
def test_an_encoder_decoder_rolls_out_to_both_sides(name: str) -> None:
    seen = watched(name) if name in CASES else torch_transformer()
    target, source = encoder_decoder_rollout(seen)
    torch.testing.assert_close(target.sum(-1) + source.sum(-1), torch.ones(2, 5))
    identity = encoder_decoder_rollout(seen, residual=1)
    assert torch.equal(identity.target, torch.eye(5).expand(2, 5, 5))
    assert identity.source.count_nonzero() == 0


def torch_transformer() -> Seen:
    model = nn.Transformer(24, 4, 2, 2, 20, batch_first=True).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(2, 9, 24), torch.randn(2, 5, 24))
    return seen


def test_an_encoder_decoder_of_one_layer_rolls_out_by_hand() -> None:
    seen = torch_transformer()
    parts = assign_roles(seen)
    one = Roles(parts.encoder[:1], parts.decoder[:1], parts.cross[:1])
    encoder, decoder, cross = (part[0].weights().mean(1) for part in one)
    target, source = encoder_decoder_rollout(one, residual=0.25)
    own = 0.25 * torch.eye(5) + 0.75 * decoder
    torch.testing.assert_close(target, 0.25 * own)
    torch.testing.assert_close(source, 0.75 * cross @ (0.25 * torch.eye(9) + 0.75 * encoder))


def test_flow_lies_between_the_rollout_and_one() -> None:
    layers = maps(layers=3, n=5)
    found = flow(layers, rows=[4, 1], residual=0.4)
    lower = rollout(layers, rows=[4, 1], residual=0.4).double()
    assert bool((found >= lower - 1e-6).all())
    assert bool((found <= 1 + 1e-6).all())
    assert float((found - lower).max()) > 0.05


def test_flow_through_one_layer_is_its_map() -> None:
    (layer,) = maps(1)
    expected = 0.5 * torch.eye(7) + 0.5 * layer.mean(1)
    torch.testing.assert_close(flow([layer], rows=range(7)).float(), expected, atol=1e-7, rtol=0)


def test_flow_is_limited_by_the_narrowest_cut() -> None:
    # two ways from input 0 to output 2: by place 0 (0.5, then 0.3) and by place 1 (0.25, then 0.4)
    first = torch.tensor([[0.5, 0.5, 0], [0.25, 0, 0.75], [0, 0, 1.0]])
    second = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.3, 0.4, 0.3]])
    found = flow([first[None, None], second[None, None]], rows=[2], residual=0)
    torch.testing.assert_close(found[0, 0], torch.tensor([0.3 + 0.25, 0.3, 0.3 + 0.4], dtype=torch.float64))
    turned = flow([second[None, None], first[None, None]], rows=[2], residual=0)
    torch.testing.assert_close(turned[0, 0], torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64))


def explained(name: str) -> tuple[Seen, list[Tensor], list[Tensor]]:
    """The records of a model with gradients, its eager weights, and their gradients by autograd."""
    case = CASES[name]()
    with watch(case.model) as seen:
        case.run(case.model)[:, -1].square().sum().backward()
    sides = {"attention_mask": real() if name.startswith(("gpt2", "llama")) else real(side="right")}
    if name.startswith("t5"):
        sides["decoder_input_ids"] = ids()[:, :5]
    out = case.model(ids(), **sides, output_attentions=True)
    weights = list(out.attentions) if "attentions" in out else list(out.encoder_attentions)
    if "encoder_attentions" in out:
        weights += [each for pair in zip(out.decoder_attentions, out.cross_attentions, strict=True) for each in pair]
    gradients = torch.autograd.grad(out.logits[:, -1].square().sum(), weights)
    return seen, [each.detach() for each in weights], list(gradients)


@pytest.mark.parametrize("name", ["gpt2 eager", "bert eager", "llama eager"])
def test_gradient_relevance_is_that_of_autograd_through_the_weights(name: str) -> None:
    seen, weights, gradients = explained(name)
    expected = torch.eye(9).expand(2, 9, 9)
    for weight, gradient in zip(weights, gradients, strict=True):
        expected = expected + (weight * gradient).clamp(min=0).mean(1) @ expected
    found = gradient_relevance(seen)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert bool((found >= torch.eye(9)).all())
    assert float((found - torch.eye(9)).abs().max()) > 1e-3
    torch.testing.assert_close(gradient_relevance(seen, rows=[8, 3]), found[:, [8, 3]])
    turned = gradient_relevance(seen.records[::-1])
    assert not torch.allclose(turned, expected, atol=1e-4, rtol=1e-3)


def test_gradient_relevance_of_an_encoder_decoder_is_that_of_autograd() -> None:
    seen, weights, gradients = explained("t5 eager")
    bars = [(weight * gradient).clamp(min=0).mean(1) for weight, gradient in zip(weights, gradients, strict=True)]
    memory = torch.eye(9).expand(2, 9, 9)
    for bar in bars[:2]:
        memory = memory + bar @ memory
    target, source = torch.eye(5).expand(2, 5, 5), torch.zeros(2, 5, 9)
    for own, cross in ((bars[2], bars[3]), (bars[4], bars[5])):
        target, source = target + own @ target, source + own @ source
        source = source + normalise_off_identity(target).mT @ cross @ normalise_off_identity(memory)
    found = encoder_decoder_gradient_relevance(seen)
    torch.testing.assert_close(found.target, target, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.source, source, atol=1e-4, rtol=1e-3)
    assert float(found.source.abs().max()) > 1e-4


def test_normalise_off_identity_has_row_sums_of_two_or_one() -> None:
    relevance = torch.eye(3) + torch.tensor([[1.0, 3, 0], [0, 0, 0], [5, 0, 5]])
    found = normalise_off_identity(relevance[None])[0]
    assert torch.equal(found.sum(-1), torch.tensor([2.0, 1, 2]))
    assert torch.equal(found[0], torch.tensor([1.25, 0.75, 0]))


def test_gradient_relevance_of_grouped_heads_and_of_our_own_attention() -> None:
    model = Attention(24, 6, kv_heads=2).eval()
    x, towards = torch.randn(2, 9, 24), torch.randn(2, 9, 24)
    with watch(model) as seen:
        (model(x, mask=causal()) * towards).sum().backward()
    record = seen["Attention"]
    weights = record.weights().requires_grad_()
    assert record.v is not None
    out = model.project(weights @ record.v.repeat_interleave(3, 1))
    (gradient,) = torch.autograd.grad((out * towards).sum(), weights)
    expected = torch.eye(9) + (weights * gradient).clamp(min=0).mean(1)
    torch.testing.assert_close(gradient_relevance(seen), expected)


def test_errors_of_gradient_relevance() -> None:
    q = torch.randn(2, 3, 7, 5, requires_grad=True)
    with watch() as seen:
        attend(q, q, q)
    with pytest.raises(ConfigError, match=r"no gradient has reached attention; run the model with gradients enabled"):
        gradient_relevance(seen)
    with watch(values=False) as seen:
        attend(q, q, q).sum().backward()
    with pytest.raises(ConfigError, match="recorded without its values; use watch"):
        gradient_relevance(seen)
    with watch() as seen:
        attend(q, q, q, dropout=0.2).sum().backward()
    with pytest.raises(ConfigError, match=r"has dropout with probability 0\.2; call model\.eval\(\) first"):
        gradient_relevance(seen)


def test_value_weighted_attention_uses_the_norm_of_values() -> None:
    record = watched("llama sdpa").records[0]
    assert record.v is not None
    values = record.v.repeat_interleave(6 // record.v.shape[1], 1)
    lengths = values.norm(dim=-1)
    torch.testing.assert_close(value_weighted(record), record.weights() * lengths[:, :, None])
    weight = torch.randn(24, 24)
    found = value_weighted(record, projection=weight)
    for head in range(6):
        moved = values[:, head] @ weight[:, head * 4 : head * 4 + 4].T
        torch.testing.assert_close(found[:, head], record.weights()[:, head] * moved.norm(dim=-1)[:, None])
    with pytest.raises(
        ShapeError, match=r"projection is \(24, 20\) read as \(d f\), but .* has 6 concatenated heads of e=4"
    ):
        value_weighted(record, projection=weight[:, :20])


def test_values_of_equal_norm_give_the_weights() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), functional.normalize(torch.randn(2, 3, 7, 5), dim=-1)
    with watch() as seen:
        functional.scaled_dot_product_attention(q, k, v * 2.5)
    record = seen["attention"]
    torch.testing.assert_close(value_weighted(record, normalised=True), record.weights())
    torch.testing.assert_close(value_weighted(record), record.weights() * 2.5)


def zero_value_by_hand(model: ByHandModel, x: Tensor, key: int | None) -> Tensor:
    """The first attention's output and residual with one value zeroed, step by step."""
    layer = model.first
    q, k, v = (y.unflatten(-1, (3, -1)).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1))
    if key is not None:
        v[:, :, key] = 0
    late = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 8**-0.5).masked_fill(late, -math.inf).softmax(-1)
    out: Tensor = layer.out((weights @ v).transpose(1, 2).flatten(2))
    return out


def test_value_zeroing_is_zeroing_by_hand() -> None:
    case = by_hand()
    model = case.model
    assert isinstance(model, ByHandModel)
    x = torch.linspace(-3, 3, 2 * 9 * 24).reshape(2, 9, 24).cos()
    done: list[tuple[int, int]] = []
    found = value_zeroing(
        model, lambda: case.run(model), "first", keys=[0, 5, -1], block="first", progress=lambda *x: done.append(x)
    )
    with torch.no_grad():
        whole = zero_value_by_hand(model, x, None)
        for at, key in enumerate((0, 5, 8)):
            other = 1 - torch.cosine_similarity(whole, zero_value_by_hand(model, x, key), dim=-1)
            torch.testing.assert_close(found[..., at], other, atol=1e-5, rtol=1e-3)
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert float(found.max()) > 1e-3
    # a causal row does not change with a later key
    assert float(found[:, :5, 1].abs().max()) < 1e-5


ZEROED: dict[str, str] = {
    "gpt2 eager": "transformer.h.0.attn",
    "gpt2 sdpa": "transformer.h.0.attn",
    "llama sdpa": "model.layers.0.self_attn",
    "torch encoder": "layers.0.self_attn",
    "timm vit": "blocks.0.attn",
}


@pytest.mark.parametrize("name", ZEROED)
def test_value_zeroing_works_for_every_kind_of_attention(name: str) -> None:
    """A run with w_ij v_j taken out by the record's own weights, through the rest of the block as it is."""
    case = CASES[name]()
    layer = ZEROED[name]
    found = value_zeroing(case.model, lambda: case.run(case.model), layer, keys=[3], normalised=False)
    assert found.shape[-1] == 1
    assert float(found.max()) > 1e-4
    expected = VALUE_BY_HOOK[name](case.model, lambda: case.run(case.model), 3)
    torch.testing.assert_close(found[..., 0], expected, atol=2e-5, rtol=1e-3)


def by_hook(
    projection: Callable[[nn.Module], nn.Module], block: Callable[[nn.Module], nn.Module], slot: slice
) -> Callable[[nn.Module, Callable[[], object], int], Tensor]:
    """Zero the value rows at a key by a hook on the module that makes them, and compare the block's outputs."""

    def distances(model: nn.Module, run: Callable[[], object], key: int) -> Tensor:
        outputs: list[Tensor] = []
        kept = block(model).register_forward_hook(
            lambda module, args, out: outputs.append(out if isinstance(out, Tensor) else out[0])
        )

        def zero(module: nn.Module, args: object, out: Tensor) -> Tensor:
            out = out.clone()
            out[:, key, slot] = 0
            return out

        with torch.no_grad():
            run()
            changed = projection(model).register_forward_hook(zero)
            run()
        kept.remove()
        changed.remove()
        return 1 - torch.cosine_similarity(outputs[0], outputs[1], dim=-1)

    return distances


def encoder_by_hand(model: nn.Module, run: Callable[[], object], key: int) -> Tensor:
    x = torch.linspace(-3, 3, 2 * 9 * 24).reshape(2, 9, 24).cos()
    layer = model.layers[0]  # type: ignore[index]
    hidden = torch.zeros(2, 1, 1, 9)
    hidden[0, ..., 7:] = -math.inf
    outputs = []
    for zeroed in (False, True):
        flat = functional.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2).clone() for y in flat)
        if zeroed:
            v[:, :, key] = 0
        heads = functional.scaled_dot_product_attention(q, k, v, hidden).transpose(1, 2).flatten(2)
        y = layer.norm1(x + layer.self_attn.out_proj(heads))
        outputs.append(layer.norm2(y + layer.linear2(functional.relu(layer.linear1(y)))))
    return (1 - torch.cosine_similarity(*outputs, dim=-1)).detach()


VALUE_BY_HOOK: dict[str, Callable[[nn.Module, Callable[[], object], int], Tensor]] = {
    "gpt2 eager": by_hook(
        lambda m: m.get_submodule("transformer.h.0.attn.c_attn"), lambda m: m.get_submodule("transformer.h.0"),
        slice(48, 72),
    ),
    "gpt2 sdpa": by_hook(
        lambda m: m.get_submodule("transformer.h.0.attn.c_attn"), lambda m: m.get_submodule("transformer.h.0"),
        slice(48, 72),
    ),
    "llama sdpa": by_hook(
        lambda m: m.get_submodule("model.layers.0.self_attn.v_proj"), lambda m: m.get_submodule("model.layers.0"),
        slice(None),
    ),
    "timm vit": by_hook(
        lambda m: m.get_submodule("blocks.0.attn.qkv"), lambda m: m.get_submodule("blocks.0"), slice(48, 72)
    ),
    "torch encoder": encoder_by_hand,
}  # fmt: skip


def test_value_zeroing_normalises_rows_and_checks_its_arguments() -> None:
    case = by_hand()
    model = case.model
    found = value_zeroing(model, lambda: case.run(model), "second", block="second", normalised=True)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 9))
    with pytest.raises(ConfigError, match=r"each of keys takes a whole number, not 1\.5"):
        value_zeroing(model, lambda: model(x), "first", keys=[1.5])  # type: ignore[list-item]
    with pytest.raises(ShapeError, match=r"keys has index 9, but first has 9 keys"):
        value_zeroing(model, lambda: case.run(model), "first", keys=[9])
    with pytest.raises(UnknownNameError, match=r"'first\.qkv' made no attention call"):
        value_zeroing(model, lambda: case.run(model), "first.qkv")
    with pytest.raises(ConfigError, match=r"block 'second' was not called in run\(\)"):
        value_zeroing(model, lambda: model.first(torch.randn(1, 9, 24)), "first", block="second")
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks for module in model.modules())


def test_patch_map_has_the_grid_of_patches() -> None:
    relevance = torch.rand(2, 14, 14)
    found = patch_map(relevance, prefix=2, grid=(3, 4))
    assert torch.equal(found, relevance[:, 0, 2:].reshape(2, 3, 4))
    assert torch.equal(patch_map(relevance[:, :1], prefix=2, grid=(3, 4)), found)
    mean = patch_map(relevance, prefix=2, grid=(3, 4), pool="mean")
    torch.testing.assert_close(mean[:, 1, 2], relevance[:, 2:, 2 + 6].mean(1))
    square = torch.rand(2, 9, 9)
    assert torch.equal(patch_map(square, prefix=0, pool="mean"), square.mean(1).reshape(2, 3, 3))


def test_a_vit_is_explained_by_its_class_token_and_by_its_mean() -> None:
    seen = watched("timm vit")
    assert patch_map(rollout(seen, rows=[0])).shape == (2, 3, 3)
    whole = patch_map(rollout(seen), pool="mean")
    assert whole.shape == (2, 3, 3)
    assert bool((whole >= 0).all())


def test_errors_of_patch_map() -> None:
    with pytest.raises(
        ShapeError, match=r"14 tokens less a prefix of 1 are 13 patches, which do not form a 4 x 4 grid; give prefix="
    ):
        patch_map(torch.rand(2, 14, 14))
    with pytest.raises(ConfigError, match=r"pool='class' takes the row of the class token, but prefix=0"):
        patch_map(torch.rand(2, 9, 9), prefix=0)
    with pytest.raises(ShapeError, match=r"pool='mean' needs the rows of all 10 tokens, not 1"):
        patch_map(torch.rand(2, 1, 10), pool="mean")
    with pytest.raises(ConfigError, match=r"pool is 'class' or 'mean', not 'max'"):
        patch_map(torch.rand(2, 10, 10), pool="max")  # type: ignore[arg-type]


def test_maps_that_are_not_a_stack_are_errors() -> None:
    left_out = Seen(left_out={"weights by a sigmoid": 3, "weights by exp": 1})
    with pytest.raises(ConfigError, match="because every call was left out: weights by a sigmoid; weights by exp"):
        rollout(left_out)
    with pytest.raises(ConfigError, match="there are no maps; run the model inside"):
        rollout([])
    with pytest.raises(
        ShapeError, match=r"map 1 has a map \(b i j\) = \(2, 5, 7\), but a stack of self-attention needs \(2, 7, 7\)"
    ):
        rollout([*maps(1), torch.rand(2, 3, 5, 7)])
    with pytest.raises(ShapeError, match=r"a map is \(b h i j\), not \(7, 7\)"):
        rollout([torch.rand(7, 7)])
    with pytest.raises(ConfigError, match=r"residual is the weight of the identity, from 0 to 1, not 1\.5"):
        rollout(maps(), residual=1.5)
    with pytest.raises(ConfigError, match=r"heads are fused by 'mean', 'max' or 'min', not 'sum'"):
        rollout(maps(), heads="sum")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"2 encoder, 0 decoder and 0 cross attention calls, which is not an encoder-decoder"
    ):
        encoder_decoder_rollout(watched("by hand"))
    case = CASES["by hand"]()
    with torch.no_grad(), watch(case.model, rows=[0, 1]) as seen:
        case.run(case.model)
    with pytest.raises(ConfigError, match=r"first was recorded for some rows only, but rollout needs all"):
        rollout(seen)


@pytest.mark.parametrize("relevance", ["rollout", "flow", "gradient_relevance"])
def test_an_encoder_decoder_of_equal_lengths_is_not_a_stack(relevance: str) -> None:
    seek = {
        "rollout": rollout,
        "flow": lambda maps: flow(maps, rows=[3]),
        "gradient_relevance": gradient_relevance,
    }[relevance]
    model = nn.Transformer(24, 3, 1, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 7, 24)
    with watch(model) as seen:
        model(x, x).square().sum().backward()
    with pytest.raises(
        ConfigError,
        match=r"these are cross and decoder and encoder attention calls, which are not one stack; use enc",
    ):
        seek(seen)
    assert seek(seen.records).shape[-1] == 7  # chosen by hand
    with watch(model, layers="decoder.*.self_attn") as seen:
        model(x, x).square().sum().backward()
    assert len(seen) == 2
    assert seek(seen).shape[-1] == 7


def test_two_passes_are_not_one_stack() -> None:
    case = CASES["by hand"]()
    with torch.no_grad():
        with watch(case.model) as once:
            case.run(case.model)
        with watch(case.model) as twice:
            case.run(case.model)
            case.run(case.model)
    with pytest.raises(ConfigError, match=r"first was called 2 times, so there may be several passes; watch one pass"):
        rollout(twice)
    assert torch.equal(rollout([twice["first:2"], twice["second:2"]]), rollout(once))
    transformer = nn.Transformer(24, 3, 1, 1, 32, batch_first=True).eval()
    with torch.no_grad(), watch(transformer) as seen:
        for _ in range(2):
            transformer(torch.randn(2, 7, 24), torch.randn(2, 5, 24))
    with pytest.raises(
        ConfigError, match=r"pass Roles\(encoder, decoder, cross\) of the calls of one pass: seen\.records"
    ):
        encoder_decoder_rollout(seen)
