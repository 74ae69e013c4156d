"""Seeing everything beside what there was before: `output_attentions=True` with eager attention.

    python -m bench.seeing [--device cpu|cuda] [--quick] [--json]

A GPT-2 of Hugging Face (2 layers, 12 heads, width 768) reads texts of growing length. Ours runs it as it is, with its
fused attention, under `watch`, and works out every statistic of every head; the peer hands out its matrices, and that
is all that is asked of it. Then a single call of attention at 131,072 tokens: with all statistics, and without.

Every contestant runs in a process of its own, so that its peak memory is its own; on a CPU, where a peak cannot be set
back, one for each length.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases import GateError
from bench.loading import let_torchvision_load
from bench.race import peak_bytes, race
from bench.report import machine
from regard.core.attend import attend
from regard.core.masks import causal
from regard.see.row_statistics import statistics
from regard.see.watch import watch

WAYS = ("regard", "eager")
LENGTHS = {"cpu": (1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384, 32768)}
MOST_TIMES, MOST_BYTES = 2.0, 1 << 30  # what seeing everything may cost at 131,072 tokens


@dataclass(frozen=True)
class Line:
    """One length: seconds and peak bytes of each way; None where it did not fit."""

    length: int
    seconds: float
    memory: int
    peer_seconds: float | None
    peer_memory: int | None


def everything(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """All statistics of all heads, by watching."""
    with torch.no_grad(), watch(model) as seen:
        model(tokens, use_cache=False)
    found = {}
    for name, record in seen.items():
        for what in ("lse", "entropy", "largest", "where", "distance", "received"):
            found[f"{name} {what}"] = getattr(record, what)
        found[f"{name} pooled"] = record.pooled(64)
    return found


def matrices(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """All weights, by asking for them."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights: tuple[Tensor, ...] = model(tokens, use_cache=False, output_attentions=True).attentions
    return weights


def _model(n: int, device: str) -> tuple[Any, Tensor]:
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=n, n_layer=2, bos_token_id=None, eos_token_id=None))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    return model, torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(1)).to(device)


def gate(device: str) -> None:
    """What is measured has to be right first: the statistics are those of the matrices."""
    model, tokens = _model(192, device)
    seen = everything(model, tokens)
    weights = matrices(model, tokens)
    for name, found in seen.items():
        if name.endswith("entropy"):
            w = weights[int(name.split(".")[2])].double()
            error = (torch.special.entr(w).sum(-1) - found).abs().max().item()
            if not error < (0.1 if device == "cuda" else 1e-4):  # the peer's own weights are in half precision there
                raise GateError(f"{name} is off by {error:.1e}")


def one(way: str, n: int, device: str, rounds: int) -> dict[str, float]:
    """The median seconds and the peak bytes of one way at one length, in this process."""
    run: Callable[[Any, Tensor], object] = everything if way == "regard" else matrices
    model, tokens = _model(n, device)
    run(model, tokens[:, :128])  # libraries are loaded and kernels made before anything is counted
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        kept = run(model, tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del kept
        gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak,
    }


def measured(device: str, quick: bool) -> list[Line]:
    lines = []
    lengths = (256, 512) if quick else LENGTHS[device]
    results: dict[str, dict[int, dict[str, float]]] = {}
    for way in WAYS:
        served = [n for n in lengths if way != "eager" or _fits(n, device)]
        for n in lengths:
            if n not in served:
                size = _matrix_bytes(n, device) / 2**30
                print(f"eager at {n:,}: its matrices alone would take {size:.0f} GiB", file=sys.stderr)
        results[way] = {}
        for together in [served] if device == "cuda" else [[n] for n in served]:
            command = [sys.executable, "-m", "bench.seeing", "--device", device, "--one", way, *map(str, together)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise RuntimeError(f"{way} at {together} failed:\n{ran.stderr[-2000:]}")
            results[way] |= dict(zip(together, map(json.loads, ran.stdout.splitlines()), strict=True))
    for n in lengths:
        ours, peer = results["regard"][n], results["eager"].get(n)
        beside = (None, None) if peer is None else (peer["seconds"], int(peer["bytes"]))
        lines.append(Line(n, ours["seconds"], int(ours["bytes"]), *beside))
        print(f"{n:,} tokens: {lines[-1]}", file=sys.stderr, flush=True)
    return lines


def _matrix_bytes(n: int, device: str) -> int:
    return 2 * 12 * n * n * (2 if device == "cuda" else 4)


def _fits(n: int, device: str) -> bool:
    """Whether the peer's matrices, and the few copies made on the way to each, have room."""
    if device == "cuda":
        return 3 * _matrix_bytes(n, device) < torch.cuda.mem_get_info()[1]
    return 3 * _matrix_bytes(n, device) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Long:
    """One long call: milliseconds without and with all statistics, and the memory these take."""

    case: str
    milliseconds: float
    with_statistics: float
    times: float
    extra_bytes: int

    @property
    def reached(self) -> bool:
        return self.times <= MOST_TIMES and self.extra_bytes < MOST_BYTES


def long_calls(n: int = 131072) -> list[Long]:
    """16 heads at 131,072 tokens on a GPU."""
    found = []
    for c in (64, 128):
        q, k, v = (torch.randn(1, 16, n, c, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for mask in (None, causal()):

            def without(mask: Any = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
                with torch.no_grad():
                    return attend(q, k, v, mask=mask)

            def seeing(mask: Any = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
                found = statistics(q, k, mask=mask, v=v)
                return found.out, found.entropy, found.received, found.pooled(64)

            times = race({"regard": seeing, "without": without}, rounds=5, least=0.0, device="cuda")
            ratio = times.ratio("without")
            found.append(
                Long(
                    case=f"{'full()' if mask is None else mask!r}, c={c}",
                    milliseconds=times.typical("without") * 1e3,
                    with_statistics=times.typical("regard") * 1e3,
                    times=1 / ratio.median,
                    extra_bytes=peak_bytes(seeing) - peak_bytes(without),
                )
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.seeing", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="short texts: to see that it runs")
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")
    parser.add_argument("--one", nargs="+", metavar="WAY LENGTH", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        way, *lengths = options.one
        for n in lengths:
            print(json.dumps(one(way, int(n), options.device, rounds=3)))
        return 0
    gate(options.device)
    lines = measured(options.device, options.quick)
    long = long_calls() if options.device == "cuda" and not options.quick else []
    if options.json:
        results = {"lines": [asdict(line) for line in lines], "long": [asdict(each) for each in long]}
        print(json.dumps({"machine": machine(options.device), **results}, indent=1))
    else:
        print("\n".join([machine(options.device), "", *table(lines), "", *long_table(long)]))
    return 0 if all(each.reached for each in long) else 1


def table(lines: list[Line]) -> list[str]:
    """A Markdown table."""
    header = "| tokens | seeing everything, s | peak MB | eager with weights, s | peak MB | time | memory |"
    rows = [header, "| --- " * 7 + "|"]
    for line in lines:
        ours = f"{line.seconds:.3g} | {line.memory / 1e6:,.0f}"
        if line.peer_seconds is None or line.peer_memory is None:
            rows.append(f"| {line.length:,} | {ours} | does not fit | | | |")
            continue
        ratios = f"{line.peer_seconds / line.seconds:.2f}x | {line.peer_memory / max(line.memory, 1):.2f}x"
        peer = f"{line.peer_seconds:.3g} | {line.peer_memory / 1e6:,.0f}"
        rows.append(f"| {line.length:,} | {ours} | {peer} | {ratios} |")
    return rows


def long_table(long: list[Long]) -> list[str]:
    if not long:
        return []
    header = "| 131,072 tokens, 16 heads | forward, ms | with all statistics, ms | times | extra MiB |"
    rows = [header, "| --- " * 5 + "|"]
    for each in long:
        times = f"{each.milliseconds:.1f} | {each.with_statistics:.1f} | {each.times:.2f}"
        rows.append(f"| `{each.case}` | {times} | {each.extra_bytes / 2**20:,.0f} |")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
