"""Numbers as a sentence has them."""

from collections.abc import Iterable


def listed(values: Iterable[float]) -> str:
    """Several numbers in a row: 1, 12 and 4,096; one number where all are the same."""
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
