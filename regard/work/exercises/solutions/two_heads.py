"""Reference solutions: attention with two heads, tokens in columns. A head is its three weights and three biases."""

import numpy as np
from jaxtyping import Float

from regard.work.exercises.solutions.self_attention import softmax_columns


def attend_head(X: Float[np.ndarray, "d n"], head: tuple[np.ndarray, ...]) -> Float[np.ndarray, "c n"]:
    """Return scaled self-attention with the weights and biases of one head."""
    omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = head
    # TODO: Q, K and V; scores divided by the square root of the head's width; softmax_columns; average the values
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))


def two_heads(X: Float[np.ndarray, "d n"], first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the outputs of both heads, those of the first above those of the second."""
    # TODO: call attend_head twice and stack the results
    return np.concatenate([attend_head(X, first), attend_head(X, second)], axis=0)


def multi_head(
    X: Float[np.ndarray, "d n"],
    first: tuple[np.ndarray, ...],
    second: tuple[np.ndarray, ...],
    omega_c: Float[np.ndarray, "d c"],
) -> Float[np.ndarray, "d n"]:
    """Return the two heads, mixed by the output projection."""
    # TODO: two_heads, then omega_c
    return omega_c @ two_heads(X, first, second)


def split_heads(Q: Float[np.ndarray, "d n"], heads: int) -> Float[np.ndarray, "h c n"]:
    """Split the queries of all heads, computed at once, into the queries of each head."""
    # TODO: a reshape that keeps every row whole
    return Q.reshape(heads, Q.shape[0] // heads, Q.shape[1])
