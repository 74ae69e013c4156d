"""Benchmark of attention calls compared with torch: `python -m bench`. Outputs are checked before they are timed."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard
from bench import peers
from bench.peers import Attention
from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import Function, peak_bytes, time_alternating
from regard import Mask, attend, causal, chunks, documents, full, global_tokens, padding, window
from regard.core.absolute_positions import Grid

WINDOW = window(before=255)
MAX_GROWTH = 1.2  # of the time of a window, as a power of the length
SMALL = 64  # positions of a call whose time is mostly that of Python
SMALL_MASKS = (  # masks of small calls, whose plans are remembered
    causal() & window(before=9),
    causal() & window(before=9) | global_tokens(2),
    causal() & documents([0] * (SMALL // 3) + [1] * (SMALL - SMALL // 3)),
    padding([SMALL - 4]),
)
MAX_OVERHEAD = 30.0  # microseconds of a mask, beyond torch sdpa with the dense mask


def main(argv: list[str]) -> int:
    """Run the benchmark of attention. Returns the exit code: 0 if every target was reached, else 1."""
    parser = make_parser("bench", __doc__, "masks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    on_cpu = options.device == "cpu"
    with_growth = on_cpu and not options.quick and options.only in repr(WINDOW)

    def notes(results: list[BenchmarkResult]) -> dict[str, bool]:
        overhead = describe_overhead(options.only) if on_cpu and not options.quick else {}
        return overhead | (describe_growth(results) if with_growth else {})

    results = (cpu_results if on_cpu else gpu_results)(options.quick, options.only)
    return print_report(results, options.device, options.json, notes)


def cpu_results(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the CPU results: full, causal and window masks against torch, and compiled against uncompiled calls.

    quick  use few sizes and rounds
    only   measure only masks whose repr contains this text
    """
    for n in (256,) if quick else (SMALL, 512, 1024, 2048):
        for mask in _select(only, full(), causal()):
            peer = {"torch sdpa": peers.sdpa(causal=mask == causal())}
            target = 1 / 1.3 if n == SMALL else 0.97
            yield from _measure("cpu", mask, (1, 8, n, 64), torch.float32, peer, target, quick)
    for mask in _select(only, WINDOW):
        for n in (1024,) if quick else (1024, 2048, 4096, 8192, 16384):
            peer = {"eager": peers.eager(mask.dense(n))}
            yield from _measure("cpu", mask, (1, 2, n, 64), torch.float32, peer, 10.0 if n == 16384 else 0.0, quick)
    n = 1024 if quick else 32768
    for mask in _select(only, causal() & WINDOW, *(() if quick else _sparse_masks(n))):
        yield from compiled_results("cpu", mask, (1, 2, n, 64), torch.float32, quick)


def _sparse_masks(n: int) -> tuple[Mask, ...]:
    """Return masks for n tokens that cover each rule by which the kernels skip blocks."""
    packed = documents(torch.arange(n) // 500)
    return causal() & WINDOW | global_tokens(16), chunks(256), causal() & packed, causal() & WINDOW & padding([n - 9])


def compiled_results(
    device: str, mask: Mask, shape: tuple[int, int, int, int], dtype: torch.dtype, quick: bool
) -> Iterator[BenchmarkResult]:
    """Yield the time of a call inside torch.compile, with static and dynamic lengths, compared with the call outside.

    shape  (b, h, n, c) of q, k and v
    """
    outside = {"not compiled": _regard_attention(mask)}
    for dynamic in (False, True):
        ours = torch.compile(_regard_attention(mask), fullgraph=True, dynamic=dynamic)
        title = f"{mask!r} inside torch.compile{', dynamic' if dynamic else ''}"
        yield from _measure(device, mask, shape, dtype, outside, 1 / 1.1, quick, ours, title)


def gpu_results(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the GPU results: full and causal masks against cuDNN, flash and flex, and sparse masks against flex.

    quick  use few sizes and rounds
    only   measure only masks whose repr contains this text
    """
    sparse = causal() & WINDOW, causal() & WINDOW | global_tokens(64)
    for width in (128,) if quick else (64, 128):
        for mask in _select(only, full(), causal()):
            is_causal = mask == causal()
            others: dict[str, Attention] = {
                "cuDNN": peers.sdpa_backend(SDPBackend.CUDNN_ATTENTION, is_causal),
                "flash": peers.sdpa_backend(SDPBackend.FLASH_ATTENTION, is_causal),
                "flex": peers.flex(peers.flex_predicate(mask) if is_causal else None, 4096),
            }
            yield from _measure("cuda", mask, (4, 16, 4096, width), torch.bfloat16, others, 0.98, quick)
        for mask in _select(only, *sparse):
            others = {"flex": peers.flex(peers.flex_predicate(mask), 32768)}
            yield from _measure("cuda", mask, (1, 16, 32768, width), torch.bfloat16, others, 1.0, quick)
            yield from compiled_results("cuda", mask, (1, 16, 32768, width), torch.bfloat16, quick)


def describe_overhead(only: str = "") -> dict[str, bool]:
    """Measure how many microseconds longer a small masked call takes than torch's scaled_dot_product_attention.

    Returns, for each mask, a line of text and whether the target is reached. The shortest of many rounds counts,
    because other programs on the machine can only make a round longer.
    """
    q, k, v = torch.randn(3, 1, 8, SMALL, 64, generator=torch.Generator().manual_seed(0))
    lines = {}
    for mask in _select(only, *SMALL_MASKS):
        calls = {"regard": _regard_attention(mask), "torch sdpa": peers.sdpa_masked(mask.dense(SMALL))}
        functions = {name: _forward(call, q, k, v) for name, call in calls.items()}
        shortest = [
            min(x) for x in time_alternating(functions, rounds=61, min_seconds=0.01, device="cpu").seconds.values()
        ]
        more = 1e6 * (shortest[0] - shortest[1])
        lines[f"{mask!r}: {more:.0f} us more than torch sdpa, at most {MAX_OVERHEAD:.0f}"] = more <= MAX_OVERHEAD
    return lines


def describe_growth(results: list[BenchmarkResult]) -> dict[str, bool]:
    """Return a line about how the time of a window mask grows with the length, and whether the target is reached."""
    names = [f"{WINDOW!r}, forward", f"{WINDOW!r}, forward + backward"]
    powers = {name: growth_power(results, name) for name in names}
    return {f"{name}: time grows as n^{p:.2f} from 1k to 16k": p <= MAX_GROWTH for name, p in powers.items()}


def growth_power(results: list[BenchmarkResult], name: str) -> float:
    """Return the exponent p in time ~ n^p of our calls named `name`, from the shortest to the longest length n."""
    lines = [result for result in results if result.name == name]
    first, last = ((line.milliseconds, int(line.shape.split(" x ")[2])) for line in (lines[0], lines[-1]))
    return math.log(last[0] / first[0]) / math.log(last[1] / first[1])


def _select(only: str, *masks: Mask) -> list[Mask]:
    return [mask for mask in masks if only in repr(mask)]


def _regard_attention(mask: Mask) -> Attention:
    return lambda q, k, v: attend(q, k, v, mask=mask)


def _measure(
    device: str,
    mask: Mask,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    others: dict[str, Attention],
    target: float,
    quick: bool,
    ours: Attention | None = None,
    title: str = "",
) -> Iterator[BenchmarkResult]:
    """Check our attention, then yield its time compared with the fastest of the other attentions.

    Two results are yielded: of the forward pass, and of the forward and backward pass together.

    shape   (b, h, n, c) of q, k and v
    others  the attentions to compare with, by name
    target  how many times as fast as the fastest other attention ours should be
    ours    our attention; None is `attend` with the mask
    title   name in the result; "" is the repr of the mask
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    ours = _regard_attention(mask) if ours is None else ours
    check_attention(mask, ours, q, k, v, grad)
    attentions = {"regard": ours, **others}
    with regard.recording() as ran:
        ours(q, k, v)
    # on a CPU, many short turns: a disturbance seldom lasts for two turns
    short = device == "cpu" and target < 1 and shape[2] <= 16384
    rounds, min_seconds = (3, 0.02) if quick else (61 if short else 9, 0.05)
    for name, functions in (
        ("forward", {name: _forward(each, q, k, v) for name, each in attentions.items()}),
        ("forward + backward", {name: _forward_backward(each, q, k, v, grad) for name, each in attentions.items()}),
    ):
        timings = time_alternating(functions, rounds=rounds, min_seconds=min_seconds, device=device)
        peer, memory = timings.fastest_peer(), {}
        if device == "cuda":
            used = [peak_bytes(functions[who]) / 1e6 for who in ("regard", peer)]
            memory = {"megabytes": used[0], "peer_megabytes": used[1]}
        size = " x ".join(map(str, shape))
        yield make_result(timings, f"{title or repr(mask)}, {name}", size, ran[0], peer, target, **memory)


def _forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Function:
    def run() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return run


def _forward_backward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Function:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> object:
        return torch.autograd.grad(attention(*leaves), leaves, grad)

    return run


def check_attention(mask: Mask, attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    """Compare outputs and gradients of some rows with the definition in float64; raise CorrectnessError if they differ.

    The error of outputs may be twice the error of the naive method in the same dtype, the error of gradients three
    times. The attention is called with and without gradients, as in the timings, because the kernels may differ.
    """
    n = q.shape[2]
    rows = torch.cat([torch.arange(min(n, 48)), torch.arange(0, n, max(1, n // 61)), torch.arange(max(0, n - 48), n)])
    rows = rows.unique().to(q.device)
    pick = (slice(-1, None), slice(None, None, max(1, q.shape[1] - 1)))  # the first and the last head
    row, column = rows[:, None], torch.arange(n, device=q.device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    visible = mask.to(q.device).see(Grid(zero, zero, row, column, row, column)).expand(len(rows), n)
    chosen = torch.zeros_like(grad)
    chosen[:, :, rows] = grad[:, :, rows]

    def numbers(attend_rows: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x[pick].detach().to(dtype).requires_grad_() for x in (q[:, :, rows], k, v)]
        out = attend_rows(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, chosen[:, :, rows][pick].to(dtype))]

    truth = numbers(lambda a, b, c: attend(a, b, c, mask=visible, kernel="reference"), torch.float64)
    naive = numbers(peers.eager(visible), q.dtype)
    names = ("outputs", "gradients of q", "gradients of k", "gradients of v")

    def check(which: int, own: Tensor) -> None:
        right = truth[which]
        error, allowed = ((x.double() - right).abs().max().item() for x in (own[pick], naive[which]))
        slack = torch.finfo(q.dtype).eps * max(1.0, right.abs().max().item())
        if not error <= (3 if which else 2) * allowed + slack:
            raise CorrectnessError(
                f"{mask!r}: error {error:.2e} of {names[which]} against float64, the naive method has {allowed:.2e}"
            )

    with torch.no_grad():
        check(0, attention(q, k, v)[:, :, rows])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grad_q, grad_k, grad_v = torch.autograd.grad(attention(*leaves), leaves, chosen)
    for which, own in enumerate((grad_q[:, :, rows], grad_k, grad_v), 1):
        check(which, own)
