"""The built-in images: 1,797 handwritten digits of 8 x 8 pixels.

`digits.npz` holds the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0. Pixels and labels are unchanged
and in the original order; they are stored as bytes. scikit-learn's `load_digits` reads the same set.
"""

from functools import cache
from pathlib import Path

import numpy
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from regard.data.images import Images


@cache
def read_digits() -> tuple[UInt8[Tensor, "1797 8 8"], Int[Tensor, "1797"]]:
    """Read the built-in handwritten digits. Returns the pixels, integers from 0 to 16, and the labels."""
    with numpy.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        return torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"]).long()


def digits() -> Images:
    """Return the built-in handwritten digits in their original order, with one channel and pixels from 0 to 255.

    >>> digits().pixels.shape
    torch.Size([1797, 1, 8, 8])
    """
    shades, labels = read_digits()
    pixels = (shades * (255 / 16)).round().to(torch.uint8)[:, None]
    return Images(pixels, labels.clone(), tuple(map(str, range(10))))
