"""The built-in images: 1,797 handwritten digits of 8 x 8, which come with scikit-learn."""

import torch

from regard.data.images import Images


def digits() -> Images:
    """All digits in their order, one channel. Their 17 shades of grey are spread over 0 to 255."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    shades = torch.from_numpy(found.images)
    pixels = (shades * (255 / 16)).round().to(torch.uint8)[:, None]
    return Images(pixels, torch.from_numpy(found.target).long(), tuple(map(str, range(10))))
