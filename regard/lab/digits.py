"""Handwritten digits of 8 x 8 pixels: 1,397 training images, 400 test images, training and accuracy."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.seeds import make_generator
from regard.data.digits import read_digits
from regard.lab.fitting import fit_cross_entropy
from regard.models.vit import ViTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

SIDE, CLASSES, TRAIN_IMAGES = 8, 10, 1397


class Digits(NamedTuple):
    """Images of handwritten digits, 8 x 8 pixels, and their labels."""

    images: Float[Tensor, "n 1 8 8"]
    labels: Int[Tensor, "n"]

    def subset(self, rows: Int[Tensor, "m"]) -> "Digits":
        """Return the images and labels with these indices."""
        return Digits(self.images[rows], self.labels[rows])

    def shuffle_pixels(self, seed: int) -> "Digits":
        """Return the images with their pixels in a random order, the same order for all images."""
        order = torch.randperm(SIDE * SIDE, generator=make_generator(seed))
        return Digits(self.images.flatten(2)[:, :, order].unflatten(2, (SIDE, SIDE)), self.labels)


@cache
def load_digit_images() -> tuple[Digits, Digits]:
    """Return the training and test images of handwritten digits; pixels are in -1..1, and the split is fixed."""
    pixels, labels = read_digits()
    images = pixels[:, None] / 8 - 1
    both = Digits(images, labels)
    order = torch.randperm(len(images), generator=make_generator(0))  # the file is sorted by writer
    return both.subset(order[:TRAIN_IMAGES]), both.subset(order[TRAIN_IMAGES:])


def build_digit_vit(vit: Callable[[ViTConfig], Any], seed: int, *, positions_std: float, **settings: Any) -> Any:
    """Build a small Vision Transformer for digits with mean pooling, and larger initial weights than usual.

    With these weights a short training is enough.

    vit            builds the model from a ViTConfig
    positions_std  standard deviation of the initial position embeddings
    settings       further fields of ViTConfig
    """
    width = settings["width"]
    model = vit(ViTConfig(**{"image": SIDE, "channels": 1, "pool": "mean", "ff_width": 2 * width} | settings))
    # a larger init than the published one, for short training
    table = {"positions.weight": normal(positions_std), "*norm.weight": constant(1.0)}
    init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def train_classifier(model: Any, given: Digits, *, steps: int, batch: int, rate: float, seed: int) -> None:
    """Train a classifier in place on random batches of these images.

    steps  number of training steps
    batch  number of images per step
    rate   learning rate
    seed   random seed of the batches
    """
    draws = make_generator(seed)

    def sample() -> tuple[tuple[Tensor], Tensor]:
        images, labels = given.subset(torch.randint(len(given.labels), (batch,), generator=draws))
        return (images,), labels

    fit_cross_entropy(model, sample, steps=steps, rate=rate)


@torch.no_grad()
def accuracy(model: Any, given: Digits) -> float:
    """Return the accuracy of a classifier on these images."""
    return float((model(given.images).argmax(-1) == given.labels).double().mean())
