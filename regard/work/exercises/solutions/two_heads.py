"""Attention with two heads, tokens in columns. A head is its three weights and three biases."""

import numpy as np
from jaxtyping import Float

from regard.work.attention_steps import Array
from regard.work.exercises.solutions.self_attention import softmax_columns


def attend_head(X: Float[Array, "d n"], head: tuple[Array, ...]) -> Float[Array, "c n"]:
    """One head: scaled self-attention that gives columns as narrow as its own weights."""
    omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = head
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))


def two_heads(X: Float[Array, "d n"], first: tuple[Array, ...], second: tuple[Array, ...]) -> Array:
    """Both heads side by side, the outputs of the first above those of the second."""
    return np.concatenate([attend_head(X, first), attend_head(X, second)], axis=0)


def multi_head(
    X: Float[Array, "d n"],
    first: tuple[Array, ...],
    second: tuple[Array, ...],
    omega_c: Float[Array, "d c"],
) -> Float[Array, "d n"]:
    """The two heads, mixed by the output projection."""
    return omega_c @ two_heads(X, first, second)


def split_heads(Q: Float[Array, "d n"], heads: int) -> Float[Array, "h c n"]:
    """Queries of all heads, made at once, cut into those of each head: whole rows stay together."""
    return Q.reshape(heads, Q.shape[0] // heads, Q.shape[1])
