"""Linear layers with int8 weights, against the products of the rounded weights and of the weights in float64."""

from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.base.errors import CheckpointError, ConfigError
from regard.models.gpt import GPT, GPTConfig
from regard.nn.attention import KeysValues
from regard.nn.int8 import Int8Linear, int8_linear, quantize_int8, quantize_weight
from regard.nn.projection import Linear, linear

SIZES = [(5, 7), (33, 31), (64, 64), (13, 48), (768, 3072)]  # torch's kernel computes those whose width divides by 16


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_product_has_the_error_of_the_rounded_weights(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs).to(dtype), torch.randn(3, 2, inputs, dtype=dtype)
    small = Int8Linear(layer)
    y = small(x)
    assert (y.dtype, y.shape) == (dtype, (3, 2, outputs))
    rounded = x.double() @ small.weight.dequantize(torch.float64).mT + layer.bias.double()
    # bfloat16 activations and sums: 2 ** -8 of each
    assert (y.double() - rounded).abs().max() <= 2**-7 * rounded.abs().max()
    exact = x.double() @ layer.weight.double().mT + layer.bias.double()
    assert (y.double() - exact).norm() <= 0.02 * exact.norm()


def test_no_weight_moves_by_more_than_half_a_scale() -> None:
    weight = torch.randn(7, 21) * torch.tensor([1e-6, 1e-3, 1, 10, 1e4, 1e9, 0])[:, None]
    small = quantize_weight(weight)
    moved = (small.dequantize() - weight).abs()
    assert (moved <= 0.5001 * small.scales[:, None]).all()
    assert small.values.abs().amax(1).tolist() == [127] * 6 + [0]


def test_rows_of_a_weight_give_the_same_numbers_as_the_whole() -> None:
    layer, x = Int8Linear(nn.Linear(32, 15)), torch.randn(2, 32)
    assert torch.equal(linear(x, layer.weight[4:9], layer.bias[4:9]), layer(x)[:, 4:9])


def test_gradients_reach_the_input() -> None:
    layer, x = Int8Linear(nn.Linear(32, 15)), torch.randn(2, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.dequantize().sum(0).expand(2, -1))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_refused(number: float) -> None:
    weight = torch.ones(3, 5)
    weight[1, 2] = number
    with pytest.raises(ConfigError, match="a weight is NaN or infinity, which int8 cannot hold"):
        quantize_weight(weight)


def test_a_nan_input_gives_nan_in_its_row_only() -> None:
    layer, x = Int8Linear(nn.Linear(32, 15)), torch.randn(3, 32)
    x[1, 4] = torch.nan
    assert layer(x.detach()).isnan().any(1).tolist() == [False, True, False]


@torch.no_grad()
def test_a_quantized_gpt_predicts_almost_as_well() -> None:
    model: Any = regard.load("text-gpt")
    small = quantize_int8(model)
    text = torch.randint(0, model.config.vocab, (1, 65), generator=torch.Generator().manual_seed(0))
    text = torch.tensor([list(model.generate(text[:, :9], max_new_tokens=56, temperature=1.0)[0].tokens)])
    losses = [
        nn.functional.cross_entropy(each(text[:, :-1])[0].double(), text[0, 1:]).item() for each in (model, small)
    ]
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0]
    assert sum(isinstance(part, Int8Linear) for part in small.modules()) == 4 * model.config.depth
    assert not any(isinstance(part, Int8Linear) for part in model.modules())


def test_cached_and_uncached_decoding_agree() -> None:
    config = GPTConfig(vocab=23, context=31, width=48, depth=2, heads=3, tied=False)
    small = quantize_int8(GPT(config))
    texts = [small.generate([[3, 1, 4]], max_new_tokens=9, use_cache=each)[0].tokens for each in (True, False)]
    assert texts[0] == texts[1]
    assert isinstance(small.head, Linear)  # the output layer keeps its weights


def test_cross_attention_uses_parts_of_a_fused_weight() -> None:
    layer = regard.nn.Attention(width=32, heads=4)
    x, memory = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    small = quantize_int8(layer)
    with torch.no_grad():
        whole, exact = small(x, memory), layer(x, memory)
        assert torch.equal(whole, small(x, KeysValues(*small.keys_values(memory))))
    assert 0 < (whole - exact).norm() < 0.05 * exact.norm()


def test_what_cannot_be_quantized_or_saved_says_so(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"ReLU has no linear layer of regard\.nn to quantize"):
        quantize_int8(nn.ReLU())
    with pytest.raises(CheckpointError, match="int8 weights; save the model that was passed to quantize_int8"):
        quantize_int8(GPT(GPTConfig(vocab=23, context=31, width=48, depth=2, heads=3))).save(tmp_path)


def test_int8_linear_is_compiled() -> None:
    layer, x = Int8Linear(nn.Linear(32, 15)), torch.randn(2, 32)
    with torch.no_grad():
        compiled = torch.compile(
            lambda x: int8_linear(x, layer.weight, layer.bias), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(x), layer(x), atol=2e-2, rtol=0)
