"""Time several functions in alternating rounds; ratios are computed within each round."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

Function = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a peer regard is: the median over rounds, the smallest and the largest value."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timings:
    """Measured times: for each function by name, the seconds per call in each round. Ours is named "regard"."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return median(self.seconds[name])

    def fastest_peer(self) -> str:
        return min((name for name in self.seconds if name != "regard"), key=self.median)

    def ratio(self, peer: str) -> Ratio:
        rounds = sorted(b / a for a, b in zip(self.seconds["regard"], self.seconds[peer], strict=True))
        return Ratio(median(rounds), rounds[0], rounds[-1])


def time_alternating(functions: dict[str, Function], *, rounds: int, min_seconds: float, device: str) -> Timings:
    """Time functions in alternation: in each round, every function is called repeatedly for at least `min_seconds`."""
    clock = _cuda_seconds if device == "cuda" else _cpu_seconds
    for function in functions.values():  # compilation and first allocations are not timed
        function()
        function()
    repeats = {name: max(1, round(min_seconds / max(clock(call, 1), 1e-7))) for name, call in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    gc.disable()
    try:
        for turn in range(rounds):
            order = list(functions)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                seconds[name].append(clock(functions[name], repeats[name]))
    finally:
        gc.enable()
    return Timings(seconds)


def _cpu_seconds(function: Function, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def _cuda_seconds(function: Function, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def peak_bytes(function: Function) -> int:
    """Return the peak GPU memory of a call in bytes, without the memory that was allocated before the call."""
    function()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
