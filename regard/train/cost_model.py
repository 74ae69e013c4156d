"""What a run will take, before it runs: memory on each device and seconds a step, from counts and stated rates."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.train.machine_rates import Rates
from regard.train.op_counter import Cost, Work
from regard.train.plan import TrainingPlan
from regard.train.step_cost import Counts, Held

WAYS = ("data", "sharded")
MANY = 1024  # devices, beyond which no more are advised
MOST = 1 << 30  # records at once, beyond which no room is sought


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    data         what batches are taken from, where it lies on the device, and the batch
    activations  what a forward pass leaves for the backward pass
    passing      the most that a step makes at once: activations, gradients, and what is in between
    """

    parameters: int
    optimizer: int
    averaging: int
    data: int
    gradients: int
    activations: int
    passing: int

    @property
    def total(self) -> int:
        """The most at once. Gradients and activations are in it as far as they are there together."""
        return self.parameters + self.optimizer + self.averaging + self.data + self.passing


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step.

    arithmetic, traffic, launches  what each would take alone
    compute        the longest of these three for each kind of operation
    communication  between devices
    step           with communication as far as it does not go on while a device computes
    """

    arithmetic: float
    traffic: float
    launches: float
    compute: float
    communication: float
    step: float


@dataclass(frozen=True)
class Prediction:
    """What a run takes.

    at_once  records in one share of the batch
    flops    floating-point operations of a step on one device
    limit    bytes that a device has, where that is known
    largest  the most records at once that the limit leaves room for
    advice   settings that would fit, where these do not
    """

    machine: str
    devices: int
    parallel: str
    precision: str
    compiled: bool
    batch: int
    accumulate: int
    at_once: int
    steps: int
    parameters: int
    flops: float
    memory: Memory
    seconds: Seconds
    limit: int | None
    largest: int | None
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.limit is None or self.memory.total <= self.limit

    @property
    def run_seconds(self) -> float:
        """All steps, without evaluations and states on disk."""
        return self.steps * self.seconds.step


def predict_memory(
    counts: Counts,
    plan: TrainingPlan,
    rates: Rates,
    *,
    devices: int = 1,
    parallel: str = "data",
    limit: int | None = None,
) -> Prediction:
    """Memory and time of a run whose step was counted, on so many devices.

    limit  bytes of one device; None takes what the rates say, if they do
    """
    check_integer("devices", devices, 1)
    if parallel not in WAYS:
        raise ConfigError(f"parallel is one of {', '.join(WAYS)}, not {parallel!r}")
    shares = devices * plan.gradient_accumulation_steps
    if plan.batch_size % shares:
        raise ConfigError(
            f"a batch of {plan.batch_size} has no {shares} equal shares for {devices} devices and "
            f"accumulate={plan.gradient_accumulation_steps}; use a multiple of {shares}, "
            f"such as {plan.batch_size + -plan.batch_size % shares}"
        )
    limit = rates.capacity if limit is None else limit
    at_once = plan.batch_size // shares
    memory = held(counts, at_once, plan.gradient_accumulation_steps, devices, parallel)
    work = counts.work(at_once, plan.gradient_accumulation_steps)
    if plan.compile:
        work = _compiled(work, plan.gradient_accumulation_steps * counts.kept.at(counts.per_record * at_once))
    return Prediction(
        machine=rates.name,
        devices=devices,
        parallel=parallel,
        precision=plan.precision,
        compiled=plan.compile,
        batch=plan.batch_size,
        accumulate=plan.gradient_accumulation_steps,
        at_once=at_once,
        steps=plan.steps,
        parameters=sum(prod(each.shape) for each in counts.parameters),
        flops=work.flops,
        memory=memory,
        seconds=_seconds(
            work,
            rates,
            _communication(counts, rates, devices, parallel, plan.gradient_accumulation_steps),
            plan.gradient_accumulation_steps,
        ),
        limit=limit,
        largest=None if limit is None else _largest(counts, plan.gradient_accumulation_steps, devices, parallel, limit),
        advice=tuple(_advice(counts, plan, devices, parallel, limit)),
    )


def held(counts: Counts, at_once: int, accumulate: int = 1, devices: int = 1, parallel: str = "data") -> Memory:
    """Bytes on the device that holds most, with so many records in a share."""
    pieces = devices if parallel == "sharded" else 1
    size = counts.at_most * at_once
    parameters, gradients = (
        sum(each.bytes(pieces) for each in tensors) for tensors in (counts.parameters, counts.gradients)
    )
    made = counts.alone if accumulate == 1 else counts.several
    if pieces > 1:
        passing = made.beside.at(size) + _gathered(counts) + gradients
        if accumulate > 1:
            # gradients of all shares are added up whole, and a block of them is copied where it is sent
            passing += sum(each.bytes() for each in counts.gradients) + _largest_blocks(counts.gradients, 1)
    else:
        # where they are sent, gradients lie in buckets too
        passing = made.peak.at(size) + (gradients if devices > 1 else 0)
    return Memory(
        parameters=parameters + counts.buffers,
        optimizer=sum(each.bytes(pieces) for each in counts.remembered),
        averaging=counts.copies * (parameters + counts.meant),
        data=round(counts.given.at(size)),
        gradients=gradients,
        activations=round(counts.kept.at(size)),
        passing=round(passing),
    )


def _gathered(counts: Counts) -> int:
    """Bytes of parameters that are whole at once where they lie in pieces: those of no block, and of some blocks."""
    beside = sum(each.bytes() for each in counts.parameters if each.block is None)
    return beside + _largest_blocks(counts.parameters, 3)  # the one at work, the next, and what that is unpacked from


def _largest_blocks(tensors: Iterable[Held], most: int) -> int:
    blocks: Counter[str] = Counter()
    for each in tensors:
        if each.block is not None:
            blocks[each.block] += each.bytes()
    return sum(sorted(blocks.values())[-most:])


def _seconds(work: Work, rates: Rates, communication: float, accumulate: int) -> Seconds:
    parts = [
        (cost.flops / rates.arithmetic(dtype), cost.moved / (rates.reached * rates.memory), cost.calls * rates.launch)
        for (_, dtype), cost in work.costs.items()
    ]
    compute = sum(map(max, parts))
    # gradients are sent while the last share goes back, which is two thirds of its time
    beside = min(communication, 2 / 3 * compute / accumulate)
    arithmetic, traffic, launches = map(sum, zip(*parts, strict=True))
    return Seconds(arithmetic, traffic, launches, compute, communication, compute + communication - beside)


def _communication(counts: Counts, rates: Rates, devices: int, parallel: str, accumulate: int) -> float:
    """In a ring every device sends (n - 1) / n of what is summed up, or gathered from all, in n - 1 messages."""
    size = sum(each.bytes() for each in counts.gradients)
    blocks = len({each.block for each in counts.parameters}) if parallel == "sharded" else 1
    # a sum for all is a sum in pieces, gathered. Pieces of weights are gathered on the way there and back
    rounds = 1 + (2 * accumulate if parallel == "sharded" else 1)
    return rounds * (devices - 1) * (size / devices / rates.link + blocks * rates.latency)


def _compiled(work: Work, kept: float) -> Work:
    """Work of a compiled model: what is no product rides along with one, and what is kept is written and read once."""
    costs = {
        kind: cost for kind, cost in work.costs.items() if cost.flops or kind[0].startswith(("_fused", "_foreach"))
    }
    calls = sum(cost.calls for cost in costs.values() if cost.flops)
    return Work({**costs, ("riding", torch.float32): Cost(calls, 0.0, 2 * kept)})


def _largest(counts: Counts, accumulate: int, devices: int, parallel: str, limit: int) -> int:
    """The most records in a share that leave a device within its limit; 0 where none does."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high + 1) // 2
        if held(counts, middle, accumulate, devices, parallel).total <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _advice(counts: Counts, plan: TrainingPlan, devices: int, parallel: str, limit: int | None) -> Iterator[str]:
    """What would fit, each by itself: in pieces, in more shares, on more devices, with a smaller batch."""

    def fits(accumulate: int, devices: int, parallel: str) -> bool:
        if limit is None or plan.batch_size % (accumulate * devices):
            return limit is None
        return held(counts, plan.batch_size // (accumulate * devices), accumulate, devices, parallel).total <= limit

    if limit is None or fits(plan.gradient_accumulation_steps, devices, parallel):
        return
    told = False
    if parallel == "data" and devices > 1 and fits(plan.gradient_accumulation_steps, devices, "sharded"):
        told = True
        yield "--parallel sharded"
    for accumulate in range(plan.gradient_accumulation_steps + 1, plan.batch_size // devices + 1):
        if fits(accumulate, devices, parallel):
            told = True
            yield f"accumulate={accumulate}"
            break
    for way in dict.fromkeys((parallel, "sharded")):
        more = next((n for n in range(devices + 1, MANY + 1) if fits(plan.gradient_accumulation_steps, n, way)), None)
        if more is not None:
            told = True
            yield f"--devices {more} --parallel {way}"
            break
    largest = _largest(counts, plan.gradient_accumulation_steps, devices, parallel, limit)
    if largest:
        told = True
        yield f"batch={largest * devices * plan.gradient_accumulation_steps}"
    if not told:
        yield "a smaller model: not even one record fits beside this one"
