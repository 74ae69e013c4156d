"""A registry of objects by name, with suggestions for unknown names."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from regard.base.errors import UnknownNameError
from regard.base.validation import suggest

T = TypeVar("T")
MAX_LISTED = 30  # if no name is similar, an error lists all names if there are at most this many


class Registry(Generic[T]):
    """A mapping from names to registered objects, in the order of registration.

    kind  what the objects are, such as "kernel", for error messages
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under a name."""

        def register(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return register

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UnknownNameError(f"unknown {self.kind} {name!r}{self._suggestion(name)}")
        return self._entries[name]

    def _suggestion(self, name: str) -> str:
        """Return a hint for an unknown name: the similar names.

        If there are none, the hint lists all names, or if there are more than MAX_LISTED, the first and the last in
        alphabetical order.
        """
        if near := suggest(name, self._entries, most=3):
            return near
        if len(self._entries) <= MAX_LISTED:
            return f" (there are: {', '.join(self._entries)})"
        return f" (there are {len(self._entries)}, from {min(self._entries)!r} to {max(self._entries)!r})"

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
