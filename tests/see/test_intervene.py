"""Interventions: exact on every kind of attention, undone on exit, and never without effect."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.base.errors import ConfigError, InterventionError, ShapeError, UnknownNameError
from regard.see.interventions.intervene import Interventions
from regard.see.record import Seen
from tests.see.model_cases import CASES, Case, by_hand, ids, torch_encoder
from tests.see.test_watch_registry import Masked, registered
from tests.see.watch_helpers import CallModule, no_hooks_left, qkv, softmax_weights

pytestmark = [
    pytest.mark.usefixtures("check_hooks_removed"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors",
        "ignore:enable_nested_tensor",
        "ignore:flex_attention called without torch.compile",
    ),
]

# the weight of the output projection of the second layer, and its axis of heads
PROJECTIONS = {
    "gpt2": ("transformer.h.1.attn.c_proj.weight", 0),
    "bert": ("bert.encoder.layer.1.attention.output.dense.weight", 1),
    "vit": ("vit.layers.1.attention.o_proj.weight", 1),
    "llama": ("model.layers.1.self_attn.o_proj.weight", 1),
    "t5": ("encoder.block.1.layer.0.SelfAttention.o.weight", 1),
    "timm": ("blocks.1.attn.proj.weight", 1),
    "torch": ("layers.1.self_attn.out_proj.weight", 1),
    "by": ("second.out.weight", 1),
}


def without_head(name: str, case: Case, head: int, heads: int) -> Tensor:
    """The output of the model with the columns of one head in the output projection set to zero."""
    path, axis = PROJECTIONS[name.split()[0]]
    weight = case.model.get_parameter(path)
    kept = weight.detach().clone()
    width = weight.shape[axis] // heads
    with torch.no_grad():
        weight.narrow(axis, head * width, width).zero_()
        out = case.run(case.model)
        weight.copy_(kept)
    return out


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Case]:
    return request.param, CASES[request.param]()


def recorded(case: Case) -> Seen:
    with torch.no_grad(), regard.watch(case.model) as seen:
        case.run(case.model)
    return seen


def run_edited(model: nn.Module, make: Callable[[Interventions], object], run: Callable[[], object]) -> None:
    """Make edits and run the model."""
    with regard.intervene(model) as edit:
        make(edit)
        run()


def assert_same(name: str, found: Tensor, expected: Tensor) -> None:
    if name == "torch encoder":  # the fused layer returns zeros at padding, and no edited layer is fused
        found, expected = found[:, :7], expected[:, :7]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_without_edits_no_bit_changes(case: tuple[str, Case]) -> None:
    _, each = case
    with torch.no_grad():
        plain = each.run(each.model)
        with regard.intervene(each.model) as edit:
            assert torch.equal(each.run(each.model), plain)
        assert repr(edit) == "no edits"


def test_an_ablated_head_is_the_model_without_its_output(case: tuple[str, Case]) -> None:
    name, each = case
    seen = recorded(each)
    heads = seen[each.names[1]].q.shape[1]
    with torch.no_grad():
        plain = each.run(each.model)
        expected = without_head(name, each, 1, heads)
        with regard.intervene(each.model) as edit:
            edit.ablate(each.names[1], heads=[1])
            found = each.run(each.model)
        assert_same(name, found, expected)
        assert float((found - plain).abs().max()) > 1e-2
        assert torch.equal(each.run(each.model), plain)
    assert no_hooks_left()


def test_edits_that_change_nothing_give_the_model_itself(case: tuple[str, Case]) -> None:
    """The recorded weights, beta times one, and the outputs of the same run."""
    name, each = case
    seen = recorded(each)
    makers: list[Callable[[Interventions, str], None]] = [
        lambda edit, layer: edit.set_weights(layer, seen[layer].weights()),
        lambda edit, layer: edit.scale_beta(layer, 1.0),
        lambda edit, layer: edit.patch(layer, source=seen),
        lambda edit, layer: edit.hide(layer, keys=[]),
    ]
    with torch.no_grad():
        plain = each.run(each.model)
        for make in makers:
            with regard.intervene(each.model) as edit:
                for layer in each.names:
                    make(edit, layer)
                assert_same(name, each.run(each.model), plain)


def test_hidden_keys_and_beta_equal_weights_that_are_set(case: tuple[str, Case]) -> None:
    """Both computed from the eager weights of the model: w' ~ w ** factor over the keys that remain."""
    name, each = case
    layer = each.names[0]
    seen = recorded(each)
    scores = (
        seen[layer].q @ seen[layer].k.repeat_interleave(seen[layer].q.shape[1] // seen[layer].k.shape[1], 1).mT
    ) * seen[layer].beta
    lse = seen[layer].lse[..., None]
    weights = seen[layer].weights()
    # log w = beta q.k + bias - lse, and one more beta q.k is a factor of two
    double = (weights.log() + lse + scores).softmax(-1).nan_to_num(0.0)
    kept = weights.clone()
    kept[..., 3] = 0
    kept = kept / kept.sum(-1, keepdim=True)
    outputs = []
    with torch.no_grad():
        for make in (
            lambda edit: edit.scale_beta(layer, 2.0, heads=[0]),
            lambda edit: edit.set_weights(layer, double[:, :1], heads=[0]),
            lambda edit: edit.hide(layer, keys=[3], heads=[0, 2]),
            lambda edit: edit.set_weights(layer, kept[:, [0, 2]], heads=[0, 2]),
        ):
            with regard.intervene(each.model) as edit:
                make(edit)
                outputs.append(each.run(each.model))
    real = slice(2, None) if name.startswith(("gpt2", "llama")) else slice(None)  # rows of left padding are arbitrary
    assert_same(name, outputs[0][1:, real], outputs[1][1:, real])
    assert_same(name, outputs[2][1:, real], outputs[3][1:, real])
    assert not torch.allclose(outputs[0], outputs[2])


def test_patching_every_head_of_the_last_layers_moves_the_answer() -> None:
    """With all attention of another run and the same input to everything else, only attention differs."""
    each = by_hand()
    x, other = torch.randn(2, 2, 9, 24)
    with torch.no_grad():
        with regard.watch(each.model) as seen:
            each.model(other)
        with regard.intervene(each.model) as edit:
            edit.patch("first", source=seen, heads=[0, 1, 2], positions=[4, -1])
            found = each.model(x)
        first, second = each.model.first, each.model.second  # type: ignore[union-attr]
        own, changed = first(x), first(other)  # type: ignore[operator]
        own[:, [4, 8]] = changed[:, [4, 8]]
        expected = x + own
        expected = expected + second(expected)  # type: ignore[operator]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mean", "mean of source", "resample"])
def test_mean_and_resample_ablation_by_hand(kind: str) -> None:
    q, k, v = torch.randn(3, 4, 2, 5, 8, dtype=torch.float64).unbind()
    others = torch.randn(3, 6, 2, 5, 8, dtype=torch.float64).unbind()
    model = CallModule(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v))
    with regard.watch(model) as seen:
        model(*others)
    heads, source = (softmax_weights(a, b) @ c for a, b, c in ((q, k, v), others))
    with regard.intervene(model) as edit:
        if kind == "resample":
            edit.ablate("CallModule", heads=[1], how="resample", source=seen, seed=3)
        else:
            edit.ablate(0, heads=[1], how="mean", source=seen if "source" in kind else None)
        found = model(q, k, v)
        again = model(q, k, v)
    assert torch.equal(found, again)
    torch.testing.assert_close(found[:, 0], heads[:, 0])
    if kind == "resample":
        draws = torch.randint(6, (4,), generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(found[:, 1], source[draws, 1])
    else:
        mean = (source if "source" in kind else heads).mean((0, 2))[1]
        torch.testing.assert_close(found[:, 1], mean.expand(4, 5, 8))


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    out: Tensor = flex_attention(q, k, v)
    return out


def into_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    torch.matmul(softmax_weights(q, k), v, out=out)
    return out


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhic,bhjc->bhij", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhij,bhje->bhie", weights, v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h = q.shape[:2]
    weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul(q.shape[-1] ** -0.5).softmax(-1)
    return torch.bmm(weights.view(b * h, *weights.shape[1:]), v.flatten(0, 1)).unflatten(0, (b, h))


def by_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmax_weights(q, k)
    return (weights[..., None] * v[..., None, :, :]).sum(-2)


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
    "sdpa operator": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "flex": flex,
    "attend": lambda q, k, v: regard.attend(q, k, v),
    "attend blocked": lambda q, k, v: regard.attend(q, k, v, kernel="eager"),
    "matmul": lambda q, k, v: softmax_weights(q, k) @ v,
    "buffer": into_buffer,
    "einsum": by_einsum,
    "bmm": by_bmm,
    "product and sum": by_sum,
}


class SixHeads(CallModule):
    num_heads = 6


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_is_edited(form: str) -> None:
    q, k, v = qkv()
    model = SixHeads(FORMS[form])
    weights = softmax_weights(q, k)
    heads = weights @ v
    other = torch.rand(5, 7)
    with torch.no_grad(), regard.intervene(model) as edit:
        edit.ablate("SixHeads", heads=[1])
        edit.set_weights(0, other, heads=[2])
        edit.hide(0, keys=[-1, 2], heads=[4])
        edit.scale_beta(0, 3.0, heads=[5, 4])
        found = model(q, k, v)
    expected = heads.clone()
    expected[:, 1] = 0
    expected[:, 2] = other @ v[:, 2]
    sharp = softmax_weights(q, k, beta=3 * 8**-0.5)
    expected[:, 5] = (sharp @ v)[:, 5]
    sharp[..., [6, 2]] = 0
    expected[:, 4] = ((sharp / sharp.sum(-1, keepdim=True)) @ v)[:, 4]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert "changed 1 call" in repr(edit)


def test_an_output_projection_in_the_same_einsum_is_applied_to_the_edited_heads() -> None:
    q, k, v = qkv(h=3, g=3)
    out = torch.randn(3, 3, 11)
    model = CallModule(lambda q, k, v, out: torch.einsum("bhij,bhje,hed->bid", softmax_weights(q, k), v, out))
    heads = softmax_weights(q, k) @ v
    heads[:, 1] = 0
    with regard.intervene(model) as edit:
        edit.ablate(0, heads=[1])
        found = model(q, k, v, out)
    torch.testing.assert_close(found, torch.einsum("bhie,hed->bid", heads, out), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("functional_form", [True, False])
def test_multihead_attention_of_torch_is_edited(need_weights: bool, functional_form: bool) -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=not functional_form).eval()
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(2, 5, 12)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            if not functional_form:
                out: Tensor = self.layer(x, x, x, need_weights=need_weights)[0]
                return out
            found: Tensor = functional.multi_head_attention_forward(
                x, x, x, 12, 3, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
                layer.out_proj.weight, layer.out_proj.bias, training=False, need_weights=need_weights,
            )[0]  # fmt: skip
            return found

    model = Wrapped()
    flat = functional.linear(x if not functional_form else x.transpose(0, 1), layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in flat.chunk(3, -1))
    heads = softmax_weights(q, k) @ v
    heads[:, 2] = 0
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    with regard.intervene(model) as edit:
        edit.ablate(0, heads=[-1])
        found = model(x)
    torch.testing.assert_close(found, expected if not functional_form else expected.transpose(0, 1))


def test_a_custom_operator_of_a_registry_is_edited_by_its_output() -> None:
    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Masked, scaling: float, **rest: Any) -> Any:
        return torch.ops.regard_tests.opaque(q, k, v, scaling, True), None

    with registered(own) as each, torch.no_grad():
        with regard.intervene(each.model) as edit:
            edit.ablate("1.self_attn", heads=[1])
            found = each.model(ids(), use_cache=False).logits
        weight = each.model.get_parameter(PROJECTIONS["llama"][0])
        weight[:, 4:8] = 0
        torch.testing.assert_close(found, each.model(ids(), use_cache=False).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["by hand", "gpt2 sdpa", "torch encoder, norm first"])
def test_gradients_are_those_of_the_edited_model(name: str) -> None:
    each = CASES[name]()
    path, axis = PROJECTIONS[name.split()[0]]
    weight = each.model.get_parameter(path)
    others = [p for key, p in each.model.named_parameters() if key != path and p.requires_grad]
    heads = recorded(each)[each.names[1]].q.shape[1]
    with regard.intervene(each.model) as edit:
        edit.ablate(each.names[1], heads=[1])
        found = torch.autograd.grad(each.run(each.model).square().sum(), others, allow_unused=True)
    width = weight.shape[axis] // heads
    with torch.no_grad():
        weight.narrow(axis, width, width).zero_()
    expected = torch.autograd.grad(each.run(each.model).square().sum(), others, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_gradients_flow_through_beta_hidden_keys_and_weights_by_hand() -> None:
    """Hand-written attention keeps the gradients of its queries, keys, values and bias."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 3, 5, 4, dtype=torch.float64).unbind())
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    given = torch.rand(5, 5, dtype=torch.float64, requires_grad=True)
    model = CallModule(lambda q, k, v: (q @ k.mT * 0.5 + bias).softmax(-1) @ v)

    def expected() -> Tensor:
        scores = q @ k.mT * 0.5 + bias
        scores = torch.stack(
            [2 * q[:, 0] @ k[:, 0].mT * 0.5 + bias, scores[:, 1].index_fill(-1, torch.tensor([3]), -math.inf)], 1
        )
        return torch.cat([scores.softmax(-1) @ v[:, :2], given @ v[:, 2:]], 1)

    with regard.intervene(model) as edit:
        edit.scale_beta(0, 2.0, heads=[0])
        edit.hide(0, keys=[3], heads=[1])
        edit.set_weights(0, given, heads=[2])
        found = model(q, k, v)
    torch.testing.assert_close(found, expected())
    tensors = (q, k, v, bias, given)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), tensors),
        torch.autograd.grad(expected().square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_all_is_undone_after_an_error() -> None:
    each = torch_encoder()
    plain = each.run(each.model)
    edits = []
    with pytest.raises(ZeroDivisionError):
        run_edited(each.model, lambda edit: (edits.append(edit), edit.ablate(0, heads=[0])), lambda: 1 / 0)
    assert no_hooks_left()
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(each.run(each.model), plain)
    with pytest.raises(ConfigError, match=r"call it inside `with regard\.intervene"):
        edits[0].ablate(0)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("h.1", "made no attention call that is recorded; did you mean 'transformer.h.1.attn'"),
        (2, "made 2 attention calls: transformer.h.0.attn, transformer.h.1.attn"),
    ],
)
def test_an_edit_without_effect_is_an_error_at_the_end_of_the_pass(layer: str | int, words: str) -> None:
    each = CASES["gpt2 sdpa"]()
    done: list[Tensor] = []
    with pytest.raises(InterventionError, match="changed nothing") as error:
        run_edited(each.model, lambda edit: edit.ablate(layer), lambda: done.append(each.run(each.model)))
    assert words in str(error.value)
    assert not done  # raised by the pass itself


def test_a_numbered_call_that_is_never_made_is_an_error_at_the_end_of_the_block() -> None:
    each = CASES["gpt2 sdpa"]()
    with pytest.raises(InterventionError, match=r"changed nothing: transformer\.h\.1\.attn made 2 attention calls"):
        run_edited(
            each.model, lambda edit: edit.ablate("h.1.attn:3"), lambda: (each.run(each.model), each.run(each.model))
        )


def test_an_edit_without_a_pass_or_of_attention_that_is_left_out_is_an_error() -> None:
    each = CASES["gpt2 sdpa"]()
    with pytest.raises(InterventionError, match="no attention was recorded"):
        run_edited(each.model, lambda edit: edit.ablate("h.1.attn"), lambda: None)
    gated = CallModule(lambda q, k, v: (q @ k.mT).sigmoid() @ v)
    with pytest.raises(InterventionError, match=r"left out: .*sigmoid of a product"):
        run_edited(gated, lambda edit: edit.ablate(0), lambda: gated(*qkv()))


def test_layers_are_names_unique_suffixes_or_indices() -> None:
    each = CASES["gpt2 sdpa"]()
    outputs = []
    for layer in ("transformer.h.1.attn", "1.attn", 1):
        with torch.no_grad(), regard.intervene(each.model) as edit:
            edit.ablate(layer, heads=[0])
            each.run(each.model)
            outputs.append(each.run(each.model))  # the second pass is edited too
        assert "changed 2 calls" in repr(edit)
    assert all(torch.equal(outputs[0], other) for other in outputs)
    with regard.intervene(each.model) as edit:
        with pytest.raises(ConfigError, match=r"fits 2 modules: transformer\.h\.0\.attn, transformer\.h\.1\.attn"):
            edit.ablate("attn")
        with pytest.raises(UnknownNameError, match=r"did you mean 'transformer\.h\.1\.attn"):
            edit.ablate("h.1.atn")
        with pytest.raises(ConfigError, match="layer, if it is an index, is -1"):
            edit.ablate(-1)


class Twice(nn.Module):
    """One attention module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = CallModule(lambda x: functional.scaled_dot_product_attention(x, x, x))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_a_name_is_for_every_call_and_a_number_for_one() -> None:
    model, x = Twice(), torch.randn(1, 2, 5, 4)
    once = functional.scaled_dot_product_attention(x, x, x)
    with regard.intervene(model) as edit:
        edit.ablate("layer:2", heads=[1])
        second = model(x)
    expected = functional.scaled_dot_product_attention(once, once, once)
    expected[:, 1] = 0
    torch.testing.assert_close(second, expected)
    with regard.intervene(model) as edit:
        edit.ablate("layer")
        assert float(model(x).abs().max()) == 0
    assert "changed 2 calls" in repr(edit)


def test_a_number_means_the_same_call_in_watch_and_intervene() -> None:
    """Numbers count over the whole block, also over several forward passes."""
    model, x = Twice(), torch.randn(1, 2, 5, 4)
    with regard.watch(model) as seen:
        first, _ = model(x), model(x + 1)
    assert list(seen) == ["layer", "layer:2", "layer:3", "layer:4"]
    with regard.intervene(model) as edit, regard.watch(model) as edited:
        edit.ablate("layer:4", heads=[1])
        assert torch.equal(model(x), first)
        assert not model(x + 1)[:, 1].any()
    assert edit.edits[0].calls == ["layer:4"]
    assert torch.equal(edited["layer:4"].q, seen["layer:4"].q)


def test_what_cannot_be_edited_is_refused_with_the_reason() -> None:
    q, k, v = qkv()
    scaled = CallModule(lambda q, k, v: (softmax_weights(q, k) * 0.5) @ v)
    with pytest.raises(InterventionError, match="after the softmax"):
        run_edited(scaled, lambda edit: edit.hide(0, keys=[1]), lambda: scaled(q, k, v))
    with regard.watch(scaled) as seen:
        scaled(q, k, v)
    with pytest.raises(InterventionError, match="cannot be computed from its record"):
        run_edited(scaled, lambda edit: edit.patch(0, source=seen), lambda: scaled(q, k, v))
    capped = CallModule(lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v)
    with pytest.raises(InterventionError, match="beta is unknown"):
        run_edited(capped, lambda edit: edit.scale_beta(0, 2.0), lambda: capped(q, k, v))
    each = CASES["llama sdpa"]()
    each.model.train()
    each.model.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.raises(InterventionError, match="activation checkpointing"):
        run_edited(each.model, lambda edit: edit.ablate(0), lambda: each.run(each.model))


def test_arguments_are_checked_before_the_model_runs() -> None:
    each = by_hand()
    with regard.watch(each.model, values=False) as seen:
        each.run(each.model)
    with regard.intervene(each.model) as edit:
        for call, error, words in (
            (lambda: edit.ablate(0, how="noise"), ConfigError, "how is one of zero, mean, resample"),
            (lambda: edit.ablate(0, how="resample"), ConfigError, "pass source=, what watch recorded, and seed="),
            (lambda: edit.ablate(0, how="mean", seed=3), ConfigError, "a seed is for how='resample'"),
            (lambda: edit.ablate(0, source=seen), ConfigError, "takes no source"),
            (lambda: edit.patch(0, source=each.model), ConfigError, "not ByHandModel"),  # type: ignore[arg-type]
            (lambda: edit.scale_beta(0, math.inf), ConfigError, "must be finite"),
            (lambda: edit.hide(0, keys=3), ConfigError, "keys takes a list"),  # type: ignore[arg-type]
            (lambda: edit.set_weights(0, [[1.0]]), ConfigError, "takes a floating-point tensor"),  # type: ignore[arg-type]
        ):
            with pytest.raises(error, match=words):
                call()
    for make, error, words in (
        (lambda edit: edit.ablate(0, heads=[3]), ShapeError, "first has 3 heads"),
        (lambda edit: edit.hide(0, keys=[9]), ShapeError, "first has 9 keys"),
        (lambda edit: edit.patch(0, source=seen), InterventionError, "values were not recorded"),
        (lambda edit: edit.set_weights(0, torch.rand(4, 9)), ShapeError, r"\(b, chosen heads, i, j\) = \(2, 3, 9, 9\)"),
    ):
        with pytest.raises(error, match=words):
            run_edited(each.model, make, lambda: each.run(each.model))


def test_watching_inside_sees_what_the_edit_changed() -> None:
    each = by_hand()
    plain = recorded(each)
    with torch.no_grad(), regard.intervene(each.model) as edit, regard.watch(each.model) as seen:
        edit.ablate("first")
        each.run(each.model)
    assert torch.equal(seen["first"].q, plain["first"].q)
    assert not torch.allclose(seen["second"].q, plain["second"].q)


def test_watching_inside_records_the_edited_weights(case: tuple[str, Case]) -> None:
    name, each = case
    plain = recorded(each)
    layer = list(plain)[1]
    before = plain[layer].weights()
    with torch.no_grad(), regard.intervene(each.model) as edit, regard.watch(each.model) as seen:
        edit.hide(layer, keys=[2], heads=[1])
        edit.scale_beta(layer, 3.0, heads=[0])
        each.run(each.model)
    after = seen[layer].weights()
    assert (seen[layer].route, list(seen)) == (plain[layer].route, list(plain))
    assert seen[layer].positions == plain[layer].positions
    assert not after[:, 1, :, 2].any()
    kept = before[:, 1].clone()
    kept[..., 2] = 0
    total = kept.sum(-1, keepdim=True)
    assert_same(name, after[:, 1], kept / total.masked_fill(total == 0, 1))
    assert_same(name, after[:, -1], before[:, -1])
    assert not torch.allclose(after[:, 0, :7], before[:, 0, :7], atol=1e-3)


@pytest.mark.parametrize("inside", [True, False])
def test_what_an_edit_computes_is_not_recorded(inside: bool) -> None:
    model = regard.build("birthplace", depth=2, width=24, heads=3, context=32, seed=1).eval()
    x = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.watch(model) as plain:
        model(x)
    managers = (regard.intervene(model), regard.watch(model))
    with torch.no_grad(), managers[not inside] as one, managers[inside] as other:
        edit, seen = (one, other) if inside else (other, one)
        assert isinstance(edit, Interventions)
        edit.patch(0, source=plain)
        edit.scale_beta(1, 2.0)
        model(x)
    assert isinstance(seen, Seen)
    assert list(seen) == list(plain)
    factor = 2 if inside else 1  # inside, the call is recorded as the edit changed it
    assert torch.equal(seen["blocks.1.attention"].q, factor * plain["blocks.1.attention"].q)


def test_generation_is_edited_at_every_step() -> None:
    model = regard.build("birthplace", depth=2, width=24, heads=3, context=32, seed=1).eval()
    x = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.intervene(model) as edit:
        edit.ablate(1, heads=[2])
        whole = model(x)
        cache = model.cache()
        parts = [model(x[:, :4], cache=cache), model(x[:, 4:], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert "changed 3 calls" in repr(edit)


def test_an_index_needs_a_forward_pass_of_the_model_itself() -> None:
    model, x = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval(), torch.randn(1, 5, 16)
    with regard.intervene(model) as edit:
        edit.ablate(0)
        with pytest.raises(InterventionError, match="outside a forward pass"):
            model.forward(x)
        model(x)
    with regard.intervene(model) as edit:
        edit.ablate("self_attn")
        first, second = model.forward(x), model.forward(x)
    assert torch.equal(first, second)
    assert not torch.equal(first, model(x))


def test_an_empty_list_of_heads_is_refused() -> None:
    model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    with regard.intervene(model) as edit, pytest.raises(ConfigError, match="ablate got no heads"):
        edit.ablate(0, heads=[])


def test_head_importance_leaves_gradients_as_they_were() -> None:
    model, x = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True), torch.randn(1, 5, 16)
    model.linear1.weight.grad = torch.ones_like(model.linear1.weight)
    regard.see.head_importance(model.eval(), lambda: model(x).square().sum())
    assert torch.equal(model.linear1.weight.grad, torch.ones_like(model.linear1.weight))
    assert model.linear2.weight.grad is None


def test_induction_scores_need_repeated_tokens() -> None:
    model = regard.load("induction-gpt")
    with pytest.raises(ConfigError, match="tokens do not repeat after 7 tokens"):
        regard.see.induction_scores(model, torch.arange(17)[None], length=7)
