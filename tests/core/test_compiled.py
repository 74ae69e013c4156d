"""The operator that computes masked attention in compiled code, called directly: outputs and gradients."""

import math
from typing import Any

import pytest
import torch

from regard import (
    additive,
    alibi,
    attend,
    causal,
    dilated,
    documents,
    full,
    global_tokens,
    key_padding,
    padding,
    prefix,
    sink,
    strided,
    window,
)
from regard.core.attend import prepare_request
from regard.core.kernels import compiled

N, H, G = 333, 4, 2  # six blocks, the last one not full


def with_holes() -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(N, N, generator=draw).masked_fill(torch.rand(N, N, generator=draw) < 0.3, -math.inf)
    values[7], values[:, 9] = -math.inf, -math.inf  # a query that sees no key, and a key that no query sees
    return values


LOGITS = torch.linspace(-1, 1, H)
LEFT = torch.arange(N) >= torch.tensor([[100], [0]])
CASES: dict[str, Any] = {
    "a window": (causal() & window(before=70), None),
    "documents": (causal() & documents(torch.arange(N) // 50), None),
    "global tokens and alibi": (causal() & window(before=30) | global_tokens(3), alibi(heads=H)),
    "sorted by remainders": (causal() & dilated(3) & window(before=100), None),
    "sorted by remainders, and a sink": (causal() & strided(5), sink(LOGITS)),
    "padding and a sink": (causal() & window(before=60) & padding([200, N]), sink(LOGITS)),
    "padding on the left": (causal() & window(before=60) & key_padding(LEFT), alibi(heads=H)),
    "scores that hide": (causal() & window(before=60), additive(with_holes())),
    "nothing is visible": (~full(), None),
    "queries that see nothing": (window(before=20) & prefix(50), None),
}


@pytest.mark.parametrize("kernel", ["blocked", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_eager(name: str, kernel: str) -> None:
    mask, term = CASES[name]
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, H, N, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, G, N, 8, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = attend(*leaves, mask=mask, scores=term, kernel="eager")
    out = compiled.masked_attention(prepare_request(*leaves, mask, term, None, 0.0, None), kernel)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-9)
    found, wanted = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    for own, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, right, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kernel", ["blocked", "sdpa"])
@pytest.mark.parametrize("term", [None, additive(with_holes())], ids=["by the mask", "by scores"])
def test_nan_reaches_no_gradient_of_a_key_that_is_hidden_from_all(term: Any, kernel: str) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 1, H, N, 8)
    k, v = torch.randn(2, 1, G, N, 8)
    k[:, :, 9], grad[:, :, 50] = math.nan, math.nan  # row 50 is in the block that key 9 is in
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = causal() & window(before=60)
    mask = mask & key_padding((torch.arange(N) != 9)[None]) if term is None else mask
    out = compiled.masked_attention(prepare_request(*leaves, mask, term, None, 0.0, None), kernel)
    assert out.isfinite().all()
    _, of_k, of_v = torch.autograd.grad(out, leaves, grad)
    assert not of_k[:, :, 9].any()
    assert not of_v[:, :, 9].any()
