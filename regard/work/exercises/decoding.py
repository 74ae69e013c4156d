"""Checks of the exercises on decoding: sampling, greedy, top-k, nucleus (top-p), beam search."""

import numpy as np

from regard.work.exercises.checks import Case, FunctionCheck
from regard.work.exercises.exercise import load_set
from regard.work.exercises.run_answer import NextTokenTable


def _distributions(generator: np.random.Generator) -> list[np.ndarray]:
    drawn = [generator.dirichlet(np.full(size, 0.7)) for size in (5, 7, 11)]
    return [np.array([0.1, 0.4, 0.05, 0.25, 0.2]), *drawn]


def _sample_cases(generator: np.random.Generator) -> list[Case]:
    draws = (0.0, 0.07, 0.31, 0.52, 0.77, 0.999)
    return [(p, draw) for p in _distributions(generator) for draw in draws]


def _equal_draw_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases for sampling where the random number equals a cumulative sum of probabilities exactly.

    All numbers are exact in floating point.
    """
    first, last = np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.5, 0.5])
    return [(last, 0.0), (last, 0.5), (first, 0.5), (first, 0.75)]


def _rank_cases(generator: np.random.Generator) -> list[Case]:
    return [(p, k) for p in _distributions(generator) for k in (1, 2, 4)]


def _top_k_cases(generator: np.random.Generator) -> list[Case]:
    return [(p, k) for p in _distributions(generator) for k in (1, 2, 3, 5)]


def _tie_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases for top-k with equally likely tokens of which top-k keeps only some."""
    return [(np.array([0.25, 0.125, 0.25, 0.25, 0.125]), k) for k in (1, 2, 4)]


def _nucleus_cases(generator: np.random.Generator) -> list[Case]:
    return [(p, mass) for p in _distributions(generator) for mass in (0.05, 0.3, 0.6, 0.9)]


def _equal_mass_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases for nucleus sampling where the mass equals a cumulative sum of probabilities exactly.

    All numbers are exact in floating point.
    """
    return [(np.array([0.125, 0.5, 0.0625, 0.25, 0.0625]), mass) for mass in (0.5, 0.75, 0.875)]


def _beam_cases(generator: np.random.Generator) -> list[Case]:
    cases: list[Case] = []
    for size, beams, length in ((5, 3, 4), (4, 2, 5), (6, 4, 3), (3, 1, 4)):
        table = generator.dirichlet(np.full(size, 0.6), size=size)
        cases.append((NextTokenTable(table), int(generator.integers(size)), beams, length))
    # the likeliest first token leads to unlikely ones: greedy decoding misses the likeliest text
    trap = np.array([[0.0, 0.55, 0.45, 0.0], [0.3, 0.25, 0.25, 0.2], [0.0, 0.0, 0.02, 0.98], [0.02, 0.0, 0.0, 0.98]])
    return [*cases, (NextTokenTable(trap), 0, 2, 2)]


def _long_memory_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases for beam search where the next token depends on the last two tokens, not only on the last."""
    tables = NextTokenTable(generator.dirichlet(np.full(4, 0.5), size=(4, 4)))
    return [(tables, start, beams, 4) for start, beams in ((0, 3), (2, 2), (3, 1))]


DECODING = load_set(
    "decoding",
    {
        "sample": FunctionCheck((_sample_cases, _equal_draw_cases)),
        "kth": FunctionCheck((_rank_cases,)),
        "top-k": FunctionCheck((_top_k_cases,), unordered=_tie_cases),
        "nucleus": FunctionCheck((_nucleus_cases, _equal_mass_cases)),
        "beam": FunctionCheck((_beam_cases, _long_memory_cases)),
    },
)
