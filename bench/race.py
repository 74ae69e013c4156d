"""Timing by turns: contestants alternate in rounds, and a ratio is taken within each round."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a peer ours is: the median over rounds and its range."""

    peer: str
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Race:
    """Seconds per call of every contestant in every round."""

    seconds: dict[str, list[float]]

    def typical(self, name: str) -> float:
        return median(self.seconds[name])

    def best_peer(self) -> str:
        return min((name for name in self.seconds if name != "regard"), key=self.typical)

    def ratio(self, peer: str) -> Ratio:
        rounds = sorted(b / a for a, b in zip(self.seconds["regard"], self.seconds[peer], strict=True))
        return Ratio(peer, median(rounds), rounds[0], rounds[-1])


def race(contestants: dict[str, Run], *, rounds: int, least: float, device: str) -> Race:
    """Time the contestants by turns. A turn repeats its call until it lasts `least` seconds."""
    clock = _cuda_seconds if device == "cuda" else _cpu_seconds
    for run in contestants.values():  # compiling, planning and first allocations stay out of the numbers
        run()
        run()
    repeats = {name: max(1, round(least / max(clock(run, 1), 1e-7))) for name, run in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    try:
        for turn in range(rounds):
            order = list(contestants)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                seconds[name].append(clock(contestants[name], repeats[name]))
    finally:
        gc.enable()
    return Race(seconds)


def _cpu_seconds(run: Run, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _cuda_seconds(run: Run, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def peak_bytes(run: Run) -> int:
    """The most GPU memory held during a call, beyond what was held before."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
