"""Weights that a model itself returns are those of the edited computation, or the edit is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.base.errors import InterventionError
from regard.integrations import huggingface
from regard.see.interventions.intervene import Interventions
from tests.see.model_cases import CASES, ids
from tests.see.test_intervene import run_edited
from tests.see.watch_helpers import CallModule, qkv

pytestmark = pytest.mark.usefixtures("check_hooks_removed")
B, H, N, D = 2, 3, 7, 12
Edit = Callable[[Interventions], None]
GIVEN = torch.randn(B, 1, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(-1)


def edited_weights(weights: Tensor, scores: Tensor, edit: str) -> Tensor:
    """The weights after an edit of head 1, by hand."""
    weights = weights.clone()
    if edit == "hide":
        scores = scores.clone()
        scores[..., 2] = -torch.inf
        weights[:, 1] = scores[:, 1].softmax(-1)
    elif edit == "scale_beta":
        weights[:, 1] = (scores[:, 1] * 3).softmax(-1)
    elif edit == "set_weights":
        weights[:, 1] = GIVEN[:, 0]
    return weights


EDITS: dict[str, Edit] = {
    "hide": lambda edit: edit.hide(0, keys=[2], heads=[1]),
    "scale_beta": lambda edit: edit.scale_beta(0, 3.0, heads=[1]),
    "set_weights": lambda edit: edit.set_weights(0, GIVEN, heads=[1]),
    "ablate": lambda edit: edit.ablate(0, heads=[1]),
}
INPUT = torch.randn(B, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layer_of(kind: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    return kind(D, H, batch_first=True).double().eval()


def heads_of(layer: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores (b h i j) and the values (b h j e) of self-attention, by hand."""
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (H, -1)).transpose(1, 2)
        for weight, bias in zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    )
    return q @ k.mT * q.shape[-1] ** -0.5, v


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, regard.nn.MultiheadAttention])
def test_multihead_attention_returns_the_edited_weights(
    kind: type[nn.MultiheadAttention], edit: str, averaged: bool
) -> None:
    layer = layer_of(kind)
    scores, v = heads_of(layer, INPUT)
    with regard.intervene(layer) as edits:
        EDITS[edit](edits)
        out, weights = layer(INPUT, INPUT, INPUT, average_attn_weights=averaged)
    expected = edited_weights(scores.softmax(-1), scores, edit)
    assert weights is not None
    torch.testing.assert_close(weights, expected.mean(1) if averaged else expected)
    heads = expected @ v
    heads[:, 1] *= edit != "ablate"
    torch.testing.assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))


def test_two_edits_of_averaged_weights() -> None:
    layer = layer_of(nn.MultiheadAttention)
    scores, _ = heads_of(layer, INPUT)
    with regard.intervene(layer) as edits:
        edits.hide(0, keys=[2], heads=[1])
        edits.set_weights(0, GIVEN, heads=[0])
        _, weights = layer(INPUT, INPUT, INPUT)
    expected = edited_weights(scores.softmax(-1), scores, "hide")
    expected[:, 0] = GIVEN[:, 0]
    torch.testing.assert_close(weights, expected.mean(1))


def test_one_sequence_and_the_functional_form() -> None:
    layer = layer_of(nn.MultiheadAttention)
    model = CallModule(
        lambda x: functional.multi_head_attention_forward(
            x, x, x, D, H, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight,
            layer.out_proj.bias, training=False, average_attn_weights=False,
        )
    )  # fmt: skip
    scores, _ = heads_of(layer, INPUT[:1])
    for each in (model, layer):
        given = (INPUT[0],) if each is model else (INPUT[0],) * 3
        with regard.intervene(each) as edits:
            edits.hide(0, keys=[2], heads=[1])
            _, weights = each(*given) if each is model else each(*given, average_attn_weights=False)
        torch.testing.assert_close(weights, edited_weights(scores.softmax(-1), scores, "hide")[0])


def test_the_mean_of_dropped_weights_cannot_be_edited() -> None:
    layer = nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True).double()
    with pytest.raises(InterventionError, match=r"mean of the weights of all heads after dropout.*model\.eval\(\)"):
        run_edited(layer, EDITS["hide"], lambda: layer(INPUT, INPUT, INPUT))


@pytest.mark.parametrize("training", [False, True])
def test_our_layer_with_weights_is_one_call(training: bool) -> None:
    layer = regard.nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True).double().train(training)
    with regard.watch(layer) as seen:
        _, weights = layer(INPUT, INPUT, INPUT, average_attn_weights=False)
    scores, v = heads_of(layer, INPUT)
    assert list(seen) == ["MultiheadAttention"]
    torch.testing.assert_close(seen.records[0].v, v)
    torch.testing.assert_close(seen.records[0].weights(), scores.softmax(-1))
    assert seen.records[0].dropout == 0.5 * training
    assert weights is not None
    assert bool((weights == 0).any()) == training


# GPT-2 does not pass output_attentions on to a registered function
@pytest.mark.parametrize(
    ("family", "implementation"),
    [("gpt2 sdpa", "eager"), *((name, each) for name in ("bert sdpa", "llama eager") for each in ("eager", "regard"))],
)
def test_output_attentions_of_hugging_face_are_the_edited_weights(family: str, implementation: str) -> None:
    huggingface.register()
    model: Any = CASES[family]().model
    model.set_attn_implementation(implementation)
    run = lambda: model(ids(), output_attentions=True)  # noqa: E731
    with torch.no_grad(), regard.watch(model) as seen:
        plain = run()
    assert len(seen) == len(plain.attentions)
    for record, weights in zip(seen.records, plain.attentions, strict=True):
        torch.testing.assert_close(record.weights(), weights, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), regard.intervene(model) as edit:
        edit.hide(1, keys=[1], heads=[0])
        edited = run()
    assert torch.equal(edited.attentions[0], plain.attentions[0])
    expected = plain.attentions[1].clone()
    expected[:, 0, :, 1] = 0
    expected[:, 0] /= expected[:, 0].sum(-1, keepdim=True).clamp(min=1e-9)
    torch.testing.assert_close(edited.attentions[1], expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), regard.intervene(model) as edit:
        edit.ablate(1)
        ablated = run()
    assert torch.equal(ablated.attentions[1], plain.attentions[1])


def attend_by_hand(change: Callable[[Tensor], tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Attention in float32, or what `change` computes from its weights: those to use, and what is returned."""
    weights, returned = change((q @ k.mT * 0.5).softmax(-1))
    return weights @ v, returned if returned is not None else weights


BY_HAND: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
    "the weights": lambda w: (w, w),
    "a view of them": lambda w: (w, w.view(-1, *w.shape[2:])),
    "weights from a view": lambda w: (w.view(-1, *w.shape[2:]).view(w.shape), w),
    "a copy": lambda w: (w, w.clone()),
    "another dtype": lambda w: (w, w.float()),
    "before dropout": lambda w: (functional.dropout(w, 0.0, training=True), w),
}


@pytest.mark.parametrize("form", BY_HAND)
def test_weights_returned_by_code_written_by_hand_are_edited(form: str) -> None:
    q, k, v = (x.double() for x in qkv())
    model = CallModule(lambda q, k, v: attend_by_hand(BY_HAND[form], q, k, v))
    scores = q @ k.mT * 0.5
    with regard.intervene(model) as edit:
        edit.hide(0, keys=[2], heads=[1])
        out, weights = model(q, k, v)
    expected = scores.softmax(-1)
    scores[..., 2] = -torch.inf
    expected[:, 1] = scores[:, 1].softmax(-1)
    torch.testing.assert_close(weights.reshape(expected.shape).double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, expected @ v)


def test_weights_before_dropout_have_none_and_the_output_has_that_of_the_used_weights() -> None:
    q, k, v = (x.double() for x in qkv())
    model = CallModule(lambda q, k, v: keep_both(q, k, v))

    def keep_both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        dropped = functional.dropout(weights, 0.5, training=True)
        return dropped @ v, weights, dropped

    with regard.intervene(model) as edit:
        edit.hide(0, keys=[2])
        out, weights, dropped = model(q, k, v)
    assert not weights[..., 2].any()
    assert bool(weights[..., :2].all())
    torch.testing.assert_close(dropped[dropped > 0], 2 * weights[dropped > 0])
    torch.testing.assert_close(out, dropped @ v)


REFUSED: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
    "their mean": lambda w: (w, w.mean(1)),
    "a part of them": lambda w: (w, w[:, :1]),
    "a multiple": lambda w: (w, w * 2),
}


@pytest.mark.parametrize("form", REFUSED)
def test_numbers_computed_from_the_weights_before_their_use_are_refused(form: str) -> None:
    q, k, v = qkv()
    model = CallModule(lambda q, k, v: attend_by_hand(REFUSED[form], q, k, v))
    with pytest.raises(InterventionError, match="the model may return weights that are not those of the edit"):
        run_edited(model, lambda edit: edit.hide(0, keys=[2]), lambda: model(q, k, v))
    with regard.intervene(model) as edit:
        edit.ablate(0)
        out, returned = model(q, k, v)
    assert not out.any()
    torch.testing.assert_close(returned, REFUSED[form]((q @ k.mT * 0.5).softmax(-1))[1])


def test_gradients_of_other_heads_are_right_and_those_of_replaced_weights_are_an_error() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv())
    model = CallModule(lambda q, k, v: attend_by_hand(lambda w: (w, w), q, k, v))
    with regard.intervene(model) as edit:
        edit.hide(0, keys=[2], heads=[1])
        out, weights = model(q, k, v)
    found = torch.autograd.grad(out.square().sum() + weights[:, 0].square().sum(), (q, k, v), retain_graph=True)
    scores = q @ k.mT * 0.5
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    hidden[:, 1, :, 2] = True
    by_hand = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    loss = (by_hand @ v).square().sum() + by_hand[:, 0].square().sum()
    for one, other in zip(found, torch.autograd.grad(loss, (q, k, v)), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(InterventionError, match="only the outputs of edited heads have gradients"):
        weights.square().sum().backward()


def test_one_map_for_several_heads_is_edited_as_a_whole_or_refused() -> None:
    q, k, v = (x.double() for x in qkv())
    q, k = q[:, :1], k[:, :1]
    model = CallModule(lambda q, k, v: attend_by_hand(lambda w: (w, w), q, k, v))
    with regard.intervene(model) as edit:
        edit.hide(0, keys=[2])
        out, weights = model(q, k, v)
    torch.testing.assert_close(out, weights @ v)
    assert not weights[..., 2].any()
    with pytest.raises(InterventionError, match="several heads share one map"):
        run_edited(model, EDITS["hide"], lambda: model(q, k, v))
