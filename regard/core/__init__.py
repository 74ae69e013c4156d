"""Functions on tensors, without parameters: attention and what it is made of."""
