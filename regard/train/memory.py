"""Predict the memory of a training run on each device, for DDP and FSDP, before it runs.

A few steps of the training loop run on the CPU with two small batch sizes. Their memory is measured and extrapolated to
the whole batch, so the prediction holds for every model, task, optimizer and precision.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.base.counting import saved_tensor_bytes
from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.train import rng_state
from regard.train.averaging import LastKAverage
from regard.train.loop import Trainer
from regard.train.memory_tracker import IgnoreAttentionDropout, MemoryTracker
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS
from regard.train.task import Task

PARALLEL = ("ddp", "fsdp")
SAMPLES = 2, 8  # at least this many samples in the two micro-batches that are measured
MICRO_BATCHES = 32  # micro-batches of a step among which the one with the longest samples is searched
STEPS = 16  # steps of a run whose batch sizes are compared, because some have longer samples than others
MAX_DEVICES = 1024  # largest number of devices to advise
MAX_SAMPLES = 1 << 30  # largest micro-batch to try


@dataclass(frozen=True)
class PeakFit:
    """Predicts the peak memory in bytes from the size of a micro-batch, as the maximum of linear functions.

    For each allocation in a training step, the bytes that are in use after it are a linear function of the size of the
    micro-batch. Which allocation gives the peak depends on this size. So every linear function that is the largest for
    some size is kept.

    lines  slope and intercept of each linear function
    """

    lines: tuple[tuple[float, float], ...]

    @staticmethod
    def fit(sizes: tuple[int, int], small: list[int], large: list[int]) -> "PeakFit":
        """Fit linear functions to measurements with two sizes of micro-batch: one for each allocation in a step.

        If the two steps have different numbers of allocations, one linear function is fitted to the two peaks.

        sizes         the two sizes of micro-batch
        small, large  bytes after each allocation of a step, with the first and the second size
        """
        if len(small) != len(large):
            small, large = [max(small)], [max(large)]
        highest: list[tuple[float, float]] = []
        for line in sorted({_line_through(sizes, *values) for values in zip(small, large, strict=True)}, reverse=True):
            if not highest or line[1] > highest[-1][1]:  # else another line is above it everywhere
                highest.append(line)
        return PeakFit(tuple(highest))

    def at(self, size: float) -> float:
        """Return the predicted bytes for a micro-batch of this size."""
        return max(0.0, *(slope * size + intercept for slope, intercept in self.lines))


@dataclass(frozen=True)
class StepPeak:
    """The peak memory that a training step allocates, as a function of the size of a micro-batch.

    total        peak memory of all tensors
    activations  peak memory of all tensors except the accumulated gradients (`.grad`) of parameters
    """

    total: PeakFit
    activations: PeakFit

    @staticmethod
    def fit(sizes: tuple[int, int], small: MemoryTracker, large: MemoryTracker) -> "StepPeak":
        """Fit the peak memory of a step to two measured steps.

        sizes         the sizes of the micro-batches of the two steps
        small, large  the measurements, with the first and the second size
        """
        return StepPeak(
            PeakFit.fit(sizes, small.alive, large.alive),
            PeakFit.fit(sizes, small.alive_activations, large.alive_activations),
        )


@dataclass(frozen=True)
class TensorSize:
    """The shape of a tensor and its bytes per element.

    block  name of the block, such as a Transformer layer, that the tensor belongs to; None if it is in no block
    """

    shape: tuple[int, ...]
    element_size: int
    block: str | None = None

    def bytes(self, shards: int = 1) -> int:
        """Return the bytes of the largest of `shards` shards. FSDP divides the first dimension."""
        first = [ceil(size / shards) for size in self.shape[:1]]
        return prod((*first, *self.shape[1:])) * self.element_size


@dataclass(frozen=True)
class StepMemory:
    """The measured memory of a training step.

    Entries that depend on the size of a micro-batch are functions of it. The size is the number of elements of all
    tensors of the micro-batch.

    sample_size  elements per sample, in the largest of the batches that were compared
    parameters, gradients, optimizer  sizes of the parameters, their gradients and the optimizer state
    buffers      bytes of the model's buffers
    averaged_buffers  bytes of the buffers that weight averaging copies
    copies       number of copies of the weights that weight averaging keeps
    inputs       function: bytes of the data that a step reads, such as its batch
    activations  function: bytes of the tensors that autograd saves for the backward pass
    single       function: peak of a step with one micro-batch
    accumulated  function: peak of a step with several micro-batches, which keeps the gradients of earlier ones
    """

    sample_size: float
    parameters: tuple[TensorSize, ...]
    gradients: tuple[TensorSize, ...]
    optimizer: tuple[TensorSize, ...]
    buffers: int
    averaged_buffers: int
    copies: int
    inputs: PeakFit
    activations: PeakFit
    single: StepPeak
    accumulated: StepPeak


@dataclass(frozen=True)
class DeviceMemory:
    """Predicted bytes on one device during training.

    data         bytes of the batch, and of the data set if it is on the device
    activations  bytes of tensors saved for the backward pass
    step_peak    largest number of bytes that a step allocates at once: activations, gradients and temporary tensors
    """

    parameters: int
    optimizer: int
    averaging: int
    data: int
    gradients: int
    activations: int
    step_peak: int

    @property
    def total(self) -> int:
        """The peak memory in bytes. Activations and gradients are counted in `step_peak`."""
        return self.parameters + self.optimizer + self.averaging + self.data + self.step_peak


@dataclass(frozen=True)
class MemoryPrediction:
    """The predicted memory of a training run.

    micro_batch  samples that a device computes at once
    parameters   number of parameters
    memory       predicted bytes on the device with the largest shards
    limit        bytes of memory of a device; None if not known
    max_micro_batch  number of samples in the largest micro-batch that fits; None if there is no limit
    advice       changes of the settings that would make the run fit; empty if it fits or the limit is not known
    """

    devices: int
    parallel: str
    precision: str
    batch_size: int
    gradient_accumulation_steps: int
    micro_batch: int
    parameters: int
    memory: DeviceMemory
    limit: int | None
    max_micro_batch: int | None
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.limit is None or self.memory.total <= self.limit

    @property
    def max_batch_size(self) -> int | None:
        """The largest batch size that fits, with these numbers of devices and of gradient accumulation steps.

        None if there is no limit.
        """
        if self.max_micro_batch is None:
            return None
        return self.max_micro_batch * self.devices * self.gradient_accumulation_steps


def measure_step_memory(model: nn.Module, task: Task, plan: TrainingPlan, *, gpu: bool = False) -> StepMemory:
    """Measure the memory of a training step on the CPU. The model is not changed.

    gpu  whether the memory on a GPU is to be predicted. Attention then runs without dropout, because with dropout the
         CPU allocates a matrix of attention weights, which a GPU does not
    """
    # a compiled model saves at most what it saves uncompiled
    plan = replace(plan, compile=False)
    attention: AbstractContextManager[Any] = IgnoreAttentionDropout() if gpu else nullcontext()
    with rng_state.preserve_rng_state(SINGLE_PROCESS.device), attention:
        trainer = Trainer(copy.deepcopy(model).cpu(), task, plan)
        trainer.model.train()
        sample_sizes = {step: _size(task.batch(step, 0, 1)) / plan.batch_size for step in sampled_steps(plan)}
        longest = max(sample_sizes, key=lambda step: sample_sizes[step])
        small, large = (_largest_micro_batch(task, longest, plan, count) for count in _sample_counts(plan.batch_size))
        sizes = _size(small), _size(large)
        trainer.train_step([small], 0.0)  # creates the optimizer state
        saved = [_saved_bytes(trainer, small)], [_saved_bytes(trainer, large)]
        one, one_large = (_track(trainer, [batch]) for batch in (small, large))
        two, two_large = (_track(trainer, [batch, batch]) for batch in (small, large))
    parameters = {name: _tensor_size(p, _block(trainer.model, name)) for name, p in trainer.parameters.items()}
    buffers = list(trainer.model.buffers())
    return StepMemory(
        sample_size=sample_sizes[longest],
        parameters=tuple(parameters.values()),
        gradients=tuple(parameters[name] for name, p in trainer.parameters.items() if p.requires_grad),
        optimizer=tuple(_tensor_size(tensor) for tensor in trainer.optimizer.state_dict().values()),
        buffers=sum(buffer.nbytes for buffer in buffers),
        averaged_buffers=sum(buffer.nbytes for buffer in buffers if buffer.is_floating_point()),
        copies=plan.averaging.snapshots(plan.steps)
        if isinstance(plan.averaging, LastKAverage)
        else int(plan.averaging is not None),
        inputs=PeakFit.fit(sizes, [one.input_bytes], [one_large.input_bytes]),
        activations=PeakFit.fit(sizes, *saved),
        single=StepPeak.fit(sizes, one, one_large),
        accumulated=StepPeak.fit(sizes, two, two_large),
    )


def predict_memory(
    step: StepMemory, plan: TrainingPlan, *, devices: int = 1, parallel: str = "ddp", limit: int | None = None
) -> MemoryPrediction:
    """Predict the memory of a training run on some devices, and the largest batch that fits.

    If the run does not fit, the prediction suggests settings with which it fits.

    step      memory of one step, measured by `measure_step_memory`
    devices   number of devices
    parallel  "ddp" or "fsdp"
    limit     bytes of memory of one device; None if not known
    """
    check_integer("devices", devices, 1)
    if parallel not in PARALLEL:
        raise ConfigError(f"parallel must be one of {', '.join(PARALLEL)}, not {parallel!r}")
    micro_batch, accumulation = plan.micro_batch_size(devices), plan.gradient_accumulation_steps
    return MemoryPrediction(
        devices=devices,
        parallel=parallel,
        precision=plan.precision,
        batch_size=plan.batch_size,
        gradient_accumulation_steps=accumulation,
        micro_batch=micro_batch,
        parameters=sum(prod(each.shape) for each in step.parameters),
        memory=device_memory(step, micro_batch, accumulation, devices, parallel),
        limit=limit,
        max_micro_batch=None if limit is None else _max_micro_batch(step, accumulation, devices, parallel, limit),
        advice=() if limit is None else tuple(_advice(step, plan, devices, parallel, limit)),
    )


def device_memory(
    step: StepMemory, micro_batch: int, accumulation: int = 1, devices: int = 1, parallel: str = "ddp"
) -> DeviceMemory:
    """Return the predicted bytes on the device with the largest shards.

    step          memory of one step, measured by `measure_step_memory`
    micro_batch   samples that a device computes at once
    accumulation  number of gradient accumulation steps
    devices       number of devices
    parallel      "ddp" or "fsdp"
    """
    shards = devices if parallel == "fsdp" else 1
    size = step.sample_size * micro_batch
    parameters, gradients = (
        sum(each.bytes(shards) for each in tensors) for tensors in (step.parameters, step.gradients)
    )
    peak = step.single if accumulation == 1 else step.accumulated
    if shards > 1:
        step_peak = peak.activations.at(size) + _gathered_bytes(step) + gradients
        if accumulation > 1:
            # unsharded gradients of all micro-batches, and a copy of the block that is reduced
            step_peak += sum(each.bytes() for each in step.gradients) + _largest_blocks(step.gradients, 1)
    else:
        step_peak = peak.total.at(size) + (gradients if devices > 1 else 0)  # DDP copies gradients to buckets
    return DeviceMemory(
        parameters=parameters + step.buffers,
        optimizer=sum(each.bytes(shards) for each in step.optimizer),
        averaging=step.copies * (parameters + step.averaged_buffers),
        data=round(step.inputs.at(size)),
        gradients=gradients,
        activations=round(step.activations.at(size)),
        step_peak=round(step_peak),
    )


def sampled_steps(plan: TrainingPlan) -> list[int]:
    """Return step numbers spread evenly over the run; the batches of these steps are compared to find the largest."""
    count = min(STEPS, plan.steps)
    return [plan.steps * number // count for number in range(count)]


def _line_through(sizes: tuple[int, int], small: int, large: int) -> tuple[float, float]:
    """Return slope and intercept of the line through the bytes at two sizes.

    If the sizes are equal, the line goes through the origin.
    """
    if sizes[0] == sizes[1]:
        return small / sizes[0], 0.0
    slope = (large - small) / (sizes[1] - sizes[0])
    return slope, small - slope * sizes[0]


def _gathered_bytes(step: StepMemory) -> int:
    """Return the bytes of parameters that FSDP holds unsharded at the same time.

    These are the parameters outside blocks, the current block, the next block and a copy of a block.
    """
    outside = sum(each.bytes() for each in step.parameters if each.block is None)
    return outside + _largest_blocks(step.parameters, 3)


def _largest_blocks(tensors: Iterable[TensorSize], count: int) -> int:
    blocks: Counter[str] = Counter()
    for each in tensors:
        if each.block is not None:
            blocks[each.block] += each.bytes()
    return sum(sorted(blocks.values())[-count:])


def _max_micro_batch(step: StepMemory, accumulation: int, devices: int, parallel: str, limit: int) -> int:
    """Return the largest number of samples in a micro-batch that fits; 0 if not even one does."""
    low, high = 0, MAX_SAMPLES
    while low < high:
        middle = (low + high + 1) // 2
        if device_memory(step, middle, accumulation, devices, parallel).total <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _advice(step: StepMemory, plan: TrainingPlan, devices: int, parallel: str, limit: int) -> Iterator[str]:
    """Yield changes of the settings, any one of which would make the run fit into memory.

    Possible changes are FSDP, more accumulation steps, more devices and a smaller batch; if none of these is enough, a
    smaller model, whose size is not computed. Nothing is yielded if the run fits already.
    """
    accumulation = plan.gradient_accumulation_steps

    def fits(accumulation: int, devices: int, parallel: str) -> bool:
        micro_batch, rest = divmod(plan.batch_size, accumulation * devices)
        return not rest and device_memory(step, micro_batch, accumulation, devices, parallel).total <= limit

    if fits(accumulation, devices, parallel):
        return
    advice = []
    if parallel == "ddp" and devices > 1 and fits(accumulation, devices, "fsdp"):
        advice.append("--parallel fsdp")
    more = range(accumulation + 1, plan.batch_size // devices + 1)
    advice += [f"gradient_accumulation_steps={n}" for n in more if fits(n, devices, parallel)][:1]
    choices = ((n, way) for way in dict.fromkeys((parallel, "fsdp")) for n in range(devices + 1, MAX_DEVICES + 1))
    advice += [f"--devices {n} --parallel {way}" for n, way in choices if fits(accumulation, n, way)][:1]
    largest = _max_micro_batch(step, accumulation, devices, parallel, limit)
    if largest:
        advice.append(f"batch_size={largest * devices * accumulation}")
    yield from advice or ["a smaller model: with this one not even one sample fits"]


def _sample_counts(batch_size: int) -> tuple[int, int]:
    """Return the two sizes of micro-batch, in samples, with which memory is measured.

    Both divide the batch size, and the second is a multiple of the first.
    """
    divisors = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    first = next((count for count in divisors if count >= SAMPLES[0]), batch_size)
    return first, next((count for count in divisors if count >= SAMPLES[1] and count % first == 0), batch_size)


def _largest_micro_batch(task: Task, step: int, plan: TrainingPlan, samples: int) -> Any:
    """Return the micro-batch with the most elements among some micro-batches of one step.

    samples  number of samples in each micro-batch
    """
    of = plan.batch_size // samples
    parts = {of - 1 - of * number // MICRO_BATCHES for number in range(MICRO_BATCHES)}  # the last one included
    return max((task.batch(step, part, of) for part in sorted(parts)), key=_size)


def _size(batch: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(batch))


def _tensors(batch: Any) -> list[Tensor]:
    fields = getattr(batch, "__dataclass_fields__", None)
    values = batch if fields is None else [getattr(batch, name) for name in fields]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _saved_bytes(trainer: Trainer, batch: Any) -> int:
    exclude = [*trainer.model.parameters(), *trainer.model.buffers(), *_tensors(batch)]
    with saved_tensor_bytes(exclude) as saved:
        trainer.train_step([batch], 0.0)
    return sum(saved.values())


def _track(trainer: Trainer, micro_batches: list[Any]) -> MemoryTracker:
    with MemoryTracker(trainer.model, trainer.optimizer.state_dict().values()) as tracker:
        trainer.train_step(micro_batches, 0.0)
    return tracker


def _tensor_size(tensor: Tensor, block: str | None = None) -> TensorSize:
    return TensorSize(tuple(tensor.shape), tensor.element_size(), block)


def _block(model: nn.Module, name: str) -> str | None:
    """Return the name of the block that a parameter belongs to; None if it is in no block.

    A block is a member of the outermost ModuleList. FSDP shards and gathers a block as a whole.
    """
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    return None
