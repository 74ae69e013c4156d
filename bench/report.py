"""Benchmark reports: results, the printed table, JSON output and the exit code."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from bench.timing import Timings

_HEADER = ("case", "shape b x h x n x c", "kernel", "ms", "peer", "ms", "ratio (range)", "target", "MB", "peer MB")


class CorrectnessError(AssertionError):
    """Raised if the output of a function to be timed is wrong."""


@dataclass(frozen=True)
class BenchmarkResult:
    """The time of regard compared with another implementation (the peer); one row of the printed table.

    kernel            the kernel that regard used
    ratio, low, high  how many times as fast as the peer regard is: median, smallest and largest value over rounds
    target            the ratio to reach
    """

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
        """Whether the ratio reaches the target and regard uses no more memory than the peer."""
        more = self.megabytes is not None and self.peer_megabytes is not None and self.megabytes > self.peer_megabytes
        return self.ratio >= self.target and not more

    def __str__(self) -> str:
        return f"{self.name} [{self.shape}]: {self.ratio:.2f}x {self.peer}"


def make_result(
    timings: Timings, name: str, shape: str, kernel: str, peer: str, target: float, **memory: float
) -> BenchmarkResult:
    """Return the result that compares regard with one peer.

    timings  times of regard and its peers
    memory   `megabytes` and `peer_megabytes`, if measured
    """
    ratio = timings.ratio(peer)
    return BenchmarkResult(
        name, shape, kernel, timings.median("regard") * 1e3, peer, timings.median(peer) * 1e3,
        ratio.median, ratio.low, ratio.high, target, **memory,
    )  # fmt: skip


def make_parser(prog: str, description: str | None, only: str = "cases") -> argparse.ArgumentParser:
    """Return an argument parser with the options that all benchmarks have: --quick, --only and --json.

    only  what the option --only selects, for its help text
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes, to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only {only} whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def print_report(
    results: Iterable[BenchmarkResult],
    device: str,
    as_json: bool,
    notes: Callable[[list[BenchmarkResult]], dict[str, bool]] | None = None,
) -> int:
    """Print each result on stderr when it is measured, then all results on stdout. Returns the exit code.

    notes  function of the results that returns further lines to print, each with whether its target was reached
    """
    lines = []
    for result in results:
        lines.append(result)
        print(result, file=sys.stderr, flush=True)
    if not lines:
        print("no case has that name", file=sys.stderr)
        return 2
    extra = {} if notes is None else notes(lines)
    if as_json:
        rows = [{**asdict(line), "reached": line.reached} for line in lines]
        print(json.dumps({"machine": describe_machine(device), "results": rows, "notes": list(extra)}, indent=1))
    else:
        print("\n".join([describe_machine(device), "", *markdown_table(lines), "", *extra]))
    missed = [str(line) for line in lines if not line.reached] + [
        note for note, reached in extra.items() if not reached
    ]
    if missed:
        print("missed:", *missed, sep="\n  ", file=sys.stderr)
    return 1 if missed else 0


def describe_machine(device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {where}; ratio = peer's time / ours, median (range) over alternating rounds"


def markdown_table(results: Iterable[BenchmarkResult]) -> list[str]:
    rows = [_HEADER, ("---",) * len(_HEADER)]
    for line in results:
        memory = [f"{x:.0f}" if x is not None else "" for x in (line.megabytes, line.peer_megabytes)]
        target = f">= {line.target:.2f}" if line.target else ""
        ratio = f"{line.ratio:.2f} ({line.low:.2f} to {line.high:.2f})"
        times = f"{line.milliseconds:.3g}", line.peer, f"{line.peer_milliseconds:.3g}"
        rows.append((f"`{line.name}`".replace("|", "\\|"), line.shape, line.kernel, *times, ratio, target, *memory))
    return ["| " + " | ".join(row) + " |" for row in rows]
