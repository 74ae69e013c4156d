"""Colormaps and images: numbers as colours, PNG files, shade characters and overlays on an image.

The colormap is cividis, which is readable with colour blindness and in grey print. Attention maps use a square-root
scale from zero to the largest weight: the first row of a causal map is always 1, and a linear scale would leave all
other cells dark. Overlays on an image use a linear scale. Each picture is shown with the numbers of its scale.
"""

import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.shading import shade

COLORMAP = "cividis"
MODES = {1: "L", 3: "RGB"}
OVERLAY_OPACITY = 0.6
HALF = (0.5, 0.5, 0.5)


def read_image(
    path: str | os.PathLike[str], side: int, *, channels: int = 3, resample: int = Image.Resampling.BILINEAR
) -> UInt8[Tensor, "y x channels"]:
    """Read an image file, rotate it upright and resize it to a square.

    side      pixels a side
    channels  3 for RGB, 1 for grey
    resample  a resampling filter of pillow; 2 is bilinear
    """
    if channels not in MODES:
        raise ConfigError(f"an image has 1 channel (grey) or 3 (red, green, blue), not {channels}")
    file = Path(path)
    try:
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened).convert(MODES[channels])
            resized = upright.resize((side, side), Image.Resampling(resample))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}; give the path of a png or jpeg") from None
    except UnidentifiedImageError:
        raise ConfigError(f"{file} is not an image; give a png or jpeg") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # pillow's errors for damage
        raise ConfigError(f"{file} cannot be read as an image: {error}; give an undamaged png or jpeg") from None
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).reshape(side, side, channels)


def normalise_pixels(
    pixels: UInt8[Tensor, "y x channels"], mean: Sequence[float] = HALF, std: Sequence[float] = HALF
) -> Float[Tensor, "1 channels y x"]:
    """Scale pixels to 0 to 1, subtract the mean and divide by std in each channel: the input of an image model."""
    channels = pixels.shape[-1]
    centre, scale = (torch.tensor(each[:channels], dtype=torch.float32) for each in (mean, std))
    return ((pixels.float() / 255 - centre) / scale).permute(2, 0, 1)[None]


class ColourScale(NamedTuple):
    """The numbers of the first and the last colour, and the power in between: 1 is linear, 0.5 a square root."""

    low: float
    top: float
    power: float = 1.0

    def normalise(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Map numbers to 0 to 1."""
        width = self.top - self.low
        return ((values - self.low) / (width if width > 0 else 1.0)).clamp(0, 1) ** self.power


def root_scale(values: Float[Tensor, "rows columns"]) -> ColourScale:
    """A square-root scale from zero to the largest value, for weights."""
    return ColourScale(0.0, float(values.nan_to_num(0.0).max()) if values.numel() else 0.0, 0.5)


def linear_scale(values: Float[Tensor, "..."]) -> ColourScale:
    """A linear scale from the smallest to the largest value, for overlays."""
    return ColourScale(float(values.min()), float(values.max()))


def quantise(values: Float[Tensor, "rows columns"], scale: ColourScale) -> UInt8[Tensor, "rows columns"]:
    """Map numbers to 0 to 255; NaN becomes 0."""
    return (scale.normalise(values).nan_to_num(0.0) * 255).round().to(torch.uint8).cpu()


@cache
def palette() -> tuple[tuple[int, int, int], ...]:
    """The 256 colours of the colormap."""
    from matplotlib import colormaps

    table = colormaps[COLORMAP](range(256), bytes=True)[:, :3].tolist()
    return tuple((red, green, blue) for red, green, blue in table)


def apply_colormap(values: Float[Tensor, "rows columns"], scale: ColourScale) -> UInt8[Tensor, "rows columns 3"]:
    """Map numbers to RGB colours."""
    return torch.tensor(palette(), dtype=torch.uint8)[quantise(values, scale).long()]


def cell_colours(value: float, scale: ColourScale) -> tuple[str, str]:
    """The CSS background colour of a number, and black or white for text on it."""
    red, green, blue = palette()[int(quantise(torch.tensor([[value]]), scale)[0, 0])]
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 128
    return f"#{red:02x}{green:02x}{blue:02x}", "#000" if is_light else "#fff"


def map_png(values: Float[Tensor, "rows columns"], scale: ColourScale) -> bytes:
    """A map as a PNG file with a palette, one pixel for each number."""
    rows, columns = values.shape
    image = Image.frombytes("P", (columns, rows), quantise(values, scale).numpy().tobytes())
    image.putpalette([part for colour in palette() for part in colour])
    return _encode_png(image)


def pixels_png(pixels: UInt8[Tensor, "y x 3"]) -> bytes:
    """RGB pixels as a PNG file."""
    return _encode_png(Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.cpu().numpy().tobytes()))


def _encode_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def data_uri(png: bytes) -> str:
    """A PNG file as a data URI."""
    return f"data:image/png;base64,{b64encode(png).decode('ascii')}"


def overlay(pixels: UInt8[Tensor, "y x channels"], values: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "y x 3"]:
    """A map over the grey image, without interpolation between its cells."""
    y, x, _ = pixels.shape
    rows, columns = values.shape
    down, across = torch.arange(y) * rows // y, torch.arange(x) * columns // x
    colours = apply_colormap(values, linear_scale(values))[down[:, None], across[None]].float()
    grey = pixels.cpu().float().mean(-1, keepdim=True)
    return (OVERLAY_OPACITY * colours + (1 - OVERLAY_OPACITY) * grey).round().to(torch.uint8)


def shade_rows(values: Float[Tensor, "rows columns"], scale: ColourScale, wide: int = 2) -> list[str]:
    """Each row of a map as shade characters, `wide` of them for a number."""
    return ["".join(shade(share) * wide for share in row) for row in scale.normalise(values).tolist()]


def downsample(values: Float[Tensor, "rows columns"], most: int) -> Float[Tensor, "fewer_rows fewer_columns"]:
    """Average a grid to at most `most` cells a side."""
    rows, columns = (min(size, most) for size in values.shape)
    return torch.nn.functional.adaptive_avg_pool2d(values[None], (rows, columns))[0]


def mosaic(maps: Sequence[Sequence[Tensor]], cells: int, gap: int = 2) -> UInt8[Tensor, "y x 3"]:
    """Attention maps in rows on white, each with its own scale and enlarged to a square of `cells` pixels."""
    step = cells + gap
    sheet = torch.full((len(maps) * step, max(map(len, maps)) * step, 3), 255, dtype=torch.uint8)
    for row, several in enumerate(maps):
        for column, values in enumerate(several):
            down, across = (torch.arange(cells) * size // cells for size in values.shape)
            target = sheet[row * step : row * step + cells, column * step : column * step + cells]
            target.copy_(apply_colormap(values, root_scale(values))[down[:, None], across[None]])
    return sheet
