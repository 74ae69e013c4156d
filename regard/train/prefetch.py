"""Prefetch batches: a thread loads the batch of the next step while the current step is computed."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Prefetcher:
    """Context manager that loads the batch of the next step in a background thread.

    `next` raises the exception if loading that batch failed.

    load   returns the batch of a step
    start  the first step
    stop   one after the last step
    """

    def __init__(self, load: Callable[[int], Any], start: int, stop: int) -> None:
        self._load, self._step, self._stop = load, start, stop
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._future: Future[Any] | None = None

    def __enter__(self) -> "Prefetcher":
        self._submit()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._worker.shutdown(cancel_futures=True)

    def next(self) -> Any:
        """Return the batch of the next step."""
        assert self._future is not None, "all steps are done"
        batch = self._future.result()
        self._step += 1
        self._submit()
        return batch

    def _submit(self) -> None:
        self._future = self._worker.submit(self._load, self._step) if self._step < self._stop else None


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device, inside tuples, lists, dicts and dataclasses."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    move = partial(move_to_device, device=device)
    if isinstance(batch, dict):
        return {name: move(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(move, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {each.name: move(getattr(batch, each.name)) for each in dataclasses.fields(batch) if each.init}
        return dataclasses.replace(batch, **fields)
    return batch
