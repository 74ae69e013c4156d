"""Checks of the exercises on two heads with tokens in columns: one head, both heads, output projection, splitting."""

import numpy as np

from regard.work.exercises.checks import Case, FunctionCheck
from regard.work.exercises.exercise import load_set


def _head_cases(generator: np.random.Generator) -> list[Case]:
    sizes = ((6, 5, 3), (10, 3, 5), (4, 4, 4))
    return [(generator.normal(size=(d, n)), _draw_head(generator, d, c)) for d, n, c in sizes]


def _two_head_cases(generator: np.random.Generator) -> list[Case]:
    cases: list[Case] = []
    for d, n in ((6, 5), (10, 3), (8, 8)):
        heads = (_draw_head(generator, d, d // 2) for _ in range(2))
        cases.append((generator.normal(size=(d, n)), *heads))
    return cases


def _projection_cases(generator: np.random.Generator) -> list[Case]:
    return [(*case, generator.normal(size=(len(case[0]),) * 2)) for case in _two_head_cases(generator)]


def _split_cases(generator: np.random.Generator) -> list[Case]:
    return [(generator.normal(size=(d, n)), heads) for d, n, heads in ((6, 5, 2), (12, 7, 3), (8, 4, 4))]


def _draw_head(generator: np.random.Generator, d: int, c: int) -> tuple[np.ndarray, ...]:
    shapes = ((c, d), (c, d), (c, d), (c, 1), (c, 1), (c, 1))
    return tuple(generator.normal(size=shape) for shape in shapes)


TWO_HEADS = load_set(
    "two-heads",
    {
        "head": FunctionCheck((_head_cases,)),
        "stacked": FunctionCheck((_two_head_cases,)),
        "projected": FunctionCheck((_projection_cases,)),
        "split": FunctionCheck((_split_cases,)),
    },
)
