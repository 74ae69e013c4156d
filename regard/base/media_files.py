"""Bounded readers of images and of WAV files."""

import io
import warnings
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from regard.base.errors import DataError
from regard.base.files import Error, describe, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 40_000_000
MAX_SAMPLE_RATE = 1_000_000
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}


def decode_image(where: Path | str, data: bytes, error: Error = DataError) -> "Image":
    """Decode the bytes of an image file with 8 bits per channel. The image is rotated upright by its EXIF data.

    where  name of the file in error messages
    error  class of the exception that is raised if the image cannot be decoded
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow warns about damaged metadata and about large images
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
                if opened.mode not in EIGHT_BIT_MODES:
                    raise error(f"{where} has pixels of mode {opened.mode!r}; expected 8 bits per channel")
                if opened.width * opened.height > MAX_PIXELS:
                    size = f"{opened.width:,} x {opened.height:,}"
                    raise error(f"{where} has {size} pixels, more than {MAX_PIXELS:,}; make it smaller")
                opened.load()
                return ImageOps.exif_transpose(opened)
    except error:
        raise
    except UnidentifiedImageError:  # the message of pillow would name an object in memory
        raise error(
            f"{where} cannot be read as an image: its {len(data)} bytes are truncated or of an unknown format"
        ) from None
    except Exception as failure:  # decoders raise errors of all kinds
        raise error(f"{where} cannot be read as an image: {describe(failure)}") from None


def read_wav(file: Path) -> tuple[numpy.ndarray[Any, numpy.dtype[numpy.float64]], int]:
    """Read a WAV file of integer samples. Returns an array (frames, channels) from -1 to 1, and the sample rate."""
    try:
        with wave.open(io.BytesIO(read_bytes(file)), "rb") as opened:
            channels, width, rate, frames = opened.getparams()[:4]
            data = opened.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as failure:  # RuntimeError: a chunk is longer than the file
        why = str(failure) or "it ends inside its header"
        raise DataError(f"{file} is not a WAV file of integers: {why}") from None
    if not 0 < rate < MAX_SAMPLE_RATE:
        raise DataError(f"{file} has a sample rate of {rate}; expected 1 to {MAX_SAMPLE_RATE - 1}")
    if width > 4:
        raise DataError(f"{file} has {8 * width} bits per sample; expected 8, 16, 24 or 32")
    if len(data) != frames * channels * width:
        raise DataError(f"{file} is truncated: it has {len(data) // (channels * width)} of {frames} samples")
    if not frames:
        raise DataError(f"{file} has no samples")
    return _decode_samples(data, width).reshape(frames, channels) / 2.0 ** (8 * width - 1), rate


def _decode_samples(data: bytes, width: int) -> numpy.ndarray[Any, numpy.dtype[numpy.int32]]:
    """Decode little-endian WAV samples of `width` bytes to signed integers.

    Unsigned 8-bit samples are shifted by -128.
    """
    if width == 1:
        return numpy.frombuffer(data, dtype=numpy.uint8).astype(numpy.int32) - 128
    if width == 3:
        padded = numpy.zeros((len(data) // 3, 4), dtype=numpy.uint8)
        padded[:, 1:] = numpy.frombuffer(data, dtype=numpy.uint8).reshape(-1, 3)
        return padded.reshape(-1).view("<i4").astype(numpy.int32) >> 8
    return numpy.frombuffer(data, dtype=f"<i{width}").astype(numpy.int32)
