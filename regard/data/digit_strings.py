"""A data set of digit strings as sounds."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from regard.base.errors import DataError


@dataclass(frozen=True, eq=False)
class DigitStrings:
    """Sounds of different lengths with samples from -1 to 1, and the digits in each."""

    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: tuple[Int64[Tensor, "_"], ...]
    sample_rate: int

    def __post_init__(self) -> None:
        if len(self.sounds) != len(self.labels):
            raise DataError(f"there are {len(self.sounds)} sounds, but {len(self.labels)} strings of digits")

    def __len__(self) -> int:
        return len(self.sounds)
