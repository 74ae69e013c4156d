"""The mask that hides nothing."""

from collections.abc import Iterator

from regard.core.masks.algebra import Full, Mask


def full() -> Mask:
    """Full mask: every query sees every key.

    >>> full().count(5)
    25
    """
    return Full()


def examples(n: int) -> list[str]:
    return ["full()"]


def candidates(n: int) -> Iterator[Mask]:
    yield full()
