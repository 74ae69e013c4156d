"""Noisy keys as in the explorer's Plane view, so that the Python code shown by the view gives the same numbers."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.attend import attend

DRAWS = 200
_MASK = 0xFFFFFFFF  # 32 bits


def standard_deviation(
    q: Float[Tensor, "h c"],
    k: Float[Tensor, "j c"],
    v: Float[Tensor, "j e"],
    *,
    beta: float,
    spread: float,
    along: int,
    length: float,
    seed: int,
) -> float:
    """Return the standard deviation of the attention output over 200 draws of noisy keys.

    The output is averaged over heads. The variances of its components are added before the square root.

    q       one query for each head
    beta    inverse temperature
    spread  standard deviation of the noise of every component of a key
    along   index of a key that is also multiplied by a random factor with mean 1; -1 for none
    length  standard deviation of this factor
    seed    seed of the draws

    Here the query is equally similar to both keys, and the noise shifts weight from one to the other:

    >>> one = torch.tensor([[2.0, 2.0]]).double()
    >>> keys = torch.eye(2).double()
    >>> round(standard_deviation(one, keys, keys, beta=5, spread=0.01, along=-1, length=0.0, seed=0), 4)
    0.0739
    """
    keys = _draw_keys(k, spread, along, length, seed)
    out = attend(q[None, :, None].expand(DRAWS, -1, -1, -1), keys[:, None], v.expand(DRAWS, 1, -1, -1), beta=beta)
    return float(out.mean(1)[:, 0].var(0, correction=0).sum().sqrt())


def _draw_keys(
    keys: Float[Tensor, "j c"], spread: float, along: int, length: float, seed: int
) -> Float[Tensor, "draws j c"]:
    """Draw noisy copies of keys in float64; static/plane.js draws the same numbers."""
    normal = _normals(seed)
    drawn = []
    for _ in range(DRAWS):
        for j, key in enumerate(keys.tolist()):
            longer = 1 + length * next(normal) if j == along else 1.0
            drawn.append([x * longer + spread * next(normal) for x in key])
    return torch.tensor(drawn, dtype=torch.float64).reshape(DRAWS, *keys.shape)


def _normals(seed: int) -> Iterator[float]:
    """Yield standard normal random numbers, the same as `generator` in static/maths.js.

    The generator mulberry32 makes uniform numbers, and the Box-Muller transform makes them normal.
    """
    state = seed & _MASK

    def uniform() -> float:
        nonlocal state
        state = (state + 0x6D2B79F5) & _MASK
        mixed = (state ^ state >> 15) * (state | 1) & _MASK
        mixed ^= (mixed + ((mixed ^ mixed >> 7) * (mixed | 61) & _MASK)) & _MASK
        return (mixed ^ mixed >> 14) / 2**32

    while True:
        size = math.sqrt(-2 * math.log(1 - uniform()))
        yield size * math.cos(2 * math.pi * uniform())
