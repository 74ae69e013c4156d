"""Two heads with tokens in columns: one head, both stacked, the output projection, and heads cut out of one matrix."""

import inspect
from collections.abc import Callable
from functools import partial

import numpy as np

from regard.work.attention_steps import Array
from regard.work.exercises.checks import Case, by_answers
from regard.work.exercises.exercise import Exercise, Exercises, PlantedMistake
from regard.work.exercises.solutions import two_heads as solutions
from regard.work.exercises.solutions.self_attention import softmax_columns

Head = tuple[Array, ...]

GIVEN = f"""\
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

Array = NDArray[np.float64]


{inspect.getsource(softmax_columns)}

tokens, width, heads = 6, 8, 2
np.random.seed(3)
X = np.random.normal(size=(width, tokens))
np.random.seed(0)


def draw_head() -> tuple[Array, ...]:
    weights = [np.random.normal(size=(width // heads, width)) for _ in range(3)]
    biases = [np.random.normal(size=(width // heads, 1)) for _ in range(3)]
    return (*weights, *biases)


first, second = draw_head(), draw_head()
omega_c = np.random.normal(size=(width, width))
"""

ABOUT = """\
Two heads look at the same tokens side by side, each with weights of its own and half the width. Their outputs are put
on top of each other, and one more matrix, omega_c, mixes them. A token is a column, as before; a head is a tuple
`(omega_q, omega_k, omega_v, beta_q, beta_k, beta_v)`.

The cell below has the softmax over columns, inputs of 6 tokens of width 8, two heads of width 4 and omega_c.
"""


def _one() -> list[Case]:
    draws = np.random.default_rng(3)
    return [(draws.normal(size=(d, n)), _drawn(draws, d, c)) for d, n, c in ((6, 5, 3), (10, 3, 5), (4, 4, 4))]


def _two() -> list[Case]:
    draws = np.random.default_rng(4)
    return [(draws.normal(size=(d, n)), _drawn(draws, d, d // 2), _drawn(draws, d, d // 2)) for d, n in _SIZES]


def _mixed() -> list[Case]:
    draws = np.random.default_rng(5)
    return [(*case, draws.normal(size=(len(case[0]),) * 2)) for case in _two()]


def _whole() -> list[Case]:
    draws = np.random.default_rng(6)
    return [(draws.normal(size=(d, n)), heads) for d, n, heads in ((6, 5, 2), (12, 7, 3), (8, 4, 4))]


_SIZES = ((6, 5), (10, 3), (8, 6))


def _drawn(draws: np.random.Generator, d: int, c: int) -> Head:
    shapes = ((c, d), (c, d), (c, d), (c, 1), (c, 1), (c, 1))
    return tuple(draws.normal(size=shape) for shape in shapes)


def _head(
    X: Array, head: Head, *, scale: str = "head", axis: int = 0, biases: bool = True, exchanged: bool = False
) -> Array:
    """One head with one thing wrong."""
    omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = head
    Q, K, V = omega_q @ X + biases * beta_q, omega_k @ X + biases * beta_k, omega_v @ X + biases * beta_v
    Q, K = (K, Q) if exchanged else (Q, K)
    scores = K.T @ Q / {"head": len(Q) ** 0.5, "none": 1.0, "model": len(X) ** 0.5, "width": len(Q)}[scale]
    weights = softmax_columns(scores) if axis == 0 else softmax_columns(scores.T).T
    return V @ weights


def _stack(
    X: Array,
    first: Head,
    second: Head,
    *,
    order: str = "stacked",
    scale: str = "head",
    axis: int = 0,
    exchanged: bool = False,
) -> Array:
    """Both heads with one thing wrong."""
    above, below = (_head(X, head, scale=scale, axis=axis, exchanged=exchanged) for head in (first, second))
    if order == "interleaved":
        return np.stack([above, below], axis=1).reshape(-1, X.shape[1])
    if order == "side by side":
        return np.concatenate([above, below], axis=1)
    if order == "added":
        return above + below
    if order == "twice the first":
        return np.concatenate([above, above])
    if order == "stacked layers":
        return np.concatenate([above, _head(np.concatenate([above, above]), second)])
    return np.concatenate([below, above] if order == "swapped" else [above, below])


def _projected(
    X: Array,
    first: Head,
    second: Head,
    omega_c: Array,
    *,
    turned: bool = False,
    out: bool = True,
    order: str = "stacked",
) -> Array:
    """Both heads and the output projection with one thing wrong."""
    joined = _stack(X, first, second, order=order)
    if not out:
        return joined
    return (omega_c.T if turned else omega_c) @ joined


def _cut(Q: Array, heads: int, *, way: str) -> Array:
    d, n = Q.shape
    if way == "no transpose":
        return Q.reshape(heads, n, d // heads).transpose(0, 2, 1)
    if way == "interleaved":
        return Q.reshape(d // heads, heads, n).transpose(1, 0, 2)
    return Q.reshape(heads, n, d // heads)


def _inside(wrong: Callable[..., Array]) -> tuple[PlantedMistake, ...]:
    """Slips inside a head, of anything that takes `scale`, `axis` and `exchanged` on to its heads."""
    return (
        PlantedMistake(
            "missing scale",
            "the scores are not divided: each head divides by np.sqrt of its own width.",
            partial(wrong, scale="none"),
        ),
        PlantedMistake(
            "scale from the model's width",
            "the scores were divided by the root of the width of X. A head is narrower: divide by the root of its own "
            "width, Q.shape[0].",
            partial(wrong, scale="model"),
        ),
        PlantedMistake(
            "scale by the width itself",
            "the scores were divided by the head's width; divide by its root.",
            partial(wrong, scale="width"),
        ),
        PlantedMistake(
            "softmax over the wrong axis",
            "each row of the weights adds up to one, but each column should: keys are in rows, and a query's weights "
            "in a column.",
            partial(wrong, axis=1),
        ),
        PlantedMistake(
            "queries and keys exchanged",
            "queries and keys have changed places: the scores are K.T @ Q, so that keys are in rows.",
            partial(wrong, exchanged=True),
        ),
    )


TWO_HEADS = Exercises(
    name="two-heads",
    title="Two heads",
    about=ABOUT,
    given=GIVEN,
    tasks=(
        Exercise(
            name="head",
            title="One head",
            prompt="""\
Write `attend_head`: scaled self-attention with the six arrays of one head. Its queries, keys and values are narrower
than X, so the output is too: 4 x 6 for `attend_head(X, first)`.
""",
            starter='''\
def attend_head(X: Float[Array, "d n"], head: tuple[Array, ...]) -> Float[Array, "c n"]:
    """One head: scaled self-attention that gives columns as narrow as its own weights."""
    omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = head
    # TODO: Q, K and V; scores divided by the root of the head's width; softmax_columns; the mean of the values
    raise NotImplementedError
''',
            solution=solutions.attend_head,
            check=by_answers(_one),
            slips=(
                *_inside(_head),
                PlantedMistake(
                    "forgotten bias",
                    "the biases are missing: Q, K and V are omega @ X + beta.",
                    partial(_head, biases=False),
                ),
            ),
        ),
        Exercise(
            name="stacked",
            title="Both heads",
            prompt="""\
Write `two_heads`: both heads look at X, and the output of the first stands above that of the second, 8 x 6 with the
inputs above. The heads are parallel: the second does not see what the first gives.
""",
            starter='''\
def two_heads(X: Float[Array, "d n"], first: tuple[Array, ...], second: tuple[Array, ...]) -> Array:
    """Both heads side by side, the outputs of the first above those of the second."""
    # TODO: attend_head twice, one above the other
    raise NotImplementedError
''',
            solution=solutions.two_heads,
            check=by_answers(_two),
            slips=(
                PlantedMistake(
                    "heads in the other order",
                    "the second head stands above the first; put the first on top.",
                    partial(_stack, order="swapped"),
                ),
                PlantedMistake(
                    "heads interleaved",
                    "rows of the two heads alternate. All rows of the first head come first, then all of the second: "
                    "concatenate, do not reshape.",
                    partial(_stack, order="interleaved"),
                ),
                PlantedMistake(
                    "heads beside each other",
                    "the heads were joined along the tokens. A token keeps its column: join along axis 0.",
                    partial(_stack, order="side by side"),
                ),
                PlantedMistake(
                    "heads added up",
                    "the heads were added, which loses which is which. Put one above the other.",
                    partial(_stack, order="added"),
                ),
                PlantedMistake(
                    "one head twice",
                    "the first head stands there twice; the lower half comes from `second`.",
                    partial(_stack, order="twice the first"),
                ),
                PlantedMistake(
                    "heads one after the other",
                    "the second head looked at what the first gave. Both look at X: heads are parallel, layers are "
                    "not.",
                    partial(_stack, order="stacked layers"),
                ),
                *_inside(_stack),
            ),
        ),
        Exercise(
            name="projected",
            title="The output projection",
            prompt="""\
Without one more matrix the two heads would never meet. Write `multi_head`: omega_c times the stacked heads, 8 x 6
again.
""",
            starter='''\
def multi_head(
    X: Float[Array, "d n"],
    first: tuple[Array, ...],
    second: tuple[Array, ...],
    omega_c: Float[Array, "d c"],
) -> Float[Array, "d n"]:
    """The two heads, mixed by the output projection."""
    # TODO: two_heads, then omega_c
    raise NotImplementedError
''',
            solution=solutions.multi_head,
            check=by_answers(_mixed),
            slips=(
                PlantedMistake(
                    "forgotten output projection",
                    "these are the stacked heads. Multiply them by omega_c, which mixes them.",
                    partial(_projected, out=False),
                ),
                PlantedMistake(
                    "transposed output projection",
                    "omega_c was turned over. It acts on columns from the left as it is: omega_c @ heads.",
                    partial(_projected, turned=True),
                ),
                PlantedMistake(
                    "heads in the other order",
                    "the second head stands above the first before omega_c; put the first on top.",
                    partial(_projected, order="swapped"),
                ),
                PlantedMistake(
                    "heads interleaved",
                    "rows of the two heads alternate before omega_c: concatenate, do not reshape.",
                    partial(_projected, order="interleaved"),
                ),
            ),
        ),
        Exercise(
            name="split",
            title="All heads at once",
            prompt="""\
In practice one matrix makes the queries of all heads: rows 0 to D/H - 1 are the first head's, the next D/H the
second's. Write `split_heads`, which cuts such a D x N matrix into H x D/H x N, for any H.
""",
            starter='''\
def split_heads(Q: Float[Array, "d n"], heads: int) -> Float[Array, "h c n"]:
    """Queries of all heads, made at once, cut into those of each head: whole rows stay together."""
    # TODO: a reshape that keeps every row whole
    raise NotImplementedError
''',
            solution=solutions.split_heads,
            check=by_answers(_whole),
            slips=(
                PlantedMistake(
                    "reshape without transpose",
                    "a reshape to heads x tokens x width cuts rows in the middle, and turning it afterwards does not "
                    "mend that: rows are what comes first in memory, so reshape to heads x width x tokens.",
                    partial(_cut, way="no transpose"),
                ),
                PlantedMistake(
                    "heads interleaved",
                    "row 0 went to the first head and row 1 to the second. A head has D/H rows in a run: heads come "
                    "first in the reshape.",
                    partial(_cut, way="interleaved"),
                ),
                PlantedMistake(
                    "tokens before width",
                    "this has tokens in the middle, and rows cut to get there. The order is heads, width, tokens.",
                    partial(_cut, way="tokens first"),
                ),
            ),
        ),
    ),
)
