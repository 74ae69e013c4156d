"""What a caller chose by number or name: checked before anything runs, with an error that says what there is."""

from collections.abc import Iterable

import torch

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import LARGEST_INTEGER, check_integer


def check_indices(what: str, chosen: object) -> tuple[int, ...] | None:
    """A list of whole numbers, negative ones from the end; None is all. `what` names it as the caller wrote it."""
    if chosen is None:
        return None
    if isinstance(chosen, str | bytes) or not isinstance(chosen, Iterable) or getattr(chosen, "ndim", 1) != 1:
        raise ConfigError(f"{what} takes a list of whole numbers such as [0, -1], or None for all, not {chosen!r}")
    return tuple(check_integer(f"each of {what}", each, -LARGEST_INTEGER) for each in chosen)


def resolve_indices(what: str, chosen: tuple[int, ...], size: int, name: str) -> tuple[int, ...]:
    """The same numbers counted from the start, each one that is there."""
    for number in chosen:
        if not -size <= number < size:
            raise ShapeError(f"{what} asks for {number}, but {name} has {size} of them; choose from 0 to {size - 1}")
    return tuple(number % size for number in chosen)


def check_device(what: str, device: torch.device | str | None) -> torch.device | None:
    """A device that can hold numbers here; None leaves them where they are."""
    if device is None:
        return None
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what}={str(device)!r} cannot be used here: {reason}; 'cpu' always can") from None
    if found.type == "meta":
        raise ConfigError(f"{what}='meta' keeps no numbers, so nothing could be seen; 'cpu' always can")
    return found
