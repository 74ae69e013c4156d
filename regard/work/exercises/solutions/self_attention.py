"""Reference solutions: self-attention with tokens in columns."""

import numpy as np
from jaxtyping import Float


def softmax_columns(scores: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "m n"]:
    """Return weights that add up to one in every column."""
    # TODO: subtract the largest score of each column, take exponentials, divide by their sum
    exponentials = np.exp(scores - scores.max(axis=0, keepdims=True))
    return exponentials / exponentials.sum(axis=0, keepdims=True)


def self_attention(
    X: Float[np.ndarray, "d n"],
    omega_q: Float[np.ndarray, "c d"],
    omega_k: Float[np.ndarray, "c d"],
    omega_v: Float[np.ndarray, "e d"],
    beta_q: Float[np.ndarray, "c 1"],
    beta_k: Float[np.ndarray, "c 1"],
    beta_v: Float[np.ndarray, "e 1"],
) -> Float[np.ndarray, "e n"]:
    """Return one output per token: the values, averaged with the softmax of the scores as weights."""
    # TODO: compute Q, K and V; take the softmax of K.T @ Q; average the values
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q)


def scaled_self_attention(
    X: Float[np.ndarray, "d n"],
    omega_q: Float[np.ndarray, "c d"],
    omega_k: Float[np.ndarray, "c d"],
    omega_v: Float[np.ndarray, "e d"],
    beta_q: Float[np.ndarray, "c 1"],
    beta_k: Float[np.ndarray, "c 1"],
    beta_v: Float[np.ndarray, "e 1"],
) -> Float[np.ndarray, "e n"]:
    """Return self-attention whose scores are divided by the square root of the width of the queries."""
    # TODO: as before, but divide K.T @ Q before the softmax
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))
