"""A small convolutional network (CNN), a baseline for images. LeCun et al. 1998."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.models.model import Config, Model
from regard.nn.blocks import run_blocks
from regard.nn.convolution import INITIALIZERS, ConvNorm
from regard.nn.embeddings import check_image
from regard.nn.init import Initializers


@dataclass(frozen=True, kw_only=True, slots=True)
class CNNConfig(Config):
    """Settings of a convolutional network.

    widths  number of channels of each stage; every stage after the first halves rows and columns
    """

    channels: int = 1
    classes: int = 10
    widths: tuple[int, ...] = (32, 64, 128)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check()
        if not self.widths:
            raise ConfigError("widths has one number for each stage and cannot be empty, as in widths=(32, 64)")


class CNN(Model):
    """A convolutional network (CNN). Maps images of any size to logits of classes."""

    Config = CNNConfig
    config: CNNConfig

    def __init__(self, config: CNNConfig) -> None:
        super().__init__(config)
        sizes = (config.channels, *config.widths)
        self.stages = nn.ModuleList(
            ConvNormReLU(old, new, stride=2 if number else 1) for number, (old, new) in enumerate(pairwise(sizes))
        )
        self.head = nn.Linear(sizes[-1], config.classes)
        self.init_weights()

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b classes"]:
        pooled = functional.dropout(self.hidden(image).mean((2, 3)), self.config.dropout, self.training)
        return self.head(pooled)

    def hidden(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b d rows columns"]:
        """Return the feature maps of the last stage."""
        check_image(image, self.config.channels)
        return run_blocks(self.stages, image)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        side = 28 if length is None else length
        return (torch.zeros(batch, self.config.channels, side, side),)

    def initializers(self) -> Initializers:
        return INITIALIZERS


class ConvNormReLU(ConvNorm):
    """A 3 x 3 convolution, batch norm and ReLU."""

    def forward(self, x: Float[Tensor, "b m y x"]) -> Float[Tensor, "b d rows columns"]:
        return super().forward(x).relu()


PRESETS = {"cnn": CNNConfig()}
