"""The slips that have a name: at which stage each happens, what comes of it, and how to tell it to a student."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from regard.work.attention_steps import Array, Stage, Start, Values, softmax
from regard.work.problem import ROLES

Seen = NDArray[np.bool_]
WORDS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class CommonMistake:
    """A stage computed in a wrong way that people know."""

    name: str
    stage: str
    words: str
    compute: Stage


@cache
def known_slips() -> tuple[CommonMistake, ...]:
    """Every named slip that changes a whole stage, the likelier ones of a stage first."""
    return (*_projections(), *_scores(), *_scales(), *_weights(), *_outputs())


def _projections() -> Iterator[CommonMistake]:
    for role in ROLES:
        yield CommonMistake(
            "transposed product",
            role,
            f"the weights of the {WORDS[role]} were turned over before the product",
            _turned_weights(role),
        )
        for other in ROLES:
            if other != role:
                yield CommonMistake(
                    "wrong factor",
                    role,
                    f"these are the {WORDS[other]}: their weights were taken instead of those of the {WORDS[role]}",
                    _instead(role, other),
                )
        yield CommonMistake("missing bias", role, "the bias was not added", _without_bias(role))


def _turned_weights(role: str) -> Stage:
    def compute(begin: Start, values: Values) -> Array | None:
        weights = begin.weights.get(role)
        if weights is None or begin.inputs is None or weights.shape[0] != weights.shape[1]:
            return None
        found: Array = begin.inputs @ weights.T + begin.biases.get(role, 0.0)
        return found

    return compute


def _instead(role: str, other: str) -> Stage:
    def compute(begin: Start, values: Values) -> Array | None:
        if begin.inputs is None or role not in begin.weights or other not in begin.weights:
            return None
        found: Array = begin.inputs @ begin.weights[other] + begin.biases.get(other, 0.0)
        return found if found.shape[1] == begin.weights[role].shape[1] else None

    return compute


def _without_bias(role: str) -> Stage:
    def compute(begin: Start, values: Values) -> Array | None:
        if begin.inputs is None or role not in begin.biases:
            return None
        found: Array = begin.inputs @ begin.weights[role]
        return found

    return compute


def _product(left: str, right: str, turned: bool = True) -> Stage:
    """left right^T, or left right, of two earlier stages; None unless it has the shape of the scores."""

    def compute(begin: Start, values: Values) -> Array | None:
        a, b = values[left], values[right].T if turned else values[right]
        if a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != begin.visible.shape:
            return None
        return a @ b

    return compute


def _scores() -> Iterator[CommonMistake]:
    yield CommonMistake(
        "sign", "scores", "every score has the other sign", lambda begin, values: -values["q"] @ values["k"].T
    )
    yield CommonMistake(
        "transposed product",
        "scores",
        "the two factors have changed places, so that keys stand where queries should and queries where keys should",
        _product("k", "q"),
    )
    yield CommonMistake(
        "transposed product", "scores", "the keys were not turned over", _product("q", "k", turned=False)
    )
    for left, right in (("q", "q"), ("k", "k"), ("q", "v"), ("v", "k")):
        yield CommonMistake(
            "wrong factor",
            "scores",
            f"the {WORDS[left]} were multiplied with the {WORDS[right]} instead of the queries with the keys",
            _product(left, right),
        )

    yield CommonMistake(
        "scaled too early",
        "scores",
        "these are the scaled scores, which are the next step",
        lambda begin, values: values["q"] @ values["k"].T / np.sqrt(begin.width) if begin.scaled else None,
    )
    yield CommonMistake(
        "scale not asked for",
        "scores",
        "the scores were divided by the root of the width, which was not asked for",
        lambda begin, values: None if begin.scaled else values["q"] @ values["k"].T / np.sqrt(begin.width),
    )


def _scales() -> Iterator[CommonMistake]:
    yield CommonMistake(
        "missing scale",
        "scaled",
        "the scores were not divided by the root of the width",
        _scale(lambda begin: 1.0 if begin.scaled else None),
    )
    yield CommonMistake(
        "scale by d instead of root d",
        "scaled",
        "the scores were divided by the width itself, not by its root",
        _scale(lambda begin: begin.width),
    )
    yield CommonMistake(
        "scale not asked for",
        "scaled",
        "the scores were divided by the root of the width, which was not asked for",
        _scale(lambda begin: None if begin.scaled else np.sqrt(begin.width)),
    )
    yield CommonMistake(
        "scale upside down",
        "scaled",
        "the scores were multiplied by the root of the width instead of divided by it",
        _scale(lambda begin: 1 / np.sqrt(begin.width)),
    )
    yield CommonMistake(
        "scale from another width",
        "scaled",
        "the scores were divided by the root of the width of all heads together; a head has a share of it",
        _scale(lambda begin: None if begin.joined == begin.width else np.sqrt(begin.joined)),
    )
    yield CommonMistake(
        "scale from another width",
        "scaled",
        "the scores were divided by the root of the inputs' width, not of the queries'",
        _scale(lambda begin: None if begin.inputs is None else np.sqrt(begin.inputs.shape[1])),
    )
    yield CommonMistake(
        "scale from another width",
        "scaled",
        "the scores were divided by the root of the number of keys, not of the queries' width",
        _scale(lambda begin: np.sqrt(begin.visible.shape[1])),
    )


def _scale(divisor: Callable[[Start], float | None]) -> Stage:
    def compute(begin: Start, values: Values) -> Array | None:
        by = divisor(begin)
        return None if by is None else values["scores"] / by

    return compute


def _weights() -> Iterator[CommonMistake]:
    def of(change: Callable[[Start, Array], Array | None]) -> Stage:
        return lambda begin, values: change(begin, values["scaled"])

    def masked(change: Callable[[Start, Array], Array | None]) -> Stage:
        """A slip about a mask, which there must be."""
        return lambda begin, values: None if begin.visible.all() else change(begin, values["scaled"])

    yield CommonMistake(
        "softmax over the other axis",
        "weights",
        "the weights of each key add up to 1, but those of each query should",
        of(lambda begin, s: softmax(s, begin.visible, axis=0)),
    )
    yield CommonMistake(
        "softmax over everything",
        "weights",
        "all weights together add up to 1, but those of each query should",
        of(lambda begin, s: softmax(s.reshape(1, -1), begin.visible.reshape(1, -1)).reshape(s.shape)),
    )
    yield CommonMistake(
        "all weight to the largest",
        "weights",
        "the largest score of each query got all the weight; softmax gives every score a share",
        of(_hardest),
    )
    yield CommonMistake("no softmax", "weights", "these are the scores themselves", of(lambda begin, s: s))
    yield CommonMistake(
        "no normalisation",
        "weights",
        "the exponentials were not divided by their sum",
        of(lambda begin, s: np.where(begin.visible, np.exp(np.minimum(s, 700.0)), 0.0)),
    )
    yield CommonMistake(
        "no normalisation",
        "weights",
        "the exponentials, of scores less the largest, were not divided by their sum",
        of(lambda begin, s: np.where(begin.visible, np.exp(s - s.max(1, keepdims=True)), 0.0)),
    )
    yield CommonMistake(
        "no exponentials", "weights", "the scores were divided by their sum without exponentials", of(_linear)
    )
    yield CommonMistake(
        "percent",
        "weights",
        "the weights are given in percent; those of a query should add up to 1, not to 100",
        of(lambda begin, s: 100 * softmax(s, begin.visible)),
    )
    yield CommonMistake(
        "another base",
        "weights",
        "powers of 2 were taken where the exponentials are powers of e",
        of(lambda begin, s: softmax(s * np.log(2), begin.visible)),
    )
    yield CommonMistake(
        "sign", "weights", "the scores went in with the other sign", of(lambda begin, s: softmax(-s, begin.visible))
    )
    yield CommonMistake(
        "mask forgotten",
        "weights",
        "hidden keys have weights too",
        masked(lambda begin, s: softmax(s, np.ones_like(begin.visible))),
    )
    yield CommonMistake(
        "mask the other way round",
        "weights",
        "what should be hidden was seen, and what should be seen was hidden",
        masked(lambda begin, s: softmax(s, ~begin.visible)),
    )
    yield CommonMistake(
        "mask turned over",
        "weights",
        "keys and queries have changed places in the mask",
        masked(lambda begin, s: softmax(s, begin.visible.T) if s.shape[0] == s.shape[1] else None),
    )
    for words, moved in (
        ("each query sees what the next one should", lambda seen: np.vstack([seen[1:], seen[-1:]])),
        ("each query sees what the one before should", lambda seen: np.vstack([np.zeros_like(seen[:1]), seen[:-1]])),
        ("each query sees what the one before should", lambda seen: np.vstack([seen[:1], seen[:-1]])),
    ):
        yield CommonMistake("mask off by one", "weights", words, masked(_moved_mask(moved)))
    yield CommonMistake(
        "mask after softmax",
        "weights",
        "hidden weights were set to 0 after the softmax, so the others do not add up to 1",
        masked(lambda begin, s: softmax(s, np.ones_like(begin.visible)) * begin.visible),
    )
    yield CommonMistake(
        "hidden scores set to zero",
        "weights",
        "hidden scores became 0, whose exponential is 1; they should become minus infinity",
        masked(lambda begin, s: softmax(np.where(begin.visible, s, 0.0), np.ones_like(begin.visible))),
    )


def _hardest(begin: Start, scores: Array) -> Array:
    seen = np.where(begin.visible, scores, -np.inf)
    found: Array = ((np.arange(seen.shape[1]) == seen.argmax(1)[:, None]) & begin.visible).astype(np.float64)
    return found


def _moved_mask(moved: Callable[[Seen], Seen]) -> Callable[[Start, Array], Array]:
    return lambda begin, scores: softmax(scores, moved(begin.visible))


def _linear(begin: Start, scores: Array) -> Array | None:
    seen = np.where(begin.visible, scores, 0.0)
    total = seen.sum(1, keepdims=True)
    return None if (total == 0).any() else seen / total


def _outputs() -> Iterator[CommonMistake]:
    def turned(begin: Start, values: Values) -> Array | None:
        weights = values["weights"]
        return weights.T @ values["v"] if weights.shape[0] == weights.shape[1] else None

    def values_turned(begin: Start, values: Values) -> Array | None:
        v = values["v"]
        return values["weights"] @ v.T if v.shape[0] == v.shape[1] else None

    yield CommonMistake("transposed product", "output", "the weights were turned over before the product", turned)
    yield CommonMistake("transposed product", "output", "the values were turned over before the product", values_turned)
    for role in ("k", "q"):
        yield CommonMistake(
            "wrong factor",
            "output",
            f"the weights were multiplied with the {WORDS[role]} instead of the values",
            _weighted(role),
        )


def _weighted(role: str) -> Stage:
    def compute(begin: Start, values: Values) -> Array | None:
        other = values[role]
        if other.shape != values["v"].shape:
            return None
        return values["weights"] @ other

    return compute
