"""Common mistakes in a calculation of attention: the step they change, what they compute, and how to explain them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from regard.work.attention_steps import Array, HeadInputs, StepFunction, StepValues, softmax
from regard.work.problem import ROLES

Visible = NDArray[np.bool_]
NOUNS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class CommonMistake:
    """A common mistake: a wrong calculation of one step of attention.

    step         name of the step
    explanation  sentence for the student
    compute      function that calculates the step with this mistake, or returns None if the shapes do not allow it
    """

    name: str
    step: str
    explanation: str
    compute: StepFunction


@cache
def common_mistakes() -> tuple[CommonMistake, ...]:
    """Return all common mistakes in a calculation of attention, by step; in each step, the likeliest comes first."""
    return (*_projection_mistakes(), *_score_mistakes(), *_scale_mistakes(), *_softmax_mistakes(), *_output_mistakes())


def _is_square(array: Array | None) -> bool:
    return array is not None and array.shape[0] == array.shape[1]


def _projection_mistakes() -> Iterator[CommonMistake]:
    for role in ROLES:
        text = f"the weights of the {NOUNS[role]} were transposed before the product"
        yield CommonMistake("transposed product", role, text, _transposed_weights(role))
        for other in ROLES:
            if other != role:
                text = f"these are the {NOUNS[other]}: their weights were used instead of those of the {NOUNS[role]}"
                yield CommonMistake("wrong factor", role, text, _other_weights(role, other))
        yield CommonMistake("missing bias", role, "the bias was not added", _with_bias(role, role, 0.0))
        yield CommonMistake("sign", role, "the bias was subtracted instead of added", _with_bias(role, role, -1.0))
        for other in ROLES:
            if other != role:
                text = f"the bias of the {NOUNS[other]} was added instead of that of the {NOUNS[role]}"
                yield CommonMistake("wrong bias", role, text, _with_bias(role, other, 1.0))


def _transposed_weights(role: str) -> StepFunction:
    def compute(head: HeadInputs, values: StepValues) -> Array | None:
        if head.inputs is None or not _is_square(head.weights.get(role)):
            return None
        return head.inputs @ head.weights[role].T + head.biases.get(role, 0.0)

    return compute


def _other_weights(role: str, other: str) -> StepFunction:
    def compute(head: HeadInputs, values: StepValues) -> Array | None:
        if role not in head.weights or other not in head.weights:
            return None
        return head.project(other) if head.weights[other].shape == head.weights[role].shape else None

    return compute


def _with_bias(role: str, other: str, factor: float) -> StepFunction:
    """Return a function that calculates q, k or v with a wrong bias: `factor` times the bias of `other`.

    role, other  "q", "k" or "v": the matrix to calculate, and the matrix whose bias is used
    """

    def compute(head: HeadInputs, values: StepValues) -> Array | None:
        if head.inputs is None or not {role, other} <= set(head.biases):
            return None
        own, bias = head.biases[role], head.biases[other]
        return head.inputs @ head.weights[role] + factor * bias if bias.shape == own.shape else None

    return compute


def _product(left: str, right: str, transpose: bool = True) -> StepFunction:
    """Return a function that calculates the scores from two earlier steps, as left @ right^T or as left @ right.

    The function returns None if the product does not have the shape of the scores.

    left, right  names of the steps, such as "q" and "k"
    """

    def compute(head: HeadInputs, values: StepValues) -> Array | None:
        a, b = values[left], values[right].T if transpose else values[right]
        if a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != head.visible.shape:
            return None
        return a @ b

    return compute


def _score_mistakes() -> Iterator[CommonMistake]:
    def scaled(head: HeadInputs, values: StepValues) -> Array:
        return values["q"] @ values["k"].T / np.sqrt(head.width)

    def mistake(name: str, explanation: str, compute: StepFunction) -> CommonMistake:
        return CommonMistake(name, "scores", explanation, compute)

    yield mistake("sign", "every score has the wrong sign", lambda head, values: -values["q"] @ values["k"].T)
    yield mistake(
        "transposed product",
        "the two factors were exchanged, so that keys are where queries should be and queries where keys should be",
        _product("k", "q"),
    )
    yield mistake("transposed product", "the keys were not transposed", _product("q", "k", transpose=False))
    for left, right in (("q", "q"), ("k", "k"), ("q", "v"), ("v", "k")):
        text = f"the {NOUNS[left]} were multiplied by the {NOUNS[right]} instead of the queries by the keys"
        yield mistake("wrong factor", text, _product(left, right))
    text = "every score was divided by the lengths of its query and its key; the score is their product alone"
    yield mistake("divided by the lengths", text, _cosines)
    text = "these are the scaled scores, which are the next step"
    yield mistake("scaled too early", text, lambda head, values: scaled(head, values) if head.scaled else None)
    text = "the scores were divided by the square root of the width, but this problem has no scale"
    yield mistake("unwanted scale", text, lambda head, values: None if head.scaled else scaled(head, values))


def _cosines(head: HeadInputs, values: StepValues) -> Array | None:
    lengths = [np.linalg.norm(values[role], axis=1) for role in ("q", "k")]
    return None if min(map(min, lengths)) == 0 else values["q"] @ values["k"].T / np.outer(*lengths)


def _scale_mistakes() -> Iterator[CommonMistake]:
    def mistake(name: str, explanation: str, divisor: Callable[[HeadInputs], float | None]) -> CommonMistake:
        def compute(head: HeadInputs, values: StepValues) -> Array | None:
            by = divisor(head)
            return None if by is None else values["scores"] / by

        return CommonMistake(name, "scaled", f"the scores were {explanation}", compute)

    yield mistake(
        "missing scale",
        "not divided by the square root of the width",
        lambda head: 1.0 if head.scaled else None,
    )
    yield mistake(
        "scale by d instead of sqrt(d)",
        "divided by the width itself, not by its square root",
        lambda head: head.width,
    )
    yield mistake(
        "unwanted scale",
        "divided by the square root of the width, but this problem has no scale",
        lambda head: None if head.scaled else np.sqrt(head.width),
    )
    yield mistake(
        "inverted scale",
        "multiplied by the square root of the width instead of divided by it",
        lambda head: 1 / np.sqrt(head.width),
    )
    another = "scale from another width"
    yield mistake(
        another,
        "divided by the square root of the width of all heads together; a head has only a share of it",
        lambda head: None if head.total_width == head.width else np.sqrt(head.total_width),
    )
    yield mistake(
        another,
        "divided by the square root of the width of the inputs, not of the queries",
        lambda head: None if head.inputs is None else np.sqrt(head.inputs.shape[1]),
    )
    yield mistake(
        another,
        "divided by the square root of the number of keys, not of the width of the queries",
        lambda head: np.sqrt(head.visible.shape[1]),
    )


WeightFunction = Callable[[Array, Visible], Array | None]


def _softmax_mistakes() -> Iterator[CommonMistake]:
    def mistake(name: str, explanation: str, weights: WeightFunction, needs_mask: bool = False) -> CommonMistake:
        return CommonMistake(
            name,
            "weights",
            explanation,
            lambda head, values: None if needs_mask and head.visible.all() else weights(values["scaled"], head.visible),
        )

    yield mistake(
        "softmax over the other axis",
        "the weights of each key add up to 1, but those of each query should",
        lambda scores, visible: softmax(scores, visible, axis=0),
    )
    yield mistake(
        "softmax over everything",
        "all weights together add up to 1, but those of each query should",
        lambda scores, visible: softmax(scores.reshape(1, -1), visible.reshape(1, -1)).reshape(scores.shape),
    )
    yield mistake(
        "all weight on the largest score",
        "the largest score of each query got all the weight; softmax gives every score a share",
        _hard_max,
    )
    yield mistake("no softmax", "these are the scores themselves", lambda scores, visible: scores)
    yield mistake(
        "no normalisation",
        "the exponentials were not divided by their sum",
        lambda scores, visible: np.where(visible, np.exp(np.minimum(scores, 700.0)), 0.0),
    )
    yield mistake(
        "no normalisation",
        "the exponentials of scores minus the largest were not divided by their sum",
        lambda scores, visible: np.where(visible, np.exp(scores - scores.max(1, keepdims=True)), 0.0),
    )
    yield mistake("no exponentials", "the scores were divided by their sum without exponentials", _without_exp)
    yield mistake(
        "divided by the length",
        "the exponentials were divided by the root of the sum of their squares, not by their sum",
        lambda scores, visible: _divide_exponentials(scores, visible, lambda row: float(np.linalg.norm(row))),
    )
    yield mistake(
        "divided by the number of keys",
        "the exponentials were divided by the number of keys, not by their sum",
        lambda scores, visible: _divide_exponentials(scores, visible, lambda row: len(row)),
    )
    yield mistake(
        "sigmoid instead of softmax",
        "the sigmoid of each score was taken alone; the exponentials of a query should be divided by their sum",
        lambda scores, visible: np.where(visible, 1 / (1 + np.exp(np.minimum(-scores, 700.0))), 0.0),
    )
    yield mistake(
        "logarithm of the weights",
        "these are the logarithms of the weights",
        lambda scores, visible: np.log(softmax(scores, visible)) if visible.all() else None,
    )
    yield mistake(
        "percent",
        "the weights are in percent; those of a query should add up to 1, not to 100",
        lambda scores, visible: 100 * softmax(scores, visible),
    )
    yield mistake(
        "softmax twice",
        "softmax was applied twice; apply it once",
        lambda scores, visible: softmax(softmax(scores, visible), visible),
    )
    yield mistake(
        "equal weights",
        "all keys have the same weight, as if every score were the same",
        lambda scores, visible: softmax(np.zeros_like(scores), visible),
    )
    yield CommonMistake(
        "missing scale",
        "weights",
        "the weights were calculated from the scores, not from the scaled scores",
        lambda head, values: softmax(values["scores"], head.visible) if head.scaled else None,
    )
    yield CommonMistake(
        "no softmax",
        "weights",
        "these are the scores, neither scaled nor passed through the softmax",
        lambda head, values: values["scores"] if head.scaled else None,
    )
    for base in (2, 10):
        yield mistake("another base", f"these are powers of {base} instead of powers of e", _with_base(base))
    after = "the weights were divided by the square root of the width, after the softmax; "
    for scaled, advice in ((True, "divide the scores before it"), (False, "this problem has no scale")):
        yield CommonMistake("scale after softmax", "weights", after + advice, _scale_after_softmax(scaled))
    yield mistake("sign", "the scores have the wrong sign", lambda scores, visible: softmax(-scores, visible))
    for name, explanation, change in (
        ("mask forgotten", "hidden keys have weights too", np.ones_like),
        ("mask inverted", "hidden keys were visible, and visible keys were hidden", np.logical_not),
        ("mask off by one", "each query sees what the next one should see", lambda seen: seen[_shift(seen, 1)]),
        ("mask off by one", "each query sees what the one before should see", lambda seen: np.roll(_drop(seen), 1, 0)),
        ("mask off by one", "each query sees what the one before should see", lambda seen: seen[_shift(seen, -1)]),
    ):
        yield mistake(name, explanation, _with_mask(change), needs_mask=True)
    yield mistake(
        "mask transposed",
        "queries and keys were exchanged in the mask",
        lambda scores, visible: softmax(scores, visible.T) if _is_square(scores) else None,
        needs_mask=True,
    )
    yield mistake(
        "mask after softmax",
        "hidden weights were set to 0 after the softmax, so the others do not add up to 1",
        lambda scores, visible: softmax(scores, np.ones_like(visible)) * visible,
        needs_mask=True,
    )
    yield mistake(
        "hidden scores set to zero",
        "hidden scores became 0, whose exponential is 1; they should become minus infinity",
        lambda scores, visible: softmax(np.where(visible, scores, 0.0), np.ones_like(visible)),
        needs_mask=True,
    )


def _divide_exponentials(scores: Array, visible: Visible, divisor: Callable[[Array], float]) -> Array | None:
    """Return the exponentials of the visible scores, each row divided by a number; hidden scores give 0.

    Returns None if a query sees no key.

    divisor  function that returns this number for the exponentials of the visible scores of a row
    """
    if not visible.any(1).all():
        return None
    raised = np.where(visible, np.exp(np.minimum(scores, 700.0)), 0.0)
    return np.stack([row / divisor(row[seen]) for row, seen in zip(raised, visible, strict=True)])


def _with_base(base: int) -> WeightFunction:
    return lambda scores, visible: softmax(scores * np.log(base), visible)


def _scale_after_softmax(scaled: bool) -> StepFunction:
    return lambda head, values: (
        softmax(values["scores"], head.visible) / np.sqrt(head.width) if head.scaled == scaled else None
    )


def _with_mask(change: Callable[[Visible], Visible]) -> WeightFunction:
    return lambda scores, visible: softmax(scores, change(visible))


def _shift(visible: Visible, by: int) -> NDArray[np.intp]:
    """Return the row indices of a mask, each increased by `by` and clipped to the range of valid indices."""
    return np.clip(np.arange(len(visible)) + by, 0, len(visible) - 1)


def _drop(visible: Visible) -> Visible:
    """Return the mask with all keys hidden from the last query."""
    return visible & (np.arange(len(visible)) < len(visible) - 1)[:, None]


def _hard_max(scores: Array, visible: Visible) -> Array:
    seen = np.where(visible, scores, -np.inf)
    return ((np.arange(seen.shape[1]) == seen.argmax(1)[:, None]) & visible).astype(np.float64)


def _without_exp(scores: Array, visible: Visible) -> Array | None:
    seen = np.where(visible, scores, 0.0)
    total = seen.sum(1, keepdims=True)
    return None if (total == 0).any() else seen / total


def _output_mistakes() -> Iterator[CommonMistake]:
    def mistake(name: str, explanation: str, compute: Callable[[Array, Array], Array | None]) -> CommonMistake:
        return CommonMistake(name, "output", explanation, lambda head, values: compute(values["weights"], values["v"]))

    yield mistake(
        "transposed product",
        "the weights were transposed before the product",
        lambda weights, v: weights.T @ v if _is_square(weights) else None,
    )
    yield mistake(
        "transposed product",
        "the values were transposed before the product",
        lambda weights, v: weights @ v.T if _is_square(v) else None,
    )
    yield mistake(
        "weights ignored",
        "these are the sums of all values; each value should be multiplied by its weight",
        lambda weights, v: np.ones_like(weights) @ v,
    )
    yield mistake(
        "weights ignored",
        "these are the values themselves; each output is their sum, weighted by a row of the weights",
        lambda weights, v: v if _is_square(weights) else None,
    )
    for role in ("k", "q"):
        text = f"the weights were multiplied by the {NOUNS[role]} instead of the values"
        yield CommonMistake("wrong factor", "output", text, _average_of(role))


def _average_of(role: str) -> StepFunction:
    return lambda head, values: values["weights"] @ values[role] if values[role].shape == values["v"].shape else None
