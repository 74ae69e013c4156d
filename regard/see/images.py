"""Read image files as pixels, and convert pixels to the input of an image model."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.files import read_bytes
from regard.base.media_files import decode_image

MODES = {1: "L", 3: "RGB"}
HALF = (0.5, 0.5, 0.5)


def read_image(
    path: str | os.PathLike[str], side: int, *, channels: int = 3, resample: int = Image.Resampling.BILINEAR
) -> UInt8[Tensor, "y x channels"]:
    """Read an image file, rotate it upright and resize it to a square.

    side      height and width in pixels
    channels  3 for RGB, 1 for grey
    resample  a resampling filter of pillow; 2 is bilinear
    """
    if channels not in MODES:
        raise ConfigError(f"an image has 1 channel (grey) or 3 (red, green, blue), not {channels}")
    file = Path(path)
    upright = decode_image(file, read_bytes(file, ConfigError), ConfigError).convert(MODES[channels])
    resized = upright.resize((side, side), Image.Resampling(resample))
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).reshape(side, side, channels)


def normalise_pixels(
    pixels: UInt8[Tensor, "y x channels"], mean: Sequence[float] = HALF, std: Sequence[float] = HALF
) -> Float[Tensor, "1 channels y x"]:
    """Convert 8-bit pixels to the input of an image model: scale to 0..1, subtract `mean`, divide by `std`.

    mean, std  one number for each channel; default 0.5
    """
    channels = pixels.shape[-1]
    centre, scale = (torch.tensor(each[:channels], dtype=torch.float32) for each in (mean, std))
    return ((pixels.float() / 255 - centre) / scale).permute(2, 0, 1)[None]
