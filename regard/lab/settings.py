"""Validation of the settings of claims: limits that hold for every claim, and smallest values of single settings."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.nn.attention import check_heads

# counts that may be 0, and indices of tokens, keys and queries, which begin at 0
_FROM_ZERO = {"seed", "tuning", "look_ahead", "look_back", "shift"}
_FROM_ZERO |= {"token", "place", "query", "changed", "two", "looks_at"}


def check_settings(setup: Any) -> None:
    """Check the settings of a lab claim, else raise ConfigError.

    Integers must be at least 1; seeds, indices and a few others (listed in _FROM_ZERO) can be 0. Tuples must not be
    empty. Floats must be finite, except that `betas` can have inf. The number of heads must divide the width.
    """
    for field in fields(setup):
        value = getattr(setup, field.name)
        if is_dataclass(value):
            check_settings(value)
        if value == ():
            raise ConfigError(f"{field.name} is empty, but must have at least one value")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                check_integer(field.name, number, 0 if field.name in _FROM_ZERO else 1)
            elif isinstance(number, float) and not (math.isfinite(number) or (field.name == "betas" and number > 0)):
                raise ConfigError(f"{field.name} must be a finite number, not {number:g}")
    if hasattr(setup, "width") and hasattr(setup, "heads"):
        for heads in setup.heads if isinstance(setup.heads, tuple) else (setup.heads,):
            check_heads(setup.width, heads)


def setting_error(setup: Any, text: str, *names: str) -> ConfigError:
    """Return a ConfigError whose message ends with the values of these settings: "TEXT: keys=3, width=2"."""
    return ConfigError(f"{text}: {', '.join(f'{name}={getattr(setup, name)}' for name in names)}")


def check_at_least(setup: Any, **smallest: float) -> None:
    """Check that settings are not below their smallest values, else raise ConfigError.

    smallest  smallest values by name of the setting, such as keys=2; for a tuple, the smallest number of its
              values
    """
    for name, least in smallest.items():
        value = getattr(setup, name)
        if isinstance(value, tuple):
            if len(value) < least:
                raise setting_error(setup, f"{name} must have at least {least} values", name)
        elif value < least:
            raise ConfigError(f"{name} is {value:g}, but must be at least {least:g}")


def check_growing(setup: Any, *names: str) -> None:
    """Check that the values of these settings grow, each larger than the one before, else raise ConfigError."""
    for name in names:
        value = getattr(setup, name)
        if list(value) != sorted(set(value)):
            raise setting_error(setup, f"{name} must grow", name)


def check_indices(name: str, indices: tuple[int, ...], size: int, what: str) -> None:
    """Check that every index is between 0 and `size` - 1, else raise ConfigError.

    name  name of the setting, for the error message
    what  what is indexed, for the error message: "tokens", "keys" or "queries"
    """
    outside = [index for index in indices if not 0 <= index < size]
    if outside:
        raise ConfigError(f"{name} must be between 0 and {size - 1}, the indices of {size} {what}: {name}={outside[0]}")
