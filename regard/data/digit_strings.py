"""A data set of digit strings as sounds."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from regard.data.records import Records


@dataclass(frozen=True, eq=False)
class DigitStrings(Records):
    """Sounds of different lengths with samples from -1 to 1, and the digits in each.

    >>> strings = tones(2)
    >>> len(strings.sounds), strings.sample_rate
    (2, 8000)
    """

    PER_RECORD = ("sounds", "labels")
    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: tuple[Int64[Tensor, "_"], ...]
    sample_rate: int
