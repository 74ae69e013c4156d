"""Training steps as CUDA graphs: a step is captured once and replayed with new batches, which have the same shape.

A step of a small model has many short kernels, and Python takes longer to launch them than the GPU takes to run them. A
CUDA graph launches the whole step at once: forward pass, backward pass, gradient clipping and optimizer.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.train.prefetch import map_tensors

EAGER_STEPS = 3  # before a step is captured: compilers, autotuning and lazy initialization are done then
# A step: (micro-batches) to (sum of the losses, their count)
Step = Callable[[list[Any]], tuple[Tensor, Tensor]]


class StepGraphs:
    """Runs training steps on a GPU, as CUDA graphs if possible.

    step        function that computes one step
    clear       function that removes gradients, which is called if capturing a graph failed
    on_message  called with a message that says whether graphs are used and, if not, why

    The loss must depend only on the tensors of the batch, the model and the RNG state, because any other value that
    Python code reads is fixed when a graph is captured. Graphs are not used if batches differ in shape or if the step
    synchronizes with the GPU.
    """

    def __init__(
        self, step: Step, device: torch.device, clear: Callable[[], None], on_message: Callable[[str], None]
    ) -> None:
        self._step, self._device, self._clear, self._on_message = step, device, clear, on_message
        self._stream = torch.cuda.Stream(device)
        self._shape: Hashable = None  # that of all batches so far
        self._eager_steps = 0
        self._graph: _CapturedStep | None = None
        self._usable = True

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Context manager: run the steps inside the block on a side stream.

        CUDA graphs cannot be captured on the default stream.
        """
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def run(self, micro_batches: list[Any]) -> tuple[Tensor, Tensor]:
        """Do one step. The result must be used before the next step, because replaying a graph overwrites it."""
        if self._usable:
            self._check_shape(batch_signature(micro_batches))
        if self._usable and self._graph is None and self._eager_steps >= EAGER_STEPS:
            self._capture(micro_batches)
        if self._graph is not None:
            return self._graph.replay(micro_batches)
        self._eager_steps += 1
        return self._step(micro_batches)

    def _check_shape(self, shape: Hashable) -> None:
        """Disable CUDA graphs if the shape of this batch differs from the shape of the earlier batches."""
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            self._stop("batches differ in shape")

    def _capture(self, micro_batches: list[Any]) -> None:
        generator = torch.cuda.default_generators[self._stream.device.index]
        before = generator.get_state()
        try:
            self._graph = _CapturedStep(self._step, micro_batches, self._stream)
        except Exception as error:  # the step runs again without a graph, and raises what is not about capturing
            self._clear()
            # a failed capture leaves the generator in its state of capturing
            fresh = torch.Generator(self._stream.device)
            fresh.set_state(before)
            generator.graphsafe_set_state(fresh)
            reason = str(error.__context__ or error).split("\n")[0]
            self._stop(f"one could not be captured: {reason}")
            return
        self._on_message("training steps run as CUDA graphs; cuda_graphs=False turns this off")

    def _stop(self, reason: str) -> None:
        self._usable, self._graph = False, None
        self._on_message(f"training steps run without CUDA graphs, because {reason}")


class _CapturedStep:
    """One training step as a CUDA graph, with the static tensors that hold its batch."""

    def __init__(self, step: Step, micro_batches: list[Any], stream: torch.cuda.Stream) -> None:
        self._inputs: list[Tensor] = []
        self._graph = torch.cuda.CUDAGraph()
        batch = map_tensors(micro_batches, lambda tensor: self._add_input(tensor, stream.device))
        # other threads load batches into pinned memory, which is allowed during a capture of this thread only
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._total, self._count = step(batch)

    def _add_input(self, tensor: Tensor, device: torch.device) -> Tensor:
        self._inputs.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor))
        return self._inputs[-1]

    def replay(self, micro_batches: list[Any]) -> tuple[Tensor, Tensor]:
        for held, new in zip(self._inputs, list_tensors(micro_batches), strict=True):
            held.copy_(new, non_blocking=True)
        self._graph.replay()
        return self._total, self._count


def list_tensors(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in the order of `map_tensors`."""
    found: list[Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def batch_signature(batch: Any) -> Hashable:
    """Return a key of a batch: batches with equal keys can use one CUDA graph.

    The key contains the shapes and dtypes of the tensors, and all values of the batch that are not tensors.
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, dict):
        return dict, tuple((name, batch_signature(value)) for name, value in batch.items())
    if isinstance(batch, tuple | list):
        return type(batch), tuple(map(batch_signature, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (getattr(batch, each.name) for each in dataclasses.fields(batch) if each.init)
        return type(batch), tuple(map(batch_signature, fields))
    try:
        hash(batch)
    except TypeError:
        return type(batch), id(batch)  # equal to no other batch
    return type(batch), batch
