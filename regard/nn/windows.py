"""Window partition of images and its inverse, as in Swin."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import ShapeError
from regard.base.validation import check_integer


def partition(x: Float[Tensor, "b y x d"], size: int) -> Float[Tensor, "bw n d"]:
    """Split images into size x size windows, row by row. Each window becomes one sequence of the batch.

    Images are padded with zeros to whole windows. n is size * size, the number of positions in a window.
    """
    if x.ndim != 4:
        raise ShapeError(f"x is {tuple(x.shape)}, but windows are cut from images, (batch, rows, columns, width)")
    check_integer("size", size, 1)
    rows, columns, d = x.shape[1:]
    x = pad(x, (0, 0, 0, -columns % size, 0, -rows % size))
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # b, window rows, size, window columns, size, d
    return x.transpose(2, 3).reshape(-1, size * size, d)


def merge(windows: Float[Tensor, "bw n d"], size: int, rows: int, columns: int) -> Float[Tensor, "b y x d"]:
    """Join windows to images and remove the padding: the inverse of `partition`.

    rows, columns  height and width of the images without padding
    """
    check_integer("size", size, 1)
    down, across = -(-rows // size), -(-columns // size)
    if windows.shape[0] % (down * across) or windows.shape[1] != size * size:
        raise ShapeError(
            f"windows is {tuple(windows.shape)}, but an image of {rows} x {columns} has {down * across} windows "
            f"of {size * size} positions"
        )
    x = windows.reshape(-1, down, across, size, size, windows.shape[-1]).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)[:, :rows, :columns]
