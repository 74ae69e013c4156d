"""Block-diagonal masks."""

from collections.abc import Iterator

from regard.base.validation import check_integer
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.chunks import Chunks


def blocks(size: int) -> Mask:
    """Block-diagonal mask: a query sees its own block of `size` positions, j // size == i // size.

    Qiu et al. 2020, arXiv:1911.02972.

    >>> blocks(2).dense(3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    return Chunks(check_integer("blocks(size)", size, 1, "positions"), 0, 0)


def examples(n: int) -> list[str]:
    return ["blocks(4)"]


def candidates(n: int) -> Iterator[Mask]:
    yield from (blocks(size) for size in range(2, n))
