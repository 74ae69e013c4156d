"""Dropout: the share of weights that are zeroed at random, in training and in eval."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from regard.see.measure.measurement import Plate
from regard.see.measure.read_weights import READINGS, training_mode


def seen_through(plate: Plate) -> tuple[Plate, float]:
    """The plate without the dropout of eval, where there should be none, and the share it zeroed."""
    if plate.deterministic or not bool(plate.awake.any()):
        return plate, 0.0
    larger = float(plate.flat.sum(-1)[plate.awake].median())  # every weight was kept in some reading
    share = _dropped(plate, lambda: larger)
    if share:
        eye = replace(plate.eye, larger=larger)
        plate = replace(plate, eye=eye, flat=plate.flat / larger, drawn=plate.drawn / larger)
    return plate, share


def dropped_in_training(plate: Plate, in_eval: float) -> float | None:
    """The share of weights that training zeroes; None for a function, which knows no training."""
    eye = plate.eye
    if eye.probe.module is None:
        if in_eval:
            plate.notes.append("weights are dropped at every call: a function has no eval mode to tell it not to")
        return None
    exact = eye.weights(*plate.still)
    with training_mode(eye.probe.module, training=True):
        largest = replace(eye, readings=READINGS, larger=1.0)
        return _dropped(plate, lambda: float((largest.weights(*plate.still) / exact)[plate.visible].median()))


def _dropped(plate: Plate, measure: Callable[[], float]) -> float:
    """The share of weights that are zeroed; `measure` gives the factor by which the others are larger."""
    zeroed = torch.stack([plate.eye.once(*plate.still)[plate.visible] == 0 for _ in range(16)]).double()
    share = float(zeroed.mean()) if zeroed.numel() else 0.0
    if not share:
        return 0.0
    same = plate.eye.answer(*plate.still, torch.ones_like(plate.v))[plate.awake]
    if bool(((same - same[..., :1]).abs() > 1e-6).any()):
        plate.notes.append("dropout acts on the output, not on the weights")
    larger = measure()
    exact = 1 - 1 / larger
    if abs(exact - share) < 5 * math.sqrt(share * (1 - share) / zeroed.numel()) + 1e-3:
        return round(exact, 6)  # what is kept is larger by 1 / (1 - p), which tells p exactly
    plate.notes.append(f"dropout makes what it keeps {larger:.4g} times as large, which is not 1 / (1 - p)")
    return share
