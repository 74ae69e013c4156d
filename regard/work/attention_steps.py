"""Attention calculated step by step in float64, where a step can be replaced by a student's numbers or by a mistake.

Tokens are rows in all arrays, even if they are columns in the problem.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regard.work.exact_numbers import Matrix, to_floats
from regard.work.problem import ROLES, LinearProjection, Problem

Array = NDArray[np.float64]
STEPS = ("q", "k", "v", "scores", "scaled", "weights", "output")


@dataclass(frozen=True)
class HeadInputs:
    """The arrays from which the attention of one head is calculated.

    The keys of `vectors`, `weights` and `biases` are "q", "k" and "v".

    inputs       the tokens in rows; None if the problem states q, k and v
    vectors      the matrices that the problem states
    weights      the projection weights of the matrices that the problem does not state
    biases       the projection biases of these matrices
    visible      visible[i, j] is whether query i sees key j
    scaled       whether scores are divided by the square root of `width`
    width        width of the queries and keys of this head
    total_width  sum of this width over all heads
    """

    inputs: Array | None
    vectors: Mapping[str, Array]  # those of q, k and v that the problem states
    weights: Mapping[str, Array]  # of those of q, k and v that are not stated
    biases: Mapping[str, Array]
    visible: NDArray[np.bool_]
    scaled: bool
    width: int
    total_width: int  # width of all heads together

    def project(self, role: str) -> Array:
        """Return q, k or v of the head: the matrix that the problem states, or else inputs times weights plus bias.

        role  "q", "k" or "v"
        """
        if role in self.vectors:
            return self.vectors[role]
        assert self.inputs is not None
        return self.inputs @ self.weights[role] + self.biases.get(role, 0.0)


StepValues = Mapping[str, Array]
# the function returns None if it does not apply to these shapes
StepFunction = Callable[[HeadInputs, StepValues], Array | None]


def head_inputs(problem: Problem, index: int) -> HeadInputs:
    """Return the arrays from which the attention of head `index`, counted from 0, is calculated."""
    vectors, weights, biases = {}, {}, {}
    for role in ROLES:
        source = problem.heads[index].role(role)
        if isinstance(source, LinearProjection):
            weights[role] = to_array(source.weights, problem)
            if source.bias is not None:
                biases[role] = np.array([float(each) for each in source.bias])
        else:
            vectors[role] = to_array(source, problem)
    return HeadInputs(
        inputs=None if problem.inputs is None else to_array(problem.inputs, problem),
        vectors=vectors,
        weights=weights,
        biases=biases,
        visible=np.array(problem.visible, dtype=bool),
        scaled=problem.scaled,
        width=problem.width(index),
        total_width=sum(problem.width(each) for each in range(len(problem.heads))),
    )


def to_array(matrix: Matrix, problem: Problem) -> Array:
    """Convert a matrix of the problem to a float64 array with tokens in rows."""
    found = np.array(to_floats(matrix), dtype=np.float64)
    return found if problem.by_rows else found.T


def compute_steps(
    head: HeadInputs, fixed: StepValues, changed: Mapping[str, StepFunction] | None = None
) -> dict[str, Array] | None:
    """Calculate all steps of one head's attention in order, and return their matrices by name of the step.

    The steps are q, k, v, scores, scaled, weights and output. Returns None if a function in `changed` returns None,
    because its mistake is impossible with these shapes.

    fixed    matrices by name of the step; these steps are not calculated
    changed  functions by name of the step, which replace the correct calculation, such as a typical mistake
    """
    values: dict[str, Array] = {}
    for name in STEPS:
        if name in fixed:
            values[name] = fixed[name]
            continue
        found = (changed or {}).get(name, CORRECT[name])(head, values)
        if found is None:
            return None
        values[name] = found
    return values


def correct_steps(head: HeadInputs, fixed: StepValues) -> dict[str, Array]:
    """Calculate all steps of one head's attention correctly, and return their matrices by name of the step.

    The steps are q, k, v, scores, scaled, weights and output.

    fixed  matrices by name of the step; these steps are not calculated
    """
    found = compute_steps(head, fixed)
    assert found is not None  # only a mistake may fail to apply
    return found


def softmax(scores: Array, visible: NDArray[np.bool_], axis: int = 1) -> Array:
    """Return the softmax of visible scores along an axis; a row or column without visible scores gets zeros."""
    with np.errstate(over="ignore"):
        top = np.where(visible, scores, -np.inf).max(axis, keepdims=True)
        shifted = np.where(visible, scores - np.where(np.isfinite(top), top, 0.0), 0.0)
        exponentials = np.where(visible, np.exp(shifted), 0.0)
    total = exponentials.sum(axis, keepdims=True)
    return exponentials / np.where(total == 0, 1.0, total)


CORRECT: dict[str, StepFunction] = {
    "q": lambda head, values: head.project("q"),
    "k": lambda head, values: head.project("k"),
    "v": lambda head, values: head.project("v"),
    "scores": lambda head, values: values["q"] @ values["k"].T,
    "scaled": lambda head, values: values["scores"] / np.sqrt(head.width) if head.scaled else values["scores"],
    "weights": lambda head, values: softmax(values["scaled"], head.visible),
    "output": lambda head, values: values["weights"] @ values["v"],
}


def dot_product_terms(head: HeadInputs, values: StepValues, step: str, row: int, column: int) -> Array | None:
    """Return the products whose sum is one entry of a step's matrix; None if the entry is not a dot product.

    step         name of the step, such as "scores"
    row, column  position of the entry, counted from 0
    """
    if step in head.weights and head.inputs is not None:
        return head.inputs[row] * head.weights[step][:, column]
    if step == "scores":
        return values["q"][row] * values["k"][column]
    if step == "output":
        return values["weights"][row] * values["v"][:, column]
    return None
