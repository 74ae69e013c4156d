"""Strings of digits as sound: what a listener hears, and what was said."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from regard.base.errors import DataError


@dataclass(frozen=True, eq=False)
class DigitStrings:
    """Sounds of different lengths, from -1 to 1, and the digits of each."""

    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: tuple[Int64[Tensor, "_"], ...]
    rate: int

    def __post_init__(self) -> None:
        if len(self.sounds) != len(self.labels):
            raise DataError(f"{len(self.sounds)} sounds have {len(self.labels)} strings of digits; each needs one")

    def __len__(self) -> int:
        return len(self.sounds)
