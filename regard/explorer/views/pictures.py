"""Pictures that the page uploads and shows, as data URLs."""

import base64
import binascii
import io
from pathlib import Path

import torch
from torch import Tensor

from regard.base.errors import ConfigError

LARGEST = 1 << 20  # bytes of an uploaded picture


def read_upload(address: str, folder: Path) -> Path:
    """Decode an uploaded image and write it into a folder; returns the path.

    address  the image as a base64 data URL
    """
    head, _, data = address.partition(",")
    kind = head.removeprefix("data:image/").removesuffix(";base64")
    if not head.startswith("data:image/") or kind not in ("png", "jpeg", "gif", "bmp", "webp"):
        raise ConfigError("upload a PNG, JPEG, GIF, BMP or WebP picture")
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        raise ConfigError("the picture arrived damaged; choose it again") from None
    if len(content) > LARGEST:
        raise ConfigError(f"a picture may have at most {LARGEST:,} bytes; this one has {len(content):,}")
    path = folder / f"upload.{kind}"
    path.write_bytes(content)
    return path


def pixels_address(pixels: Tensor) -> str:
    """Convert pixels (channels, height, width) to a data URL of a PNG; values are scaled to 0..255."""
    from PIL import Image

    low, high = pixels.min(), pixels.max()
    shown = ((pixels - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    shown = shown.expand(3, -1, -1) if len(shown) == 1 else shown[:3]
    file = io.BytesIO()
    Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy()).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
