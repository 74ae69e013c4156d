"""Memoisation of results that depend on a mask."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.tracing import outside_inference_mode
from regard.core.masks.algebra import Mask

T = TypeVar("T")


@contextmanager
def planning() -> Iterator[None]:
    """Context manager: tensors made inside the `with` block are real CPU tensors without gradients.

    A fake tensor mode, another default device and inference mode are switched off inside the block.
    """
    with _disable_current_modes(), torch.device("cpu"), outside_inference_mode():
        yield


def joint_key(mask: Mask, rest: tuple[Hashable, ...] | None) -> Hashable | None:
    """Return the cache key of a result that depends on a mask and on other values. None if it must not be cached.

    rest  the other values, such as lengths; None if the result must not be cached because of them
    """
    own = mask.key()
    return None if own is None or rest is None else (own, *rest)


_in_graphs: dict[int, object] = {}


def _keep_for_graph(result: object) -> None:
    """Keep a reference to a result forever if a CUDA graph is being captured.

    Every replay of the graph reads the memory of the result, so the memory must not be freed.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _in_graphs[id(result)] = result


class Memo(Generic[T]):
    """A cache of the last `most` results that depend on a mask.

    The mask of each result is stored too, so that its tensors are not freed. A key may contain the ids of these
    tensors, and Python may use the id of a freed tensor again for another one.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[Hashable, tuple[Mask, T]] = {}
        self._lock = Lock()

    def peek(self, key: Hashable | None) -> T | None:
        """Return the cached result of a key, or None if there is none."""
        found = self._kept.get(key)
        return None if found is None else found[1]

    def get(
        self, key: Hashable | None, mask: Mask, make: Callable[[], T], worth: Callable[[T], bool] = lambda made: True
    ) -> T:
        """Return the cached result of `key`. If there is none, compute it with `make()`.

        mask   the mask on which the result depends; it is stored with the result
        make   function that computes the result
        worth  function of the result that returns whether to store it; with a key of None, nothing is stored
        """
        found = None if key is None else self._kept.get(key)
        if found is not None:
            _keep_for_graph(found[1])
            return found[1]
        with planning():
            made = make()
        if key is not None and worth(made):
            with self._lock:  # threads may compute a result twice, but must not evict at the same time
                while len(self._kept) >= self.most:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = (mask, made)
        return made
