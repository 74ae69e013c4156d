"""Self-attention with tokens in columns."""

import numpy as np
from jaxtyping import Float

from regard.work.attention_steps import Array


def softmax_columns(scores: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Weights that add up to one in every column."""
    exponentials = np.exp(scores - scores.max(axis=0, keepdims=True))
    weights: Array = exponentials / exponentials.sum(axis=0, keepdims=True)
    return weights


def self_attention(
    X: Float[Array, "d n"],
    omega_q: Float[Array, "c d"],
    omega_k: Float[Array, "c d"],
    omega_v: Float[Array, "e d"],
    beta_q: Float[Array, "c 1"],
    beta_k: Float[Array, "c 1"],
    beta_v: Float[Array, "e 1"],
) -> Float[Array, "e n"]:
    """Every token's mean of the values, weighted by how well keys agree with its query."""
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q)


def scaled_self_attention(
    X: Float[Array, "d n"],
    omega_q: Float[Array, "c d"],
    omega_k: Float[Array, "c d"],
    omega_v: Float[Array, "e d"],
    beta_q: Float[Array, "c 1"],
    beta_k: Float[Array, "c 1"],
    beta_v: Float[Array, "e 1"],
) -> Float[Array, "e n"]:
    """Self-attention whose scores are divided by the root of the queries' width."""
    Q = omega_q @ X + beta_q
    K = omega_k @ X + beta_k
    V = omega_v @ X + beta_v
    return V @ softmax_columns(K.T @ Q / np.sqrt(Q.shape[0]))
