"""Self-attention with tokens in columns: the softmax, the mechanism, the scale."""

from functools import partial

import numpy as np

from regard.work.attention_steps import Array
from regard.work.exercises.checks import Case, by_answers
from regard.work.exercises.exercise import Exercise, Exercises, PlantedMistake
from regard.work.exercises.solutions import self_attention as solutions

GIVEN = """\
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

Array = NDArray[np.float64]

tokens, width = 3, 4
np.random.seed(3)
X = np.concatenate([np.random.normal(size=(width, 1)) for _ in range(tokens)], axis=1)
np.random.seed(0)
omega_q, omega_k, omega_v = (np.random.normal(size=(width, width)) for _ in range(3))
beta_q, beta_k, beta_v = (np.random.normal(size=(width, 1)) for _ in range(3))
"""

ABOUT = """\
A token is a column here: `X` is D x N, one column of length D for each of N tokens. Queries, keys and values are made
from the same columns by three linear maps with biases. Each query is compared with every key, a softmax turns what
comes out into weights, and the output is the values averaged by those weights, again one column a token.

The cell below draws small inputs and weights, the same every time.
"""

ARGUMENTS = """\
    X: Float[Array, "d n"],
    omega_q: Float[Array, "c d"],
    omega_k: Float[Array, "c d"],
    omega_v: Float[Array, "e d"],
    beta_q: Float[Array, "c 1"],
    beta_k: Float[Array, "c 1"],
    beta_v: Float[Array, "e 1"],
"""


def _scores() -> list[Case]:
    draws = np.random.default_rng(1)
    return [(draws.normal(size=(5, 3)),), (draws.normal(size=(4, 4)),)]


def _far_scores() -> list[Case]:
    return [(np.array([[1000.0, -1000.0], [999.0, -1001.0], [0.0, -1000.5]]),)]


def _problems() -> list[Case]:
    """Inputs and weights of odd sizes, the last of them square throughout, as in the given cell."""
    draws = np.random.default_rng(2)
    cases: list[Case] = []
    for d, n, c, e in ((5, 3, 2, 7), (3, 6, 7, 4), (4, 4, 4, 4)):
        shapes = ((d, n), (c, d), (c, d), (e, d), (c, 1), (c, 1), (e, 1))
        cases.append(tuple(draws.normal(size=shape) for shape in shapes))
    return cases


def _softmax(
    scores: Array, *, axis: int | None = 0, exponentials: bool = True, normal: bool = True, shift: str = "axis"
) -> Array:
    """A softmax with one thing wrong."""
    shifts = {"axis": scores.max(axis=axis, keepdims=True), "all": scores.max(), "none": 0.0}
    parts = np.exp(scores - shifts[shift]) if exponentials else scores
    weights: Array = parts / parts.sum(axis=axis, keepdims=True) if normal else np.exp(scores)
    return weights


def _attention(
    *inputs: Array,
    scale: str = "none",
    axis: int | None = 0,
    biases: bool = True,
    crossed: bool = False,
    turned: bool = False,
    mixed: str = "v",
    softmax: bool = True,
) -> Array:
    """Self-attention with one thing wrong."""
    X, omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = inputs
    Q, K, V = omega_q @ X + biases * beta_q, omega_k @ X + biases * beta_k, omega_v @ X + biases * beta_v
    width = len(Q)
    divisors = {"none": 1.0, "root": width**0.5, "width": width, "upside down": width**-0.5}
    divisors |= {"inputs": len(X) ** 0.5, "tokens": X.shape[1] ** 0.5}
    scores = (Q.T @ K if crossed else K.T @ Q) / divisors[scale]
    weights = _softmax(scores, axis=axis) if softmax else scores
    return {"v": V, "x": X}[mixed] @ (weights.T if turned else weights)


def _common(scale: str) -> tuple[PlantedMistake, ...]:
    """Slips that self-attention has with a scale and without one."""
    wrong = partial(_attention, scale=scale)
    return (
        PlantedMistake(
            "softmax over the wrong axis",
            "each row of your weights adds up to one, but each column should: a column holds what one query gives to "
            "all keys. Sum over axis 0.",
            partial(wrong, axis=1),
        ),
        PlantedMistake(
            "softmax over everything",
            "all your weights together add up to one. Every column should by itself: sum over axis 0 only.",
            partial(wrong, axis=None),
        ),
        PlantedMistake(
            "no softmax",
            "the scores went into the mean as they are; they become weights in the softmax.",
            partial(wrong, softmax=False),
        ),
        PlantedMistake(
            "transposed product",
            "your scores are Q'K, which has queries in rows. The softmax runs down columns, so keys must be in rows: "
            "K'Q.",
            partial(wrong, crossed=True),
        ),
        PlantedMistake(
            "transposed weights",
            "the weights were turned over before they met the values. V has a column for each key and the weights a "
            "row for each key: V @ weights.",
            partial(wrong, turned=True),
        ),
        PlantedMistake(
            "forgotten bias",
            "the biases are missing: Q, K and V are omega @ X + beta.",
            partial(wrong, biases=False),
        ),
        PlantedMistake(
            "inputs instead of values",
            "the weights average X itself. They should average V = omega_v @ X + beta_v.",
            partial(wrong, mixed="x"),
        ),
    )


SELF_ATTENTION = Exercises(
    name="self-attention",
    title="Self-attention by columns",
    about=ABOUT,
    given=GIVEN,
    tasks=(
        Exercise(
            name="softmax",
            title="A softmax over columns",
            prompt="""\
Write `softmax_columns`: exponentials of the scores, divided by their sum, so that every column adds up to one. It
should stay finite at scores of 1000 as well: what is subtracted from a whole column before the exponential changes no
weight.
""",
            starter='''\
def softmax_columns(scores: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Weights that add up to one in every column."""
    # TODO: subtract the largest score of each column, take exponentials, divide by their sum
    raise NotImplementedError
''',
            solution=solutions.softmax_columns,
            check=by_answers(_scores, _far_scores),
            slips=(
                PlantedMistake(
                    "softmax over the wrong axis",
                    "each row adds up to one, but each column should: sum over axis 0, and keep that axis.",
                    partial(_softmax, axis=1),
                ),
                PlantedMistake(
                    "softmax over everything",
                    "all entries together add up to one. Every column should by itself: sum over axis 0.",
                    partial(_softmax, axis=None),
                ),
                PlantedMistake(
                    "no exponentials",
                    "the scores were divided by their sum; take np.exp first, so that no weight is negative.",
                    partial(_softmax, exponentials=False),
                ),
                PlantedMistake(
                    "no normalisation",
                    "these are the exponentials alone; divide by the sum of each column.",
                    partial(_softmax, normal=False),
                ),
                PlantedMistake(
                    "overflow",
                    "right for small scores, but exp(1000) is too large for a float. Subtract the largest score of "
                    "each column first: it cancels.",
                    partial(_softmax, shift="none"),
                ),
                PlantedMistake(
                    "largest score of all columns",
                    "right for small scores, but the largest score of the whole matrix was subtracted. Where a column "
                    "lies far below it all exponentials are 0: subtract each column's own largest.",
                    partial(_softmax, shift="all"),
                ),
            ),
        ),
        Exercise(
            name="attention",
            title="Self-attention",
            prompt="""\
Write `self_attention`: Q = omega_q X + beta_q, and K and V alike; weights are the softmax over the columns of K'Q; the
output is V times the weights. There is no scale yet. With the inputs above, the first column of
`self_attention(X, omega_q, omega_k, omega_v, beta_q, beta_k, beta_v)` is 0.94744244, -0.24348429, -0.91310441,
-0.44522983.
""",
            starter=f'''\
def self_attention(
{ARGUMENTS}) -> Float[Array, "e n"]:
    """Every token's mean of the values, weighted by how well keys agree with its query."""
    # TODO: make Q, K and V; the softmax of K'Q; the mean of the values
    raise NotImplementedError
''',
            solution=solutions.self_attention,
            check=by_answers(_problems),
            slips=(
                *_common("none"),
                PlantedMistake(
                    "scale not asked for",
                    "the scores were divided by the root of the width. That is the next exercise.",
                    partial(_attention, scale="root"),
                ),
            ),
        ),
        Exercise(
            name="scaled",
            title="Scaled self-attention",
            prompt="""\
The wider queries and keys are, the farther their products lie apart, and the nearer the softmax is to choosing one key
alone. Write `scaled_self_attention`, in which scores are divided by the root of the width of the queries. With the
inputs above, its first row is 0.97411966, 1.59622051, 1.32638014.
""",
            starter=f'''\
def scaled_self_attention(
{ARGUMENTS}) -> Float[Array, "e n"]:
    """Self-attention whose scores are divided by the root of the queries' width."""
    # TODO: as before, with K'Q divided before the softmax
    raise NotImplementedError
''',
            solution=solutions.scaled_self_attention,
            check=by_answers(_problems),
            slips=(
                PlantedMistake(
                    "missing scale",
                    "the scores went into the softmax as they are: divide them by np.sqrt of the queries' width.",
                    partial(_attention, scale="none"),
                ),
                PlantedMistake(
                    "scale by the width itself",
                    "the scores were divided by the width; divide by its root, np.sqrt.",
                    partial(_attention, scale="width"),
                ),
                PlantedMistake(
                    "scale upside down",
                    "the scores were multiplied by the root of the width; divide.",
                    partial(_attention, scale="upside down"),
                ),
                PlantedMistake(
                    "scale from another width",
                    "the scores were divided by the root of the inputs' width. What counts is how wide queries and "
                    "keys are: Q.shape[0].",
                    partial(_attention, scale="inputs"),
                ),
                PlantedMistake(
                    "scale from the number of tokens",
                    "the scores were divided by the root of the number of tokens: shape[1] counts tokens, shape[0] is "
                    "the width.",
                    partial(_attention, scale="tokens"),
                ),
                *_common("root"),
            ),
        ),
    ),
)
