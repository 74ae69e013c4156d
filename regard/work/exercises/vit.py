"""The Vision Transformer as modules of torch: patches, attention, a block, the whole."""

import torch
from torch import Tensor, nn

from regard.work.exercises.checks import Case, by_outputs
from regard.work.exercises.exercise import Exercise, Exercises, PlantedMistake
from regard.work.exercises.solutions.vit import Block, PatchEmbedding, SelfAttention, ViT

GIVEN = """\
import torch
from jaxtyping import Float
from torch import Tensor, nn

images = torch.randn(2, 3, 12, 8)
"""

ABOUT = """\
A Vision Transformer cuts an image into patches, makes a token of each, and lets the tokens attend to each other in
blocks; a class is read from one token more, which belongs to no patch. Each part is a module of torch, and larger ones
are handed the smaller ones. Tokens are rows: (batch, tokens, width).

Keep the names that `__init__` gives to layers and parameters: the tests put weights of their own into them.
"""


class _Patches(PatchEmbedding):
    """Patches cut in another way."""

    way = "no transpose"

    def forward(self, images: Tensor) -> Tensor:
        b, channels, height, width = images.shape
        p, rows, columns = self.patch, height // self.patch, width // self.patch
        cut = images.reshape(b, channels, rows, p, columns, p)
        orders = {
            "no transpose": (0, 1, 2, 3, 4, 5),
            "columns first": (0, 4, 2, 1, 3, 5),
            "channels last": (0, 2, 4, 3, 5, 1),
            "patches turned": (0, 2, 4, 1, 5, 3),
        }
        out: Tensor = self.project(cut.permute(orders[self.way]).reshape(b, rows * columns, channels * p * p))
        return out


class _PatchesByColumn(_Patches):
    way = "columns first"


class _PatchesChannelsLast(_Patches):
    way = "channels last"


class _PatchesTurned(_Patches):
    way = "patches turned"


class _Attention(SelfAttention):
    """Attention with one thing wrong."""

    scale = "head"
    over_keys = True
    split_turned = True
    joined_turned = True
    projected = True
    crossed = False

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        c = d // self.heads
        made = [project(x) for project in (self.query, self.key, self.value)]
        if self.split_turned:
            q, k, v = (part.reshape(b, n, self.heads, c).transpose(1, 2) for part in made)
        else:
            q, k, v = (part.reshape(b, self.heads, n, c) for part in made)
        scores = q @ k.transpose(-2, -1) / {"head": c**0.5, "none": 1.0, "model": d**0.5, "width": c}[self.scale]
        if self.crossed:
            scores = scores.transpose(-2, -1)
        mixed = scores.softmax(-1 if self.over_keys else -2) @ v
        joined = mixed.transpose(1, 2).reshape(b, n, d) if self.joined_turned else mixed.reshape(b, n, d)
        out: Tensor = self.out(joined) if self.projected else joined
        return out


class _NoScale(_Attention):
    scale = "none"


class _ModelScale(_Attention):
    scale = "model"


class _WidthScale(_Attention):
    scale = "width"


class _OverQueries(_Attention):
    over_keys = False


class _SplitByReshape(_Attention):
    split_turned = False


class _JoinedByReshape(_Attention):
    joined_turned = False


class _BothByReshape(_Attention):
    split_turned = joined_turned = False


class _NoOut(_Attention):
    projected = False


class _Crossed(_Attention):
    crossed = True


class _NoOutLayer(_NoOut):
    """Not even the layer is there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.out


class _NoBias(SelfAttention):
    """Projections without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))


class _Block(Block):
    """A block with one thing wrong."""

    way = "post-norm"

    def forward(self, x: Tensor) -> Tensor:
        first, second, act = self.attention_norm, self.feedforward_norm, nn.functional.gelu
        if self.way == "post-norm":
            x = first(x + self.attention(x))
            return _tensor(second(x + self.down(act(self.up(x)))))
        if self.way == "no residual":
            return _tensor(self.down(act(self.up(second(self.attention(first(x)))))))
        if self.way == "no residual around attention":
            x = self.attention(first(x))
        elif self.way == "no first norm":
            x = x + self.attention(x)
        elif self.way == "residual after norm":
            x = first(x) + self.attention(first(x))
        else:
            x = x + self.attention(first(x))
        inside = self.up(x if self.way == "no second norm" else (first if self.way == "one norm" else second)(x))
        if self.way == "relu":
            inside = inside.relu()
        elif self.way != "no activation":
            inside = act(inside)
        if self.way == "residual after norm":
            x = second(x)
        return _tensor(self.down(inside) if self.way == "no residual around feed-forward" else x + self.down(inside))


def _tensor(x: Tensor) -> Tensor:
    """What a module gives, which to a type checker may be anything."""
    return x


def _block(name: str) -> type[_Block]:
    return type("_WrongBlock", (_Block,), {"way": name})


class _ViT(ViT):
    """A Vision Transformer with one thing wrong."""

    way = "no positions"

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images)
        token = self.class_token.expand(patches.shape[0], -1, -1)
        if self.way == "positions of patches only":
            x = torch.cat([token, patches + self.positions[:, 1:]], 1)
        elif self.way == "class token last":
            x = torch.cat([patches, token], 1) + self.positions
        elif self.way == "positions multiplied":
            x = torch.cat([token, patches], 1) * self.positions
        else:
            x = torch.cat([token, patches], 1) + (0 if self.way == "no positions" else self.positions)
        x = self.blocks(x)
        if self.way != "no norm":
            x = self.norm(x)
        read = {"mean": x.mean(1), "last": x[:, -1], "class token last": x[:, -1], "mean of patches": x[:, 1:].mean(1)}
        return _tensor(self.head(read.get(self.way, x[:, 0])))


def _vit(name: str) -> type[_ViT]:
    return type("_WrongViT", (_ViT,), {"way": name})


class _NoClassToken(ViT):
    """Patches alone, averaged."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__(patches, blocks, tokens, width, classes)
        del self.class_token
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images) + self.positions)
        return _tensor(self.head(self.norm(x).mean(1)))


class _PositionsTooFew(ViT):
    """A class token without a position."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__(patches, blocks, tokens, width, classes)
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))


class _NoPositions(ViT):
    """No positions at all."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__(patches, blocks, tokens, width, classes)
        del self.positions


def _drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)), dtype=torch.float64)


PATCHES: tuple[Case, ...] = ((3, 4, 10), (1, 2, 5), (2, 3, 7))
ATTENTIONS: tuple[Case, ...] = ((12, 3), (10, 2), (6, 1))
BLOCKS: tuple[Case, ...] = ((6, 14, lambda: SelfAttention(6, 3)), (4, 9, lambda: SelfAttention(4, 1)))
VITS: tuple[Case, ...] = (
    (lambda: PatchEmbedding(3, 4, 6), lambda: nn.Sequential(Block(6, 11, SelfAttention(6, 2))), 6, 6, 5),
    (lambda: PatchEmbedding(1, 2, 4), lambda: Block(4, 7, SelfAttention(4, 1)), 9, 4, 3),
)

VIT = Exercises(
    name="vit",
    title="The Vision Transformer",
    about=ABOUT,
    given=GIVEN,
    tasks=(
        Exercise(
            name="patches",
            title="Patches",
            prompt="""\
Write `PatchEmbedding`: an image (batch, channels, height, width) is cut into squares of `patch` x `patch` pixels, row
by row from the top left. Each is flattened channel by channel and within a channel row by row, and projected by one
linear layer, `project`. That is the same as a convolution whose kernel and stride are `patch`.
""",
            starter='''\
class PatchEmbedding(nn.Module):
    """Cuts images into patches and projects each: channel by channel, row by row."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b n d"]:
        # TODO: reshape to (b, k, rows, patch, columns, patch), bring rows and columns to the front, flatten, project
        raise NotImplementedError
''',
            solution=PatchEmbedding,
            check=by_outputs(PATCHES, lambda: [(_drawn(2, 3, 12, 8),), (_drawn(3, 1, 6, 10),), (_drawn(1, 2, 9, 6),)]),
            slips=(
                PlantedMistake(
                    "reshape without permute",
                    "a reshape alone cuts the image into runs of pixels, not into squares. Give rows and columns of "
                    "patches axes of their own, permute them to the front, then flatten.",
                    _Patches,
                ),
                PlantedMistake(
                    "patches by column",
                    "the patches come column by column; they should come row by row from the top left.",
                    _PatchesByColumn,
                ),
                PlantedMistake(
                    "channels last",
                    "inside a patch the channels change fastest. They should change slowest: all of the first channel, "
                    "then all of the second.",
                    _PatchesChannelsLast,
                ),
                PlantedMistake(
                    "patches turned over",
                    "inside a patch the pixels go column by column; they should go row by row.",
                    _PatchesTurned,
                ),
            ),
        ),
        Exercise(
            name="attention",
            title="Self-attention of several heads",
            prompt="""\
Write `SelfAttention`: three linear layers give queries, keys and values; each is cut into heads of width d/h; every
head attends with scores divided by the root of its own width; the heads are put together again, and `out` mixes them.
Write the softmax of the scores yourself.
""",
            starter='''\
class SelfAttention(nn.Module):
    """Self-attention of several heads, each of an equal share of the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        # TODO: heads (b, h, n, c); scores and their softmax (b, h, n, n); heads together again; out
        raise NotImplementedError
''',
            solution=SelfAttention,
            check=by_outputs(ATTENTIONS, lambda: [(_drawn(2, 5, 12),), (_drawn(1, 7, 10),), (_drawn(3, 4, 6),)]),
            slips=(
                PlantedMistake("missing scale", "the scores are not divided by the root of a head's width.", _NoScale),
                PlantedMistake(
                    "scale from the model's width",
                    "the scores were divided by the root of the whole width; a head has a share of it, d / heads.",
                    _ModelScale,
                ),
                PlantedMistake(
                    "scale by the width itself",
                    "the scores were divided by the head's width, not its root.",
                    _WidthScale,
                ),
                PlantedMistake(
                    "softmax over the wrong axis",
                    "the weights of each key add up to one, but those of each query should: softmax over the last "
                    "axis, -1.",
                    _OverQueries,
                ),
                PlantedMistake(
                    "transposed product",
                    "the scores are K Q', which has keys in rows; Q K' has a row for each query.",
                    _Crossed,
                ),
                PlantedMistake(
                    "reshape without transpose",
                    "heads were cut by a reshape to (b, h, n, c), which mixes tokens up. Reshape to (b, n, h, c), "
                    "where a token's numbers stay together, then transpose.",
                    _SplitByReshape,
                ),
                PlantedMistake(
                    "heads joined without transpose",
                    "heads were joined by a reshape of (b, h, n, c). Transpose to (b, n, h, c) first, so that a "
                    "token's heads lie side by side.",
                    _JoinedByReshape,
                ),
                PlantedMistake(
                    "heads cut and joined without transpose",
                    "heads were cut and joined by a reshape alone, so that each looks at a stretch of tokens. Reshape "
                    "to (b, n, h, c) and transpose, on the way in and on the way out.",
                    _BothByReshape,
                ),
                PlantedMistake(
                    "forgotten output projection", "the joined heads come out as they are; `out` mixes them.", _NoOut
                ),
                PlantedMistake(
                    "forgotten output projection", "there is no layer `out`, which mixes the heads.", _NoOutLayer
                ),
                PlantedMistake("forgotten bias", "the layers query, key and value have biases too.", _NoBias),
            ),
        ),
        Exercise(
            name="block",
            title="A block",
            prompt="""\
Write `Block`: x plus attention of the normalised x, then x plus the feed-forward part of the normalised x. The norm
stands before each part (pre-norm), what is added to is not normalised, and the feed-forward part is `up`, GELU, `down`.
The attention is handed in.
""",
            starter='''\
class Block(nn.Module):
    """Attention and a feed-forward part, each normalised before and added to what came in."""

    def __init__(self, width: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        # TODO: two parts, each with its norm before it and a residual around it
        raise NotImplementedError
''',
            solution=Block,
            check=by_outputs(BLOCKS, lambda: [(_drawn(2, 5, 6),), (_drawn(1, 3, 4),)]),
            slips=(
                PlantedMistake(
                    "post-norm instead of pre-norm",
                    "the norms stand after the sums, as in the Transformer of 2017. Here they stand before attention "
                    "and before the feed-forward part, and nothing normalises the sum.",
                    _block("post-norm"),
                ),
                PlantedMistake(
                    "missing residual",
                    "nothing is added to what came in; both parts have a residual around them.",
                    _block("no residual"),
                ),
                PlantedMistake(
                    "missing residual",
                    "the residual around attention is missing: x + attention(norm(x)).",
                    _block("no residual around attention"),
                ),
                PlantedMistake(
                    "missing residual",
                    "the residual around the feed-forward part is missing: x + down(gelu(up(norm(x)))).",
                    _block("no residual around feed-forward"),
                ),
                PlantedMistake(
                    "residual after the norm",
                    "the normalised x was added. The residual carries x as it came in.",
                    _block("residual after norm"),
                ),
                PlantedMistake(
                    "missing norm",
                    "attention gets x as it is; normalise it with attention_norm first.",
                    _block("no first norm"),
                ),
                PlantedMistake(
                    "missing norm",
                    "the feed-forward part gets x as it is; normalise it with feedforward_norm first.",
                    _block("no second norm"),
                ),
                PlantedMistake(
                    "one norm for both",
                    "both parts use attention_norm; the second has feedforward_norm.",
                    _block("one norm"),
                ),
                PlantedMistake(
                    "relu instead of gelu",
                    "the feed-forward part has GELU between its layers, not ReLU.",
                    _block("relu"),
                ),
                PlantedMistake(
                    "no activation",
                    "without GELU between them `up` and `down` are one linear map.",
                    _block("no activation"),
                ),
            ),
        ),
        Exercise(
            name="vit",
            title="The whole model",
            prompt="""\
Write `ViT`: tokens of the patches, `class_token` put before them, `positions` added to all of them (one for each patch
and one for the class token), then the blocks, `norm`, and `head` on the class token alone. `patches` and `blocks` are
handed in; `tokens` is the number of patches.
""",
            starter='''\
class ViT(nn.Module):
    """Patches behind a class token, positions added, blocks, and a class read from the first token."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = patches
        self.blocks = blocks
        # TODO: class_token (1, 1, width) and positions (1, tokens + 1, width), both nn.Parameter
        # TODO: norm, a LayerNorm, and head, a Linear to the classes
        raise NotImplementedError

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b w"]:
        # TODO: patches, class token before them, positions, blocks, norm, head on the first token
        raise NotImplementedError
''',
            solution=ViT,
            check=by_outputs(VITS, lambda: [(_drawn(2, 3, 12, 8),), (_drawn(3, 1, 6, 6),)]),
            slips=(
                PlantedMistake(
                    "no class token",
                    "there is no class token, and the patches are averaged. Put `class_token` before the patches, "
                    "with a position of its own, and read the class from it.",
                    _NoClassToken,
                ),
                PlantedMistake(
                    "no position for the class token",
                    "positions are as many as patches; the class token needs one too: tokens + 1.",
                    _PositionsTooFew,
                ),
                PlantedMistake(
                    "positions not added",
                    "there is no parameter `positions`; without it patches have no place.",
                    _NoPositions,
                ),
                PlantedMistake(
                    "positions not added",
                    "the positions are never added, so that the model cannot tell where a patch was.",
                    _vit("no positions"),
                ),
                PlantedMistake(
                    "positions of patches only",
                    "positions were added before the class token came in; add them to all tokens, after.",
                    _vit("positions of patches only"),
                ),
                PlantedMistake(
                    "positions multiplied",
                    "tokens were multiplied by positions; add them.",
                    _vit("positions multiplied"),
                ),
                PlantedMistake(
                    "class token last",
                    "the class token was put behind the patches; it comes before them.",
                    _vit("class token last"),
                ),
                PlantedMistake(
                    "another token read",
                    "the class is read from the last token; read it from the first, [:, 0].",
                    _vit("last"),
                ),
                PlantedMistake(
                    "mean instead of class token",
                    "the class is read from the mean of all tokens; read it from the class token alone, [:, 0].",
                    _vit("mean"),
                ),
                PlantedMistake(
                    "mean instead of class token",
                    "the class is read from the mean of the patches; read it from the class token, [:, 0].",
                    _vit("mean of patches"),
                ),
                PlantedMistake(
                    "missing norm", "the final norm is missing: head(norm(blocks(x))[:, 0]).", _vit("no norm")
                ),
            ),
        ),
    ),
)
