"""Problems by name: one small enough to do by hand, and the two of a textbook's notebooks."""

from collections.abc import Callable
from typing import Any

from regard.base.registry import Registry
from regard.work.exact_numbers import Grid, Value
from regard.work.files import Fields, typed
from regard.work.problem import Heads

BUILTIN_PROBLEMS: Registry[Callable[[], Fields]] = Registry("worked example")


@BUILTIN_PROBLEMS.add("three-tokens")
def three_tokens() -> Fields:
    """Three tokens of width 4, one head of width 2, all numbers short fractions, no scale."""
    written = {
        "inputs": "1,-1,0,2; 0,-1,2,1; -2,2,-1,0",
        "wq": "0,1; 1,0; -1/2,0; 1,1",
        "wk": "1,-1/2; 0,1; 1/2,-1/2; 1,1/2",
        "wv": "1,1/2; -1/2,0; -1,2; 1/2,-1",
    }
    matrices: dict[str, Heads] = {name: (typed(words, name),) for name, words in written.items()}
    return matrices, {}, {"name": "three-tokens", "scaled": False}


@BUILTIN_PROBLEMS.add("udl-12-1")
def udl_12_1() -> Fields:
    """Notebook 12.1 of Understanding Deep Learning (Prince, 2023): 3 tokens of width 4 in columns, no scale."""
    width, tokens = 4, 3
    draw = _drawing(3)
    inputs = [draw(width, 1) for _ in range(tokens)]
    draw = _drawing(0)
    weights = {name: (_grid(draw(width, width)),) for name in ("wq", "wk", "wv")}
    biases: dict[str, tuple[tuple[Value, ...], ...]] = {name: (_column(draw(width, 1)),) for name in ("bq", "bk", "bv")}
    together = tuple(tuple(float(each[row, 0]) for each in inputs) for row in range(width))
    settings = {"name": "udl-12-1", "convention": "columns", "scaled": False}
    return {"inputs": (together,), **weights}, biases, settings


@BUILTIN_PROBLEMS.add("udl-12-2")
def udl_12_2() -> Fields:
    """Notebook 12.2 of the same book: 6 tokens of width 8 in columns, two heads of width 4, scaled and mixed."""
    width, tokens, heads = 8, 6, 2
    inputs = _grid(_drawing(3)(width, tokens))
    draw = _drawing(0)
    weights: dict[str, list[Grid]] = {name: [] for name in ("wq", "wk", "wv")}
    biases: dict[str, list[tuple[Value, ...]]] = {name: [] for name in ("bq", "bk", "bv")}
    for _ in range(heads):  # a head's weights and biases are drawn before the next head's
        for name in weights:
            weights[name].append(_grid(draw(width // heads, width)))
        for name in biases:
            biases[name].append(_column(draw(width // heads, 1)))
    matrices = {name: tuple(several) for name, several in weights.items()}
    settings = {"name": "udl-12-2", "convention": "columns", "scaled": True}
    return (
        {"inputs": (inputs,), **matrices, "wo": (_grid(draw(width, width)),)},
        {name: tuple(several) for name, several in biases.items()},
        settings,
    )


def _drawing(seed: int) -> Callable[[int, int], Any]:
    from numpy.random import RandomState  # the book's own generator: its stream never changes

    source = RandomState(seed)
    return lambda rows, columns: source.normal(size=(rows, columns))


def _grid(array: Any) -> Grid:
    return tuple(tuple(map(float, row)) for row in array)


def _column(array: Any) -> tuple[Value, ...]:
    return tuple(float(row[0]) for row in array)
