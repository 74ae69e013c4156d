"""From probabilities of the next token to text."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from regard.work.attention_steps import Array


def sample(probabilities: Float[Array, "w"], draw: float) -> int:
    """The token at which the probabilities, summed up in order, first exceed a number drawn from 0 to 1."""
    above = int(np.searchsorted(np.cumsum(probabilities), draw, side="right"))
    return min(above, len(probabilities) - 1)  # rounding may leave the whole sum a little below one


def kth_likeliest(probabilities: Float[Array, "w"], k: int) -> int:
    """The token of rank k: the likeliest for k = 1, which is greedy decoding."""
    return int(np.argsort(-probabilities, kind="stable")[k - 1])


def top_k(probabilities: Float[Array, "w"], k: int) -> Float[Array, "w"]:
    """The k likeliest tokens, with probabilities that add up to one again."""
    kept = np.zeros_like(probabilities)
    best = np.argsort(-probabilities, kind="stable")[:k]
    kept[best] = probabilities[best]
    left: Array = kept / kept.sum()
    return left


def nucleus(probabilities: Float[Array, "w"], mass: float) -> Float[Array, "w"]:
    """The fewest of the likeliest tokens that have at least this mass, made to add up to one again."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    best = order[before < mass]
    kept = np.zeros_like(probabilities)
    kept[best] = probabilities[best]
    left: Array = kept / kept.sum()
    return left


def beam_search(step: Callable[[list[int]], Array], start: int, beams: int, length: int) -> tuple[list[int], float]:
    """The likeliest text found by keeping the best few at every step, and the logarithm of its probability."""
    kept: list[tuple[list[int], float]] = [([start], 0.0)]
    for _ in range(length):
        longer = [
            ([*tokens, token], score + float(np.log(probability)))
            for tokens, score in kept
            for token, probability in enumerate(step(tokens))
            if probability > 0
        ]
        kept = sorted(longer, key=lambda each: -each[1])[:beams]
    return kept[0]
