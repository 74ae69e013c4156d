"""Norms: mean and size of each token, under autocast too."""

import pytest
import torch

from regard.base.errors import ConfigError, UnknownNameError
from regard.nn.norms import NORMS, norm


def test_layer_gives_mean_zero_and_variance_one():
    x = torch.randn(2, 5, 7, dtype=torch.float64) * 3 + 4
    one = norm("layer", 7, 1e-9).double()
    torch.testing.assert_close(one(x), (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False))
    assert sorted(one.state_dict()) == ["bias", "weight"]


def test_rms_gives_size_one_and_keeps_the_mean():
    x = torch.randn(2, 5, 7, dtype=torch.float64) * 3 + 4
    one = norm("rms", 7, 1e-9).double()
    torch.testing.assert_close(one(x), x / x.square().mean(-1, keepdim=True).sqrt())
    assert sorted(one.state_dict()) == ["weight"]


@pytest.mark.parametrize("kind", list(NORMS))
def test_eps_keeps_zeros_finite(kind):
    x = torch.zeros(1, 1, 7, requires_grad=True)
    norm(kind, 7)(x).sum().backward()
    assert x.grad.isfinite().all()


def test_eps_is_that_of_the_caller():
    x = torch.full((1, 1, 7), 1e-3)
    torch.testing.assert_close(norm("rms", 7, 0.5)(x), x / (1e-6 + 0.5) ** 0.5)


@pytest.mark.parametrize("kind", list(NORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_near_the_truth(kind, dtype):
    one, x = norm(kind, 7), torch.randn(2, 5, 7).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = one(x)
    torch.testing.assert_close(out, one(x.float()).to(out.dtype), rtol=0.01, atol=0.01)
    # torch's own choice differs between devices for "layer"; ours does not
    assert kind == "layer" or out.dtype == torch.float32


@pytest.mark.parametrize("kind", list(NORMS))
def test_a_model_of_bfloat16_stays_in_bfloat16(kind):
    assert norm(kind, 7).bfloat16()(torch.randn(2, 5, 7).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", list(NORMS))
def test_it_compiles(kind):
    one, x = norm(kind, 7), torch.randn(2, 5, 7)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(one, fullgraph=True, backend="aot_eager")(x), one(x))


def test_bad_settings_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown norm 'layr'; did you mean 'layer'\?$"):
        norm("layr", 7)
    for eps in (0.0, -1e-5, 1.0):
        with pytest.raises(ConfigError, match="eps is between 0 and 1"):
            norm("rms", 7, eps)
    with pytest.raises(ConfigError, match="eps is '1e-5', but takes one real number"):
        norm("rms", 7, "1e-5")
    with pytest.raises(ConfigError, match="width is 0, but must be at least 1"):
        norm("layer", 0)
