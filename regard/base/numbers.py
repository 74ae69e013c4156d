"""Numbers that users hand in: checked, and plain Python afterwards."""

import math
import operator
from numbers import Real

from regard.base.errors import ConfigError


def whole(what: str, value: object, least: int, counts: str = "positions") -> int:
    """A whole number of at least `least`. `what` names it as the user wrote it: `window(before)`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # numpy's whole numbers are welcome
    except TypeError:
        raise ConfigError(f"{what} takes a whole number, not {value!r}") from None
    if number < least:
        raise ConfigError(f"{what} is {number}, but must be at least {least}: it counts {counts}")
    return number


def real(what: str, value: object, meaning: str = "") -> float:
    """A real number that is not NaN; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        hint = "; call .item() on it" if hasattr(value, "item") else ""
        raise ConfigError(f"{what} is {value!r}, but takes one real number{meaning and ', '}{meaning}{hint}")
    return float(value)
