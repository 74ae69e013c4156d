"""What `regard plan` predicts beside what a run takes, for each recipe: memory at its peak and seconds a step.

    python -m bench.planning [--device cuda|cpu] [--machine NAME] [--only RECIPE] [--data RECIPE=PATH] [--steps N]
                             [--set RECIPE:a.b=c] [--json]

Memory is what torch's allocator had handed out at most; on a CPU its profiler tells that of a step, and the tensors
that are held throughout are added. Seconds are those of the fastest step: a busy machine only makes them slower.
"""

import argparse
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from regard.cli.settings import applied
from regard.recipes.recipe import RECIPES, Phase, RunLocation, Start, get_recipe
from regard.train.averaging import LastKAverage
from regard.train.cost_model import predict_memory
from regard.train.loop import _Run
from regard.train.machine_rates import Rates, machine, measured
from regard.train.op_counter import Tally
from regard.train.process_group import Processes
from regard.train.step_cost import STEPS, count_step

MIB = 1 << 20
WARMUP = 3  # steps that do not count


@dataclass(frozen=True)
class Line:
    """One phase of a recipe: bytes and seconds of a step, predicted and measured."""

    name: str
    machine: str
    predicted_bytes: int
    bytes: int
    predicted_seconds: float
    seconds: float

    @property
    def ratios(self) -> tuple[float, float]:
        """Predicted over measured: memory and time."""
        return self.predicted_bytes / self.bytes, self.predicted_seconds / self.seconds


def lines(start: Start, name: str, rates: Rates, device: torch.device, steps: int) -> Iterator[Line]:
    for phase in start.phases:
        told = predict_memory(count_step(start.model, phase.task, phase.plan, gpu=rates.gpu), phase.plan, rates)
        size, seconds = real(start, phase, device, steps)
        yield Line(f"{name}, {phase.name}", rates.name, told.memory.total, size, told.seconds.step, seconds)


def real(start: Start, phase: Phase, device: torch.device, steps: int) -> tuple[int, float]:
    """Bytes at the peak and seconds of a step of a run, batches being there already as they are for the loop."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    plan = replace(phase.plan, steps=steps + WARMUP)
    run = _Run(copy.deepcopy(start.model), phase.task, plan, None, Processes(device=device), print, print)
    run.model.train()
    if run.averager is not None and isinstance(plan.averaging, LastKAverage):
        for number in range(plan.averaging.count):  # as many states as there will be
            run.averager.update((number + 1) * plan.averaging.every)
    taken = []
    for step in range(steps + WARMUP):
        if device.type == "cuda" and step == WARMUP:
            torch.cuda.reset_peak_memory_stats(device)  # compiling is over
        batch = run._batch(step)
        begin = time.perf_counter()
        run._one(batch, 1.0)
        if run.averager is not None:
            run.averager.update(step + 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    seconds = min(taken[WARMUP:])
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before, seconds
    remembered = [
        *run.optimizer.state_dict().values(),
        *([] if run.averager is None else run.averager.tensors().values()),
    ]
    held = sum(tensor.nbytes for tensor in [*run.model.parameters(), *run.model.buffers(), *remembered])
    taken_bytes = []
    for batch in map(run._batch, range(STEPS)):
        with Tally(run.model, remembered) as tally:
            run._one(batch, 1.0)
        taken_bytes.append(tally.given + allocated(partial(run._one, batch, 1.0)))
    return held + max(taken_bytes), seconds


def allocated(act: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator handed out at once for an act."""
    with torch.profiler.profile(profile_memory=True) as told:
        act()
    assert told.profiler is not None
    events = [each for each in told.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes: list[int] = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.planning", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--machine", default="measured", help="rates: h200, cpu ... [measured here]")
    parser.add_argument("--only", choices=RECIPES, help="one recipe")
    parser.add_argument("--data", action="append", default=[], metavar="RECIPE=PATH", help="its real form, and data")
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE:a.b=c", help="a setting of a recipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    rates = measured(device) if options.machine == "measured" else machine(options.machine)
    data = {name: Path(path) for name, path in (each.split("=", 1) for each in options.data)}
    results = []
    for name in [options.only] if options.only else RECIPES:
        chosen = get_recipe(name)
        settings = chosen.settings(real=name in data)
        settings = applied(settings, [each.split(":", 1)[1] for each in options.set if each.startswith(f"{name}:")])
        start = chosen.module.start(settings, RunLocation(data=data.get(name)))
        for line in lines(start, name, rates, device, options.steps):
            results.append(line)
            print(_told(line), file=sys.stderr, flush=True)
    if options.json:
        found = [{**asdict(line), "ratios": line.ratios} for line in results]
        print(json.dumps({"machine": _machine(device), "rates": asdict(rates), "results": found}, indent=1))
    else:
        print("\n".join([_machine(device), f"rates: {rates.name}, {rates.source}", *map(_told, results)]))
    return 0


def _machine(device: torch.device) -> str:
    gpu = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {where}; ratio = predicted / measured"


def _told(line: Line) -> str:
    memory, time_ = line.ratios
    return (
        f"{line.name}: memory {line.predicted_bytes / MIB:,.1f} MiB predicted, {line.bytes / MIB:,.1f} measured, "
        f"{memory:.2f}x; a step {line.predicted_seconds * 1e3:,.2f} ms predicted, {line.seconds * 1e3:,.2f} measured, "
        f"{time_:.2f}x"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
