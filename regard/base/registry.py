"""Named things, and a helpful word when a name is not among them."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from regard.base.errors import UnknownNameError

T = TypeVar("T")


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
            near = get_close_matches(name, self._things, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(f"unknown {self.kind} {name!r}{hint} (there are: {', '.join(self._things)})")
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)
