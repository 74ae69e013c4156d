"""DaViT: alternating window attention and channel attention. Ding et al. 2022, arXiv:2204.03645.

The cost of both kinds of attention is linear in the area of the image. From stage to stage the grid gets coarser and
the number of channels grows.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.base.errors import ConfigError
from regard.models.model import Config, Model
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Residual, run_blocks
from regard.nn.channel_attention import ChannelAttention
from regard.nn.embeddings import check_image
from regard.nn.feedforward import FeedForward
from regard.nn.init import Initializers, constant, fan_in, normal
from regard.nn.norms import norm
from regard.nn.windows import merge, partition


@dataclass(frozen=True, kw_only=True, slots=True)
class DaViTConfig(Config):
    """Settings of a DaViT. `widths`, `depths` and `heads` have one number for each stage.

    depths     number of pairs of blocks; a pair is a block with window attention and one with channel attention
    heads      number of heads of window attention, and of groups of channel attention
    window     side of the windows, in positions of the stage's grid
    ff_factor  width of the hidden feed-forward layer, as a multiple of the stage's width
    classes    number of classes; 0 returns pooled features instead of logits
    drop_path  stochastic depth: probability of dropping a residual branch in the last pair of blocks; the
               probability grows linearly from 0 in the first pair
    """

    channels: int = 3
    classes: int = 1000
    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (1, 1, 3, 1)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    ff_factor: int = 4
    query_key_value_bias: bool = True
    eps: float = 1e-5
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        self.check(zero=("classes",))
        if not len(self.widths) == len(self.depths) == len(self.heads) or not self.widths:
            raise ConfigError(
                "widths, depths and heads have one number for each stage: "
                f"widths={self.widths}, depths={self.depths}, heads={self.heads}"
            )
        for width, heads in zip(self.widths, self.heads, strict=True):
            check_heads(width, heads)


class DaViT(Model):
    """A DaViT (Dual Attention Vision Transformer). Maps images to logits of classes."""

    Config = DaViTConfig
    config: DaViTConfig

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__(config)
        self.stem = Stem(config.channels, config.widths[0], config.eps)
        self.stages = nn.ModuleList(DaViTStage(config, number) for number in range(len(config.widths)))
        self.norm = norm("layer", config.widths[-1], config.eps)
        self.head = nn.Linear(config.widths[-1], config.classes) if config.classes else None
        self.init_weights()

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b classes"]:
        """Return the logits of the classes, or pooled features if classes=0."""
        pooled = self.norm(self.hidden(image).mean((1, 2)))
        return pooled if self.head is None else self.head(pooled)

    def hidden(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b rows columns d"]:
        """Return the features of the last stage as a grid.

        The stem divides the numbers of rows and columns by 4, and each stage after the first divides them by 2.
        """
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x, recompute=self.gradient_checkpointing)
        return x

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        side = 224 if length is None else length
        return (torch.zeros(batch, self.config.channels, side, side),)

    def initializers(self) -> Initializers:
        return {
            "*norm.weight": constant(1.0),
            "*norm.bias": constant(0.0),
            "*.bias": constant(0.0),
            "*.projection.weight": fan_in(),
            "*_positions.weight": fan_in(3**-0.5),  # small compared with what it is added to
            "*.weight": normal(0.02, cut=2),
        }


class Stem(nn.Module):
    """The patch embedding of DaViT: a convolution with overlapping patches, one per 4 x 4 pixels, and a norm."""

    def __init__(self, channels: int, width: int, eps: float) -> None:
        super().__init__()
        self.channels = channels
        self.projection = nn.Conv2d(channels, width, 7, stride=4, padding=3)
        self.norm = norm("layer", width, eps)

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b rows columns d"]:
        check_image(image, self.channels)
        return self.norm(_convolve(self.projection, image.permute(0, 2, 3, 1)))


class Downsample(nn.Module):
    """A norm and a convolution that halve rows and columns and change the width."""

    def __init__(self, old: int, new: int, eps: float) -> None:
        super().__init__()
        self.norm = norm("layer", old, eps)
        self.projection = nn.Conv2d(old, new, 2, stride=2)

    def forward(self, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b rows columns m"]:
        rows, columns = x.shape[1:3]
        even = pad(self.norm(x), (0, 0, 0, columns % 2, 0, rows % 2))
        return _convolve(self.projection, even)


class DaViTStage(nn.Module):
    """One stage of DaViT: downsampling, except in the first stage, then pairs of blocks."""

    def __init__(self, config: DaViTConfig, number: int) -> None:
        super().__init__()
        width, before, total = config.widths[number], sum(config.depths[:number]), sum(config.depths)
        self.downsample = Downsample(config.widths[number - 1], width, config.eps) if number else None
        shares = [config.drop_path * (before + n) / max(total - 1, 1) for n in range(config.depths[number])]
        self.blocks = nn.ModuleList(DualBlock(config, number, share) for share in shares)

    def forward(self, x: Float[Tensor, "b y x d"], *, recompute: bool = False) -> Float[Tensor, "b rows columns m"]:
        return run_blocks(self.blocks, x if self.downsample is None else self.downsample(x), recompute=recompute)


class DualBlock(nn.Module):
    """A pair of DaViT blocks: window attention, then channel attention."""

    def __init__(self, config: DaViTConfig, number: int, drop_path: float) -> None:
        super().__init__()
        width, heads, bias = config.widths[number], config.heads[number], config.query_key_value_bias
        windows, channels = Attention(width, heads, bias=bias, out_bias=True), ChannelAttention(width, heads, bias=bias)
        self.window = GridBlock(config, width, windows, drop_path, window=config.window)
        self.channel = GridBlock(config, width, channels, drop_path)

    def forward(self, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b y x d"]:
        return self.channel(self.window(x))


class GridBlock(nn.Module):
    """A DaViT block: x + attention, then x + feed-forward.

    Before attention and before the feed-forward network, a depthwise convolution adds position information.

    window  side of the attention windows. Windows at the edge are padded with zeros, which are not masked. None
            makes the whole grid one sequence
    """

    def __init__(
        self, config: DaViTConfig, width: int, attention: nn.Module, drop_path: float, *, window: int | None = None
    ) -> None:
        super().__init__()
        self.window = window
        self.attention_positions = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.attention_norm = norm("layer", width, config.eps)
        self.attention = attention
        self.feedforward_positions = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.feedforward_norm = norm("layer", width, config.eps)
        self.feedforward = FeedForward(width, config.ff_factor * width)
        self.residual = Residual(drop_path=drop_path)

    def forward(self, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b y x d"]:
        rows, columns = x.shape[1:3]
        x = x + _convolve(self.attention_positions, x)
        inner = self.attention_norm(x)
        if self.window is None:
            attended = self.attention(inner.flatten(1, 2))
        else:
            attended = merge(self.attention(partition(inner, self.window)), self.window, rows, columns).flatten(1, 2)
        x = x + self.residual(attended).unflatten(1, (rows, columns))
        x = x + _convolve(self.feedforward_positions, x)
        output = self.feedforward(self.feedforward_norm(x).flatten(1, 2))
        return x + self.residual(output).unflatten(1, (rows, columns))


def _convolve(convolution: nn.Conv2d, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b rows columns m"]:
    """Apply a convolution to a grid of positions. The output has the dtype of the weights, also under autocast."""
    return convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).to(convolution.weight.dtype)


# published: 28.3, 49.7 and 87.9 million parameters; 4.5, 8.8 and 15.5 billion multiplications at 224 x 224
PRESETS = {
    "davit-tiny": DaViTConfig(),
    "davit-small": DaViTConfig(depths=(1, 1, 9, 1)),
    "davit-base": DaViTConfig(widths=(128, 256, 512, 1024), depths=(1, 1, 9, 1), heads=(4, 8, 16, 32)),
}
