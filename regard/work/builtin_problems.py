"""Built-in problems: one small enough to do by hand, and two from the textbook Understanding Deep Learning."""

from collections.abc import Callable
from typing import Any

from regard.base.registry import Registry
from regard.work.exact_numbers import Matrix, Value
from regard.work.files import ProblemFields, parse_matrix
from regard.work.problem import BiasPerHead, MatrixPerHead

BUILTIN_PROBLEMS: Registry[Callable[[], ProblemFields]] = Registry("worked example")


@BUILTIN_PROBLEMS.add("three-tokens")
def three_tokens() -> ProblemFields:
    """Return a problem with three tokens of width 4 and one head of width 2, in short fractions, without scaling."""
    written = {
        "inputs": "1,-1,0,2; 0,-1,2,1; -2,2,-1,0",
        "wq": "0,1; 1,0; -1/2,0; 1,1",
        "wk": "1,-1/2; 0,1; 1/2,-1/2; 1,1/2",
        "wv": "1,1/2; -1/2,0; -1,2; 1/2,-1",
    }
    matrices: dict[str, MatrixPerHead] = {name: (parse_matrix(text, name),) for name, text in written.items()}
    return matrices, {}, {"name": "three-tokens", "scaled": False}


@BUILTIN_PROBLEMS.add("udl-12-1")
def udl_12_1() -> ProblemFields:
    """Return the problem of notebook 12.1 of Understanding Deep Learning (Prince, 2023).

    The problem has 3 tokens of width 4 in columns, and no scaling.
    """
    width, tokens = 4, 3
    draw = _normal_generator(3)
    inputs = [draw(width, 1) for _ in range(tokens)]
    draw = _normal_generator(0)
    weights = {name: (_to_matrix(draw(width, width)),) for name in ("wq", "wk", "wv")}
    biases: dict[str, BiasPerHead] = {name: (_column(draw(width, 1)),) for name in ("bq", "bk", "bv")}
    columns = tuple(tuple(float(each[row, 0]) for each in inputs) for row in range(width))
    settings = {"name": "udl-12-1", "convention": "columns", "scaled": False}
    return {"inputs": (columns,), **weights}, biases, settings


@BUILTIN_PROBLEMS.add("udl-12-2")
def udl_12_2() -> ProblemFields:
    """Return the problem of notebook 12.2 of Understanding Deep Learning (Prince, 2023).

    The problem has 6 tokens of width 8 in columns, two heads, scaling and an output projection.
    """
    width, tokens, heads = 8, 6, 2
    inputs = _to_matrix(_normal_generator(3)(width, tokens))
    draw = _normal_generator(0)
    weights: dict[str, list[Matrix]] = {name: [] for name in ("wq", "wk", "wv")}
    biases: dict[str, list[tuple[Value, ...]]] = {name: [] for name in ("bq", "bk", "bv")}
    for _ in range(heads):  # all weights and biases of one head are drawn before those of the next
        for name in weights:
            weights[name].append(_to_matrix(draw(width // heads, width)))
        for name in biases:
            biases[name].append(_column(draw(width // heads, 1)))
    matrices = {name: tuple(several) for name, several in weights.items()}
    settings = {"name": "udl-12-2", "convention": "columns", "scaled": True}
    return (
        {"inputs": (inputs,), **matrices, "wo": (_to_matrix(draw(width, width)),)},
        {name: tuple(several) for name, several in biases.items()},
        settings,
    )


def _normal_generator(seed: int) -> Callable[[int, int], Any]:
    from numpy.random import RandomState  # the generator of the book: its random numbers never change

    generator = RandomState(seed)
    return lambda rows, columns: generator.normal(size=(rows, columns))


def _to_matrix(array: Any) -> Matrix:
    return tuple(tuple(map(float, row)) for row in array)


def _column(array: Any) -> tuple[Value, ...]:
    return tuple(float(row[0]) for row in array)
