"""Validate numbers and names from users."""

import math
import operator
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real

from regard.base.errors import ConfigError

# torch.compile assumes that a float is finite and evaluates `x == inf` once; it evaluates a comparison with the
# largest finite number at every call
LARGEST_FLOAT = sys.float_info.max
LARGEST_INTEGER = 1 << 40  # larger than any position; sums of a few fit 64 bits


def suggest(name: object, known: Iterable[str], most: int = 1) -> str:
    """Return "; did you mean 'NAME'?" with the most similar known names, or "" if no name is similar.

    Upper and lower case are not distinguished.

    most  maximum number of names
    """
    names = {each.lower(): each for each in known}
    near = [names[each] for each in get_close_matches(str(name).lower(), names, n=most)]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_integer(what: str, value: object, least: int, counts: str = "") -> int:
    """Return `value` as an int. Raises ConfigError if it is not a whole number of at least `least`.

    what    name of the value in error messages, such as `window(before)`
    counts  what the number counts, such as "positions", for error messages
    """
    try:
        dtype, axes = str(getattr(value, "dtype", "")), tuple(getattr(value, "shape", ()))
        if isinstance(value, bool) or axes or "bool" in dtype:
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # numpy integers are accepted
    except TypeError:
        raise ConfigError(f"{what} takes a whole number, not {value!r}") from None
    if number > LARGEST_INTEGER:
        raise ConfigError(f"{what} is {number}, which is too large for a position or size")
    if number < least:
        raise ConfigError(f"{what} is {number}, but must be at least {least}{counts and ': it counts '}{counts}")
    return number


def check_range(
    what: str,
    value: object,
    least: float,
    most: float = LARGEST_FLOAT,
    *,
    above: bool = False,
    below: bool = False,
) -> float:
    """Return `value` as a float. Raises ConfigError if it is outside the range from `least` to `most`.

    what   name of the value in error messages
    above  exclude `least` itself
    below  exclude `most` itself
    """
    number = check_number(what, value)
    if not least <= number <= most or (above and number == least) or (below and number == most):
        end = "" if most == LARGEST_FLOAT else f" and {'below' if below else 'at most'} {most:g}"
        raise ConfigError(f"{what} must be {'above' if above else 'at least'} {least:g}{end}, not {number:g}")
    return number


def check_number(what: str, value: object, meaning: str = "") -> float:
    """Return `value` as a float. Raises ConfigError if it is not a real number. Infinity is allowed, NaN is not.

    what     name of the value in error messages, such as `alibi(slope)`
    meaning  what the number means, for error messages
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.nan  # an integer larger than any float
    if not (
        number <= LARGEST_FLOAT or number > LARGEST_FLOAT
    ):  # NaN, by a comparison that compiled code evaluates at every call
        hint = "; call .item() on it" if getattr(value, "shape", None) == () and not isinstance(value, Real) else ""
        raise ConfigError(f"{what} is {value!r}, but takes one real number{meaning and ', '}{meaning}{hint}")
    return number
