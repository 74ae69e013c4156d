"""Memoisation of results that depend on a mask."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from torch.utils._python_dispatch import _disable_current_modes

from regard.core.masks.algebra import Mask

T = TypeVar("T")


def joint_key(mask: Mask, rest: tuple[Hashable, ...] | None) -> Hashable | None:
    """The memo key of a mask and of everything else a result depends on; None if it must not be memoised."""
    own = mask.key()
    return None if own is None or rest is None else (own, *rest)


class Memo(Generic[T]):
    """The latest `most` results by key. Masks are stored too, so that their tensors keep their identities."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[Hashable, tuple[Mask, T]] = {}
        self._lock = Lock()

    def get(
        self, key: Hashable | None, mask: Mask, make: Callable[[], T], worth: Callable[[T], bool] = lambda made: True
    ) -> T:
        """The stored result, or `make()`, which is stored if there is a key and `worth(result)`."""
        if key is None:
            return make()
        found = self._kept.get(key)
        if found is not None:
            return found[1]
        with _disable_current_modes():  # results must be real even if the caller traces with fake tensors
            made = make()
        if worth(made):
            with self._lock:  # threads may compute a result twice, but must not evict at the same time
                while len(self._kept) >= self.most:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = (mask, made)
        return made
