"""The benchmark of `watch` and `statistics`, compared with `output_attentions=True` and eager attention.

    python -m bench.watching [--device cpu|cuda] [--quick] [--json]

The model is a GPT-2 of Hugging Face (2 layers, 12 heads, width 768) on texts of growing length. Regard runs it with
fused attention under `watch` and computes every statistic of every head; the peer only returns its attention matrices.
Further measurements:

    on a CPU  the time of all statistics at 2,048 tokens, divided by the model's time, with and without left padding
    on a GPU  a single attention call at 131,072 tokens, with all statistics and without
    on a GPU  the time of GPT-2 124M under `watch` without statistics, divided by the time of the model alone

Each method runs in its own process, so that its peak memory can be measured. On a CPU each length has its own process
too, because the peak cannot be reset.
"""

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

from bench.report import CorrectnessError, describe_machine, make_parser
from bench.timing import Function, peak_bytes, time_alternating
from regard.core.attend import attend
from regard.core.masks import causal
from regard.integrations.torchvision import let_torchvision_load
from regard.see.row_statistics import statistics
from regard.see.watch import watch

METHODS = ("regard", "eager")
LENGTHS = {"cpu": (1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384, 32768)}
MAX_RATIO, MAX_BYTES = 2.0, 1 << 30  # targets for the cost of all statistics at 131,072 tokens
MAX_EXTRA = 1.0  # target for the cost of all statistics on a CPU, in multiples of the model
MAX_WATCHED = 1.3  # target for the time of a model under `watch` on a GPU, in multiples of the model alone


@dataclass(frozen=True)
class WatchResult:
    """Seconds and peak bytes of regard and of its peer at one length.

    The peer's values are None if its attention matrices do not fit into memory.
    """

    length: int
    seconds: float
    memory: int
    peer_seconds: float | None
    peer_memory: int | None


def all_statistics(model: Any, tokens: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
    """Run the model under `watch` and return all statistics of all heads by name."""
    with torch.no_grad(), watch(model) as seen:
        model(tokens, attention_mask=padding, use_cache=False)
    found = {}
    for name, record in seen.items():
        for statistic in ("lse", "entropy", "largest", "where", "distance", "received"):
            found[f"{name} {statistic}"] = getattr(record, statistic)
        found[f"{name} pooled"] = record.pooled(64)
    return found


def all_matrices(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """Run the model with eager attention and return the attention matrices of all layers."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights: tuple[Tensor, ...] = model(tokens, use_cache=False, output_attentions=True).attentions
    return weights


def _build_gpt2(n: int, device: str, layers: int = 2) -> tuple[Any, Tensor]:
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=n, n_layer=layers, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    return model, torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(1)).to(device)


def check_statistics(device: str) -> None:
    """Compare the entropies of `watch` with those of the peer's matrices; raise CorrectnessError if they differ."""
    model, tokens = _build_gpt2(192, device)
    found = all_statistics(model, tokens)
    weights = all_matrices(model, tokens)
    for name, value in found.items():
        if name.endswith("entropy"):
            w = weights[int(name.split(".")[2])].double()
            error = (torch.special.entr(w).sum(-1) - value).abs().max().item()
            if not error < (0.1 if device == "cuda" else 1e-4):  # on a GPU the peer's weights are in bfloat16
                raise CorrectnessError(f"the error of {name} is {error:.1e}")


def measure_method(method: str, n: int, device: str, rounds: int) -> dict[str, float]:
    """Return the median seconds and the peak bytes of one method at one length, measured in this process.

    method  "regard" computes all statistics; "eager" returns the attention matrices
    n       number of tokens
    """
    run: Callable[[Any, Tensor], object] = all_statistics if method == "regard" else all_matrices
    model, tokens = _build_gpt2(n, device)
    run(model, tokens[:, :128])  # libraries are loaded and kernels compiled before the measurement
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = run(model, tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del result
        gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    used = torch.cuda.max_memory_allocated() if device == "cuda" else peak
    return {"seconds": sorted(seconds)[len(seconds) // 2], "bytes": used}


def measure(device: str, quick: bool) -> list[WatchResult]:
    """Measure both methods at all lengths, in child processes, and return a result for each length."""
    lengths = (256, 512) if quick else LENGTHS[device]
    results: dict[str, dict[int, dict[str, float]]] = {}
    for method in METHODS:
        fitting = [n for n in lengths if method == "regard" or _matrices_fit(n, device)]
        for n in sorted({*lengths} - {*fitting}):
            size = _matrix_bytes(n, device) / 2**30
            print(f"eager at {n:,}: its matrices alone would take {size:.0f} GiB", file=sys.stderr)
        results[method] = {}
        for group in [fitting] if device == "cuda" else [[n] for n in fitting]:
            command = [sys.executable, "-m", "bench.watching", "--device", device, "--method", method, *map(str, group)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise RuntimeError(f"{method} at {group} failed:\n{ran.stderr[-2000:]}")
            results[method] |= dict(zip(group, map(json.loads, ran.stdout.splitlines()), strict=True))
    lines = []
    for n in lengths:
        ours, peer = results["regard"][n], results["eager"].get(n)
        other = (None, None) if peer is None else (peer["seconds"], int(peer["bytes"]))
        lines.append(WatchResult(n, ours["seconds"], int(ours["bytes"]), *other))
        print(f"{n:,} tokens: {lines[-1]}", file=sys.stderr, flush=True)
    return lines


def _matrix_bytes(n: int, device: str) -> int:
    return 2 * 12 * n * n * (2 if device == "cuda" else 4)


def _matrices_fit(n: int, device: str) -> bool:
    """Return whether memory has room for the peer's attention matrices at length n and their temporary copies."""
    on_gpu = device == "cuda"
    memory = torch.cuda.mem_get_info()[1] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 3 * _matrix_bytes(n, device) < memory


@dataclass(frozen=True)
class CostResult:
    """The cost of `watch` with all statistics.

    case     description of the input
    seconds  seconds of the model alone
    extra    additional time under `watch`, divided by `seconds`
    """

    case: str
    seconds: float
    extra: float

    @property
    def reached(self) -> bool:
        return self.extra <= MAX_EXTRA


def measure_costs(quick: bool) -> list[CostResult]:
    """Measure on a CPU how much longer a model takes under `watch` with all statistics, with and without padding."""
    n = 256 if quick else 2048
    model, tokens = _build_gpt2(n, "cpu")
    tokens = tokens.repeat(2, 1)
    left_padded = torch.ones_like(tokens)
    left_padded[0, : n // 3] = 0
    results = []
    for case, padding in (("no padding", None), ("padded on the left", left_padded)):

        def alone(padding: Tensor | None = padding) -> object:
            with torch.no_grad():
                return model(tokens, attention_mask=padding, use_cache=False)

        def with_all(padding: Tensor | None = padding) -> object:
            return all_statistics(model, tokens, padding)

        timings = time_alternating({"regard": with_all, "model": alone}, rounds=5, min_seconds=0.0, device="cpu")
        extra = 1 / timings.ratio("model").median - 1
        results.append(CostResult(f"{n:,} tokens, {case}", timings.median("model"), extra))
        print(results[-1], file=sys.stderr, flush=True)
    return results


@dataclass(frozen=True)
class WatchedResult:
    """The time of a model under `watch` without statistics, compared with the model alone.

    length            number of tokens
    milliseconds      time of the model alone
    ratio, low, high  time under `watch` divided by the time alone: median, smallest and largest value over rounds
    """

    length: int
    milliseconds: float
    ratio: float
    low: float
    high: float

    @property
    def reached(self) -> bool:
        return self.ratio <= MAX_WATCHED


def measure_watched(
    device: str, lengths: tuple[int, ...] = (256, 512, 1024), layers: int = 12, rounds: int = 9
) -> list[WatchedResult]:
    """Measure the time of a model under `watch` without statistics, compared with the model alone, by length."""
    results = []
    for n in lengths:
        model, tokens = _build_gpt2(n, device, layers)

        def alone(model: Any = model, tokens: Tensor = tokens) -> object:
            with torch.no_grad():
                return model(tokens, use_cache=False)

        def watched(model: Any = model, tokens: Tensor = tokens) -> object:
            with torch.no_grad(), watch(model) as seen:
                model(tokens, use_cache=False)
            if len(seen) != layers:
                raise CorrectnessError(f"{len(seen)} of {layers} attention calls were recorded")
            return seen

        functions: dict[str, Function] = {"regard": watched, "alone": alone}
        timings = time_alternating(functions, rounds=rounds, min_seconds=0.01 * rounds, device=device)
        ratio = timings.ratio("alone")
        slowdown = 1 / ratio.median, 1 / ratio.high, 1 / ratio.low
        results.append(WatchedResult(n, timings.median("alone") * 1e3, *slowdown))
        print(results[-1], file=sys.stderr, flush=True)
    return results


@dataclass(frozen=True)
class LongCallResult:
    """The time and memory of all statistics in one long attention call.

    case             mask and head width
    milliseconds     time of the call without statistics
    with_statistics  time of the call with all statistics, in milliseconds
    times            `with_statistics` divided by `milliseconds`
    extra_bytes      additional peak memory with statistics
    """

    case: str
    milliseconds: float
    with_statistics: float
    times: float
    extra_bytes: int

    @property
    def reached(self) -> bool:
        return self.times <= MAX_RATIO and self.extra_bytes < MAX_BYTES


def measure_long_calls(n: int = 131072) -> list[LongCallResult]:
    """Measure attention with 16 heads and n tokens on a GPU, with all statistics and without."""
    results = []
    for c in (64, 128):
        q, k, v = (torch.randn(1, 16, n, c, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for mask in (None, causal()):

            def without(mask: Any = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
                with torch.no_grad():
                    return attend(q, k, v, mask=mask)

            def with_all(mask: Any = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
                found = statistics(q, k, mask=mask, v=v)
                return found.out, found.entropy, found.received, found.pooled(64)

            functions: dict[str, Function] = {"regard": with_all, "without": without}
            timings = time_alternating(functions, rounds=5, min_seconds=0.0, device="cuda")
            name = f"{'full()' if mask is None else mask!r}, c={c}"
            milliseconds = timings.median("without") * 1e3, timings.median("regard") * 1e3
            extra = peak_bytes(with_all) - peak_bytes(without)
            results.append(LongCallResult(name, *milliseconds, 1 / timings.ratio("without").median, extra))
            print(results[-1], file=sys.stderr, flush=True)
    return results


def main(argv: list[str]) -> int:
    """Run the benchmark of `watch`. Returns the exit code: 0 if long calls and costs reached their targets, else 1."""
    parser = make_parser("bench.watching", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", nargs="+", metavar="METHOD LENGTH", help="measure one method in this process")
    options = parser.parse_args(argv)
    if options.method:
        method, *lengths = options.method
        for n in lengths:
            print(json.dumps(measure_method(method, int(n), options.device, rounds=3)))
        return 0
    check_statistics(options.device)
    lines = measure(options.device, options.quick)
    long = measure_long_calls() if options.device == "cuda" and not options.quick else []
    watched = measure_watched("cuda") if options.device == "cuda" else []
    costs = measure_costs(options.quick) if options.device == "cpu" else []
    if options.json:
        results = {"lines": [asdict(line) for line in lines], "long": [asdict(each) for each in long]}
        results["costs"] = [asdict(each) for each in costs]
        results["watched"] = [asdict(each) for each in watched]
        print(json.dumps({"machine": describe_machine(options.device), **results}, indent=1))
    else:
        print(
            "\n".join(
                [
                    describe_machine(options.device),
                    "",
                    *markdown_table(lines),
                    "",
                    *long_call_table(long),
                    *cost_table(costs),
                    "",
                    *watched_table(watched),
                ]
            )
        )
    reached = [each.reached for each in long] + [each.reached for each in costs] + [each.reached for each in watched]
    return 0 if all(reached) else 1


def markdown_table(lines: list[WatchResult]) -> list[str]:
    rows = [
        "| tokens | all statistics, s | peak MB | eager with weights, s | peak MB | time | memory |",
        "| --- " * 7 + "|",
    ]
    for line in lines:
        ours = f"{line.seconds:.3g} | {line.memory / 1e6:,.0f}"
        if line.peer_seconds is None or line.peer_memory is None:
            rows.append(f"| {line.length:,} | {ours} | does not fit | | | |")
            continue
        ratios = f"{line.peer_seconds / line.seconds:.2f}x | {line.peer_memory / max(line.memory, 1):.2f}x"
        peer = f"{line.peer_seconds:.3g} | {line.peer_memory / 1e6:,.0f}"
        rows.append(f"| {line.length:,} | {ours} | {peer} | {ratios} |")
    return rows


def long_call_table(long: list[LongCallResult]) -> list[str]:
    if not long:
        return []
    header = "| 131,072 tokens, 16 heads | forward, ms | with all statistics, ms | times | extra MiB |"
    rows = [header, "| --- " * 5 + "|"]
    for each in long:
        times = f"{each.milliseconds:.1f} | {each.with_statistics:.1f} | {each.times:.2f}"
        rows.append(f"| `{each.case}` | {times} | {each.extra_bytes / 2**20:,.0f} |")
    return rows


def cost_table(costs: list[CostResult]) -> list[str]:
    rows = [
        "| GPT-2, 2 layers, batch of 2 | model, s | all statistics, in multiples of the model |",
        "| --- " * 3 + "|",
    ]
    return [*rows, *(f"| {each.case} | {each.seconds:.2f} | {each.extra:.2f} |" for each in costs)] if costs else []


def watched_table(watched: list[WatchedResult]) -> list[str]:
    rows = ["| GPT-2 124M, tokens | model, ms | under `watch`, in multiples of the model |", "| --- " * 3 + "|"]
    cells = (
        f"| {each.length:,} | {each.milliseconds:.1f} | {each.ratio:.2f} ({each.low:.2f} to {each.high:.2f}) |"
        for each in watched
    )
    return [*rows, *cells] if watched else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
