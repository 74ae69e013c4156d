"""The letters of tensor axes, used in signatures, einsum strings, error messages and documentation."""

from collections.abc import Sequence

LEGEND = {
    "b": "batch",
    "h": "query heads",
    "g": "key/value heads",
    "i": "query positions",
    "j": "key positions",
    "n": "positions",
    "c": "width per head of q and k",
    "e": "width per head of v",
    "d": "model width",
    "f": "feed-forward width",
    "w": "vocabulary",
}


def format_axis(letter: str, size: int) -> str:
    """Format an axis letter with its size and meaning, such as `c=8 (width per head of q and k)`."""
    return f"{letter}={size} ({LEGEND[letter]})"


def format_shape(name: str, shape: Sequence[int], letters: str) -> str:
    """Format a tensor's name, shape and axis letters, such as `k is (2, 4, 9, 8) read as (b g j c)`."""
    return f"{name} is {tuple(shape)} read as ({' '.join(letters.split())})"
