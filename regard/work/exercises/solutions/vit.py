"""Reference solutions: the Vision Transformer, part by part."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class ImagePatches(nn.Module):
    """Cut images into patches and project each patch to a token."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b n d"]:
        # TODO: reshape to (b, k, rows, patch, columns, patch), permute rows and columns to the front, flatten, project
        b, channels, height, width = images.shape
        rows, columns = height // self.patch, width // self.patch
        cut = images.reshape(b, channels, rows, self.patch, columns, self.patch)
        flat = cut.permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, channels * self.patch**2)
        return self.project(flat)


class SelfAttention(nn.Module):
    """Multi-head self-attention; the heads share the width equally."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        # TODO: heads (b, h, n, c); scores and their softmax (b, h, n, n); concatenate the heads; apply out
        b, n, d = x.shape
        q, k, v = (
            project(x).reshape(b, n, self.heads, d // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, n, d))


class TransformerBlock(nn.Module):
    """A pre-norm Transformer block: attention and a feed-forward part, each with a norm before and a residual."""

    def __init__(self, width: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        # TODO: two parts, each with a norm before it and a residual around it
        x = x + self.attention(self.attention_norm(x))
        hidden = nn.functional.gelu(self.up(self.feedforward_norm(x)))
        return x + self.down(hidden)


class VisionTransformer(nn.Module):
    """A class token before the patches, positions added, blocks, and the class read from the class token."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = patches
        self.blocks = blocks
        # TODO: class_token (1, 1, width) and positions (1, tokens + 1, width), both nn.Parameter
        # TODO: norm, a LayerNorm, and head, a Linear to the classes
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens + 1, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b w"]:
        # TODO: patches, class token before them, positions, blocks, norm, head on the first token
        patches = self.patches(images)
        first = self.class_token.expand(patches.shape[0], -1, -1)
        x = torch.cat([first, patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def accuracy(logits: Float[Tensor, "b w"], labels: Int[Tensor, "b"]) -> float:
    """Return the fraction of images whose likeliest class is the label."""
    # TODO: the argmax over the classes, compared with the labels; the mean
    return float((logits.argmax(-1) == labels).double().mean())
