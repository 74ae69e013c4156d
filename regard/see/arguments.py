"""Validate the indices and devices that a caller passes, before the model runs."""

from collections.abc import Iterable

import torch

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import LARGEST_INTEGER, check_integer


def check_indices(what: str, indices: object) -> tuple[int, ...] | None:
    """Check that `indices` is a list of integers or None, else raise ConfigError; return it as a tuple.

    None, which selects all, is returned unchanged.

    what  name of the argument, for the error message
    """
    if indices is None:
        return None
    if isinstance(indices, str | bytes) or not isinstance(indices, Iterable) or getattr(indices, "ndim", 1) != 1:
        raise ConfigError(f"{what} takes a list of whole numbers such as [0, -1], or None for all, not {indices!r}")
    return tuple(check_integer(f"each of {what}", each, -LARGEST_INTEGER) for each in indices)


def resolve_indices(what: str, indices: tuple[int, ...], size: int, name: str) -> tuple[int, ...]:
    """Convert negative indices to positive ones; raise ShapeError if an index is out of range.

    what  name of the argument, for the error message
    size  length of the indexed axis
    name  name of the indexed layer, for the error message
    """
    for number in indices:
        if not -size <= number < size:
            raise ShapeError(f"{what} has index {number}, but {name} has {size} {what}; choose from 0 to {size - 1}")
    return tuple(number % size for number in indices)


def check_index(what: str, index: object, size: int, counted: str, *, negative: bool = True) -> int:
    """Check one index; raise ConfigError if it is not an integer or is out of range. Returns a nonnegative index.

    what      name of the argument, for the error message
    size      length of the indexed axis
    counted   what the axis contains, for the error message, such as "heads of layer.0"
    negative  whether negative indices, which count from the end, are accepted
    """
    number = check_integer(what, index, -LARGEST_INTEGER)
    if not (-size if negative else 0) <= number < size:
        raise ConfigError(f"{what} is {number}, but there are {size} {counted}; choose from 0 to {size - 1}")
    return number % size


def check_device(what: str, device: torch.device | str | None) -> torch.device | None:
    """Check that torch can compute on a device, else raise ConfigError; return the device.

    None is returned unchanged.

    what  name of the argument, for the error message
    """
    if device is None:
        return None
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what}={str(device)!r} cannot be used here: {reason}; 'cpu' always can") from None
    if found.type == "meta":
        raise ConfigError(f"{what}='meta' holds no numbers; 'cpu' always can")
    return found
