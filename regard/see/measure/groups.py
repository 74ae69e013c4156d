"""Grouped heads: which key head each query head reads, and whether anything leaks between heads or sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.see.measure.measurement import Plate


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Who reads whom."""

    groups: tuple[int, ...] | None = None  # the key head whose values each query head reads
    grouping: str | None = None  # "repeat", "tile", "one to one" or "shared"
    key_heads: tuple[int, ...] = ()  # the key head whose keys each query head is compared with


def read_groups(plate: Plate, steady: bool) -> Groups:
    """v = 1 in one key head shows who reads it; k changed in one key head shows whose weights it makes.

    steady  weights read twice are the same
    """
    eye, notes = plate.eye, plate.notes
    share, moved = torch.zeros(eye.h, eye.g), torch.zeros(eye.h, eye.g, dtype=torch.bool)
    leak = 0.0
    for head in range(eye.g):
        v, other = torch.zeros_like(plate.v), plate.k.clone()
        v[:1, head] = 1
        out = eye.ask(*plate.still, v)[..., 0].masked_fill(~plate.awake, 0)
        share[:, head] = out[0].sum(-1) / plate.awake[0].sum(-1).clamp(min=1)
        leak = max(leak, float(out[1:].abs().max()))
        other[:, head] *= -1
        change = (eye.weights(plate.q, other) - plate.drawn).masked_fill(~plate.visible, 0)
        moved[:, head] = change.abs().amax((0, 2, 3)) > 1e-6
    if leak > 1e-6:
        notes.append(f"sequences are mixed: values of the first reach others with a weight of {leak:.2g}")
    own, of_keys = tuple(share.abs().argmax(1).tolist()), tuple(moved.int().argmax(1).tolist())
    mixed = [head for head, read in enumerate((share.abs() > 1e-4).sum(1).tolist()) if read != 1]
    if mixed:
        notes.append(f"query heads {mixed} read the values of none or of several key heads")
    if steady and bool((moved.sum(1) > 1).any()):
        notes.append("the weights of a query head depend on several key heads: heads are mixed")
    told = bool((moved.sum(1) == 1).all())
    if told and not mixed and of_keys != own:
        notes.append(f"keys are read by another order than values: {list(of_keys)}")
    key_heads = of_keys if told else own
    return (
        Groups(key_heads=key_heads) if mixed else Groups(groups=own, grouping=_named(own, eye.g), key_heads=key_heads)
    )


def _named(groups: Sequence[int], g: int) -> str:
    h = len(groups)
    if list(groups) == list(range(h)):
        return "one to one"
    if g == 1:
        return "shared"
    if h % g == 0 and list(groups) == [head // (h // g) for head in range(h)]:
        return "repeat"
    return "tile" if list(groups) == [head % g for head in range(h)] else "an order of its own"
