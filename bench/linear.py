"""Benchmark of causal linear attention, compared with a chunked form in torch operations and with softmax attention.

If flash-linear-attention is installed, it is timed too. There it computes less: no feature map, and no division by the
sum of weights.
"""

import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

import regard
from bench import peers
from bench.peers import Attention
from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import Function, peak_bytes, time_alternating
from regard import causal, linear_attend
from regard.core.linear import FeatureMap, elu_plus_one, performer, relu, squared_relu

MAPS: dict[str, Callable[[], FeatureMap]] = {
    "elu_plus_one": elu_plus_one,
    "relu": relu,
    "squared_relu": squared_relu,
    "performer": lambda: performer(width=64, count=64),
}
LENGTHS = {"cuda": (16384, 131072, 1 << 20), "cpu": (2048, 4096, 8192)}
FLA = "flash-linear-attention"
BYTES = "copying as many bytes"  # as the inputs and outputs have: no kernel is faster
MAX_GROWTH = 1.1  # of the time, as a power of the length


def main(argv: list[str]) -> int:
    """Run the benchmark of linear attention. Returns the exit code: 0 if every target was reached, else 1."""
    parser = make_parser("bench.linear", __doc__, "feature maps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    results = measure_all(options.device, options.quick, options.only)
    return print_report(results, options.device, options.json, None if options.quick else describe_growth)


def measure_all(device: str, quick: bool, only: str) -> Iterator[BenchmarkResult]:
    """Yield the results of the first feature map at all lengths, and of each other feature map at the shortest length.

    only  measure only feature maps whose name contains this text
    """
    lengths = (256,) if quick else LENGTHS[device]
    names = [name for name in MAPS if only in name]
    for name in names:
        for n in lengths if name == names[0] else lengths[:1]:
            # the chunked form in operations of torch takes seconds for long sequences, softmax attention minutes
            others: dict[str, Attention] = {}
            if n <= 16384 and device == "cuda":
                others["torch, chunked"] = _linear(MAPS[name](), "torch")
            if device == "cuda" and find_spec("fla") is not None:
                others[FLA] = peers.fla
            if n <= 131072:
                others["torch sdpa, causal"] = peers.sdpa(causal=True)
            yield from measure(device, name, n, others, quick)


def measure(device: str, name: str, n: int, others: dict[str, Attention], quick: bool) -> Iterator[BenchmarkResult]:
    """Check one feature map at length n, then yield its time compared with each peer, forward and backward.

    others  the attentions to compare with, by name
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.Generator(device).manual_seed(0)
    shape = 1, 16, n, 64
    q, k, v, grad = (torch.randn(shape, generator=source, device=device, dtype=dtype) for _ in range(4))
    features = MAPS[name]()
    ours = _linear(features, None)
    check(features, ours, q, k, v, grad)
    with regard.recording() as ran:
        ours(q, k, v)
    attentions = {"regard": ours, **others}
    rounds, min_seconds = (3, 0.01) if quick else (7, 0.02)
    # inputs and outputs of the forward pass are 4 tensors; the backward pass reads 5 and writes 3
    for title, make, copies in (("forward", _forward, 2), ("backward", _backward, 4)):
        functions = {
            who: make(each, *(_swap_memory(x) if who == FLA else x for x in (q, k, v, grad)))
            for who, each in attentions.items()
        }
        functions[BYTES] = _copy(q, copies)
        timings = time_alternating(functions, rounds=rounds, min_seconds=min_seconds, device=device)
        for peer in (*others, BYTES):
            memory = {}
            if device == "cuda" and peer != BYTES:
                used = [peak_bytes(functions[who]) / 1e6 for who in ("regard", peer)]
                memory = {"megabytes": used[0], "peer_megabytes": used[1]}
            size, kernel = " x ".join(map(str, shape)), ran[0] if ran else "torch"
            target = 1.0 if peer != BYTES and device == "cuda" else 0.0
            yield make_result(timings, f"{name}, {title}", size, kernel, peer, target, **memory)


def describe_growth(results: list[BenchmarkResult]) -> dict[str, bool]:
    """Return a line about how the time grows with the length, and whether the target is reached.

    Lengths from the second on are used, of the feature map that was measured at all lengths.
    """
    lines = {}
    for name in dict.fromkeys(result.name for result in results):
        times = {int(x.shape.split(" x ")[2]): x.milliseconds for x in results if x.name == name}
        if len(times) > 2:
            (n, first), *_, (m, last) = sorted(times.items())[1:]
            power = math.log(last / first) / math.log(m / n)
            lines[f"{name}: time grows as n^{power:.2f} from {n:,} to {m:,} tokens"] = power <= MAX_GROWTH
    return lines


def _linear(features: FeatureMap, kernel: str | None) -> Attention:
    return lambda q, k, v: linear_attend(q, k, v, features=features, mask=causal(), kernel=kernel).out


def _swap_memory(x: Tensor) -> Tensor:
    """Return a copy in which heads are the third axis in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Function:
    def run() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return run


def _backward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Function:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _copy(x: Tensor, times: int) -> Function:
    out = torch.empty_like(x)

    def run() -> object:
        for _ in range(times):
            out.copy_(x)
        return out

    return run


def check(features: FeatureMap, attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    """Compare outputs and gradients of some rows with the quadratic definition in float64.

    The error of outputs may be twice the error of the definition in the dtype of q, the error of gradients three times.
    Raises CorrectnessError if an error is larger.
    """
    n = q.shape[2]
    rows = torch.cat([torch.arange(min(n, 40)), torch.arange(0, n, max(1, n // 31)), torch.arange(max(0, n - 40), n)])
    rows = rows.unique().to(q.device)
    pick = (slice(-1, None), slice(None, None, q.shape[1] - 1))  # the first and the last head
    hidden = rows[:, None] < torch.arange(n, device=q.device)
    chosen = torch.zeros_like(grad)
    chosen[:, :, rows] = grad[:, :, rows]

    def define(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x[pick].detach().to(dtype).requires_grad_() for x in (q[:, :, rows], k, v)]
        weights = (features(leaves[0]) @ features(leaves[1]).mT).masked_fill(hidden, 0)
        out = weights @ leaves[2] / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        return [out.detach(), *torch.autograd.grad(out, leaves, chosen[:, :, rows][pick].to(dtype))]

    truth, naive = define(torch.float64), define(q.dtype)
    with torch.no_grad():
        out = attention(q, k, v)[:, :, rows]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    of_q, of_k, of_v = torch.autograd.grad(attention(*leaves), leaves, chosen)
    found = {"outputs": out, "gradients of q": of_q[:, :, rows], "gradients of k": of_k, "gradients of v": of_v}
    for (name, own), right, other in zip(found.items(), truth, naive, strict=True):
        error, allowed = ((x.double() - right).abs().max().item() for x in (own[pick], other))
        slack = torch.finfo(q.dtype).eps * right.abs().max().item()
        if not error <= (2 if name == "outputs" else 3) * allowed + slack:
            raise CorrectnessError(
                f"{features!r}: error {error:.2e} of {name} against float64, the definition has {allowed:.2e}"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
