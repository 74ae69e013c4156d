"""The mask that hides nothing."""

from collections.abc import Iterator

from regard.core.masks.algebra import Full, Mask


def full() -> Mask:
    """Full mask: every query sees every key.

    >>> full().dense(2).int()
    tensor([[1, 1],
            [1, 1]], dtype=torch.int32)
    """
    return Full()


def examples(n: int) -> list[str]:
    return ["full()"]


def candidates(n: int) -> Iterator[Mask]:
    yield full()
