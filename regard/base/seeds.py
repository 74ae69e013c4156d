"""Randomness that is a function of its seed."""

import torch
from torch import Tensor


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own, so that no draw depends on what was drawn elsewhere."""
    return torch.Generator(device=device).manual_seed(seed)


def hash_integers(x: Tensor, seed: int) -> Tensor:
    """A well-mixed 32-bit number for each non-negative integer, elementwise: the same on every device.

    Three rounds of xor-shift and odd multiplication, kept to 32 bits inside int64 so that nothing overflows.
    """
    x = x.long()  # a kernel may hand in 32-bit indices, in which the products would overflow
    x = (x ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)) & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return x ^ (x >> 16)
