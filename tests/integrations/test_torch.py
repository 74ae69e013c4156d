"""Replacing torch.nn.MultiheadAttention inside a model, and restoring it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from regard.base.errors import ConfigError
from regard.core.kernels import recording
from regard.integrations.torch import replace, restore
from regard.nn import MultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:enable_nested_tensor")
D = 12


def encoder(heads: int = 3, **settings: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, heads, 20, dropout=0.3, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_runs_on_attend_with_and_without_gradients(norm_first: bool, training: bool) -> None:
    model = encoder(norm_first=norm_first).train(training)
    x = torch.randn(2, 7, D)
    report = replace(model, example=(x,))
    assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert report.max_difference is not None
    assert report.max_difference < 1e-6
    assert all(module.training is training for module in model.modules())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), recording() as kernels:
            model(x)
        assert len(kernels) == 2


@pytest.mark.parametrize("heads", [2, 3])  # only with an even number does torch pass nested tensors
def test_padded_batches_of_an_encoder_agree_on_real_rows(heads: int) -> None:
    model = encoder(heads)
    x, padding = torch.randn(2, 7, D), torch.arange(7) >= torch.tensor([[7], [4]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        report = replace(model, example=(x, None, padding))
        out = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(out[~padding], expected[~padding], atol=1e-6, rtol=1e-5)
        assert report.max_difference is not None
        assert report.max_difference < 1e-6
        restore(model)
        assert torch.equal(model(x, src_key_padding_mask=padding), expected)


def test_a_decoder_and_a_whole_transformer() -> None:
    torch.manual_seed(1)
    model = nn.Transformer(D, 3, 2, 2, 20, batch_first=True).eval()
    source, target = torch.randn(2, 7, D), torch.randn(2, 5, D)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        expected = model(source, target, tgt_mask=causal, tgt_is_causal=True)
        report = replace(model, example=(source, target))
        with recording() as kernels:
            out = model(source, target, tgt_mask=causal, tgt_is_causal=True)
    assert len(report.replaced) == len(kernels) == 6
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_parameters_are_shared_and_restore_keeps_what_was_trained() -> None:
    model = encoder()
    x, names = torch.randn(2, 7, D), list(model.state_dict())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replace(model)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(x).square().mean().backward()
    optimizer.step()
    out = model(x)
    assert restore(model) == ("layers.0.self_attn", "layers.1.self_attn")
    assert not any(isinstance(module, MultiheadAttention) for module in model.modules())
    torch.testing.assert_close(model(x), out, atol=1e-6, rtol=1e-5)
    with torch.no_grad(), recording() as kernels:
        model(x)
    assert kernels == []


def test_a_copy_and_another_dtype_can_be_restored() -> None:
    model = encoder()
    replace(model)
    other = copy.deepcopy(model).double()
    restore(other)
    assert {x.dtype for x in other.parameters()} == {torch.float64}
    assert other(torch.randn(2, 7, D, dtype=torch.float64)).shape == (2, 7, D)


def test_hooks_stay_and_can_be_removed() -> None:
    model, calls = encoder(), []
    handle = model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append("out"))  # type: ignore[union-attr,operator]
    replace(model)
    model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append("in"))  # type: ignore[union-attr,operator]
    model(torch.randn(2, 7, D))
    assert calls == ["out", "in"]
    handle.remove()
    model(torch.randn(2, 7, D))
    restore(model)
    model(torch.randn(2, 7, D))
    assert calls == ["out", "in", "in", "in"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("kind", ["pruned", "weight norm"])
def test_a_weight_that_a_hook_computes_stays_so(kind: str) -> None:
    model = encoder()
    layer = model.layers[0].self_attn  # type: ignore[union-attr]
    if kind == "pruned":
        prune.l1_unstructured(layer, "in_proj_weight", 0.5)
    else:
        nn.utils.weight_norm(layer, "in_proj_weight")
    x = torch.randn(2, 7, D)
    expected, names = model(x), list(model.state_dict())
    report = replace(model, example=(x,))
    assert report.max_difference is not None
    assert report.max_difference < 1e-6
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)
    restore(model)
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)


class Twice(nn.Module):
    """One attention layer under two names, and a subclass with code of its own."""

    def __init__(self) -> None:
        super().__init__()

        class Louder(nn.MultiheadAttention):
            def forward(self, *args: Tensor, **kwargs: object) -> object:  # type: ignore[override]
                out, weights = super().forward(*args, **kwargs)  # type: ignore[arg-type]
                return 2 * out, weights

        self.first = self.second = nn.MultiheadAttention(D, 3, batch_first=True)
        self.louder = Louder(D, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x, x, x)[0], x, x)[0]
        out: Tensor = self.louder(x, x, x)[0]
        return out


def test_a_shared_layer_stays_shared_and_a_subclass_is_left_out() -> None:
    model = Twice().eval()
    report = replace(model, example=(torch.randn(2, 5, D),))
    assert model.first is model.second
    assert isinstance(model.first, MultiheadAttention)
    assert report.replaced == ("first", "second")
    assert report.left_out == {"louder": "Louder is a subclass with code of its own"}
    assert report.max_difference is not None
    assert report.max_difference < 1e-6
    assert "left out louder" in str(report)
    restore(model)
    assert model.first is model.second
    assert type(model.second) is nn.MultiheadAttention


def test_a_parametrized_layer_is_left_out_with_the_reason() -> None:
    model = encoder()
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.self_attn, "in_proj_weight")
    report = replace(model)
    assert str(report).splitlines() == ["replaced 0 modules"] + [
        f"left out layers.{n}.self_attn: torch.nn.utils.parametrize computes its weights in a class of its own"
        for n in range(len(model.layers))
    ]


def test_wrong_models_raise_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, not str"):
        replace("encoder")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"example must be a tuple of the arguments of the model, \(x,\), not Tensor"):
        replace(encoder(), example=torch.randn(2, 7, D))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parent"):
        replace(nn.MultiheadAttention(D, 3))
    with pytest.raises(ConfigError, match=r"contains no torch\.nn\.MultiheadAttention"):
        replace(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="contains no module"):
        restore(encoder())
