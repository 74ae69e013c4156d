"""What is measured, and what has to be reached."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard
from bench import peers
from bench.peers import Attention
from bench.race import Run, peak_bytes, race
from regard import Mask, attend, causal, full, global_tokens, window
from regard.core.absolute_positions import Grid


@dataclass(frozen=True)
class Result:
    """One measured line."""

    name: str
    shape: str
    kernel: str
    milliseconds: float
    peer: str
    peer_milliseconds: float
    ratio: float
    low: float
    high: float
    target: float
    megabytes: float | None = None
    peer_megabytes: float | None = None

    @property
    def reached(self) -> bool:
        lean = self.megabytes is None or self.peer_megabytes is None or self.megabytes <= self.peer_megabytes
        return self.ratio >= self.target and lean


class GateError(AssertionError):
    """A result was wrong, so no time is taken."""


def on_cpu(quick: bool, only: str = "") -> Iterator[Result]:
    """Full and causal against torch's own call; a window against the dense matrix, at growing lengths."""
    for n in (256,) if quick else (512, 1024, 2048):
        for mask in _kept(only, full(), causal()):
            ours, peer = _ours(mask), peers.sdpa(causal=mask == causal())
            yield from _measured("cpu", mask, (1, 8, n, 64), torch.float32, ours, {"torch sdpa": peer}, 0.97, quick)
    mask = window(before=255)
    if not _kept(only, mask):
        return
    for n in (1024,) if quick else (1024, 2048, 4096, 8192, 16384):
        dense = mask.dense(n)
        target = 10.0 if n == 16384 else 0.0
        yield from _measured(
            "cpu", mask, (1, 2, n, 64), torch.float32, _ours(mask), {"eager": peers.eager(dense)}, target, quick
        )


def on_gpu(quick: bool, only: str = "") -> Iterator[Result]:
    """Full and causal against the best of cuDNN, flash and flex; windows and global tokens at 32k against flex."""
    for width in (128,) if quick else (64, 128):
        for mask in _kept(only, full(), causal()):
            is_causal = mask == causal()
            others: dict[str, Attention] = {
                "cuDNN": peers.sdpa_by(SDPBackend.CUDNN_ATTENTION, is_causal),
                "flash": peers.sdpa_by(SDPBackend.FLASH_ATTENTION, is_causal),
                "flex": peers.flex(peers.predicate(mask) if is_causal else None, 4096),
            }
            yield from _measured("cuda", mask, (4, 16, 4096, width), torch.bfloat16, _ours(mask), others, 0.98, quick)
        for mask in _kept(only, causal() & window(before=255), causal() & window(before=255) | global_tokens(64)):
            others = {"flex": peers.flex(peers.predicate(mask), 32768)}
            yield from _measured("cuda", mask, (1, 16, 32768, width), torch.bfloat16, _ours(mask), others, 1.0, quick)


def growth(results: list[Result], name: str) -> float:
    """The power of n with which our time grows, from the shortest to the longest length of one line."""
    lines = [result for result in results if result.name == name]
    first, last = lines[0], lines[-1]
    lengths = [int(line.shape.split(" x ")[2]) for line in (first, last)]
    return math.log(last.milliseconds / first.milliseconds) / math.log(lengths[1] / lengths[0])


def _kept(only: str, *masks: Mask) -> list[Mask]:
    return [mask for mask in masks if only in repr(mask)]


def _ours(mask: Mask) -> Attention:
    return lambda q, k, v: attend(q, k, v, mask=mask)


def _measured(
    device: str,
    mask: Mask,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    ours: Attention,
    others: dict[str, Attention],
    target: float,
    quick: bool,
) -> Iterator[Result]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    _gate(mask, ours, q, k, v, grad)
    contestants = {"regard": ours, **others}
    with regard.recording() as ran:
        ours(q, k, v)
    # on a CPU an even race needs many short turns: what disturbs one turn seldom disturbs its neighbour
    rounds, least = (3, 0.02) if quick else (61, 0.05) if device == "cpu" and target < 1 else (9, 0.05)
    for name, runs in (
        ("forward", {name: _forward(attention, q, k, v) for name, attention in contestants.items()}),
        ("forward + backward", {name: _both(attention, q, k, v, grad) for name, attention in contestants.items()}),
    ):
        times = race(runs, rounds=rounds, least=least, device=device)
        peer = times.best_peer()
        ratio = times.ratio(peer)
        memory = {who: peak_bytes(runs[who]) / 1e6 for who in ("regard", peer)} if device == "cuda" else {}
        yield Result(
            name=f"{mask!r}, {name}",
            shape=" x ".join(map(str, shape)),
            kernel=ran[0],
            milliseconds=times.typical("regard") * 1e3,
            peer=peer,
            peer_milliseconds=times.typical(peer) * 1e3,
            ratio=ratio.median,
            low=ratio.low,
            high=ratio.high,
            target=target,
            megabytes=memory.get("regard"),
            peer_megabytes=memory.get(peer),
        )


def _forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Run:
    def run() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return run


def _both(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Run:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> object:
        return torch.autograd.grad(attention(*leaves), leaves, grad)

    return run


def _gate(mask: Mask, attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    """Outputs and gradients of rows from all over the sequence against the float64 definition.

    Twice the error of the naive method in the same precision is allowed for outputs, three times for gradients. The
    calls are those that are timed: one without gradients and one with, which may take other plans.
    """
    n = q.shape[2]
    rows = torch.cat([torch.arange(min(n, 48)), torch.arange(0, n, max(1, n // 61)), torch.arange(max(0, n - 48), n)])
    rows = rows.unique().to(q.device)
    heads = slice(None, None, max(1, q.shape[1] - 1))  # the first and the last
    pick = (slice(-1, None), heads)
    row, column = rows[:, None], torch.arange(n, device=q.device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    visible = mask.to(q.device).see(Grid(zero, zero, row, column, row, column)).expand(len(rows), n)
    chosen = torch.zeros_like(grad)
    chosen[:, :, rows] = grad[:, :, rows]

    def few(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x[pick].detach().to(dtype).requires_grad_()

    def numbers(attend_few: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [few(q[:, :, rows], dtype), few(k, dtype), few(v, dtype)]
        out = attend_few(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, chosen[:, :, rows][pick].to(dtype))]

    truth = numbers(lambda a, b, c: attend(a, b, c, mask=visible, kernel="reference"), torch.float64)
    naive = numbers(peers.eager(visible), q.dtype)
    names = ("outputs", "gradients of q", "gradients of k", "gradients of v")

    def check(which: int, own: Tensor) -> None:
        right, plain = truth[which], naive[which]
        error, allowed = ((x.double() - right).abs().max().item() for x in (own[pick], plain))
        slack = torch.finfo(q.dtype).eps * max(1.0, right.abs().max().item())
        if not error <= (3 if which else 2) * allowed + slack:
            told = f"error {error:.2e} of {names[which]} against float64, the naive method has {allowed:.2e}"
            raise GateError(f"{mask!r}: {told}")

    with torch.no_grad():
        check(0, attention(q, k, v)[:, :, rows])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    slopes = torch.autograd.grad(attention(*leaves), leaves, chosen)
    check(1, slopes[0][:, :, rows])
    check(2, slopes[1])
    check(3, slopes[2])
