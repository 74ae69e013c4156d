"""A small memory of what was worked out for masks."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from torch.utils._python_dispatch import _disable_current_modes

from regard.core.masks.algebra import Mask

T = TypeVar("T")


def joint_key(mask: Mask, rest: tuple[Hashable, ...] | None) -> Hashable | None:
    """The key of a mask together with what else the work depends on; None where it must not be remembered."""
    own = mask.key()
    return None if own is None or rest is None else (own, *rest)


class Memo(Generic[T]):
    """The latest `most` results by key. The mask is kept too, so that its tensors' identities stay taken."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[Hashable, tuple[Mask, T]] = {}
        self._lock = Lock()

    def get(
        self, key: Hashable | None, mask: Mask, make: Callable[[], T], worth: Callable[[T], bool] = lambda made: True
    ) -> T:
        """The result under the key, made if need be; with no key, or if not worth keeping, it is forgotten again."""
        if key is None:
            return make()
        found = self._kept.get(key)
        if found is not None:
            return found[1]
        with _disable_current_modes():  # what is kept must be real even while a caller traces with fake tensors
            made = make()
        if worth(made):
            with self._lock:  # threads may make the same thing twice, but must not trip over each other's clearing
                while len(self._kept) >= self.most:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = (mask, made)
        return made
