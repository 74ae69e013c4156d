"""Shade characters for maps in a terminal."""

import math

SHADES = " ░▒▓█"


def shade(share: float) -> str:
    """Return the shading character for a number from 0 to 1: blank only for 0, solid only for 1, ? for NaN.

    >>> "".join(shade(share) for share in (0, 0.2, 0.5, 0.7, 1))
    ' ░▒▓█'
    """
    if math.isnan(share):
        return "?"
    return SHADES[0 if share <= 0 else 4 if share >= 1 else 1 + min(2, int(share * 3))]
