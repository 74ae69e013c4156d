"""Numbers as pictures: colours, PNG, shades for a terminal, and maps laid over an image.

Colours are those of cividis, which reads alike with and without colour-blindness and turns to even greys in print. Maps
of weights go from zero to the largest by the square root, because the first row of a causal map is always 1 and would
leave the rest dark; what lies over an image goes evenly from the least to the largest. So these numbers belong beside
every picture.
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

MAP = "cividis"
SHADES = " ·░▒▓█?"  # nothing, then fifths of the way, and NaN
ROOT = 0.5
MODES = {1: "L", 3: "RGB"}
COVER = 0.6  # how much of the image a map laid over it hides
HALF = (0.5, 0.5, 0.5)


def read_image(
    path: str | os.PathLike[str], side: int, *, channels: int = 3, resample: int = Image.Resampling.BILINEAR
) -> UInt8[Tensor, "y x channels"]:
    """The pixels of an image file, turned upright and resized to a square of so many, as image models take them.

    resample  as pillow numbers its ways of resizing; 2 is bilinear
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
        raise ConfigError(f"{file} is no image that can be read; give a png or jpeg") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # pillow's ways to say damaged
        raise ConfigError(f"{file} cannot be read as an image: {error}; give a whole png or jpeg") from None
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).reshape(side, side, channels)


def normalise_pixels(
    pixels: UInt8[Tensor, "y x channels"], mean: Sequence[float] = HALF, std: Sequence[float] = HALF
) -> Float[Tensor, "1 channels y x"]:
    """Pixels from 0 to 1, less the mean and divided by std in each channel: what a model takes."""
    channels = pixels.shape[-1]
    centre, scale = (torch.tensor(each[:channels], dtype=torch.float32) for each in (mean, std))
    return ((pixels.float() / 255 - centre) / scale).permute(2, 0, 1)[None]


class ColourScale(NamedTuple):
    """Which number has the first colour, which the last, and how colours grow between: 1 is evenly, ROOT faster."""

    low: float
    top: float
    power: float = 1.0

    def of(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Numbers as shares of the way."""
        way = self.top - self.low
        return ((values - self.low) / (way if way > 0 else 1.0)).clamp(0, 1) ** self.power


def root_scale(values: Float[Tensor, "rows columns"]) -> ColourScale:
    """From zero to the largest: for weights."""
    return ColourScale(0.0, float(values.nan_to_num(0.0).max()) if values.numel() else 0.0, ROOT)


def linear_scale(values: Float[Tensor, "..."]) -> ColourScale:
    """From the least to the largest: for what is compared over an image."""
    return ColourScale(float(values.min()), float(values.max()))


def quantise(values: Float[Tensor, "rows columns"], scale: ColourScale) -> UInt8[Tensor, "rows columns"]:
    """Numbers as 0 to 255; NaN has the first colour."""
    return (scale.of(values).nan_to_num(0.0) * 255).round().to(torch.uint8).cpu()


@cache
def palette() -> tuple[tuple[int, int, int], ...]:
    """The 256 colours of a map."""
    from matplotlib import colormaps

    table = colormaps[MAP](range(256), bytes=True)[:, :3].tolist()
    return tuple((red, green, blue) for red, green, blue in table)


def apply_colormap(values: Float[Tensor, "rows columns"], scale: ColourScale) -> UInt8[Tensor, "rows columns 3"]:
    """Numbers as colours."""
    return torch.tensor(palette(), dtype=torch.uint8)[quantise(values, scale).long()]


def cell_colours(value: float, scale: ColourScale) -> tuple[str, str]:
    """The background that stands for a number, and a text colour that can be read on it."""
    red, green, blue = palette()[int(quantise(torch.tensor([[value]]), scale)[0, 0])]
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 128
    return f"#{red:02x}{green:02x}{blue:02x}", "#000" if light else "#fff"


def map_png(values: Float[Tensor, "rows columns"], scale: ColourScale) -> bytes:
    """A map as a PNG, one pixel for each number: a byte each, and the colours once."""
    rows, columns = values.shape
    image = Image.frombytes("P", (columns, rows), quantise(values, scale).numpy().tobytes())
    image.putpalette([part for colour in palette() for part in colour])
    return _png(image)


def pixels_png(pixels: UInt8[Tensor, "y x 3"]) -> bytes:
    """Pixels as a PNG."""
    return _png(Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.cpu().numpy().tobytes()))


def _png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def data_uri(png: bytes) -> str:
    """A PNG as an address that holds it whole."""
    return f"data:image/png;base64,{b64encode(png).decode('ascii')}"


def overlay(pixels: UInt8[Tensor, "y x channels"], values: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "y x 3"]:
    """A map over the grey image it is about. Every cell keeps its edges: nothing between two numbers is made up."""
    y, x, _ = pixels.shape
    rows, columns = values.shape
    down, across = torch.arange(y) * rows // y, torch.arange(x) * columns // x
    colours = apply_colormap(values, linear_scale(values))[down[:, None], across[None]].float()
    grey = pixels.cpu().float().mean(-1, keepdim=True)
    return (COVER * colours + (1 - COVER) * grey).round().to(torch.uint8)


def shades(values: Float[Tensor, "rows columns"], scale: ColourScale, wide: int = 2) -> list[str]:
    """Rows of a map as text, so many characters a number: blank for zero, ? for NaN, else one of five shades."""
    shares = scale.of(values).nan_to_num(0.0)
    steps = torch.where(values == 0, 0, 1 + (shares * 5).long().clamp(max=4))
    steps = steps.masked_fill(values.isnan(), len(SHADES) - 1)
    return ["".join(SHADES[step] * wide for step in row) for row in steps.tolist()]


def downsample(values: Float[Tensor, "rows columns"], most: int) -> Float[Tensor, "fewer_rows fewer_columns"]:
    """A grid with at most so many cells a side, each the mean of those it stands for."""
    rows, columns = (min(size, most) for size in values.shape)
    return torch.nn.functional.adaptive_avg_pool2d(values[None], (rows, columns))[0]


def mosaic(maps: Sequence[Sequence[Tensor]], cells: int, gap: int = 2) -> UInt8[Tensor, "y x 3"]:
    """Maps of weights in rows on white, each with its own range and enlarged to the same square of pixels."""
    step = cells + gap
    sheet = torch.full((len(maps) * step, max(map(len, maps)) * step, 3), 255, dtype=torch.uint8)
    for row, several in enumerate(maps):
        for column, values in enumerate(several):
            down, across = (torch.arange(cells) * size // cells for size in values.shape)
            place = sheet[row * step : row * step + cells, column * step : column * step + cells]
            place.copy_(apply_colormap(values, root_scale(values))[down[:, None], across[None]])
    return sheet
