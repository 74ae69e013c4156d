"""Random numbers from seeds: torch generators and a hash of integers."""

import torch
from torch import Tensor


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new torch.Generator seeded with `seed`. The global RNG state is not used or changed."""
    return torch.Generator(device=device).manual_seed(seed)


def hash_integers(x: Tensor, seed: int) -> Tensor:
    """Hash each non-negative integer to 32 bits, elementwise. The result is the same on every device.

    The hash consists of three rounds of xor-shift and multiplication by odd numbers. The result is an int64 tensor with
    values below 2^32.
    """
    x = x.long()  # kernels pass 32-bit indices, in which the products would overflow
    x = (x ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)) & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return x ^ (x >> 16)
