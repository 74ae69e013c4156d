"""Measurements that claims share: differences, attention weights, multiply-adds, seconds, parameters."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.base.counting import count_flops
from regard.lab.verdict import Attention


def normal_tensors(draws: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return one float64 tensor of standard normal numbers for each shape, sampled in the order of the shapes."""
    return [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference between two tensors."""
    return float((a - b).abs().max())


def attend_matrices(attention: Attention, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Apply an attention function to matrices (n, c), one row per token, without the batch and head axes."""
    return attention(q[None, None], k[None, None], v[None, None], **options)[0, 0]


def attention_weights(attention: Attention, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Return the weights that an attention function gives: its outputs if the values are one-hot.

    q, k     of shape (i, c) and (j, c), or (b, h, i, c) and (b, h, j, c)
    options  passed to the attention function
    """
    values = torch.eye(k.shape[-2], dtype=k.dtype)
    if k.ndim == 2:
        return attend_matrices(attention, q, k, values, **options)
    return attention(q, k, values.expand(*k.shape[:2], -1, -1), **options)


def count_multiply_adds(call: Callable[[], Any]) -> int:
    """Count the multiply-adds (half the FLOPs) of the matrix products and attention while `call` runs."""
    with torch.no_grad(), count_flops() as flops:
        call()
    return int(flops.get_total_flops()) // 2


def measure_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Run `call` several times and return the median duration in seconds."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def count_parameters(model: Any) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_cross_attention(model: Any) -> int:
    """Return the number of blocks with cross attention in a module."""
    return sum(getattr(module, "cross", None) is not None for module in model.modules())


def growth_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of the power law y ~ x^p through the first and the last point."""
    return math.log(y[-1] / y[0]) / math.log(x[-1] / x[0])


def random_permutation(n: int, draws: torch.Generator) -> Int[Tensor, "n"]:
    """Sample a permutation of n >= 2 tokens that is not the identity."""
    order = torch.randperm(n, generator=draws)
    while torch.equal(order, torch.arange(n)):
        order = torch.randperm(n, generator=draws)
    return order
