"""The benchmark of score terms and windows on a GPU, compared with flex_attention compiled with the same term.

    python -m bench.terms [--quick] [--only TEXT] [--json]

Flex_attention is called in its usual way: with a score_mod, a mask_mod and a block mask, which is built before the
timing. Outputs and gradients are compared with float64 before the timing.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import regard
from bench.peers import Attention
from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import Function, peak_bytes, time_alternating
from regard import Mask, alibi, attend, causal, sink, softcap, t5_buckets, window
from regard.core.scores import ScoreTerm, alibi_slopes, t5_bucket

TARGET = 1.0
CAP, REACH, BUCKETS = 30.0, 128, 32
HEADS = 16
ScoreMod = Callable[..., Tensor]


@dataclass(frozen=True)
class TermCase:
    """A score term and a mask of regard, and the functions that do the same in flex_attention.

    logits   logits of an attention sink; flex_attention applies a sink afterwards, using the log-sum-exp
    options  kernel options of flex_attention; None uses its defaults, some of which do not run on this GPU
    b, n     batch size and sequence length
    """

    name: str
    mask: Mask
    term: ScoreTerm | None
    mask_mod: ScoreMod
    score_mod: ScoreMod | None = None
    logits: Tensor | None = None
    options: dict[str, int] | None = None
    b: int = 4
    n: int = 4096


def make_cases(heads: int, device: str) -> Iterator[TermCase]:
    """Yield the cases: each term under a causal mask, and windows with and without a term."""
    slopes = alibi_slopes(heads).to(device)
    table = torch.randn(BUCKETS, heads, generator=torch.Generator().manual_seed(0)).to(device)
    distances = torch.arange(-REACH, REACH + 1, device=device)
    by_distance = table[t5_bucket(distances, BUCKETS, REACH, True)].T.contiguous()
    logits = torch.linspace(-1, 1, heads, device=device)

    def cap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return CAP * torch.tanh(s / CAP)

    def add_distance(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * (i - j)

    def add_bucket(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + by_distance[h, (j - i).clamp(-REACH, REACH) + REACH]

    def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def see_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 1024)

    sliding: dict[str, Any] = {"b": 1, "n": 32768}
    yield TermCase("softcap", causal(), softcap(CAP), see, cap)
    yield TermCase("alibi", causal(), alibi(slopes=slopes), see, add_distance)
    # flex's own tiles and the table need more shared memory than an H200 has
    small = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    yield TermCase("t5_buckets", causal(), t5_buckets(table, max_distance=REACH), see, add_bucket, options=small)
    yield TermCase("sink", causal(), sink(logits), see, logits=logits)
    window_mask = causal() & window(before=1023)
    yield TermCase("window 1024", window_mask, None, see_window, **sliding)
    yield TermCase("window 1024 and softcap", window_mask, softcap(CAP), see_window, cap, **sliding)
    yield TermCase("window 1024 and sink", window_mask, sink(logits), see_window, logits=logits, **sliding)


def make_peer(case: TermCase, n: int, device: str) -> Attention:
    """Return compiled flex_attention with the mask and the score term of a case.

    n  number of queries and of keys
    """
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(case.mask_mod, None, None, n, n, device=device)
    logits = case.logits

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        aux: Any = AuxRequest(lse=True) if logits is not None else None
        options: Any = None if case.options is None else dict(case.options)
        result: Any = compiled(
            q, k, v, score_mod=case.score_mod, block_mask=blocks, return_aux=aux, kernel_options=options
        )
        if logits is None:
            out: Tensor = result
            return out
        out, sums = result
        return out * torch.sigmoid(sums.lse - logits[:, None])[..., None].to(out.dtype)

    return run


def naive(case: TermCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute textbook attention with the whole matrix of scores, in the dtype of q."""
    n, device = q.shape[2], q.device
    h, i, j = torch.arange(q.shape[1], device=device)[:, None, None], *_positions(n, device)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if case.score_mod is not None:
        scores = case.score_mod(scores, 0, h, i, j).to(q.dtype)
    scores = scores.masked_fill(~case.mask_mod(0, h, i, j), -torch.inf)
    if case.logits is not None:
        scores = torch.cat([scores, case.logits.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    out: Tensor = scores.softmax(-1)[..., :n] @ v
    return out


def _positions(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    position = torch.arange(n, device=device)
    return position[:, None], position[None, :]


def check(
    case: TermCase, ours: Attention, heads: int, width: int, dtype: torch.dtype, device: str, n: int = 2048
) -> None:
    """Compare outputs and gradients with the naive method in float64; raise CorrectnessError if they differ.

    n  sequence length, short enough that the matrix of scores fits into memory
    """
    draw = torch.Generator(device).manual_seed(1)
    inputs = [torch.randn(1, heads, n, width, generator=draw, device=device, dtype=dtype) for _ in range(4)]

    def numbers(attention: Attention, kind: torch.dtype) -> list[Tensor]:
        q, k, v, grad = (x.to(kind) for x in inputs)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    truth = numbers(lambda *x: naive(case, *x), torch.float64)
    rounded = numbers(lambda *x: naive(case, *x), dtype)
    for which, (own, other, right) in enumerate(zip(numbers(ours, dtype), rounded, truth, strict=True)):
        error, allowed = ((x.double() - right).abs().max().item() for x in (own, other))
        slack = torch.finfo(dtype).eps * max(1.0, right.abs().max().item())
        if not error <= (3 if which else 2) * allowed + slack:
            raise CorrectnessError(f"{case.name}: error {error:.2e} against float64, naive method {allowed:.2e}")


def measure(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the time of each case compared with flex_attention: forward, and forward and backward together.

    only  measure only cases whose name contains this text
    """
    for width in (64,) if quick else (64, 128):
        for case in make_cases(HEADS, "cuda"):
            if only in case.name:
                yield from _measure(case, width, quick)


def _measure(case: TermCase, width: int, quick: bool) -> Iterator[BenchmarkResult]:
    ours: Attention = lambda q, k, v: attend(q, k, v, mask=case.mask, scores=case.term)  # noqa: E731
    check(case, ours, HEADS, width, torch.bfloat16, "cuda")
    shape = (case.b, HEADS, case.n, width)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attentions = {"regard": ours, "flex": make_peer(case, shape[2], "cuda")}
    with regard.recording() as ran:
        ours(q, k, v)

    def forward(attention: Attention) -> Function:
        def run() -> object:
            with torch.no_grad():
                return attention(q, k, v)

        return run

    def both(attention: Attention) -> Function:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)

    for name, make in (("forward", forward), ("forward + backward", both)):
        functions = {who: make(attention) for who, attention in attentions.items()}
        rounds, min_seconds = (5, 0.02) if quick else (9, 0.05)
        timings = time_alternating(functions, rounds=rounds, min_seconds=min_seconds, device="cuda")
        used = [peak_bytes(function) / 1e6 for function in functions.values()]
        memory = {"megabytes": used[0], "peer_megabytes": used[1]}
        size = " x ".join(map(str, shape))
        yield make_result(timings, f"{case.name}, {name}", size, ran[0], "flex", TARGET, **memory)


def main(argv: list[str]) -> int:
    """Run the benchmark of score terms. Returns the exit code: 0 if every target was reached, else 1."""
    parser = make_parser("bench.terms", __doc__)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    return print_report(measure(options.quick, options.only), "cuda", options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
