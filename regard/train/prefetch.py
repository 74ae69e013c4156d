"""Prefetch batches: a thread loads the batches of the next steps while the current step is computed."""

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

AHEAD = 3  # batches: one that takes longer than a step is made up for by the next ones


class Prefetcher:
    """Context manager that loads the batches of the next steps in a background thread.

    If loading a batch raises an exception, `next` raises this exception for the step of this batch.

    load   function that returns the batch of a step
    start  the first step
    stop   one after the last step
    ahead  number of batches that are loaded before they are needed
    """

    def __init__(self, load: Callable[[int], Any], start: int, stop: int, ahead: int = AHEAD) -> None:
        self._load, self._step, self._stop, self._ahead = load, start, stop, ahead
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._futures: deque[Future[Any]] = deque()

    def __enter__(self) -> "Prefetcher":
        self._submit()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._worker.shutdown(cancel_futures=True)

    def next(self) -> Any:
        """Return the batch of the next step."""
        assert self._futures, "all steps are done"
        batch = self._futures[0].result()
        self._futures.popleft()
        self._submit()
        return batch

    def _submit(self) -> None:
        while len(self._futures) < self._ahead and self._step < self._stop:
            self._futures.append(self._worker.submit(self._load, self._step))
            self._step += 1


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with a function applied to all tensors, inside tuples, lists, dicts and dataclasses."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(each, function) for each in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(each, function) for each in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [each.name for each in dataclasses.fields(batch) if each.init]
        return dataclasses.replace(batch, **{name: map_tensors(getattr(batch, name), function) for name in names})
    return batch


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device, inside tuples, lists, dicts and dataclasses."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Any) -> Any:
    """Copy the CPU tensors of a batch to pinned memory, so that copies to a GPU are asynchronous."""
    return map_tensors(batch, _pin)


def _pin(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
