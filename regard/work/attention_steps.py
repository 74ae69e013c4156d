"""Attention as a chain of stages on plain arrays, any of which can be replaced: by a student's numbers or by a slip.

Everything here is float64 and has tokens in rows, whatever convention the problem is written in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regard.work.exact_numbers import Grid, floats
from regard.work.problem import ROLES, Problem, Projection

Array = NDArray[np.float64]
STAGES = ("q", "k", "v", "scores", "scaled", "weights", "output")


@dataclass(frozen=True)
class Start:
    """What a head starts from."""

    inputs: Array | None
    vectors: Mapping[str, Array]  # those of q, k and v that are given
    weights: Mapping[str, Array]  # those that make the others
    biases: Mapping[str, Array]
    visible: NDArray[np.bool_]
    scaled: bool
    width: int
    joined: int  # the widths of all heads together


Values = Mapping[str, Array]
Stage = Callable[[Start, Values], Array | None]  # None where it makes no sense for these shapes


def start(problem: Problem, number: int) -> Start:
    """What head `number`, counted from 0, starts from."""
    vectors, weights, biases = {}, {}, {}
    for role in ROLES:
        given = problem.heads[number].role(role)
        if isinstance(given, Projection):
            weights[role] = array(given.weights, problem)
            if given.bias is not None:
                biases[role] = np.array([float(each) for each in given.bias])
        else:
            vectors[role] = array(given, problem)
    return Start(
        inputs=None if problem.inputs is None else array(problem.inputs, problem),
        vectors=vectors,
        weights=weights,
        biases=biases,
        visible=np.array(problem.visible, dtype=bool),
        scaled=problem.scaled,
        width=problem.width(number),
        joined=sum(problem.width(each) for each in range(len(problem.heads))),
    )


def array(grid: Grid, problem: Problem) -> Array:
    """A matrix of the problem with tokens in rows."""
    found = np.array(floats(grid), dtype=np.float64)
    return found if problem.by_rows else found.T


def run(begin: Start, fixed: Values, changed: Mapping[str, Stage] | None = None) -> dict[str, Array] | None:
    """All stages in order; some are fixed, some are computed in another way. None where that makes no sense."""
    values: dict[str, Array] = {}
    for name in STAGES:
        if name in fixed:
            values[name] = fixed[name]
            continue
        found = (changed or {}).get(name, RIGHT[name])(begin, values)
        if found is None:
            return None
        values[name] = found
    return values


def projection(role: str) -> Stage:
    """The queries, keys or values as they should be."""

    def project(begin: Start, values: Values) -> Array:
        if role in begin.vectors:
            return begin.vectors[role]
        assert begin.inputs is not None
        return begin.inputs @ begin.weights[role] + begin.biases.get(role, 0.0)

    return project


def scale(begin: Start, values: Values) -> Array:
    return values["scores"] / np.sqrt(begin.width) if begin.scaled else values["scores"]


def softmax(scores: Array, visible: NDArray[np.bool_], axis: int = 1) -> Array:
    """Weights along an axis; a line that sees nothing gets zeros."""
    with np.errstate(over="ignore"):
        top = np.where(visible, scores, -np.inf).max(axis, keepdims=True)
        raised = np.where(visible, np.exp(np.where(visible, scores - np.where(np.isfinite(top), top, 0.0), 0.0)), 0.0)
    total = raised.sum(axis, keepdims=True)
    found: Array = raised / np.where(total == 0, 1.0, total)
    return found


RIGHT: dict[str, Stage] = {
    **{role: projection(role) for role in ROLES},
    "scores": lambda begin, values: values["q"] @ values["k"].T,
    "scaled": scale,
    "weights": lambda begin, values: softmax(values["scaled"], begin.visible),
    "output": lambda begin, values: values["weights"] @ values["v"],
}


def terms(begin: Start, values: Values, stage: str, row: int, column: int) -> Array | None:
    """The products whose sum is one entry of a stage, or None where it is no sum of products."""
    pair: tuple[Array, Array]
    if stage in begin.weights and begin.inputs is not None:
        pair = begin.inputs[row], begin.weights[stage][:, column]
    elif stage == "scores":
        pair = values["q"][row], values["k"][column]
    elif stage == "output":
        pair = values["weights"][row], values["v"][:, column]
    else:
        return None
    return pair[0] * pair[1]
