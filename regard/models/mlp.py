"""A multi-layer perceptron (MLP) on images, a baseline. Rumelhart et al. 1986."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ShapeError
from regard.models.model import Config, Model
from regard.nn.embeddings import check_image
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.init import Initializers, constant, fan_in


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig(Config):
    """Settings of a multi-layer perceptron.

    widths  widths of the hidden layers; an empty tuple makes a linear classifier
    """

    image: int = 28
    channels: int = 1
    classes: int = 10
    widths: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check()
        ACTIVATIONS[self.activation]  # raises for an unknown name


class MLP(Model):
    """A multi-layer perceptron (MLP). Maps images to logits of classes."""

    Config = MLPConfig
    config: MLPConfig

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        sizes = (config.channels * config.image**2, *config.widths)
        self.layers = nn.ModuleList(nn.Linear(old, new) for old, new in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], config.classes)
        self.init_weights()

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b classes"]:
        return self.head(self.hidden(image))

    def hidden(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b d"]:
        """Return the output of the last hidden layer."""
        check_image(image, self.config.channels)
        side = self.config.image
        if image.shape[2:] != (side, side):
            raise ShapeError(
                f"image is {image.shape[2]} x {image.shape[3]}, but a perceptron has one weight for each pixel of "
                f"{side} x {side}; resize it, or build with image={image.shape[2]}"
            )
        x = image.flatten(1)
        for layer in self.layers:
            x = ACTIVATIONS[self.config.activation](layer(x))
            x = functional.dropout(x, self.config.dropout, self.training)
        return x

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        side = self.config.image if length is None else length
        return (torch.zeros(batch, self.config.channels, side, side),)

    def initializers(self) -> Initializers:
        return {"*.bias": constant(0.0), "layers.*.weight": fan_in(math.sqrt(2)), "head.weight": fan_in()}


PRESETS = {"mlp": MLPConfig()}
