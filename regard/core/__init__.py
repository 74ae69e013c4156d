"""Attention as functions on tensors, without parameters: `attend`, masks, score terms, positions, caches, kernels."""
