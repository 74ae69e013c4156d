"""Numbers that users hand in: checked, and plain Python afterwards."""

import math
import operator
import sys
from numbers import Real

from regard.base.errors import ConfigError

# torch.compile takes a float that varies for a finite one and answers `x == inf` once and for all; a comparison with
# the largest finite number is asked again at every call
LARGEST_FLOAT = sys.float_info.max
LARGEST_INTEGER = 1 << 40  # beyond any position, and small enough that products of two in one sum fit 64 bits


def check_integer(what: str, value: object, least: int, counts: str = "") -> int:
    """A whole number of at least `least`. `what` names it as the user wrote it: `window(before)`."""
    try:
        dtype, axes = str(getattr(value, "dtype", "")), tuple(getattr(value, "shape", ()))
        if isinstance(value, bool) or axes or "bool" in dtype:
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # numpy's whole numbers are welcome
    except TypeError:
        raise ConfigError(f"{what} takes a whole number, not {value!r}") from None
    if number > LARGEST_INTEGER:
        raise ConfigError(f"{what} is {number}, which no tensor can count to")
    if number < least:
        raise ConfigError(f"{what} is {number}, but must be at least {least}{counts and ': it counts '}{counts}")
    return number


def check_number(what: str, value: object, meaning: str = "") -> float:
    """A real number that is not NaN; infinity is one."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.nan  # a whole number beyond all floats
    if not (number <= LARGEST_FLOAT or number > LARGEST_FLOAT):  # NaN, asked in a way that compiled code asks again
        hint = "; call .item() on it" if getattr(value, "shape", None) == () and not isinstance(value, Real) else ""
        raise ConfigError(f"{what} is {value!r}, but takes one real number{meaning and ', '}{meaning}{hint}")
    return number
