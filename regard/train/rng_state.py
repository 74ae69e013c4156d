"""Seeds and RNG state of torch, numpy and Python: set, save, restore."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_generators(seed: int, *more: int) -> None:
    """Seed the random number generators of Python, numpy and torch.

    more  further numbers, such as the rank, that are combined with the seed; if all are 0, `seed` is used unchanged
    """
    if any(more):
        key = hashlib.sha256(repr((seed, *more)).encode()).digest()
        seed = int.from_bytes(key[:7], "little")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the RNG state of torch, numpy and Python, as tensors and JSON values.

    device  device of the run; if it is a GPU, the state of the GPU's generator is included
    """
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, "int64"))
    version, numbers, next_gauss = random.getstate()
    return tensors, {"numpy": [kind, position, has_gauss, gauss], "python": [version, list(numbers), next_gauss]}


def restore_rng_state(tensors: dict[str, Tensor], values: dict[str, Any], device: torch.device) -> None:
    """Restore the RNG state that `save_rng_state` returned."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    kind, position, has_gauss, gauss = values["numpy"]
    numpy.random.set_state((kind, tensors["numpy"].numpy().astype("uint32"), position, has_gauss, gauss))
    version, numbers, next_gauss = values["python"]
    random.setstate((version, tuple(numbers), next_gauss))


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Context manager: restore the RNG state on exit."""
    tensors, values = save_rng_state(device)
    try:
        yield
    finally:
        restore_rng_state(tensors, values, device)
