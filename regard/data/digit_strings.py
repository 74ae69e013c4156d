"""A data set of digit strings as sounds."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from regard.data.records import Records


@dataclass(frozen=True, eq=False)
class DigitStrings(Records):
    """A data set of sounds, each with the digits that it contains.

    sounds  samples from -1 to 1; lengths may differ
    labels  the digits of each sound

    >>> strings = tones(2)
    >>> len(strings.sounds), strings.sample_rate
    (2, 8000)
    """

    PER_RECORD = ("sounds", "labels")
    sounds: tuple[Float32[Tensor, "_"], ...]
    labels: tuple[Int64[Tensor, "_"], ...]
    sample_rate: int
