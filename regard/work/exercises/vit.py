"""Exercises on the Vision Transformer as torch modules: patches, attention, a block, the whole model."""

import torch
from torch import Tensor, nn

from regard.work.exercises.checks import Case, check_module
from regard.work.exercises.exercise import Exercise, ExerciseSet, PlantedMistake
from regard.work.exercises.solutions.vit import ImagePatches, SelfAttention, TransformerBlock, VisionTransformer

SETUP_CODE = """\
import torch
from jaxtyping import Float
from torch import Tensor, nn

images = torch.randn(2, 3, 12, 8)
"""

ABOUT = """\
A Vision Transformer cuts an image into patches, turns each patch into a token, and lets the tokens attend to each other
in a stack of blocks. The class is read from an extra token, the class token. Each part is a torch module, and larger
modules receive the smaller ones as arguments. Tokens are rows: (batch, tokens, width).

Keep the names that `__init__` gives to layers and parameters: the tests load weights into them.
"""


def _random_tensor(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)), dtype=torch.float64)


PATCH_ARGUMENTS: tuple[Case, ...] = ((3, 4, 10), (1, 2, 5), (2, 3, 7))
ATTENTION_ARGUMENTS: tuple[Case, ...] = ((12, 3), (10, 2), (6, 1))
BLOCK_ARGUMENTS: tuple[Case, ...] = ((6, 14, lambda: SelfAttention(6, 3)), (4, 9, lambda: SelfAttention(4, 1)))
VIT_ARGUMENTS: tuple[Case, ...] = (
    (lambda: ImagePatches(3, 4, 6), lambda: nn.Sequential(TransformerBlock(6, 11, SelfAttention(6, 2))), 6, 6, 5),
    (lambda: ImagePatches(1, 2, 4), lambda: TransformerBlock(4, 7, SelfAttention(4, 1)), 9, 4, 3),
)

PERMUTE = "permute(0, 2, 4, 1, 3, 5)"
SCALE = "(d // self.heads) ** 0.5"
SPLIT_BY_RESHAPE = {
    "reshape(b, n, self.heads, d // self.heads).transpose(1, 2)": "reshape(b, self.heads, n, d // self.heads)"
}
JOINED_BY_RESHAPE = {"mixed.transpose(1, 2).reshape(b, n, d)": "mixed.reshape(b, n, d)"}
NO_OUT = {"self.out(mixed.transpose(1, 2).reshape(b, n, d))": "mixed.transpose(1, 2).reshape(b, n, d)"}
ATTEND = "x + self.attention(self.attention_norm(x))"
UP = "self.up(self.feedforward_norm(x))"
DOWN = "x + self.down(hidden)"
CLASS_TOKEN = "        self.class_token = nn.Parameter(torch.zeros(1, 1, width))\n"
EXPANDED = "        first = self.class_token.expand(patches.shape[0], -1, -1)\n"
POSITIONS = "        self.positions = nn.Parameter(torch.zeros(1, tokens + 1, width))\n"
TOKENS = "torch.cat([first, patches], dim=1) + self.positions"
READ = "self.norm(self.blocks(x))[:, 0]"

VIT = ExerciseSet(
    name="vit",
    title="The Vision Transformer",
    about=ABOUT,
    setup_code=SETUP_CODE,
    exercises=(
        Exercise(
            name="patches",
            title="Patches",
            prompt="""\
Write `ImagePatches`: cut an image (batch, channels, height, width) into squares of `patch` x `patch` pixels, row by
row from the top left. Flatten each square channel by channel, and within a channel row by row, and project it with one
linear layer, `project`. This is the same as a convolution whose kernel size and stride are `patch`.
""",
            solution=ImagePatches,
            check=check_module(
                PATCH_ARGUMENTS,
                lambda: [(_random_tensor(2, 3, 12, 8),), (_random_tensor(3, 1, 6, 10),), (_random_tensor(1, 2, 9, 6),)],
            ),
            mistakes=(
                PlantedMistake(
                    "reshape without permute",
                    "a reshape alone cuts the image into runs of pixels, not into squares. Give the rows and columns "
                    "of patches their own axes, permute them to the front, then flatten.",
                    {PERMUTE: "permute(0, 1, 2, 3, 4, 5)"},
                ),
                PlantedMistake(
                    "patches by column",
                    "the patches are in column order; they should be in row order from the top left.",
                    {PERMUTE: "permute(0, 4, 2, 1, 3, 5)"},
                ),
                PlantedMistake(
                    "channels last",
                    "inside a patch the channels vary fastest. They should vary slowest: all of the first channel, "
                    "then all of the second.",
                    {PERMUTE: "permute(0, 2, 4, 3, 5, 1)"},
                ),
            ),
        ),
        Exercise(
            name="attention",
            title="Multi-head self-attention",
            prompt="""\
Write `SelfAttention`: three linear layers compute queries, keys and values. Split each into heads of width d/h. Every
head attends, with scores divided by the square root of its own width. Concatenate the heads and apply `out`, which
mixes them. Write the softmax of the scores yourself.
""",
            solution=SelfAttention,
            check=check_module(
                ATTENTION_ARGUMENTS,
                lambda: [(_random_tensor(2, 5, 12),), (_random_tensor(1, 7, 10),), (_random_tensor(3, 4, 6),)],
            ),
            mistakes=(
                PlantedMistake(
                    "missing scale",
                    "you did not divide the scores by the square root of a head's width.",
                    {f" / {SCALE}": ""},
                ),
                PlantedMistake(
                    "scale from the model's width",
                    "you divided the scores by the square root of the whole width; the width of a head is d / heads.",
                    {SCALE: "d**0.5"},
                ),
                PlantedMistake(
                    "scale by the width itself",
                    "you divided the scores by the head's width, not by its square root.",
                    {SCALE: "(d // self.heads)"},
                ),
                PlantedMistake(
                    "softmax over the wrong axis",
                    "the weights of each key add up to one, but those of each query should: softmax over the last "
                    "axis, -1.",
                    {"softmax(-1)": "softmax(-2)"},
                ),
                PlantedMistake(
                    "transposed product",
                    "your scores are K Q', which has keys in rows; Q K' has a row for each query.",
                    {"scores.softmax": "scores.transpose(-2, -1).softmax"},
                ),
                PlantedMistake(
                    "reshape without transpose",
                    "you split the heads by a reshape to (b, h, n, c), which mixes up tokens. Reshape to (b, n, h, c), "
                    "which keeps the numbers of a token together, then transpose.",
                    SPLIT_BY_RESHAPE,
                ),
                PlantedMistake(
                    "heads joined without transpose",
                    "you joined the heads by a reshape of (b, h, n, c). Transpose to (b, n, h, c) first, so that the "
                    "heads of a token are next to each other.",
                    JOINED_BY_RESHAPE,
                ),
                PlantedMistake(
                    "heads split and joined without transpose",
                    "you split and joined the heads by a reshape alone, so each head sees only part of the tokens. "
                    "Reshape to (b, n, h, c) and transpose, both before and after.",
                    SPLIT_BY_RESHAPE | JOINED_BY_RESHAPE,
                ),
                PlantedMistake(
                    "forgotten output projection",
                    "you returned the concatenated heads; apply `out`, which mixes them.",
                    NO_OUT,
                ),
                PlantedMistake(
                    "forgotten output projection",
                    "the layer `out`, which mixes the heads, is missing.",
                    NO_OUT | {"        self.out = nn.Linear(width, width)\n": ""},
                ),
                PlantedMistake(
                    "forgotten bias",
                    "the layers query, key and value have biases too.",
                    {
                        f"self.{name} = nn.Linear(width, width)": f"self.{name} = nn.Linear(width, width, bias=False)"
                        for name in ("query", "key", "value")
                    },
                ),
            ),
        ),
        Exercise(
            name="block",
            title="A block",
            prompt="""\
Write `TransformerBlock`: x plus attention of the normalised x, then x plus the feed-forward part of the normalised x.
The norm comes before each part (pre-norm), the residual x itself is not normalised, and the feed-forward part is `up`,
GELU, `down`. The attention module is an argument.
""",
            solution=TransformerBlock,
            check=check_module(BLOCK_ARGUMENTS, lambda: [(_random_tensor(2, 5, 6),), (_random_tensor(1, 3, 4),)]),
            mistakes=(
                PlantedMistake(
                    "post-norm instead of pre-norm",
                    "your norms come after the sums, as in the Transformer of 2017. Here they come before attention "
                    "and before the feed-forward part, and the sum is not normalised.",
                    {
                        ATTEND: "self.attention_norm(x + self.attention(x))",
                        UP: "self.up(x)",
                        DOWN: "self.feedforward_norm(x + self.down(hidden))",
                    },
                ),
                PlantedMistake(
                    "missing residual",
                    "both residuals are missing; add the input of each part to its output.",
                    {ATTEND: "self.attention(self.attention_norm(x))", DOWN: "self.down(hidden)"},
                ),
                PlantedMistake(
                    "missing residual",
                    "the residual around attention is missing: x + attention(norm(x)).",
                    {ATTEND: "self.attention(self.attention_norm(x))"},
                ),
                PlantedMistake(
                    "missing residual",
                    "the residual around the feed-forward part is missing: x + down(gelu(up(norm(x)))).",
                    {DOWN: "self.down(hidden)"},
                ),
                PlantedMistake(
                    "residual after the norm",
                    "you added the normalised x. The residual is x as it came in.",
                    {
                        ATTEND: "self.attention_norm(x) + self.attention(self.attention_norm(x))",
                        DOWN: "self.feedforward_norm(x) + self.down(hidden)",
                    },
                ),
                PlantedMistake(
                    "missing norm",
                    "attention gets x without a norm; apply attention_norm first.",
                    {ATTEND: "x + self.attention(x)"},
                ),
                PlantedMistake(
                    "missing norm",
                    "the feed-forward part gets x without a norm; apply feedforward_norm first.",
                    {UP: "self.up(x)"},
                ),
                PlantedMistake(
                    "relu instead of gelu",
                    "the feed-forward part has GELU between its layers, not ReLU.",
                    {"nn.functional.gelu": "nn.functional.relu"},
                ),
                PlantedMistake(
                    "no activation",
                    "without GELU between them `up` and `down` are a single linear map.",
                    {f"nn.functional.gelu({UP})": UP},
                ),
            ),
        ),
        Exercise(
            name="vit",
            title="The whole model",
            prompt="""\
Write `VisionTransformer`: compute the patch tokens, put `class_token` before them, add `positions` to all tokens (one
for each patch and one for the class token), then apply the blocks, `norm`, and `head` to the class token alone.
`patches` and `blocks` are arguments; `tokens` is the number of patches.
""",
            solution=VisionTransformer,
            check=check_module(VIT_ARGUMENTS, lambda: [(_random_tensor(2, 3, 12, 8),), (_random_tensor(3, 1, 6, 6),)]),
            mistakes=(
                PlantedMistake(
                    "no class token",
                    "there is no class token, and you averaged the patches. Put `class_token` before the patches, with "
                    "its own position, and read the class from it.",
                    {
                        CLASS_TOKEN: "",
                        EXPANDED: "",
                        "tokens + 1": "tokens",
                        TOKENS: "patches + self.positions",
                        READ: "self.norm(self.blocks(x)).mean(1)",
                    },
                ),
                PlantedMistake(
                    "no position for the class token",
                    "there are only as many positions as patches; the class token needs one too: tokens + 1.",
                    {"tokens + 1": "tokens"},
                ),
                PlantedMistake(
                    "positions not added",
                    "the parameter `positions` is missing; without it the order of the patches is lost.",
                    {POSITIONS: "", " + self.positions": ""},
                ),
                PlantedMistake(
                    "positions not added",
                    "you never add the positions, so the model cannot know where a patch was.",
                    {" + self.positions": ""},
                ),
                PlantedMistake(
                    "positions of patches only",
                    "you added positions before the class token was there; add them to all tokens, afterwards.",
                    {TOKENS: "torch.cat([first, patches + self.positions[:, 1:]], dim=1)"},
                ),
                PlantedMistake(
                    "class token last",
                    "you put the class token after the patches; it comes before them.",
                    {"[first, patches]": "[patches, first]", "[:, 0]": "[:, -1]"},
                ),
                PlantedMistake(
                    "mean instead of class token",
                    "you read the class from the mean of all tokens; read it from the class token alone, [:, 0].",
                    {"[:, 0]": ".mean(1)"},
                ),
                PlantedMistake(
                    "mean instead of class token",
                    "you read the class from the mean of the patches; read it from the class token, [:, 0].",
                    {"[:, 0]": "[:, 1:].mean(1)"},
                ),
                PlantedMistake(
                    "missing norm",
                    "the final norm is missing: head(norm(blocks(x))[:, 0]).",
                    {READ: "self.blocks(x)[:, 0]"},
                ),
            ),
        ),
    ),
)
