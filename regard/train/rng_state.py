"""The generators that a model, a task or a library may draw from: all seeded, and their states kept with a run's."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_generators(seed: int, *more: int) -> None:
    """Set every generator; further numbers, where one is not 0, give other seeds."""
    if any(more):
        key = hashlib.sha256(repr((seed, *more)).encode()).digest()
        seed = int.from_bytes(key[:7], "little")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of torch's, numpy's and Python's own generators, as tensors and as JSON has it."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, "int64"))
    version, numbers, following = random.getstate()
    return tensors, {"numpy": [kind, position, has_gauss, gauss], "python": [version, list(numbers), following]}


def restore_rng_state(tensors: dict[str, Tensor], facts: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where `states` was asked for."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    kind, position, has_gauss, gauss = facts["numpy"]
    numpy.random.set_state((kind, tensors["numpy"].numpy().astype("uint32"), position, has_gauss, gauss))
    version, numbers, following = facts["python"]
    random.setstate((version, tuple(numbers), following))


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """No draw made inside is felt outside."""
    tensors, facts = save_rng_state(device)
    try:
        yield
    finally:
        restore_rng_state(tensors, facts, device)
