"""Exercises on self-attention with tokens in columns: the softmax, the mechanism, the scale."""

import numpy as np

from regard.work.exercises.checks import Case, check_outputs
from regard.work.exercises.exercise import Exercise, ExerciseSet, PlantedMistake
from regard.work.exercises.solutions import self_attention as solutions

SETUP_CODE = """\
import numpy as np
from jaxtyping import Float

tokens, width = 3, 4
np.random.seed(3)
X = np.concatenate([np.random.normal(size=(width, 1)) for _ in range(tokens)], axis=1)
np.random.seed(0)
omega_q, omega_k, omega_v = (np.random.normal(size=(width, width)) for _ in range(3))
beta_q, beta_k, beta_v = (np.random.normal(size=(width, 1)) for _ in range(3))
"""

ABOUT = """\
Here a token is a column: `X` is D x N, one column of length D for each of N tokens. Three linear maps with biases turn
the columns into queries, keys and values. Each query is compared with every key. A softmax turns these scores into
weights. The output is the average of the values with these weights, again one column per token.

The cell below draws small inputs and weights; they are the same every time.
"""


def _score_cases() -> list[Case]:
    generator = np.random.default_rng(1)
    return [(generator.normal(size=(5, 3)),), (generator.normal(size=(4, 4)),)]


def _large_score_cases() -> list[Case]:
    return [(np.array([[1000.0, -1000.0], [999.0, -1001.0], [0.0, -1000.5]]),)]


def _attention_cases() -> list[Case]:
    """Inputs and weights of odd sizes; in the last case all of them are square, as in the first cell."""
    generator = np.random.default_rng(2)
    cases: list[Case] = []
    for d, n, c, e in ((5, 3, 2, 7), (3, 6, 7, 4), (4, 4, 4, 4)):
        shapes = ((d, n), (c, d), (c, d), (e, d), (c, 1), (c, 1), (e, 1))
        cases.append(tuple(generator.normal(size=shape) for shape in shapes))
    return cases


NORMALISED = "exponentials / exponentials.sum(axis=0, keepdims=True)"
ATTENTION_MISTAKES = (
    PlantedMistake(
        "softmax over the wrong axis",
        "each row of your weights adds up to one, but each column should. A column holds the weights that one query "
        "gives to all keys. Sum over axis 0.",
        {"axis=0": "axis=1"},
    ),
    PlantedMistake(
        "softmax over everything",
        "all your weights together add up to one. Each column should add up to one: sum over axis 0 only.",
        {"axis=0": "axis=None"},
    ),
    PlantedMistake(
        "no softmax",
        "you averaged with the scores themselves. Apply the softmax to turn them into weights.",
        {NORMALISED: "scores"},
    ),
    PlantedMistake(
        "transposed product",
        "your scores are Q.T @ K, which has queries in rows. The softmax runs down the columns, so keys must be in "
        "rows: K.T @ Q.",
        {"K.T @ Q": "Q.T @ K"},
    ),
    PlantedMistake(
        "transposed weights",
        "you transposed the weights before the product with the values. V has a column for each key, and the weights "
        "have a row for each key: V @ weights.",
        {NORMALISED: f"({NORMALISED}).T"},
    ),
    PlantedMistake(
        "forgotten bias",
        "the biases are missing: Q, K and V are omega @ X + beta.",
        {" + beta_q": "", " + beta_k": "", " + beta_v": ""},
    ),
    PlantedMistake(
        "inputs instead of values",
        "you averaged X itself. Average the values, V = omega_v @ X + beta_v.",
        {"V @ softmax_columns": "X @ softmax_columns"},
    ),
)

SELF_ATTENTION = ExerciseSet(
    name="self-attention",
    title="Self-attention by columns",
    about=ABOUT,
    setup_code=SETUP_CODE,
    exercises=(
        Exercise(
            name="softmax",
            title="A softmax over columns",
            prompt="""\
Write `softmax_columns`: take the exponentials of the scores and divide them by their sum, so that every column adds up
to one. The result should stay finite for scores of 1000 too. Subtracting the same number from a whole column before
the exponential does not change the weights.
""",
            solution=solutions.softmax_columns,
            check=check_outputs(_score_cases, _large_score_cases),
            mistakes=(
                PlantedMistake(
                    "softmax over the wrong axis",
                    "each row adds up to one, but each column should: sum over axis 0, with keepdims=True.",
                    {"axis=0": "axis=1"},
                ),
                PlantedMistake(
                    "softmax over everything",
                    "all entries together add up to one. Each column should add up to one: sum over axis 0.",
                    {"axis=0": "axis=None"},
                ),
                PlantedMistake(
                    "no exponentials",
                    "you divided the scores by their sum. Take np.exp first, so that no weight is negative.",
                    {"np.exp(scores - scores.max(axis=0, keepdims=True))": "scores"},
                ),
                PlantedMistake(
                    "no normalisation",
                    "these are the exponentials only. Divide them by the sum of each column.",
                    {NORMALISED: "np.exp(scores)"},
                ),
                PlantedMistake(
                    "overflow",
                    "correct for small scores, but exp(1000) is too large for a float. Subtract the largest score of "
                    "each column first; it cancels.",
                    {" - scores.max(axis=0, keepdims=True)": ""},
                ),
                PlantedMistake(
                    "largest score of all columns",
                    "correct for small scores, but you subtracted the largest score of the whole matrix. In a column "
                    "of much smaller scores all exponentials become 0. Subtract the largest score of each column.",
                    {"scores.max(axis=0, keepdims=True)": "scores.max()"},
                ),
            ),
        ),
        Exercise(
            name="attention",
            title="Self-attention",
            prompt="""\
Write `self_attention`: Q = omega_q X + beta_q, and K and V alike. The weights are the softmax over the columns
of K'Q, and the output is V times the weights. There is no scale yet. With the inputs above, the first column of
`self_attention(X, omega_q, omega_k, omega_v, beta_q, beta_k, beta_v)` is 0.94744244, -0.24348429, -0.91310441,
-0.44522983.
""",
            solution=solutions.self_attention,
            check=check_outputs(_attention_cases),
            mistakes=(
                *ATTENTION_MISTAKES,
                PlantedMistake(
                    "unwanted scale",
                    "you divided the scores by the square root of the width. That is the next exercise.",
                    {"softmax_columns(K.T @ Q)": "softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))"},
                ),
            ),
        ),
        Exercise(
            name="scaled",
            title="Scaled self-attention",
            prompt="""\
The wider queries and keys are, the more their dot products vary, and the closer the softmax comes to choosing a single
key. Write `scaled_self_attention`, which divides the scores by the square root of the width of the queries. With the
inputs above, its first row is 0.97411966, 1.59622051, 1.32638014.
""",
            solution=solutions.scaled_self_attention,
            check=check_outputs(_attention_cases),
            mistakes=(
                PlantedMistake(
                    "missing scale",
                    "you did not divide the scores. Divide them by np.sqrt of the width of the queries.",
                    {" / np.sqrt(Q.shape[0])": ""},
                ),
                PlantedMistake(
                    "scale by the width itself",
                    "you divided the scores by the width. Divide by its square root, np.sqrt.",
                    {"np.sqrt(Q.shape[0])": "Q.shape[0]"},
                ),
                PlantedMistake(
                    "inverted scale",
                    "you multiplied the scores by the square root of the width. Divide instead.",
                    {"/ np.sqrt(Q.shape[0])": "* np.sqrt(Q.shape[0])"},
                ),
                PlantedMistake(
                    "scale from another width",
                    "you divided by the square root of the width of the inputs. Use the width of queries and keys: "
                    "Q.shape[0].",
                    {"np.sqrt(Q.shape[0])": "np.sqrt(X.shape[0])"},
                ),
                PlantedMistake(
                    "scale from the number of tokens",
                    "you divided by the square root of the number of tokens. shape[1] counts tokens, shape[0] is the "
                    "width.",
                    {"np.sqrt(Q.shape[0])": "np.sqrt(Q.shape[1])"},
                ),
                *ATTENTION_MISTAKES,
            ),
        ),
    ),
)
