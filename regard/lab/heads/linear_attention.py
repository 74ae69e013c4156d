"""What is saved if exp(k . q) is replaced by g(k) . g(q)?

Claim: The outputs cost O(N D D_g) instead of O(N^2 D), because the sums of g(k) v' and g(k) are shared by all queries
    and the N^2 weights are never computed; the cost is not O(N D). Computing all weights would still cost N^2 D_g. g
    must not be negative, otherwise weights are.
Measures: `linear_attend` against the same computation with all weights, in float64. Multiply-adds (of products and of
    the sum over keys) and seconds of both for growing N; multiply-adds for twice the D and twice the D_g; the largest
    tensor; the smallest weight for elu + 1 and for g(x) = x.
Finding: At N={{ n.length }}, D={{ n.width }} softmax attention needs {{ n["multiply-adds of softmax"]|comma }}
    multiply-adds and linear attention {{ n["multiply-adds of linear"]|comma }}. Its outputs equal those computed from
    all N^2 weights g(k) . g(q) up to {{ n.error|at_most }}, and its largest tensor has {{ n["largest tensor"]|comma }}
    numbers, where N^2 is {{ (n.length ** 2)|comma }}. The multiply-adds grow as N^{{ growth[0]|fixed }} and N^{{
    growth[1]|fixed }} (seconds as N^{{ seconds[0]|fixed(1) }} and N^{{ seconds[1]|fixed(1) }}). Computing all weights
    costs {{ n["multiply-adds of all weights by features"]|comma }} by features and {{ n["multiply-adds of all weights
    by softmax"]|comma }} by softmax. The smallest weight is {{ n["smallest weight"]|short }} with features that are not
    negative, and {{ n["smallest weight with g(x) = x"]|short }} with g(x) = x, which can be negative.
Budget: 10 seconds
Source: 003 12.10
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard.base.counting import count_flops
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.linear import Elementwise, FeatureMap, elu_plus_one, linear_attend
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import growth_exponent, largest_difference, measure_seconds
from regard.lab.settings import check_at_least, check_growing
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"h_i = \frac{(\sum_j v_j g(k_j)^\top) g(q_i)}{(\sum_j g(k_j))^\top g(q_i)}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of this lab claim's experiment: sizes of one attention head, and the timings.

    length   N, the number of tokens at which multiply-adds are counted; at least 2 * `width`. The matrix of all N x N
             weights would then be the largest tensor, so the size of the largest tensor shows that it is not computed
    width    D, the width of queries, keys and values. The number of features D_g is the same, because the feature map
             elu + 1 computes one feature from each coordinate
    lengths  increasing numbers of tokens, at which the growth of multiply-adds and seconds with N is measured
    repeats  number of timings per length; the median is used
    """

    length: int = 512
    width: int = 32
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, length=2 * self.width, width=2, lengths=2)
        check_growing(self, "lengths")


SMOKE = Setup(lengths=(128, 512), repeats=1)


class PositiveAndNegative(FeatureMap):
    """The feature map x -> [elu(x) + 1, elu(-x) + 1], which has twice as many features as x has channels."""

    def __call__(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n r"]:
        phi = elu_plus_one()
        return torch.cat([phi(x), phi(-x)], -1)

    def size(self, c: int) -> int:
        return 2 * c


def run(setup: Setup, attention: Attention = attend, linear: Callable[..., Any] = linear_attend) -> Numbers:
    """Return the measured numbers of the claim, by name.

    linear  the linear attention: linear(q, k, v, features=...), which returns its outputs as `.out`
    """
    n, d = setup.length, setup.width
    q, k, v = _sample_inputs(setup, n, d)
    eye = torch.eye(n)[None, None]
    weights = linear(q, k, eye).out
    curves = [_measure_lengths(setup, length, attention, linear) for length in setup.lengths]
    wide = _sample_inputs(setup, n, 2 * d)
    with _Largest() as made:
        linear(q, k, v)
    signed = linear(*(x.double() for x in (q, k, eye)), features=Elementwise("itself", lambda x: x)).out
    return {
        "length": n,
        "width": d,
        "error": _error(setup, linear),
        "error of softmax": largest_difference(attention(q, k, v), (q @ k.mT * d**-0.5).softmax(-1) @ v),
        "multiply-adds of softmax": _cost(lambda: attention(q, k, v)),
        "multiply-adds of linear": _cost(lambda: linear(q, k, v)),
        "multiply-adds of linear at twice D": _cost(lambda: linear(*wide)),
        "multiply-adds of linear at twice D_g": _cost(lambda: linear(q, k, v, features=PositiveAndNegative())),
        "multiply-adds of all weights by features": _cost(lambda: _all_weights(q, k)),
        "multiply-adds of all weights by softmax": _cost(lambda: q @ k.mT),
        "largest tensor": made.numbers,
        "smallest weight": weights.min().item(),
        "smallest weight with g(x) = x": signed.min().item(),
        "lengths": list(setup.lengths),
    } | {name: [curve[name] for curve in curves] for name in curves[0]}


def _sample_inputs(setup: Setup, n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 1, 1, n, d, generator=make_generator(setup.seed), dtype=dtype)


def _error(setup: Setup, linear: Callable[..., Any]) -> float:
    """Return the largest difference between the outputs of `linear` and those computed from all N x N weights."""
    q, k, v = _sample_inputs(setup, setup.length, setup.width, torch.float64)
    return largest_difference(linear(q, k, v).out, _all_weights(q, k) @ v)


def _all_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the N x N weights of linear attention with elu + 1 as feature map."""
    phi = elu_plus_one()
    sums = phi(q) @ phi(k).sum(2, keepdim=True).mT
    return phi(q) @ phi(k).mT / sums


def _cost(call: Callable[[], Any]) -> int:
    """Count the multiply-adds of the matrix products, attention calls and sums in a function call."""
    adding: Any = torch.ops.aten.sum  # counters use the name of an operator without its overload
    with count_flops() as products, FlopCounterMode(display=False, custom_mapping={adding: _sum_flops}) as sums:
        call()
    added = sums.get_flop_counts().get("Global", {}).get(adding, 0)
    return int(products.get_total_flops() + added) // 2


def _sum_flops(shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of `torch.sum` over a tensor of this shape, as a formula for `FlopCounterMode`.

    Each element counts as 2 FLOPs, like a multiply-add. `_cost` divides the FLOPs by 2, so it counts one multiply-add
    for each element.
    """
    return int(2 * math.prod(shape))


class _Largest(TorchDispatchMode):
    """Context manager that records the number of elements of the largest tensor created inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def _measure_lengths(setup: Setup, n: int, attention: Attention, linear: Callable[..., Any]) -> dict[str, float]:
    q, k, v = _sample_inputs(setup, n, setup.width)
    calls: dict[str, Callable[[], Any]] = {"softmax": lambda: attention(q, k, v), "linear": lambda: linear(q, k, v)}
    counts = {f"{name} by length": _cost(call) for name, call in calls.items()}
    return counts | {f"seconds of {name}": measure_seconds(call, setup.repeats) for name, call in calls.items()}


def verdict(numbers: Numbers) -> Decision:
    n, d, kinds = numbers["length"], numbers["width"], ("softmax", "linear")
    growth = [growth_exponent(numbers["lengths"], numbers[f"{name} by length"]) for name in kinds]
    seconds = [growth_exponent(numbers["lengths"], numbers[f"seconds of {name}"]) for name in kinds]
    softmax, linear = (numbers[f"multiply-adds of {name}"] for name in kinds)
    counts = softmax == 2 * n * n * d and linear == 2 * n * d * d + 2 * n * d
    grows = abs(growth[0] - 2) < 0.01 and abs(growth[1] - 1) < 0.01
    features = abs(numbers["multiply-adds of linear at twice D_g"] / linear - 2) < 0.01
    exact = numbers["error"] < 1e-12 and numbers["error of softmax"] < 1e-5  # the second in float32
    signs = numbers["smallest weight"] >= 0 > numbers["smallest weight with g(x) = x"]
    formed = numbers["largest tensor"] < n * n
    return decide(counts and grows and features and formed and exact and signs, growth=growth, seconds=seconds)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for axes, suffix, what in ((left, "{} by length", "multiply-adds"), (right, "seconds of {}", "seconds")):
        plot_lines(axes, numbers["lengths"], {name: numbers[suffix.format(name)] for name in ("softmax", "linear")})
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="tokens N", ylabel=what, title=what.capitalize())
    return figure
