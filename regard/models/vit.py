"""The Vision Transformer: an image as a sequence of patches. Dosovitskiy et al. 2020, arXiv:2010.11929."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.core.absolute_positions import Grid
from regard.core.masks import full, global_tokens
from regard.core.masks.algebra import BoxVisibility, Flag, Mask, Position
from regard.core.masks.forms.global_tokens import FirstRows
from regard.models.model import Config, Model
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import LearnedPositions, PatchEmbedding, interpolate_positions
from regard.nn.feedforward import FeedForward
from regard.nn.init import Initializers, constant, fan_in, normal
from regard.nn.linear_attention import LinearAttention
from regard.nn.norms import norm

# what is pooled, and the number of tokens before the first patch
POOLS = {"class": 1, "mean": 0, "class-mean": 1, "class-distilled": 2}
HEADS = ("linear", "mlp-tanh")
POSITIONS = ("learned", "none")
ATTENTIONS = ("full", "local", "global-local", "linear")
NEEDS_REACH = ("local", "global-local")


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(Config):
    """Settings of a Vision Transformer (ViT).

    image      side in pixels of the images for which positions are learned; positions are interpolated for
               other sizes
    patch      side of a patch in pixels
    classes    number of classes; 0 returns pooled features instead of logits
    pool       input of the head, after the final norm: "class", a class token before the patches; "mean", the
               mean of the patches; "class-mean", both (DINOv2); "class-distilled", a class and a distillation
               token (DeiT)
    head       the classifier: "linear", or "mlp-tanh", which has one more layer, as in the paper's pretraining
    attention  "full"; "local": a patch sees the patches within `reach` rows and columns, and the class token
               sees all patches but is not seen by them; "global-local": all patches see the class token, too;
               "linear": linear attention
    reach      for local attention: largest distance in rows and in columns between patches that see each other
    ff_width   width of the hidden layer of the feed-forward network; None is 4 * width
    drop_path  stochastic depth: probability of dropping a residual branch in the last block; the probability
               grows linearly from 0 in the first block
    """

    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    width: int = 768
    depth: int = 12
    heads: int = 12
    ff_width: int | None = None
    pool: str = "class"
    head: str = "linear"
    positions: str = "learned"
    attention: str = "full"
    reach: int | None = None
    query_key_value_bias: bool = True
    eps: float = 1e-6
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        self.check(zero=("classes",))
        for name, choices in (
            ("pool", tuple(POOLS)),
            ("head", HEADS),
            ("positions", POSITIONS),
            ("attention", ATTENTIONS),
        ):
            self.check_choice(name, choices)
        check_heads(self.width, self.heads)
        if self.image % self.patch:
            near = max(round(self.image / self.patch), 1) * self.patch
            raise ConfigError(
                f"image must be a multiple of patch: image={self.image}, patch={self.patch}; try image={near}"
            )
        if (self.reach is not None) != (self.attention in NEEDS_REACH):
            raise ConfigError(
                f"reach is for {' and '.join(NEEDS_REACH)} attention, in rows and columns of patches: "
                f"attention={self.attention!r}, reach={self.reach}"
            )
        if self.attention == "global-local" and self.pool == "mean":
            raise ConfigError("global-local attention needs the class token: pool='class'; or choose 'local'")
        if self.attention == "linear" and self.attention_dropout:
            raise ConfigError("linear attention has no weights to drop; set attention_dropout=0")

    @property
    def side(self) -> int:
        """The number of patches along one side of the image."""
        return self.image // self.patch


class ViT(Model):
    """A Vision Transformer (ViT). Maps images to logits of classes.

    >>> model = regard.build("vit-ti/16", depth=1)
    >>> model(torch.zeros(1, 3, 224, 224)).shape
    torch.Size([1, 1000])
    """

    Config = ViTConfig
    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.prefix_tokens = POOLS[config.pool]  # tokens before the first patch
        self.patches = PatchEmbedding(config.width, config.patch, config.channels)
        self.class_token = nn.Parameter(torch.zeros(config.width)) if self.prefix_tokens else None
        self.distillation_token = nn.Parameter(torch.zeros(config.width)) if self.prefix_tokens > 1 else None
        learned = config.positions == "learned"
        self.positions = LearnedPositions(self.prefix_tokens + config.side**2, config.width) if learned else None
        self.blocks = nn.ModuleList(_block(config, number) for number in range(config.depth))
        self.norm = norm("layer", config.width, config.eps)
        pooled = config.width * (2 if config.pool.startswith("class-") else 1)
        self.head_hidden = nn.Linear(pooled, pooled) if config.head == "mlp-tanh" else None
        self.head = nn.Linear(pooled, config.classes) if config.classes else None
        self.init_weights()

    def mask(self, columns: int) -> Mask:
        """Return the attention mask for images with `columns` patches per row."""
        if self.config.reach is None:
            return full()
        near = LocalPatches(self.config.reach, columns, self.prefix_tokens)
        if not self.prefix_tokens:
            return near
        first = global_tokens if self.config.attention == "global-local" else FirstRows
        return near | first(self.prefix_tokens)

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b classes"]:
        """Return the logits of the classes, or pooled features if classes=0."""
        hidden = self.hidden(image)
        parts = [hidden[:, : self.prefix_tokens].flatten(1)] if self.prefix_tokens else []
        parts += [hidden[:, self.prefix_tokens :].mean(1)] if self.config.pool.endswith("mean") else []
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.head_hidden is not None:
            pooled = self.head_hidden(pooled).tanh()
        return pooled if self.head is None else self.head(pooled)

    def hidden(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b n d"]:
        """Return the hidden states after the final norm.

        The class and distillation tokens come first, if the model has them, then the patches row by row.
        """
        x = functional.dropout(self.embed(image), self.config.dropout, self.training)
        mask = self.mask(image.shape[3] // self.config.patch)
        return self.norm(run_blocks(self.blocks, x, recompute=self.gradient_checkpointing, mask=mask))

    def embed(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b n d"]:
        """Return the input of the first block, with positions added.

        The class and distillation tokens come first, if the model has them, then the patches row by row.
        """
        grid = self.patches(image)
        # in the dtype of the parameters: autocast lowers the convolution, but the residual stream stays exact
        x = grid.flatten(1, 2).to(self.norm.weight.dtype)
        tokens = [token for token in (self.class_token, self.distillation_token) if token is not None]
        if tokens:
            x = torch.cat([*(token.expand(x.shape[0], 1, -1) for token in tokens), x], 1)
        if self.positions is None:
            return x
        table, old, new = self.positions.weight, (self.config.side, self.config.side), (grid.shape[1], grid.shape[2])
        if new == old:
            return x + table
        resized = interpolate_positions(table[self.prefix_tokens :], old, new)
        return x + torch.cat([table[: self.prefix_tokens], resized])

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        side = self.config.image if length is None else length
        return (torch.zeros(batch, self.config.channels, side, side),)

    def initializers(self) -> Initializers:
        return {
            "*_token": normal(0.02),
            "positions.weight": normal(0.02, cut=2),
            "patches.projection.weight": fan_in(),
            "*norm.weight": constant(1.0),
            "*norm.bias": constant(0.0),
            "*.bias": constant(0.0),
            "*.weight": normal(0.02, cut=2),
        }


@dataclass(frozen=True, repr=False)
class LocalPatches(Mask):
    """The local attention mask of images: a patch sees the patches within `reach` rows and columns.

    columns  number of patches in a row of the image
    prefix   number of tokens before the first patch, such as a class token; this mask hides every pair of tokens that
             contains one of them
    """

    reach: int
    columns: int
    prefix: int = 0

    def see(self, grid: Grid) -> Bool[Tensor, "..."]:
        i, j = grid.i - self.prefix, grid.j - self.prefix
        down = i // self.columns - j // self.columns
        across = i % self.columns - j % self.columns
        return (down.abs() <= self.reach) & (across.abs() <= self.reach) & (i >= 0) & (j >= 0)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        top, bottom, upper, lower = ((x - self.prefix) // self.columns for x in (first, last, start, stop))
        none: Flag = (upper > bottom + self.reach) | (lower < top - self.reach)
        if self.reach < self.columns - 1:
            return BoxVisibility(none, all=False)  # some pairs of these rows are too far apart
        near = (bottom - upper <= self.reach) & (lower - top <= self.reach)
        return BoxVisibility(none, all=near & (first >= self.prefix) & (start >= self.prefix))

    def __repr__(self) -> str:
        return f"local_patches(reach={self.reach}, columns={self.columns}, prefix={self.prefix})"


def _block(config: ViTConfig, number: int) -> Block:
    mixer: Attention
    if config.attention == "linear":
        mixer = LinearAttention(config.width, config.heads, bias=config.query_key_value_bias)
    else:
        inner, dropout = config.query_key_value_bias, config.attention_dropout
        mixer = Attention(config.width, config.heads, bias=inner, out_bias=True, dropout=dropout)
    feedforward = FeedForward(config.width, config.ff_width)
    drop_path = config.drop_path * number / max(config.depth - 1, 1)
    return Block(config.width, mixer, feedforward, eps=config.eps, dropout=config.dropout, drop_path=drop_path)


# With 1000 classes these have 5.7, 22.1, 86.6, 88.2, 304.3 and 632.0 million parameters. The paper rounds base, large
# and huge to 86, 307 and 632.
PRESETS = {
    "vit-ti/16": ViTConfig(width=192, heads=3),
    "vit-s/16": ViTConfig(width=384, heads=6),
    "vit-b/16": ViTConfig(),
    "vit-b/32": ViTConfig(patch=32),
    "vit-l/16": ViTConfig(width=1024, depth=24, heads=16),
    "vit-h/14": ViTConfig(patch=14, width=1280, depth=32, heads=16),
}
