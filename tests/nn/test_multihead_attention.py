"""regard.nn.MultiheadAttention is torch.nn.MultiheadAttention, argument by argument, but for rows that see nothing."""

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import causal, padding
from regard.base.errors import ConfigError, ShapeError
from regard.core.kernels import recording
from regard.nn import MultiheadAttention

B, Q, K, D, H = 3, 5, 7, 12, 3
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "appended bias": {"add_bias_kv": True},
    "appended zeros": {"add_zero_attn": True},
    "both appended": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 9, "vdim": 11},
    "batch first": {"batch_first": True},
    "dropout in eval": {"dropout": 0.5},
}
PADDING = torch.tensor([[False] * K, [False] * 4 + [True] * 3, [True] * 2 + [False] * 5])
HIDDEN = (torch.rand(Q, K, generator=torch.Generator().manual_seed(2)) < 0.4).index_fill(1, torch.tensor([3]), False)
CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "padding": {"key_padding_mask": PADDING},
    "mask": {"attn_mask": HIDDEN},
    "mask and padding": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
    "mask for each head": {"attn_mask": HIDDEN.repeat(B * H, 1, 1)},
    "additive mask": {"attn_mask": torch.zeros(Q, K).masked_fill(HIDDEN, -math.inf) + 0.5},
    "additive padding": {"key_padding_mask": torch.zeros(B, K).masked_fill(PADDING, -math.inf)},
    "no weights": {"need_weights": False, "key_padding_mask": PADDING},
    "weights for each head": {"average_attn_weights": False},
}


def pair(**settings: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, **settings).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(D, H, **settings).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(settings: dict[str, Any]) -> list[Tensor]:
    sizes = ((Q, D), (K, settings.get("kdim", D)), (K, settings.get("vdim", D)))
    order = (lambda n: (B, n)) if settings.get("batch_first") else (lambda n: (n, B))
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(*order(n), d, generator=draw, dtype=torch.float64).requires_grad_() for n, d in sizes]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_weights_and_gradients_are_those_of_torch(layer: str, call: str) -> None:
    results = []
    for module in pair(**LAYERS[layer]):
        given = inputs(LAYERS[layer])
        arguments = {
            k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in CALLS[call].items()
        }
        out, weights = module(*given, **arguments)
        out.square().sum().backward()
        results.append([out, weights, *(x.grad for x in given), *(x.grad for x in module.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=1e-9)


def test_signature_and_state_dict_are_those_of_torch() -> None:
    for name in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (nn.MultiheadAttention, MultiheadAttention))
        assert list(ours.parameters) == list(theirs.parameters)
        for key, parameter in ours.parameters.items():
            assert parameter.default == theirs.parameters[key].default
    layers = pair(kdim=9, vdim=11, add_bias_kv=True)
    assert list(layers[0].state_dict()) == list(layers[1].state_dict())


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_that_sees_nothing_gives_zeros_and_no_nan_in_gradients(need_weights: bool) -> None:
    _, layer = pair(batch_first=True, bias=False)
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    out, weights = layer(x, x, x, key_padding_mask=torch.tensor([[True] * 5, [False] * 5]), need_weights=need_weights)
    out.sum().backward()
    assert torch.equal(out[0], torch.zeros(5, D, dtype=torch.float64))
    assert x.grad is not None
    assert not x.grad.isnan().any()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    if need_weights:
        assert weights is not None
        assert torch.equal(weights[0], torch.zeros(5, 5, dtype=torch.float64))


def test_is_causal_needs_no_matrix_and_counts_from_the_first_query() -> None:
    theirs, ours = pair()
    q, k, v = inputs({})
    hidden = torch.ones(Q, K, dtype=torch.bool).triu(1)
    expected = theirs(q, k, v, attn_mask=hidden, is_causal=True, need_weights=False)[0]
    for given in ({"is_causal": True}, {"is_causal": True, "attn_mask": hidden}):
        torch.testing.assert_close(ours(q, k, v, **given, need_weights=False)[0], expected)


def test_a_mask_of_regard_keeps_its_own_meaning() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, K, D, dtype=torch.float64)
    hidden = torch.ones(K, K, dtype=torch.bool).triu(1)
    lengths = torch.tensor([7, 4, 6])
    expected = theirs(x, x, x, attn_mask=hidden, key_padding_mask=torch.arange(K) >= lengths[:, None])
    torch.testing.assert_close(ours(x, x, x, attn_mask=causal() & padding(lengths)), expected)


def test_inputs_without_a_batch() -> None:
    theirs, ours = pair()
    x = torch.randn(Q, D, dtype=torch.float64)
    given = {"key_padding_mask": torch.tensor([False, True, False, False, True])}
    torch.testing.assert_close(ours(x, x, x, **given), theirs(x, x, x, **given))


def test_dropout_acts_on_the_weights_in_training() -> None:
    layer = MultiheadAttention(D, H, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, D)
    _, weights = layer(x, x, x, average_attn_weights=False)
    assert 0.2 < (weights == 0).float().mean() < 0.8
    layer.eval()
    assert not (layer(x, x, x, average_attn_weights=False)[1] == 0).any()


def test_padding_is_not_expanded_to_a_matrix() -> None:
    _, layer = pair(batch_first=True)
    layer.float()
    x = torch.randn(1, 640, D)
    real = torch.arange(640) >= 96
    with recording() as kernels, torch.no_grad():
        layer(x, x, x, key_padding_mask=real[None], need_weights=False)
    assert kernels == ["blocked"]


def test_wrong_arguments_raise_what_was_expected() -> None:
    with pytest.raises(ConfigError, match="embed_dim=12, num_heads=5"):
        MultiheadAttention(12, 5)
    _, layer = pair()
    q, k, v = inputs({})
    with pytest.raises(ShapeError, match=r"attn_mask is \(7, 5\), but must be \(5, 7\) or \(9, 5, 7\)"):
        layer(q, k, v, attn_mask=HIDDEN.T)
    with pytest.raises(ShapeError, match=r"key_padding_mask is \(7, 3\), but must be \(3, 7\)"):
        layer(q, k, v, key_padding_mask=PADDING.T)
    for integers in (torch.int64, torch.uint8):
        with pytest.raises(ConfigError, match=r"key_padding_mask must be boolean.*; pass mask == 0"):
            layer(q, k, k, key_padding_mask=torch.ones(3, 7, dtype=integers))
        with pytest.raises(ConfigError, match="attn_mask must be boolean, True where hidden, or floats"):
            layer(q, k, k, attn_mask=torch.ones(5, 7, dtype=integers))
    with pytest.raises(ConfigError, match="attn_mask must be a tensor or a mask of regard, not str: 'causal'"):
        layer(q, k, v, attn_mask="causal")
    with pytest.raises(ConfigError, match=r"pass a mask of regard, causal\(\), as attn_mask"):
        layer(q, k, v, key_padding_mask=causal())
    with pytest.raises(ConfigError, match="key must be a tensor, not NoneType"):
        layer(q, None, None)
    with pytest.raises(ShapeError, match=r"key has 3 axes, \(7, 3, 12\), but must be \(n, d\) as query is"):
        layer(q[:, 0], k, v)
    with pytest.raises(ShapeError, match=r"query has 4 axes, .* but must be \(n, d\) or \(n, b, d\)"):
        layer(q[None], k, v)
    with pytest.raises(ShapeError, match=r"query has width 8, .* but the layer was built for 12"):
        layer(q[..., :8], k, v)
    with pytest.raises(ShapeError, match=r"key_padding_mask is \(1, 7\), but must be \(7,\), \(j,\)"):
        layer(q[:, 0], k[:, 0], v[:, 0], key_padding_mask=PADDING[:1])
    with pytest.raises(ConfigError, match="append"):
        pair(add_zero_attn=True)[1](q, k, v, attn_mask=causal())
    with warnings.catch_warnings(action="ignore"):  # torch warns of nested tensors once in a process
        nested = torch.nested.nested_tensor([torch.randn(3, D, dtype=torch.float64)])
    with pytest.raises(ConfigError, match="nested"):
        layer(nested, nested, nested)


def test_a_compiled_layer_with_appended_keys_takes_a_mask_that_it_computes() -> None:
    _, layer = pair(add_zero_attn=True)
    x = inputs({})[0]

    def attention(x: Tensor) -> Tensor:
        index = torch.arange(len(x))
        return layer(x, x, x, need_weights=False, attn_mask=index[:, None] < index)[0]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attention, fullgraph=True)(x), attention(x))
