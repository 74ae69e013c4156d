"""A residual network (ResNet) for small images. He et al. 2015, arXiv:1512.03385, section 4.2."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.base.errors import ConfigError
from regard.models.model import Config, Model
from regard.nn.blocks import run_blocks
from regard.nn.convolution import INITIALIZERS, ConvNorm
from regard.nn.embeddings import check_image
from regard.nn.init import Initializers

STAGES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(Config):
    """Settings of a residual network (ResNet).

    width  number of channels of the first stage; the second and third stage have two and four times as many
    depth  number of layers with weights. It is 6 n + 2: three stages of n blocks with two layers each, one layer
           before all blocks and one after
    """

    channels: int = 3
    classes: int = 10
    width: int = 16
    depth: int = 20

    def __post_init__(self) -> None:
        self.check()
        if self.depth < 8 or self.depth % 6 != 2:
            near = max(round((self.depth - 2) / 6), 1) * 6 + 2
            raise ConfigError(f"depth is 6 n + 2, for n blocks in each of three stages: depth={self.depth}; try {near}")


class ResNet(Model):
    """A residual network (ResNet). Maps images of any size to logits of classes."""

    Config = ResNetConfig
    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.stem = ConvNorm(config.channels, config.width)
        width, blocks = config.width, []
        for number in range(STAGES * (config.depth // 6)):
            wider = number and number % (config.depth // 6) == 0
            blocks.append(ConvBlock(width, 2 * width if wider else width))
            width = blocks[-1].width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, config.classes)
        self.init_weights()

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b classes"]:
        return self.head(self.hidden(image).mean((2, 3)))

    def hidden(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b d rows columns"]:
        """Return the feature maps of the last block."""
        check_image(image, self.config.channels)
        return run_blocks(self.blocks, self.stem(image).relu())

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        side = 32 if length is None else length
        return (torch.zeros(batch, self.config.channels, side, side),)

    def initializers(self) -> Initializers:
        return INITIALIZERS


class ConvBlock(nn.Module):
    """A ResNet block: two convolutions with a residual connection.

    If the block has more output than input channels, the shortcut skips every second row and column, and channels of
    zeros are added to it.
    """

    def __init__(self, old: int, width: int) -> None:
        super().__init__()
        self.old, self.width, self.stride = old, width, 2 if width > old else 1
        self.first = ConvNorm(old, width, stride=self.stride)
        self.second = ConvNorm(width, width)

    def forward(self, x: Float[Tensor, "b m y x"]) -> Float[Tensor, "b d rows columns"]:
        residual = self.second(self.first(x).relu())
        shortcut = x[:, :, :: self.stride, :: self.stride]
        missing = self.width - self.old
        return torch.relu(residual + pad(shortcut, (0, 0, 0, 0, missing // 2, missing - missing // 2)))


PRESETS = {"resnet": ResNetConfig()}
