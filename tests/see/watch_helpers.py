"""Helpers of the tests of `watch`: a module of one call, its expected weights, and a check for leftover hooks."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.core import kernels
from regard.see.record import Record
from regard.see.watch import watch

MODULE_CALL = nn.Module.__call__
FORWARDS = {kind: kind.forward for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)}


def no_hooks_left() -> bool:
    """Whether all hooks of `watch` are removed."""
    import transformers

    interface = transformers.modeling_utils.AttentionInterface
    return (
        torch._C._len_torch_function_stack() == 0
        and kernels._observers.get() == ()
        and all(kind.forward is forward for kind, forward in FORWARDS.items())
        and interface.get_interface.__qualname__ == "AttentionInterface.get_interface"
        and not hasattr(interface.get_interface, "__wrapped__")
        and torch._dynamo.eval_frame._stance.stance == "default"
        and "__call__" not in vars(torch.jit.ScriptModule)
        and nn.Module.__call__ is MODULE_CALL
    )


def assert_statistics_match(record: Record, weights: Tensor, positions: int | None = None) -> None:
    """Assert that all statistics of a record are those of a matrix of weights."""
    weights = weights.nan_to_num(0.0)  # rows that see nothing
    i, j = weights.shape[-2:]
    far = (record.query_positions[:, None] - torch.arange(j)).abs()
    close = {"atol": 2e-5, "rtol": 2e-4}
    torch.testing.assert_close(record.weights(), weights, **close)
    torch.testing.assert_close(record.entropy, torch.special.entr(weights).sum(-1), **close)
    torch.testing.assert_close(record.largest, weights.amax(-1), **close)
    torch.testing.assert_close(record.received, weights.sum(-2), **close)
    assert (record.distance is None) == ("positions of its queries are unknown" in record.note)
    if record.distance is not None:
        torch.testing.assert_close(record.distance, (weights * far).sum(-1), **close)
    torch.testing.assert_close(record.rows([i - 1]), weights[:, :, -1:], **close)


class CallModule(nn.Module):
    """A module that makes one call."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def seen_of(call: Any, *args: Tensor) -> tuple[Record, Tensor]:
    """The one record of a call."""
    plain = call(*args)
    model = CallModule(call)
    with watch(model) as seen:
        out = model(*args)
    first, second = (x[0] if isinstance(x, tuple) else x for x in (plain, out))
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    (record,) = seen.values()
    assert not seen.left_out
    return record, second


def qkv(i: int = 5, j: int = 7, h: int = 6, g: int = 6, c: int = 8, e: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, h, i, c), torch.randn(2, g, j, c), torch.randn(2, g, j, e)


def softmax_weights(q: Tensor, k: Tensor, beta: float | None = None, added: Tensor | None = None) -> Tensor:
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if beta is None else beta)
    return (scores if added is None else scores + added).softmax(-1)


class OneHead(nn.Module):
    """Attention without an axis for heads."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.qkv = by_hand, nn.Linear(24, 72)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v, mask)
        return ((q @ k.mT / 24**0.5).masked_fill(~mask, -math.inf)).softmax(-1) @ v


LOW = torch.finfo(torch.float32).min
