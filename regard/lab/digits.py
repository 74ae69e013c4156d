"""Handwritten digits of 8 x 8 pixels: 1,397 training images, 400 test images, training and accuracy."""

from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.data.digits import read_digits
from regard.lab.fitting import fit

SIDE, CLASSES, TRAIN_IMAGES = 8, 10, 1397


class Digits(NamedTuple):
    """Images and their labels."""

    images: Float[Tensor, "n 1 8 8"]
    labels: Int[Tensor, "n"]

    def subset(self, rows: Int[Tensor, "m"]) -> "Digits":
        return Digits(self.images[rows], self.labels[rows])

    def shuffle_pixels(self, seed: int) -> "Digits":
        """Shuffle the pixels of all images in the same way."""
        order = torch.randperm(SIDE * SIDE, generator=make_generator(seed))
        return Digits(self.images.flatten(2)[:, :, order].unflatten(2, (SIDE, SIDE)), self.labels)


@cache
def load_digit_images() -> tuple[Digits, Digits]:
    """Return the training and the test images, always the same split; pixels are between -1 and 1."""
    pixels, labels = read_digits()
    images = pixels[:, None] / 8 - 1
    both = Digits(images, labels)
    order = torch.randperm(len(images), generator=make_generator(0))  # the file is sorted by writer
    return both.subset(order[:TRAIN_IMAGES]), both.subset(order[TRAIN_IMAGES:])


def train_classifier(model: Any, given: Digits, *, steps: int, batch: int, rate: float, seed: int) -> None:
    """Train a classifier on random batches of these images."""
    draws = make_generator(seed)

    def loss() -> Tensor:
        images, labels = given.subset(torch.randint(len(given.labels), (batch,), generator=draws))
        return functional.cross_entropy(model(images), labels)

    fit(model.train().parameters(), loss, steps=steps, rate=rate)
    model.eval()


@torch.no_grad()
def accuracy(model: Any, given: Digits) -> float:
    """Return the accuracy of a classifier on these images."""
    return float((model(given.images).argmax(-1) == given.labels).double().mean())
