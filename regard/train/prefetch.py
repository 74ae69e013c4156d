"""Batches made ahead: while one step is learned from, a thread makes the next one's batch."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Prefetcher:
    """What `make` gives for each of the steps from `start` on, in order. An error of it comes when its step is due."""

    def __init__(self, make: Callable[[int], Any], start: int, stop: int) -> None:
        self._make, self._step, self._stop = make, start, stop
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._coming: Future[Any] | None = None

    def __enter__(self) -> "Prefetcher":
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._worker.shutdown(cancel_futures=True)

    def next(self) -> Any:
        """The batch of the next step."""
        assert self._coming is not None, "no step is left"
        made = self._coming.result()
        self._step += 1
        self._begin()
        return made

    def _begin(self) -> None:
        self._coming = self._worker.submit(self._make, self._step) if self._step < self._stop else None


def move_to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device, in whatever it holds them: tuples, lists, dicts, dataclasses."""
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
        held = {each.name: move(getattr(batch, each.name)) for each in dataclasses.fields(batch) if each.init}
        return dataclasses.replace(batch, **held)
    return batch
