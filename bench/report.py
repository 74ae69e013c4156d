"""The command: run the cases, print a table, say what was reached."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

import torch

from bench.cases import Result, growth, on_cpu, on_gpu

_WINDOW = "window(before=255)"
_HEADER = ("case", "shape b x h x n x c", "kernel", "ms", "peer", "ms", "ratio (range)", "target", "MB", "peer MB")


def main(argv: list[str]) -> int:
    """Exit code 0 if every target was reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only masks whose expression contains this")
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here")

    results = []
    for result in (on_gpu if options.device == "cuda" else on_cpu)(options.quick, options.only):
        results.append(result)
        print(f"{result.name} [{result.shape}]: {result.ratio:.2f}x {result.peer}", file=sys.stderr, flush=True)
    if not results:
        parser.error(f"no mask contains {options.only!r}; models and seeing are bench.models and bench.seeing")
    missed = [f"{line.name} [{line.shape}]: {line.ratio:.2f}x" for line in results if not line.reached]
    notes = []
    if options.device == "cpu" and not options.quick and options.only in _WINDOW:
        for name in (f"{_WINDOW}, forward", f"{_WINDOW}, forward + backward"):
            power = growth(results, name)
            notes.append(f"{name}: time grows as n^{power:.2f} from 1k to 16k")
            if power > 1.2:
                missed.append(notes[-1])
    if options.json:
        lines = [{**asdict(line), "reached": line.reached} for line in results]
        print(json.dumps({"machine": machine(options.device), "results": lines, "notes": notes}, indent=1))
    else:
        print("\n".join([machine(options.device), "", *table(results), "", *notes]))
    if missed:
        print("missed:", *missed, sep="\n  ", file=sys.stderr)
    return 1 if missed else 0


def machine(device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {where}; ratio = peer's time / ours, median (range) over alternating rounds"


def table(results: Iterable[Result]) -> list[str]:
    """A Markdown table."""
    rows = [_HEADER, ("---",) * len(_HEADER)]
    for line in results:
        memory = [f"{x:.0f}" if x is not None else "" for x in (line.megabytes, line.peer_megabytes)]
        target = f">= {line.target:.2f}" if line.target else ""
        ratio = f"{line.ratio:.2f} ({line.low:.2f} to {line.high:.2f})"
        times = f"{line.milliseconds:.3g}", line.peer, f"{line.peer_milliseconds:.3g}"
        rows.append((f"`{line.name}`".replace("|", "\\|"), line.shape, line.kernel, *times, ratio, target, *memory))
    return ["| " + " | ".join(row) + " |" for row in rows]
