"""Exercises on decoding, from probabilities to text: sampling, greedy, top-k, nucleus (top-p), beam search."""

from functools import partial

import numpy as np

from regard.work.exercises.byte_pairs import RHYME
from regard.work.exercises.checks import Case, check_outputs, check_sorted_outputs, run_checks
from regard.work.exercises.exercise import Exercise, ExerciseSet, PlantedMistake
from regard.work.exercises.solutions import decoding as solutions

SETUP_CODE = f"""\
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

rhyme = (
    "{RHYME[:107]}"
    "{RHYME[107:]}"
)
letters = sorted(set(rhyme))
follows = np.full((len(letters), len(letters)), 0.01)
for one, other in zip(rhyme, rhyme[1:]):
    follows[letters.index(one), letters.index(other)] += 1
follows /= follows.sum(axis=1, keepdims=True)


def step(tokens: list[int]) -> np.ndarray:
    return follows[tokens[-1]]
"""

ABOUT = """\
A language model gives a probability to each token that may come next. There are several ways to turn these
probabilities into text: draw at random, always take the likeliest token, draw among the likeliest, or search. Here a
token is a whole number, and probabilities are a vector.

The cell below counts which letter follows which in a rhyme. `step(tokens)` returns the probabilities of the next
letter, and `letters[token]` is the letter.
"""


def _distributions() -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    drawn = [generator.dirichlet(np.full(size, 0.7)) for size in (5, 7, 11)]
    return [np.array([0.1, 0.4, 0.05, 0.25, 0.2]), *drawn]


def _sample_cases() -> list[Case]:
    return [(p, draw) for p in _distributions() for draw in (0.0, 0.07, 0.31, 0.52, 0.77, 0.999)]


def _equal_draw_cases() -> list[Case]:
    """Draws that equal a cumulative sum exactly, in numbers that floats represent exactly."""
    first, last = np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.5, 0.5])
    return [(last, 0.0), (last, 0.5), (first, 0.5), (first, 0.75)]


def _rank_cases() -> list[Case]:
    return [(p, k) for p in _distributions() for k in (1, 2, 4)]


def _top_k_cases() -> list[Case]:
    return [(p, k) for p in _distributions() for k in (1, 2, 3, 5)]


def _tie_cases() -> list[Case]:
    """Tokens that are equally likely, of which only some may be kept."""
    return [(np.array([0.25, 0.125, 0.25, 0.25, 0.125]), k) for k in (1, 2, 4)]


def _nucleus_cases() -> list[Case]:
    return [(p, mass) for p in _distributions() for mass in (0.05, 0.3, 0.6, 0.9)]


def _equal_mass_cases() -> list[Case]:
    """Masses that equal a cumulative sum exactly, in numbers that floats represent exactly."""
    return [(np.array([0.125, 0.5, 0.0625, 0.25, 0.0625]), mass) for mass in (0.5, 0.75, 0.875)]


def _beam_cases() -> list[Case]:
    generator = np.random.default_rng(8)
    cases: list[Case] = []
    for size, beams, length in ((5, 3, 4), (4, 2, 5), (6, 4, 3), (3, 1, 4)):
        table = generator.dirichlet(np.full(size, 0.6), size=size)
        cases.append((partial(_next_token, table), int(generator.integers(size)), beams, length))
    # the likeliest first token leads to unlikely ones: greedy decoding misses the likeliest text
    trap = np.array([[0.0, 0.55, 0.45, 0.0], [0.3, 0.25, 0.25, 0.2], [0.0, 0.0, 0.02, 0.98], [0.02, 0.0, 0.0, 0.98]])
    cases.append((partial(_next_token, trap), 0, 2, 2))
    return cases


def _long_memory_cases() -> list[Case]:
    """Steps that depend on more than the last token, as in a language model."""
    tables = np.random.default_rng(9).dirichlet(np.full(4, 0.5), size=(4, 4))
    return [(partial(_next_of_two, tables), start, beams, 4) for start, beams in ((0, 3), (2, 2), (3, 1))]


def _next_token(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    row: np.ndarray = table[tokens[-1]]
    return row


def _next_of_two(tables: np.ndarray, tokens: list[int]) -> np.ndarray:
    row: np.ndarray = tables[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
    return row


SAMPLED = "min(above, len(probabilities) - 1)"
SORTED = {"np.cumsum(probabilities)": "np.cumsum(-np.sort(-probabilities))"}
ORDER = 'np.argsort(-probabilities, kind="stable")'
NOT_RESCALED = {"kept / kept.sum()": "kept"}
NUCLEUS = "order[before < mass]"

DECODING = ExerciseSet(
    name="decoding",
    title="From probabilities to text",
    about=ABOUT,
    setup_code=SETUP_CODE,
    exercises=(
        Exercise(
            name="sample",
            title="Sampling",
            prompt="""\
Write `sample`: add up the probabilities in the order of the tokens, and return the first token at which the sum exceeds
`draw`, a number from 0 to 1. With probabilities 0.1, 0.4, 0.5 a draw of 0.3 gives token 1.
""",
            solution=solutions.sample,
            check=check_outputs(_sample_cases, _equal_draw_cases),
            mistakes=(
                PlantedMistake(
                    "always the likeliest",
                    "this is the likeliest token for every draw. That is greedy decoding, not sampling.",
                    {SAMPLED: "int(probabilities.argmax())"},
                ),
                PlantedMistake(
                    "off by one",
                    "this is the token after the one where the sum exceeds the draw; tokens are counted from 0.",
                    {SAMPLED: "above + 1"},
                ),
                PlantedMistake(
                    "summed in another order",
                    "you sorted the probabilities before adding them up; keep the order of the tokens.",
                    {**SORTED, SAMPLED: f"int({ORDER}[above])"},
                ),
                PlantedMistake(
                    "rank instead of token",
                    "you sorted the probabilities and returned a rank, not a token.",
                    SORTED,
                ),
                PlantedMistake(
                    "uniform sampling",
                    "every token has the same chance here. Use the cumulative sum of the probabilities.",
                    {SAMPLED: "int(draw * len(probabilities))"},
                ),
                PlantedMistake(
                    "sum equal to the draw",
                    "the sum equals the draw here but does not exceed it. With `>=` a token of probability 0 can be "
                    "drawn. Compare with `>`.",
                    {'side="right"': 'side="left"'},
                ),
            ),
        ),
        Exercise(
            name="kth",
            title="Greedy, and the k-th likeliest",
            prompt="""\
Write `kth_likeliest`: the token of rank k by probability. Rank 1 is the likeliest token, which is greedy decoding.
""",
            solution=solutions.kth_likeliest,
            check=check_outputs(_rank_cases),
            mistakes=(
                PlantedMistake(
                    "ranks from zero",
                    "this is one rank too far: k = 1 is the likeliest token, which is at index 0.",
                    {"[k - 1]": "[min(k, len(probabilities) - 1)]"},
                ),
                PlantedMistake(
                    "k-th unlikeliest",
                    "np.argsort sorts from small to large, so this is the k-th unlikeliest. Sort -probabilities.",
                    {ORDER: 'np.argsort(probabilities, kind="stable")'},
                ),
                PlantedMistake(
                    "probability instead of token",
                    "this is the probability of the token; return the token itself, its index.",
                    {f"int({ORDER}[k - 1])": "float(-np.sort(-probabilities)[k - 1])"},
                ),
                PlantedMistake("k ignored", "this is the likeliest token for every k.", {"[k - 1]": "[0]"}),
            ),
        ),
        Exercise(
            name="top-k",
            title="Top-k",
            prompt="""\
Write `top_k`: the probabilities of the k likeliest tokens, zero for all others, rescaled to add up to one. k may be as
large as the vocabulary.
""",
            solution=solutions.top_k,
            check=run_checks(check_outputs(_top_k_cases), check_sorted_outputs(_tie_cases)),
            mistakes=(
                PlantedMistake(
                    "top-k without rescaling",
                    "you kept the right tokens, but they no longer add up to one: divide by their sum.",
                    NOT_RESCALED,
                ),
                PlantedMistake(
                    "unlikeliest kept",
                    "you kept the k unlikeliest tokens: np.argsort sorts from small to large.",
                    {"[:k]": "[::-1][:k]"},
                ),
                PlantedMistake(
                    "rescaled by softmax",
                    "a softmax of probabilities flattens them. They are probabilities already: divide by their sum.",
                    {"= probabilities[best]": "= np.exp(probabilities[best])"},
                ),
                PlantedMistake("one token too many", "you kept k + 1 tokens.", {"[:k]": "[: k + 1]"}),
                PlantedMistake(
                    "more than k on a tie",
                    "you kept all tokens as likely as the k-th, which can be more than k. Keep exactly k of them; it "
                    "does not matter which of the equally likely ones.",
                    {f"{ORDER}[:k]": "np.flatnonzero(probabilities >= -np.sort(-probabilities)[k - 1])"},
                ),
            ),
        ),
        Exercise(
            name="nucleus",
            title="Nucleus sampling",
            prompt="""\
Write `nucleus` (top-p): the fewest of the likeliest tokens that together have at least `mass`, zero for all others,
rescaled to add up to one. The token that reaches the mass is included: with 0.5, 0.3, 0.2 and a mass of 0.6 two tokens
are kept.
""",
            solution=solutions.nucleus,
            check=check_outputs(_nucleus_cases, _equal_mass_cases),
            mistakes=(
                PlantedMistake(
                    "crossing token dropped",
                    "you left out the token with which the sum reaches the mass, so less than the mass is kept, "
                    "sometimes nothing. Keep a token if the sum *before* it is below the mass.",
                    {"before < mass": "np.cumsum(probabilities[order]) <= mass"},
                ),
                PlantedMistake(
                    "one more on equality",
                    "the sum equals the mass exactly, and you kept one more token; at least the mass is enough.",
                    {"before < mass": "before <= mass"},
                ),
                PlantedMistake(
                    "nucleus without rescaling",
                    "you kept the right tokens, but they no longer add up to one: divide by their sum.",
                    NOT_RESCALED,
                ),
                PlantedMistake(
                    "nucleus unsorted",
                    "you added up the tokens in the order of the vocabulary; begin with the likeliest.",
                    {f"order = {ORDER}": "order = np.arange(len(probabilities))"},
                ),
                PlantedMistake(
                    "mass used as a threshold",
                    "you kept tokens with at least this probability. The mass is that of all kept tokens together.",
                    {NUCLEUS: "np.flatnonzero(probabilities >= mass)"},
                ),
                PlantedMistake(
                    "one token too many",
                    "you also kept the token after the one that reaches the mass.",
                    {NUCLEUS: "order[: (before < mass).sum() + 1]"},
                ),
            ),
        ),
        Exercise(
            name="beam",
            title="Beam search",
            prompt="""\
Write `beam_search`: begin with `[start]`. At each of `length` steps extend every kept text by every token of
`step(tokens)`, and keep the `beams` likeliest texts. Probabilities multiply, so their logarithms add up; skip tokens of
probability 0. Return the likeliest text, including its start, and the logarithm of its probability.
""",
            solution=solutions.beam_search,
            check=check_outputs(_beam_cases, _long_memory_cases),
            mistakes=(
                PlantedMistake(
                    "beam search without log",
                    "you added up probabilities. They multiply: add their logarithms, np.log.",
                    {"float(np.log(probability))": "float(probability)"},
                ),
                PlantedMistake(
                    "beam of one",
                    "you kept only the likeliest text at each step, as in greedy decoding; keep `beams` of them.",
                    {"[:beams]": "[:1]"},
                ),
                PlantedMistake(
                    "score of the last step alone",
                    "you compared texts by their last token only; add its score to the score of the text.",
                    {"score + float(np.log(probability))": "float(np.log(probability))"},
                ),
                PlantedMistake(
                    "last token alone",
                    "you passed only the last token to `step`. The next token depends on the whole text: step(tokens).",
                    {"step(tokens)": "step(tokens[-1:])"},
                ),
                PlantedMistake(
                    "probability instead of its logarithm",
                    "the text is right; return the logarithm of its probability with it.",
                    {"return kept[0]": "return kept[0][0], float(np.exp(kept[0][1]))"},
                ),
                PlantedMistake(
                    "start left out",
                    "the text should begin with the token it started from.",
                    {"return kept[0]": "return kept[0][0][1:], kept[0][1]"},
                ),
            ),
        ),
    ),
)
