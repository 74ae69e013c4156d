"""What a step of a run takes, whatever the machine: bytes and work, counted on a few records and scaled to any number.

The loop's own step runs, on the CPU, so that the counts hold for every model, task, optimizer and precision.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.base.counting import saved_tensor_bytes
from regard.train import rng_state
from regard.train.averaging import LastKAverage
from regard.train.loop import _Run
from regard.train.op_counter import Tally, Undropped, Work
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS
from regard.train.task import Task

FEW = 2, 8  # records that a step is counted on, at least
LOOKED_AT = 32  # shares of a batch among which the widest is sought
STEPS = 16  # whose batches are measured, from all over a run: some have longer records than others


@dataclass(frozen=True)
class Line:
    """A number that grows evenly with the size of a share of a batch."""

    fixed: float
    slope: float

    @staticmethod
    def through(sizes: tuple[int, int], values: tuple[float, float]) -> "Line":
        """Where there is one size only, all of it grows."""
        if sizes[0] == sizes[1]:
            return Line(0.0, values[0] / sizes[0])
        slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
        return Line(values[0] - slope * sizes[0], slope)

    def at(self, size: float) -> float:
        return max(0.0, self.fixed + self.slope * size)


@dataclass(frozen=True)
class Held:
    """A tensor that devices hold, and the block of the model that it belongs to; None is no block's."""

    shape: tuple[int, ...]
    element: int
    block: str | None = None

    def bytes(self, pieces: int = 1) -> int:
        """What the first of so many devices holds of it, which is the largest piece: its first axis is cut."""
        return prod((*(ceil(size / pieces) for size in self.shape[:1]), *self.shape[1:])) * self.element


@dataclass(frozen=True)
class Peak:
    """The most of several numbers that grow evenly, each of which may be the most at some size."""

    lines: tuple[Line, ...]

    @staticmethod
    def over(sizes: tuple[int, int], small: list[int], large: list[int]) -> "Peak":
        """Of what was there at each moment. Where moments differ in number, of the most there was at any."""
        if len(small) != len(large):  # a larger share went another way
            small, large = [max(small)], [max(large)]
        lines = {Line.through(sizes, values) for values in zip(small, large, strict=True)}
        highest: list[Line] = []
        for line in sorted(lines, key=lambda line: (-line.slope, -line.fixed)):
            if not highest or line.fixed > highest[-1].fixed:  # else it is below one that also grows faster
                highest.append(line)
        return Peak(tuple(highest))

    def at(self, size: float) -> float:
        return max(line.at(size) for line in self.lines)


@dataclass(frozen=True)
class Made:
    """The most bytes that a step makes at once; and beside gradients that are done."""

    peak: Peak
    beside: Peak


@dataclass(frozen=True)
class Counts:
    """What a step takes. Sizes of shares of a batch are counted in numbers that their tensors hold, padding included.

    per_record  the size of a batch for each of its records, in the mean over some steps
    at_most     the same, in the largest of them
    parameters, gradients, remembered  tensors of the model, of what learns in it, and of the optimizer
    buffers     bytes of what the model holds besides parameters
    meant       bytes of those buffers that are averaged as parameters are
    copies      of all that is averaged
    given       bytes of data that a step looks at
    kept        bytes that autograd keeps of a forward pass for the backward pass
    alone       what a step on one share makes
    several     what a step on several shares makes, which has gradients of those before
    share       work for a share of size `counted_at`; `growth` is what each number more takes
    update      work of a step that all its shares have in common
    """

    per_record: float
    at_most: float
    parameters: tuple[Held, ...]
    gradients: tuple[Held, ...]
    remembered: tuple[Held, ...]
    buffers: int
    meant: int
    copies: int
    given: Line
    kept: Line
    alone: Made
    several: Made
    counted_at: int
    share: Work
    growth: Work
    update: Work

    def work(self, records: int, shares: int) -> Work:
        """What a device does in a step, with so many records in each of its shares."""
        one = self.share.plus(self.growth, self.per_record * records - self.counted_at)
        return self.update.plus(one, shares)


def count_step(model: nn.Module, task: Task, plan: TrainingPlan, *, gpu: bool = False) -> Counts:
    """Count a step of a run. The model is left as it is.

    gpu  count fused attention as GPUs have it, whose dropout needs no matrix
    """
    # what is compiled cannot be counted by operation; `predicted` knows what compiling spares
    eager = replace(plan, compile=False)
    imitated: AbstractContextManager[Any] = Undropped() if gpu else nullcontext()
    with rng_state.preserve_rng_state(SINGLE_PROCESS.device), imitated:
        run = _Run(copy.deepcopy(model).cpu(), task, eager, None, SINGLE_PROCESS, _unheard, _unheard)
        run.model.train()
        lengths = {step: _size(task.batch(step, 0, 1)) / plan.batch_size for step in steps_over(plan)}
        longest = max(lengths, key=lambda step: lengths[step])
        small, large = (_widest(task, longest, plan.batch_size, records) for records in _few(plan.batch_size))
        sizes = _size(small), _size(large)
        run._one([small], 0.0)  # so that the optimizer remembers
        saved = _kept(run, small), _kept(run, large)
        one, more = _tallied(run, [small]), _tallied(run, [large])
        two, two_more = _tallied(run, [small] * 2), _tallied(run, [large] * 2)
    between, share = sizes[1] - sizes[0], two.work.plus(one.work, -1)
    held = {name: _held(p, _block(run.model, name)) for name, p in run.parameters.items()}
    return Counts(
        per_record=sum(lengths.values()) / len(lengths),
        at_most=lengths[longest],
        parameters=tuple(held.values()),
        gradients=tuple(held[name] for name, p in run.parameters.items() if p.requires_grad),
        remembered=tuple(_held(tensor) for tensor in run.optimizer.state_dict().values()),
        buffers=sum(buffer.nbytes for buffer in run.model.buffers()),
        meant=sum(buffer.nbytes for buffer in run.model.buffers() if buffer.is_floating_point()),
        copies=_copies(plan),
        given=Line.through(sizes, (one.given, more.given)),
        kept=Line.through(sizes, saved),
        alone=_made(sizes, one, more),
        several=_made(sizes, two, two_more),
        counted_at=sizes[0],
        share=share,
        growth=Work().plus(more.work.plus(one.work, -1), 1 / between if between else 0.0),
        update=one.work.plus(share, -1),
    )


def _few(batch: int) -> tuple[int, int]:
    """Two numbers of records that divide a batch evenly; the second is a multiple of the first, so even where it is."""
    shares = [records for records in range(1, batch + 1) if batch % records == 0]
    first = next((records for records in shares if records >= FEW[0]), batch)
    return first, next((records for records in shares if records >= FEW[1] and records % first == 0), batch)


def steps_over(plan: TrainingPlan) -> list[int]:
    """The steps that are looked at."""
    count = min(STEPS, plan.steps)
    return [plan.steps * number // count for number in range(count)]


def _widest(task: Task, step: int, batch: int, records: int) -> Any:
    """The share of a batch that has the longest of the records looked at."""
    of = batch // records
    looked_at = {of - 1 - of * number // LOOKED_AT for number in range(LOOKED_AT)}  # the last one too
    return max((task.batch(step, part, of) for part in sorted(looked_at)), key=_size)


def _size(batch: Any) -> int:
    """Numbers in the tensors of a batch; what else there is, such as masks, goes along with them."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def _tensors(batch: Any) -> list[Tensor]:
    fields = getattr(batch, "__dataclass_fields__", None)
    held = batch if fields is None else [getattr(batch, name) for name in fields]
    return [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]


def _kept(run: _Run, batch: Any) -> int:
    with saved_tensor_bytes([*run.model.parameters(), *run.model.buffers(), *_tensors(batch)]) as found:
        run._one([batch], 0.0)
    return sum(found.values())


def _tallied(run: _Run, batches: list[Any]) -> Tally:
    with Tally(run.model, run.optimizer.state_dict().values()) as tally:
        run._one(batches, 0.0)
    return tally


def _made(sizes: tuple[int, int], small: Tally, large: Tally) -> Made:
    return Made(Peak.over(sizes, small.alive, large.alive), Peak.over(sizes, small.beside, large.beside))


def _held(tensor: Tensor, block: str | None = None) -> Held:
    return Held(tuple(tensor.shape), tensor.element_size(), block)


def _block(model: nn.Module, name: str) -> str | None:
    """The outermost member of a list of modules that a parameter is in: what is cut, and made whole, together."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    return None


def _copies(plan: TrainingPlan) -> int:
    if isinstance(plan.averaging, LastKAverage):
        return min(plan.averaging.count, plan.steps // plan.averaging.every)
    return 0 if plan.averaging is None else 1


def _unheard(said: object) -> None:
    """A step that is only counted has nothing to tell."""
