"""Key padding given as a boolean row for each sequence, as tokenizers return it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from regard.base.errors import DtypeError, ShapeError
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import BoxVisibility, Mask
from regard.core.masks.data import DataMask, check_strided, format_data

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


@dataclass(frozen=True, eq=False, repr=False)
class KeyPaddingMask(DataMask):
    """The mask of `key_padding`: key j of sequence b is visible if data[b, j]."""

    data: Bool[Tensor, "b n"]

    def visible_keys(self, j: Tensor, batch: Tensor) -> Tensor:
        return self.data[batch, j]

    def see(self, grid: Grid) -> Tensor:
        return self.visible_keys(grid.j, grid.batch)

    def labels(self, i: Tensor, j: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(i), (~self.data[sequence, j]).long()

    def table(self, spans: "Spans") -> BoxVisibility:
        real = self.data.cpu()[:, spans.key_positions()][:, None]  # b 1 k s
        return BoxVisibility(none=~real.any(-1), all=real.all(-1))

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if b is not None and b != len(self.data):
            raise ShapeError(f"{self!r} has {len(self.data)} rows, but q has b={b} (batch); give one row per sequence")
        keys, n = positions.keys, self.data.shape[1]
        last = keys + j - 1 if isinstance(keys, int) else int(keys.max()) if j and keys.device.type == "cpu" else -1
        if j and last >= n:
            raise ShapeError(
                f"{self!r} covers n={n} (positions), but this call has a key at position {last}; "
                "give a flag for every key, those in the cache included"
            )

    def batch(self) -> int | None:
        return len(self.data)

    def length(self) -> int:
        return self.data.shape[1]

    def with_data(self, data: Tensor) -> Mask:
        return KeyPaddingMask(data)

    def __repr__(self) -> str:
        return f"key_padding({format_data(self.data.int())})"


def key_padding(real: Sequence[Sequence[int]] | Bool[Tensor, "b n"] | Integer[Tensor, "b n"]) -> Mask:
    """Padding mask from a boolean matrix: queries see only real keys, real[b, j].

    This boolean matrix is the attention_mask that a tokenizer returns.

    real  one row per sequence, 1 or True where the key is real; a boolean tensor is used as it is, not copied

    In the example, the one sequence has three keys, the first of which is padding.

    >>> key_padding([[0, 1, 1]]).dense(1, 3).int()[:, 0, 0]
    tensor([[0, 1, 1]], dtype=torch.int32)
    """
    data = real if isinstance(real, Tensor) else torch.tensor(real)
    check_strided("key_padding(real)", data)
    if data.is_floating_point() or data.is_complex():
        raise DtypeError(
            f"key_padding(real) is {data.dtype}, but takes booleans or 0 and 1, True where the key is real"
        )
    if data.ndim != 2 or not len(data):
        raise ShapeError(f"key_padding(real) takes (b, n), one row per sequence, not {tuple(data.shape)}")
    return KeyPaddingMask(data.bool())


def examples(n: int) -> list[str]:
    row = [int(at >= n // 4) for at in range(n)]
    holes = [int(at % 3 != 1) for at in range(n)]
    return [f"key_padding([{row}])", f"key_padding([{holes}, {[0] * n}])"]
