"""Training steps as CUDA graphs: a step is captured once for each shape of a batch, and replayed with new values.

A step of a small model has many short kernels, and Python takes longer to launch them than the GPU to run them. A
graph is launched at once: forward pass, backward pass, gradient clipping and the optimizer.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from regard.train.prefetch import map_tensors

EAGER_STEPS = 3  # of each shape before it is captured: compilers, autotuning and lazy initialization are done then
MAX_GRAPHS = 64  # batches of other shapes run without a graph
FEW_REPEATS = 500  # steps without a graph, after which a run says that its batches have too many shapes
# A step: (micro-batches) to (sum of the losses, their count)
Step = Callable[[list[Any]], tuple[Tensor, Tensor]]


class StepGraphs:
    """Runs training steps on a GPU, by CUDA graphs where it can.

    step        computes one step
    clear       removes gradients, after a capture that failed
    on_message  called with whether graphs are used, and if not, why

    The loss may depend on the tensors of the batch, the model and the RNG state only: what else Python code reads is
    fixed when a graph is captured. A step that synchronizes with the GPU cannot be captured; then all steps run
    without graphs, and `on_message` gets the reason.
    """

    def __init__(
        self, step: Step, device: torch.device, clear: Callable[[], None], on_message: Callable[[str], None]
    ) -> None:
        self._step, self._device, self._clear, self._on_message = step, device, clear, on_message
        self._stream = torch.cuda.Stream(device)
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _CapturedStep] = {}
        self._steps = 0
        self._usable = True

    def stream(self) -> Any:
        """Return the context in which steps run: graphs are captured on a stream of their own, as torch demands."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def run(self, micro_batches: list[Any]) -> tuple[Tensor, Tensor]:
        """Do one step. The result must be used before the next one, which may overwrite it."""
        shape = batch_signature(micro_batches) if self._usable else None
        if shape is not None and shape not in self._graphs and self._is_repeated(shape):
            self._capture(shape, micro_batches)
        graph = self._graphs.get(shape)
        if graph is None:
            self._steps += 1
            if self._steps == FEW_REPEATS and self._usable and not self._graphs:
                self._on_message("training steps run without CUDA graphs: batches of one shape are too rare")
            return self._step(micro_batches)
        return graph.replay(micro_batches)

    def _is_repeated(self, shape: Hashable) -> bool:
        seen = self._seen.get(shape, 0)
        if len(self._seen) > 16 * MAX_GRAPHS:
            self._seen.clear()
        self._seen[shape] = seen + 1
        return seen >= EAGER_STEPS and len(self._graphs) < MAX_GRAPHS

    def _capture(self, shape: Hashable, micro_batches: list[Any]) -> None:
        generator = torch.cuda.default_generators[self._stream.device.index]
        before = generator.get_state()
        pool = next((each.graph.pool() for each in self._graphs.values()), None)
        try:
            self._graphs[shape] = _CapturedStep(self._step, micro_batches, self._stream, pool)
        except RuntimeError as error:
            self._usable = False
            self._graphs.clear()
            self._clear()
            # a failed capture leaves the generator in its state of capturing
            fresh = torch.Generator(self._stream.device)
            fresh.set_state(before)
            generator.graphsafe_set_state(fresh)
            reason = str(error.__context__ or error).split("\n")[0]
            self._on_message(f"training steps run without CUDA graphs, because one could not be captured: {reason}")
            return
        if len(self._graphs) == 1:
            self._on_message("training steps run as CUDA graphs; cuda_graphs=False turns this off")


class _CapturedStep:
    """One training step as a CUDA graph, with the tensors that it reads its batch from."""

    def __init__(self, step: Step, micro_batches: list[Any], stream: torch.cuda.Stream, pool: Any) -> None:
        self._inputs: list[Tensor] = []
        self.graph = torch.cuda.CUDAGraph()
        batch = map_tensors(micro_batches, lambda tensor: self._add_input(tensor, stream.device))
        # other threads load batches into pinned memory, which is allowed during a capture of this thread only
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._total, self._count = step(batch)

    def _add_input(self, tensor: Tensor, device: torch.device) -> Tensor:
        self._inputs.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor))
        return self._inputs[-1]

    def replay(self, micro_batches: list[Any]) -> tuple[Tensor, Tensor]:
        for held, new in zip(self._inputs, list_tensors(micro_batches), strict=True):
            held.copy_(new, non_blocking=True)
        self.graph.replay()
        return self._total, self._count


def list_tensors(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in the order of `map_tensors`."""
    found: list[Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def batch_signature(batch: Any) -> Hashable:
    """Return what must be equal for two batches to use one graph: shapes, dtypes and all values outside tensors."""
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
