"""Checks of the exercises on self-attention with tokens in columns: the softmax, the mechanism, the scale."""

import numpy as np

from regard.work.exercises.checks import Case, FunctionCheck
from regard.work.exercises.exercise import load_set


def _score_cases(generator: np.random.Generator) -> list[Case]:
    return [(generator.normal(size=(5, 3)),), (generator.normal(size=(4, 4)),)]


def _large_score_cases(generator: np.random.Generator) -> list[Case]:
    return [(np.array([[1000.0, -1000.0], [999.0, -1001.0], [0.0, -1000.5]]),)]


def _attention_cases(generator: np.random.Generator) -> list[Case]:
    """Sample test cases of inputs, weights and biases with different sizes.

    In the last case all weights are square, as in the first cell of the notebook.
    """
    cases: list[Case] = []
    for d, n, c, e in ((5, 3, 2, 7), (3, 6, 7, 4), (4, 4, 4, 4)):
        shapes = ((d, n), (c, d), (c, d), (e, d), (c, 1), (c, 1), (e, 1))
        cases.append(tuple(generator.normal(size=shape) for shape in shapes))
    return cases


SELF_ATTENTION = load_set(
    "self-attention",
    {
        "softmax": FunctionCheck((_score_cases, _large_score_cases)),
        "attention": FunctionCheck((_attention_cases,)),
        "scaled": FunctionCheck((_attention_cases,)),
    },
)
