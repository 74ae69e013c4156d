"""What is saved if exp(k . q) is replaced by g(k) . g(q)?

Claim: The outputs cost O(N D D_g) instead of O(N^2 D), because the sums of g(k) v' and g(k) are shared by all queries
    and the N^2 weights are never computed; the cost is not O(N D). Computing all weights would still cost N^2 D_g. g
    must not be negative, otherwise weights are.
Measures: `linear_attend` against the same computation with all weights, in float64. Multiply-adds (of products and of
    the sum over keys) and seconds of both for growing N; multiply-adds for twice the D and twice the D_g; the largest
    tensor; the smallest weight for elu + 1 and for g(x) = x.
Budget: 10 seconds
Source: 003 12.10
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
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
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = r"h_i = \frac{(\sum_j v_j g(k_j)^\top) g(q_i)}{(\sum_j g(k_j))^\top g(q_i)}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One head: N and D for the counts, growing lengths, and the number of timings."""

    length: int = 512
    width: int = 32
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    repeats: int = 5
    seed: int = 0


SMOKE = Setup(lengths=(128, 512), repeats=1)


class PositiveAndNegative(FeatureMap):
    """elu + 1 of x and of -x, concatenated: twice the features for the same width."""

    def __call__(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n r"]:
        phi = elu_plus_one()
        return torch.cat([phi(x), phi(-x)], -1)

    def size(self, c: int) -> int:
        return 2 * c


def run(setup: Setup, attention: Attention = attend, linear: Callable[..., Any] = linear_attend) -> Numbers:
    """linear  the linear attention: linear(q, k, v, features=...), with its outputs as `.out`"""
    n, d = setup.length, setup.width
    q, k, v = _sample_inputs(setup, n, d)
    eye = torch.eye(n)[None, None]
    weights = linear(q, k, eye).out
    curves = [_measure_seconds(setup, length, attention, linear) for length in setup.lengths]
    wide = _sample_inputs(setup, n, 2 * d)
    with _Largest() as made:
        linear(q, k, v)
    signed = linear(*(x.double() for x in (q, k, eye)), features=Elementwise("itself", lambda x: x)).out
    return {
        "length": n,
        "width": d,
        "error": _error(setup, linear),
        "error of softmax": float((attention(q, k, v) - (q @ k.mT * d**-0.5).softmax(-1) @ v).abs().max()),
        "softmax": _cost(lambda: attention(q, k, v)),
        "linear": _cost(lambda: linear(q, k, v)),
        "linear at twice D": _cost(lambda: linear(*wide)),
        "linear at twice D_g": _cost(lambda: linear(q, k, v, features=PositiveAndNegative())),
        "weights by linear": _cost(lambda: linear(q, k, eye)),
        "largest tensor": made.numbers,
        "least weight": weights.min().item(),
        "least weight with g(x) = x": signed.min().item(),
        "lengths": list(setup.lengths),
    } | {name: [curve[name] for curve in curves] for name in curves[0]}


def _sample_inputs(setup: Setup, n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 1, 1, n, d, generator=make_generator(setup.seed), dtype=dtype)


def _error(setup: Setup, linear: Callable[..., Any]) -> float:
    """Return the difference between outputs with and without computing all weights."""
    q, k, v = _sample_inputs(setup, setup.length, setup.width, torch.float64)
    phi = elu_plus_one()
    products = phi(q) @ phi(k).mT
    return float((linear(q, k, v).out - products / products.sum(-1, keepdim=True) @ v).abs().max())


def _cost(call: Callable[[], Any]) -> int:
    """Count multiply-adds of matrix products and attention, and the additions of sums over keys."""
    adding: Any = torch.ops.aten.sum  # counters use the name of an operator without its overload
    with count_flops() as products, FlopCounterMode(display=False, custom_mapping={adding: _count_additions}) as sums:
        call()
    added = sums.get_flop_counts().get("Global", {}).get(adding, 0)
    return int(products.get_total_flops() + added) // 2


def _count_additions(shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count an addition as a multiply-add, which is two operations."""
    return int(2 * math.prod(shape))


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor created inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def _measure_seconds(setup: Setup, n: int, attention: Attention, linear: Callable[..., Any]) -> dict[str, float]:
    q, k, v = _sample_inputs(setup, n, setup.width)
    calls: dict[str, Callable[[], Any]] = {"softmax": lambda: attention(q, k, v), "linear": lambda: linear(q, k, v)}
    found: dict[str, float] = {}
    for name, call in calls.items():
        found[f"{name} by length"] = _cost(call)
        seconds = []
        for _ in range(setup.repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        found[f"seconds of {name}"] = median(seconds)
    return found


def _growth_exponent(numbers: Numbers, curve: str) -> float:
    """Return the exponent of N with which a curve grows from the first length to the last."""
    lengths, values = numbers["lengths"], numbers[curve]
    return math.log(values[-1] / values[0]) / math.log(lengths[-1] / lengths[0])


def verdict(numbers: Numbers) -> Verdict:
    n, d = numbers["length"], numbers["width"]
    softmax, linear = (_growth_exponent(numbers, f"{name} by length") for name in ("softmax", "linear"))
    seconds = [_growth_exponent(numbers, f"seconds of {name}") for name in ("softmax", "linear")]
    counts = numbers["softmax"] == 2 * n * n * d and numbers["linear"] == 2 * n * d * d + 2 * n * d
    grows = abs(softmax - 2) < 0.01 and abs(linear - 1) < 0.01
    features = abs(numbers["linear at twice D_g"] / numbers["linear"] - 2) < 0.01
    formed = numbers["largest tensor"] < n * n and numbers["error"] < 1e-12
    same = numbers["error of softmax"] < 1e-5  # in float32
    signs = numbers["least weight"] >= 0 > numbers["least weight with g(x) = x"]
    return decide(
        counts and grows and features and formed and same and signs,
        f"At N={n}, D={d} softmax attention needs {numbers['softmax'] / 1e6:.1f} M multiply-adds and linear "
        f"attention {numbers['linear'] / 1e6:.2f} M, with the same outputs as with all weights up to "
        f"{numbers['error']:.0g}; its largest tensor has {numbers['largest tensor']:,} numbers. They grow as "
        f"N^{softmax:.2f} and N^{linear:.2f} (in seconds N^{seconds[0]:.1f} and N^{seconds[1]:.1f}). The smallest "
        f"weight is {numbers['least weight']:.1e}, and {numbers['least weight with g(x) = x']:.1e} if g can be "
        "negative.",
    )


@wrong_answer(
    "003 12.10",
    says="The cost falls from O(N^2 D) to O(N D).",
    right="To O(N D D_g), with D_g features: the sum of g(k) v' is a matrix of D_g x D.",
)
def _linear_in_width(numbers: Numbers) -> Verdict:
    factor = numbers["linear at twice D"] / numbers["linear"]
    return decide(factor < 2.5, f"Twice the D multiplies the cost by {factor:.2f}; with O(N D) it would be 2.")


@wrong_answer(
    "003 12.10",
    says="The attention weights become cheaper.",
    right="The outputs become cheaper, because they need no weights. There are N^2 weights, and each costs D_g.",
)
def _weights_cheaper(numbers: Numbers) -> Verdict:
    all_weights, usual = numbers["weights by linear"], numbers["softmax"]
    return decide(
        all_weights < usual / 2,
        f"All {numbers['length'] ** 2:,} weights cost {all_weights / 1e6:.1f} M multiply-adds with features, and "
        f"softmax attention with its outputs {usual / 1e6:.1f} M; the outputs alone cost "
        f"{numbers['linear'] / 1e6:.2f} M.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for axes, suffix, what in ((left, "{} by length", "multiply-adds"), (right, "seconds of {}", "seconds")):
        plot_lines(axes, numbers["lengths"], {name: numbers[suffix.format(name)] for name in ("softmax", "linear")})
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="tokens N", ylabel=what)
    left.set_title("Multiply-adds")
    right.set_title("Seconds")
    return figure
