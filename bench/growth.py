"""How time and memory of every attention mechanism grow with the sequence length n: `python -m bench growth`.

The exponent p in value ~ n^p is fitted to the logarithms at all lengths by least squares. Memory is the peak that torch
allocates during one call, including the output.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.report import CorrectnessError
from bench.timing import peak_bytes, time_alternating
from regard import alibi, attend, blocks, causal, chunks, dilated, full, global_tokens, random_links, softcap, window
from regard.core.channel import channel_attend
from regard.core.linear import linear_attend, performer
from regard.core.masks.algebra import Mask

HEADS, WIDTH = 2, 64
LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": (4096, 8192, 16384, 32768)}
QUICK_LENGTHS = (128, 256, 512)
CHECKED = 128  # length at which results are compared with float64
ATTENTION = Callable[..., Tensor]


def _masked(mask: Mask, **rest: Any) -> ATTENTION:
    def run(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return attend(q, k, v, mask=mask, **{**rest, **how})

    return run


def _linear(make_features: Callable[[], Any] | None = None) -> ATTENTION:
    def run(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        features = None if make_features is None else make_features()
        # the definition is the parallel form, which holds all pairs
        return linear_attend(q, k, v, mask=causal(), features=features, form="parallel" if how else None).out

    return run


def _channels(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return channel_attend(q, k, v)


MECHANISMS: dict[str, ATTENTION] = {
    "causal(), kernel eager": _masked(causal(), kernel="eager"),
    "full()": _masked(full()),
    "causal()": _masked(causal()),
    "causal(), alibi": _masked(causal(), scores=alibi(heads=HEADS)),
    "causal(), softcap": _masked(causal(), scores=softcap(30.0)),
    "causal() & window(before=255)": _masked(causal() & window(before=255)),
    "causal() & window(before=255) | global_tokens(16)": _masked(causal() & window(before=255) | global_tokens(16)),
    "causal() & dilated(8)": _masked(causal() & dilated(8)),
    "chunks(256, before=1)": _masked(chunks(256, before=1)),
    "blocks(256)": _masked(blocks(256)),
    "causal() & random_links(64)": _masked(causal() & random_links(64, seed=0)),
    "linear_attend, elu_plus_one": _linear(),
    "linear_attend, performer(64)": _linear(lambda: performer(width=WIDTH, count=64)),
    "channel_attend": _channels,
}


@dataclass(frozen=True)
class Growth:
    """Seconds and peak bytes of one attention mechanism at each length, and the exponents fitted to them."""

    name: str
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def time_exponent(self) -> float:
        return fit_exponent(self.lengths, self.seconds)

    @property
    def memory_exponent(self) -> float:
        return fit_exponent(self.lengths, self.peak_bytes)


def fit_exponent(lengths: tuple[int, ...], values: tuple[float, ...]) -> float:
    """Return the exponent p of the least-squares fit log(value) = p log(length) + constant."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def measure(device: str, quick: bool, only: str = "") -> Iterator[Growth]:
    """Check each mechanism, then yield its time and memory at every length, without gradients.

    only  measure only mechanisms whose name contains this text
    """
    lengths = QUICK_LENGTHS if quick else LENGTHS[device]
    rounds, min_seconds = (1, 0.0) if quick else (5, 0.05)
    for name, attention in MECHANISMS.items():
        if only not in name:
            continue
        check(name, attention, device)
        seconds, peaks = [], []
        for n in lengths:
            q, k, v = _draw(n, device)

            def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, attention: ATTENTION = attention) -> Tensor:
                with torch.no_grad():
                    return attention(q, k, v)

            timings = time_alternating({"regard": run}, rounds=rounds, min_seconds=min_seconds, device=device)
            seconds.append(timings.median("regard"))
            peaks.append(peak_bytes(run) if device == "cuda" else cpu_peak_bytes(run))
        yield Growth(name, lengths, tuple(seconds), tuple(peaks))


def check(name: str, attention: ATTENTION, device: str) -> None:
    """Compare the output of a mechanism with its definition in float64; raise CorrectnessError if they differ."""
    q, k, v = _draw(CHECKED, device)
    truth = attention(q.double(), k.double(), v.double(), kernel="reference")
    error = (attention(q, k, v).double() - truth).abs().max().item()
    if not error < (0.1 if q.dtype == torch.bfloat16 else 1e-4):
        raise CorrectnessError(f"{name}: error {error:.1e} against float64")


def cpu_peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak number of bytes that torch allocates on the CPU during a call of `function`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    # events() adds allocations to the operators that made them; the peak needs each of them
    assert found.profiler is not None
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in changes]).max())


def _draw(n: int, device: str) -> list[Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(n)
    return [torch.randn(1, HEADS, n, WIDTH, generator=generator, device=device, dtype=dtype) for _ in range(3)]


def markdown_table(results: list[Growth]) -> list[str]:
    """Return the lines of a Markdown table: time and memory at the longest length, and both exponents."""
    longest = f"{results[0].lengths[-1]:,}"
    rows = [
        ("mechanism", f"ms at {longest}", "time grows as", f"peak MB at {longest}", "memory grows as"),
        ("---",) * 5,
    ]
    for each in results:
        name, time, memory = each.name.replace("|", "\\|"), each.seconds[-1] * 1e3, each.peak_bytes[-1] / 1e6
        powers = f"n^{each.time_exponent:.2f}", f"n^{each.memory_exponent:.2f}"
        rows.append((f"`{name}`", f"{time:.3g}", powers[0], f"{memory:.3g}", powers[1]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def draw(results: list[Growth], machine: str) -> Any:
    """Draw time (left) and memory (right) against length, one line for each mechanism, with logarithmic axes.

    machine  text below the title that names the machine
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = [f"{marker}{line}" for line in ("-", "--") for marker in "osv^D*P"]
    for style, each in zip(styles, results, strict=False):
        for axes, values, exponent in (
            (panels[0], [x * 1e3 for x in each.seconds], each.time_exponent),
            (panels[1], [x / 1e6 for x in each.peak_bytes], each.memory_exponent),
        ):
            axes.plot(each.lengths, values, style, label=f"n^{exponent:.2f}  {each.name}", markersize=5)
    for axes, title, unit in zip(panels, ("time of one call", "peak memory of one call"), ("ms", "MB"), strict=True):
        axes.set(title=title, xlabel="length n", ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=2)
    figure.suptitle(machine, fontsize=9)
    return figure


def main(argv: list[str]) -> int:
    """Run the benchmark of growth and print a table, or JSON; write a picture if one is requested."""
    parser = argparse.ArgumentParser(prog="bench growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths and one round, to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mechanisms whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="write a picture: .png, .svg or .pdf")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    results = []
    for each in measure(options.device, options.quick, options.only):
        results.append(each)
        print(f"{each.name}: time n^{each.time_exponent:.2f}, memory n^{each.memory_exponent:.2f}", file=sys.stderr)
    if not results:
        parser.error(f"no mechanism has {options.only!r} in its name; they are {', '.join(MECHANISMS)}")
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    machine = f"torch {torch.__version__} on {where}; b=1, h={HEADS}, c={WIDTH}, forward without gradients"
    if options.json:
        rows = [
            {**asdict(each), "time_exponent": each.time_exponent, "memory_exponent": each.memory_exponent}
            for each in results
        ]
        print(json.dumps({"machine": machine, "results": rows}, indent=1))
    else:
        print("\n".join([machine, "", *markdown_table(results)]))
    if options.picture is not None:
        from regard.cli.output import save_picture

        save_picture(draw(results, machine), options.picture)
    return 0
