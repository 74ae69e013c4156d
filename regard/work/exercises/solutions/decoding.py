"""Reference solutions: from the probabilities of the next token to text."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float


def sample(probabilities: Float[np.ndarray, "w"], draw: float) -> int:
    """Return the first token at which the cumulative sum of the probabilities exceeds `draw`, a number from 0 to 1."""
    # TODO: np.cumsum, and the first position where it is above draw
    above = int(np.searchsorted(np.cumsum(probabilities), draw, side="right"))
    return min(above, len(probabilities) - 1)  # rounding may leave the whole sum slightly below one


def kth_likeliest(probabilities: Float[np.ndarray, "w"], k: int) -> int:
    """Return the token of rank k: the likeliest for k = 1, which is greedy decoding."""
    # TODO: np.argsort, from the largest down
    return int(np.argsort(-probabilities, kind="stable")[k - 1])


def top_k(probabilities: Float[np.ndarray, "w"], k: int) -> Float[np.ndarray, "w"]:
    """Return the probabilities of the k likeliest tokens, rescaled to add up to one."""
    # TODO: keep k tokens, set the others to zero, divide by the sum
    best = np.argsort(-probabilities, kind="stable")[:k]
    kept = np.zeros_like(probabilities)
    kept[best] = probabilities[best]
    return kept / kept.sum()


def nucleus(probabilities: Float[np.ndarray, "w"], mass: float) -> Float[np.ndarray, "w"]:
    """Return the fewest of the likeliest tokens that together have at least this mass, rescaled to add up to one."""
    # TODO: sort, np.cumsum, keep every token up to the one that reaches the mass, divide by the sum
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    best = order[before < mass]
    kept = np.zeros_like(probabilities)
    kept[best] = probabilities[best]
    return kept / kept.sum()


def beam_search(
    step: Callable[[list[int]], np.ndarray], start: int, beams: int, length: int
) -> tuple[list[int], float]:
    """Return the likeliest text found by keeping the best `beams` at every step, and its log-probability."""
    kept: list[tuple[list[int], float]] = [([start], 0.0)]
    # TODO: extend each text by each token, add the logarithm of its probability, sort, keep the best
    for _ in range(length):
        longer = [
            ([*tokens, token], score + float(np.log(probability)))
            for tokens, score in kept
            for token, probability in enumerate(step(tokens))
            if probability > 0
        ]
        kept = sorted(longer, key=lambda each: -each[1])[:beams]
    return kept[0]
