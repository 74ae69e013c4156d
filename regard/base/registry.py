"""Named things, and a helpful word when a name is not among them."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from regard.base.errors import UnknownNameError

T = TypeVar("T")
MOST_LISTED = 30  # of more names a reader finds the right one no sooner than by asking again


class Registry(Generic[T]):
    """Things by name, in the order they were added."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        def keep(thing: T) -> T:
            if name in self._things:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._things[name] = thing
            return thing

        return keep

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            raise UnknownNameError(f"unknown {self.kind} {name!r}{self._near(name)}")
        return self._things[name]

    def _near(self, name: str) -> str:
        """What may have been meant: the nearest of few names and all of them, or those of many that are near."""
        few = len(self._things) <= MOST_LISTED
        near = get_close_matches(name, self._things, n=1 if few else 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        if few:
            return f"{hint} (there are: {', '.join(self._things)})"
        return hint or f" (there are {len(self._things)}, from {min(self._things)!r} to {max(self._things)!r})"

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)
