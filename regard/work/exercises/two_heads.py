"""Exercises on two heads with tokens in columns: one head, both heads, the output projection, splitting heads."""

import numpy as np

from regard.work.exercises.checks import Case, check_outputs
from regard.work.exercises.exercise import Exercise, ExerciseSet, PlantedMistake, solution_source
from regard.work.exercises.solutions import two_heads as solutions
from regard.work.exercises.solutions.self_attention import softmax_columns

SETUP_CODE = f"""\
import numpy as np
from jaxtyping import Float


{solution_source(softmax_columns)}

tokens, width, heads = 6, 8, 2
np.random.seed(3)
X = np.random.normal(size=(width, tokens))
np.random.seed(0)


def draw_head() -> tuple[np.ndarray, ...]:
    weights = [np.random.normal(size=(width // heads, width)) for _ in range(3)]
    biases = [np.random.normal(size=(width // heads, 1)) for _ in range(3)]
    return (*weights, *biases)


first, second = draw_head(), draw_head()
omega_c = np.random.normal(size=(width, width))
"""

ABOUT = """\
Two heads attend to the same tokens in parallel, each with its own weights and half the width. Their outputs are
stacked, and one more matrix, omega_c, mixes them. A token is a column, as before. A head is a tuple
`(omega_q, omega_k, omega_v, beta_q, beta_k, beta_v)`.

The cell below has the softmax over columns, inputs of 6 tokens of width 8, two heads of width 4 and omega_c.
"""


def _head_cases() -> list[Case]:
    generator = np.random.default_rng(3)
    sizes = ((6, 5, 3), (10, 3, 5), (4, 4, 4))
    return [(generator.normal(size=(d, n)), _draw_head(generator, d, c)) for d, n, c in sizes]


def _two_head_cases() -> list[Case]:
    generator = np.random.default_rng(4)
    cases: list[Case] = []
    for d, n in ((6, 5), (10, 3), (8, 6)):
        heads = (_draw_head(generator, d, d // 2) for _ in range(2))
        cases.append((generator.normal(size=(d, n)), *heads))
    return cases


def _projection_cases() -> list[Case]:
    generator = np.random.default_rng(5)
    return [(*case, generator.normal(size=(len(case[0]),) * 2)) for case in _two_head_cases()]


def _split_cases() -> list[Case]:
    generator = np.random.default_rng(6)
    return [(generator.normal(size=(d, n)), heads) for d, n, heads in ((6, 5, 2), (12, 7, 3), (8, 4, 4))]


def _draw_head(generator: np.random.Generator, d: int, c: int) -> tuple[np.ndarray, ...]:
    shapes = ((c, d), (c, d), (c, d), (c, 1), (c, 1), (c, 1))
    return tuple(generator.normal(size=shape) for shape in shapes)


HEAD_MISTAKES = (
    PlantedMistake(
        "missing scale",
        "you did not divide the scores. Each head divides by np.sqrt of its own width.",
        {" / np.sqrt(Q.shape[0])": ""},
    ),
    PlantedMistake(
        "scale from the model's width",
        "you divided the scores by the square root of the width of X. A head is narrower: divide by the square root "
        "of its own width, Q.shape[0].",
        {"np.sqrt(Q.shape[0])": "np.sqrt(X.shape[0])"},
    ),
    PlantedMistake(
        "scale by the width itself",
        "you divided the scores by the head's width. Divide by its square root.",
        {"np.sqrt(Q.shape[0])": "Q.shape[0]"},
    ),
    PlantedMistake(
        "softmax over the wrong axis",
        "each row of the weights adds up to one, but each column should: keys are in rows, and the weights of a query "
        "are a column.",
        {"softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))": "softmax_columns(Q.T @ K / np.sqrt(Q.shape[0])).T"},
    ),
    PlantedMistake(
        "queries and keys exchanged",
        "you exchanged queries and keys. The scores are K.T @ Q, so that keys are in rows.",
        {"K.T @ Q": "Q.T @ K"},
    ),
)
BOTH = "np.concatenate([attend_head(X, first), attend_head(X, second)], axis=0)"
SWAPPED = {BOTH: "np.concatenate([attend_head(X, second), attend_head(X, first)])"}
INTERLEAVED = {BOTH: "np.stack([attend_head(X, first), attend_head(X, second)], axis=1).reshape(-1, X.shape[1])"}
SPLIT = "Q.reshape(heads, Q.shape[0] // heads, Q.shape[1])"

TWO_HEADS = ExerciseSet(
    name="two-heads",
    title="Two heads",
    about=ABOUT,
    setup_code=SETUP_CODE,
    exercises=(
        Exercise(
            name="head",
            title="One head",
            prompt="""\
Write `attend_head`: scaled self-attention with the six arrays of one head. Its queries, keys and values are narrower
than X, so the output is narrower too: 4 x 6 for `attend_head(X, first)`.
""",
            solution=solutions.attend_head,
            check=check_outputs(_head_cases),
            mistakes=(
                *HEAD_MISTAKES,
                PlantedMistake(
                    "forgotten bias",
                    "the biases are missing: Q, K and V are omega @ X + beta.",
                    {" + beta_q": "", " + beta_k": "", " + beta_v": ""},
                ),
            ),
        ),
        Exercise(
            name="stacked",
            title="Both heads",
            prompt="""\
Write `two_heads`: both heads attend to X. Put the output of the first head above the output of the second, 8 x 6 with
the inputs above. The heads are parallel: the second does not see the output of the first.
""",
            solution=solutions.two_heads,
            check=check_outputs(_two_head_cases),
            mistakes=(
                PlantedMistake(
                    "heads in the other order",
                    "the second head is above the first; put the first on top.",
                    SWAPPED,
                ),
                PlantedMistake(
                    "heads interleaved",
                    "the rows of the two heads alternate. All rows of the first head come first, then all rows of the "
                    "second: concatenate, do not reshape.",
                    INTERLEAVED,
                ),
                PlantedMistake(
                    "heads beside each other",
                    "you joined the heads along the tokens. A token keeps its column: join along axis 0.",
                    {"axis=0": "axis=1"},
                ),
                PlantedMistake(
                    "heads added up",
                    "you added the heads, which loses what each of them found. Put one above the other.",
                    {BOTH: "attend_head(X, first) + attend_head(X, second)"},
                ),
                PlantedMistake(
                    "one head twice",
                    "the first head appears twice; the lower half should come from `second`.",
                    {"attend_head(X, second)": "attend_head(X, first)"},
                ),
                PlantedMistake(
                    "heads one after the other",
                    "the second head got the output of the first. Both heads get X: heads are parallel, layers are "
                    "not.",
                    {"attend_head(X, second)": "attend_head(np.concatenate([attend_head(X, first)] * 2), second)"},
                ),
                *HEAD_MISTAKES,
            ),
        ),
        Exercise(
            name="projected",
            title="The output projection",
            prompt="""\
Without one more matrix the outputs of the two heads would never be combined. Write `multi_head`: omega_c times the
stacked heads, 8 x 6 again.
""",
            solution=solutions.multi_head,
            check=check_outputs(_projection_cases),
            mistakes=(
                PlantedMistake(
                    "forgotten output projection",
                    "these are the stacked heads. Multiply them by omega_c, which mixes them.",
                    {"omega_c @ two_heads": "two_heads"},
                ),
                PlantedMistake(
                    "transposed output projection",
                    "you transposed omega_c. It multiplies the columns from the left as it is: omega_c @ heads.",
                    {"omega_c @ two_heads": "omega_c.T @ two_heads"},
                ),
                PlantedMistake(
                    "heads in the other order",
                    "before omega_c the second head is above the first; put the first on top.",
                    SWAPPED,
                ),
                PlantedMistake(
                    "heads interleaved",
                    "before omega_c the rows of the two heads alternate: concatenate, do not reshape.",
                    INTERLEAVED,
                ),
            ),
        ),
        Exercise(
            name="split",
            title="All heads at once",
            prompt="""\
In practice one matrix computes the queries of all heads: rows 0 to D/H - 1 belong to the first head, the next D/H to
the second. Write `split_heads`, which splits such a D x N matrix into H x D/H x N, for any H.
""",
            solution=solutions.split_heads,
            check=check_outputs(_split_cases),
            mistakes=(
                PlantedMistake(
                    "reshape without transpose",
                    "a reshape to heads x tokens x width cuts rows in the middle, and a transpose afterwards does not "
                    "repair that. Rows come first in memory, so reshape to heads x width x tokens.",
                    {SPLIT: "Q.reshape(heads, Q.shape[1], -1).transpose(0, 2, 1)"},
                ),
                PlantedMistake(
                    "heads interleaved",
                    "row 0 went to the first head and row 1 to the second. A head has D/H consecutive rows: heads "
                    "come first in the reshape.",
                    {SPLIT: "Q.reshape(-1, heads, Q.shape[1]).transpose(1, 0, 2)"},
                ),
                PlantedMistake(
                    "tokens before width",
                    "here tokens are in the middle, and the reshape cut rows apart. The order is heads, width, tokens.",
                    {SPLIT: "Q.reshape(heads, Q.shape[1], -1)"},
                ),
            ),
        ),
    ),
)
