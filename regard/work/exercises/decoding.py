"""From probabilities to text: sampling, ranks, top-k, the nucleus, beam search."""

from collections.abc import Callable
from functools import partial

import numpy as np

from regard.work.attention_steps import Array
from regard.work.exercises.byte_pairs import RHYME
from regard.work.exercises.checks import Case, by_answers, in_any_order, one_after_the_other
from regard.work.exercises.exercise import Exercise, Exercises, PlantedMistake
from regard.work.exercises.solutions import decoding as solutions

Step = Callable[[list[int]], Array]

GIVEN = f"""\
from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

Array = NDArray[np.float64]

rhyme = (
    "{RHYME[:107]}"
    "{RHYME[107:]}"
)
letters = sorted(set(rhyme))
follows = np.full((len(letters), len(letters)), 0.01)
for one, other in zip(rhyme, rhyme[1:]):
    follows[letters.index(one), letters.index(other)] += 1
follows /= follows.sum(axis=1, keepdims=True)


def step(tokens: list[int]) -> Array:
    return follows[tokens[-1]]
"""

ABOUT = """\
A language model gives a probability to each token that may come next. How a text is made of them is another matter:
drawn at random, always the likeliest, drawn among the likeliest, or searched for. A token is a whole number here, and
probabilities are a vector.

The cell below counts which letter follows which in a rhyme. `step(tokens)` gives the probabilities of the next letter,
and `letters[token]` is the letter.
"""


def _distributions() -> list[Array]:
    draws = np.random.default_rng(7)
    drawn = [draws.dirichlet(np.full(size, 0.7)) for size in (5, 7, 11)]
    return [np.array([0.1, 0.4, 0.05, 0.25, 0.2]), *drawn]


def _drawn() -> list[Case]:
    return [(p, draw) for p in _distributions() for draw in (0.0, 0.07, 0.31, 0.52, 0.77, 0.999)]


def _on_the_line() -> list[Case]:
    """Draws that a sum meets exactly, in numbers that floats hold exactly."""
    first, last = np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.5, 0.5])
    return [(last, 0.0), (last, 0.5), (first, 0.5), (first, 0.75)]


def _ranked() -> list[Case]:
    return [(p, k) for p in _distributions() for k in (1, 2, 4)]


def _cut() -> list[Case]:
    return [(p, k) for p in _distributions() for k in (1, 2, 3, 5)]


def _equals() -> list[Case]:
    """Tokens that are equally likely, of which only some may be kept."""
    return [(np.array([0.25, 0.125, 0.25, 0.25, 0.125]), k) for k in (1, 2, 4)]


def _masses() -> list[Case]:
    return [(p, mass) for p in _distributions() for mass in (0.05, 0.3, 0.6, 0.9)]


def _masses_met() -> list[Case]:
    """Masses that a sum meets exactly, in numbers that floats hold exactly."""
    return [(np.array([0.125, 0.5, 0.0625, 0.25, 0.0625]), mass) for mass in (0.5, 0.75, 0.875)]


def _searches() -> list[Case]:
    draws = np.random.default_rng(8)
    cases: list[Case] = []
    for size, beams, length in ((5, 3, 4), (4, 2, 5), (6, 4, 3), (3, 1, 4)):
        table = draws.dirichlet(np.full(size, 0.6), size=size)
        cases.append((partial(_next, table), int(draws.integers(size)), beams, length))
    # the likeliest first token leads where nothing is likely: only a search that looks back finds the other way
    trap = np.array([[0.0, 0.55, 0.45, 0.0], [0.3, 0.25, 0.25, 0.2], [0.0, 0.0, 0.02, 0.98], [0.02, 0.0, 0.0, 0.98]])
    cases.append((partial(_next, trap), 0, 2, 2))
    return cases


def _next(table: Array, tokens: list[int]) -> Array:
    row: Array = table[tokens[-1]]
    return row


def _looking_back() -> list[Case]:
    """Steps that depend on more than the last token, as those of a language model do."""
    draws = np.random.default_rng(9)
    tables = draws.dirichlet(np.full(4, 0.5), size=(4, 4))
    return [(partial(_next_of_two, tables), start, beams, 4) for start, beams in ((0, 3), (2, 2), (3, 1))]


def _next_of_two(tables: Array, tokens: list[int]) -> Array:
    row: Array = tables[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
    return row


def _sample(p: Array, draw: float, *, way: str) -> int:
    if way == "late":
        return int(np.searchsorted(np.cumsum(p), draw, side="right")) + 1
    if way == "at the draw":
        return int(np.searchsorted(np.cumsum(p), draw, side="left"))
    if way == "sorted":
        order = np.argsort(-p, kind="stable")
        return int(order[np.searchsorted(np.cumsum(p[order]), draw, side="right")])
    if way == "rank":
        order = np.argsort(-p, kind="stable")
        return int(np.searchsorted(np.cumsum(p[order]), draw, side="right"))
    if way == "even":
        return int(draw * len(p))
    if way == "nearest":
        return int(np.abs(p - draw).argmin())
    return int(p.argmax())


def _rank(p: Array, k: int, *, way: str) -> float:
    order = np.argsort(-p, kind="stable")
    if way == "from zero":
        return int(order[min(k, len(p) - 1)])
    if way == "least":
        return int(np.argsort(p, kind="stable")[k - 1])
    if way == "probability":
        return float(p[order[k - 1]])
    return int(p.argmax())


def _top(p: Array, k: int, *, way: str) -> Array:
    order = np.argsort(-p, kind="stable")
    best = {"least": order[::-1][:k], "first": np.arange(k), "one more": order[: k + 1]}.get(way, order[:k])
    if way == "threshold":
        best = np.flatnonzero(p >= p[order[k - 1]])
    kept = np.zeros_like(p)
    kept[best] = p[best]
    if way == "not renormalised":
        return kept
    if way == "softmax":
        kept[best] = np.exp(p[best])
    if way == "equal":
        kept[best] = 1.0
    scaled: Array = kept / kept.sum()
    return scaled


def _nucleus(p: Array, mass: float, *, way: str) -> Array:
    order = np.arange(len(p)) if way == "unsorted" else np.argsort(-p, kind="stable")
    after = np.cumsum(p[order])
    before = after - p[order]
    best = order[before < mass]
    if way == "crossing dropped":
        best = order[after <= mass]
    if way == "one more":
        best = order[: len(best) + 1]
    if way == "one more where met":
        best = order[before <= mass]
    if way == "threshold":
        best = np.flatnonzero(p >= mass)
    if way == "least":
        best = order[before >= mass]
    kept = np.zeros_like(p)
    kept[best] = p[best]
    if way == "not renormalised":
        return kept
    scaled: Array = kept / kept.sum()
    return scaled


def _beam(step: Step, start: int, beams: int, length: int, *, way: str) -> tuple[list[int], float]:
    """Beam search with one thing wrong."""
    kept: list[tuple[list[int], float]] = [([start], 0.0)]
    for _ in range(length):
        longer: list[tuple[list[int], float]] = []
        for tokens, score in kept:
            for token, p in enumerate(step(tokens[-1:] if way == "last token" else tokens)):
                if p > 0:
                    gain = float(p) if way == "no log" else float(np.log(p))
                    longer.append(([*tokens, token], gain if way == "last step" else score + gain))
        longer.sort(key=lambda each: each[1] if way == "worst" else -each[1])
        kept = longer[: 1 if way == "greedy" else beams]
    tokens, score = kept[0]
    if way == "probability":
        return tokens, float(np.exp(score))
    if way == "start left out":
        return tokens[1:], score
    if way == "last kept":
        return kept[-1]
    return tokens, score


DECODING = Exercises(
    name="decoding",
    title="From probabilities to text",
    about=ABOUT,
    given=GIVEN,
    tasks=(
        Exercise(
            name="sample",
            title="Sampling",
            prompt="""\
Write `sample`: add the probabilities up in the order of the tokens, and return the first token at which the sum exceeds
`draw`, a number from 0 to 1. With probabilities 0.1, 0.4, 0.5 a draw of 0.3 gives token 1.
""",
            starter='''\
def sample(probabilities: Float[Array, "w"], draw: float) -> int:
    """The token at which the probabilities, summed up in order, first exceed a number drawn from 0 to 1."""
    # TODO: np.cumsum, and the first place where it is above draw
    raise NotImplementedError
''',
            solution=solutions.sample,
            check=by_answers(_drawn, _on_the_line),
            slips=(
                PlantedMistake(
                    "always the likeliest",
                    "whatever the draw, this is the likeliest token: that is greedy decoding, not sampling.",
                    partial(_sample, way="likeliest"),
                ),
                PlantedMistake(
                    "off by one",
                    "this is the token after the one where the sum exceeds the draw; tokens are counted from 0.",
                    partial(_sample, way="late"),
                ),
                PlantedMistake(
                    "summed in another order",
                    "the probabilities were sorted before they were summed up; keep the order of the tokens.",
                    partial(_sample, way="sorted"),
                ),
                PlantedMistake(
                    "rank instead of token",
                    "the probabilities were sorted, and what comes back is a rank, not a token.",
                    partial(_sample, way="rank"),
                ),
                PlantedMistake(
                    "all tokens alike",
                    "every token has the same chance here; the sum of the probabilities decides.",
                    partial(_sample, way="even"),
                ),
                PlantedMistake(
                    "nearest probability",
                    "this is the token whose probability is nearest to the draw; sum them up first.",
                    partial(_sample, way="nearest"),
                ),
                PlantedMistake(
                    "sum that only meets the draw",
                    "the sum meets the draw here, but does not exceed it: with `>=` a token of probability 0 can be "
                    "drawn. Compare with `>`.",
                    partial(_sample, way="at the draw"),
                ),
            ),
        ),
        Exercise(
            name="kth",
            title="Greedy, and the k-th likeliest",
            prompt="""\
Write `kth_likeliest`: the token of rank k by probability. Rank 1 is the likeliest, which makes it greedy decoding.
""",
            starter='''\
def kth_likeliest(probabilities: Float[Array, "w"], k: int) -> int:
    """The token of rank k: the likeliest for k = 1, which is greedy decoding."""
    # TODO: np.argsort, from the largest down
    raise NotImplementedError
''',
            solution=solutions.kth_likeliest,
            check=by_answers(_ranked),
            slips=(
                PlantedMistake(
                    "ranks from zero",
                    "this is one rank too far: k = 1 is the likeliest, which stands at place 0.",
                    partial(_rank, way="from zero"),
                ),
                PlantedMistake(
                    "k-th unlikeliest",
                    "np.argsort goes from small to large, so this is the k-th unlikeliest; sort -probabilities.",
                    partial(_rank, way="least"),
                ),
                PlantedMistake(
                    "probability instead of token",
                    "this is the probability of the token; return the token itself, its place.",
                    partial(_rank, way="probability"),
                ),
                PlantedMistake("k left out", "this is the likeliest token for any k.", partial(_rank, way="likeliest")),
            ),
        ),
        Exercise(
            name="top-k",
            title="Top-k",
            prompt="""\
Write `top_k`: the probabilities of the k likeliest tokens, zero for all others, made to add up to one again. k may be
as large as the vocabulary.
""",
            starter='''\
def top_k(probabilities: Float[Array, "w"], k: int) -> Float[Array, "w"]:
    """The k likeliest tokens, with probabilities that add up to one again."""
    # TODO: keep k, zero the rest, divide by what is left
    raise NotImplementedError
''',
            solution=solutions.top_k,
            check=one_after_the_other(by_answers(_cut), in_any_order(_equals)),
            slips=(
                PlantedMistake(
                    "top-k without renormalising",
                    "the right tokens are kept, but they no longer add up to one: divide by their sum.",
                    partial(_top, way="not renormalised"),
                ),
                PlantedMistake(
                    "unlikeliest kept",
                    "the k unlikeliest were kept: np.argsort goes from small to large.",
                    partial(_top, way="least"),
                ),
                PlantedMistake(
                    "first k kept",
                    "the first k of the vocabulary were kept; sort by probability.",
                    partial(_top, way="first"),
                ),
                PlantedMistake(
                    "renormalised by softmax",
                    "a softmax of probabilities flattens them; they are probabilities already, so divide by their sum.",
                    partial(_top, way="softmax"),
                ),
                PlantedMistake(
                    "kept tokens alike",
                    "the kept tokens all have the same probability; they keep their own, divided by the sum.",
                    partial(_top, way="equal"),
                ),
                PlantedMistake("one token too many", "k + 1 tokens were kept.", partial(_top, way="one more")),
                PlantedMistake(
                    "more than k where some are equal",
                    "all tokens as likely as the k-th were kept, which can be more than k; keep exactly k, whichever "
                    "of the equal ones.",
                    partial(_top, way="threshold"),
                ),
            ),
        ),
        Exercise(
            name="nucleus",
            title="Nucleus sampling",
            prompt="""\
Write `nucleus`: the fewest of the likeliest tokens that together have at least `mass`, zero for all others, made to add
up to one again. The token that crosses the line belongs to them: with 0.5, 0.3, 0.2 and a mass of 0.6 two are kept.
""",
            starter='''\
def nucleus(probabilities: Float[Array, "w"], mass: float) -> Float[Array, "w"]:
    """The fewest of the likeliest tokens that have at least this mass, made to add up to one again."""
    # TODO: sort, np.cumsum, keep up to and with the token that crosses, divide by what is left
    raise NotImplementedError
''',
            solution=solutions.nucleus,
            check=by_answers(_masses, _masses_met),
            slips=(
                PlantedMistake(
                    "crossing token dropped",
                    "the token with which the sum crosses the mass was left out, so that less than the mass is kept, "
                    "sometimes nothing. Keep a token if the sum *before* it is below the mass.",
                    partial(_nucleus, way="crossing dropped"),
                ),
                PlantedMistake(
                    "one more where the mass is met",
                    "the sum meets the mass exactly, and one token more was kept; at least the mass is enough.",
                    partial(_nucleus, way="one more where met"),
                ),
                PlantedMistake(
                    "nucleus without renormalising",
                    "the right tokens are kept, but they no longer add up to one: divide by their sum.",
                    partial(_nucleus, way="not renormalised"),
                ),
                PlantedMistake(
                    "nucleus unsorted",
                    "the sum went through the tokens in the order of the vocabulary; begin with the likeliest.",
                    partial(_nucleus, way="unsorted"),
                ),
                PlantedMistake(
                    "mass taken as a threshold",
                    "tokens with at least this probability were kept. The mass is that of all kept tokens together.",
                    partial(_nucleus, way="threshold"),
                ),
                PlantedMistake(
                    "one token too many",
                    "one token after the crossing was kept too.",
                    partial(_nucleus, way="one more"),
                ),
                PlantedMistake(
                    "the rest kept", "what lies outside the nucleus was kept.", partial(_nucleus, way="least")
                ),
            ),
        ),
        Exercise(
            name="beam",
            title="Beam search",
            prompt="""\
Write `beam_search`: begin with `[start]`; at each of `length` steps extend every text that is kept by every token of
`step(tokens)`, and keep the `beams` likeliest. Probabilities multiply, so their logarithms add up; leave out what has
probability 0. Return the likeliest text, with its start, and the logarithm of its probability.
""",
            starter='''\
def beam_search(step: Callable[[list[int]], Array], start: int, beams: int, length: int) -> tuple[list[int], float]:
    """The likeliest text found by keeping the best few at every step, and the logarithm of its probability."""
    kept: list[tuple[list[int], float]] = [([start], 0.0)]
    # TODO: extend each of them by each token, add the logarithm of its probability, sort, keep the best
    raise NotImplementedError
''',
            solution=solutions.beam_search,
            check=by_answers(_searches, _looking_back),
            slips=(
                PlantedMistake(
                    "beam that forgets log",
                    "probabilities were added up. They multiply: add their logarithms, np.log.",
                    partial(_beam, way="no log"),
                ),
                PlantedMistake(
                    "beam of one",
                    "only the likeliest text was kept at each step, as in greedy decoding; keep `beams` of them.",
                    partial(_beam, way="greedy"),
                ),
                PlantedMistake(
                    "score of the last step alone",
                    "texts were compared by their last token only; add to the score they had.",
                    partial(_beam, way="last step"),
                ),
                PlantedMistake(
                    "last token alone",
                    "`step` was handed only the last token; what comes next depends on the whole text: step(tokens).",
                    partial(_beam, way="last token"),
                ),
                PlantedMistake(
                    "probability instead of its logarithm",
                    "the text is right; return the logarithm of its probability beside it.",
                    partial(_beam, way="probability"),
                ),
                PlantedMistake(
                    "worst kept",
                    "the unlikeliest texts were kept: sort from the largest down.",
                    partial(_beam, way="worst"),
                ),
                PlantedMistake(
                    "start left out",
                    "the text should begin with the token it started from.",
                    partial(_beam, way="start left out"),
                ),
                PlantedMistake(
                    "last of the beam",
                    "this is the last text that was kept; return the likeliest, the first.",
                    partial(_beam, way="last kept"),
                ),
            ),
        ),
    ),
)
