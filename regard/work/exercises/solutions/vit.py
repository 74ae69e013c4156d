"""The Vision Transformer, part by part."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Cuts images into patches and projects each: channel by channel, row by row."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b n d"]:
        b, channels, height, width = images.shape
        rows, columns = height // self.patch, width // self.patch
        cut = images.reshape(b, channels, rows, self.patch, columns, self.patch)
        flat = cut.permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, channels * self.patch**2)
        out: Tensor = self.project(flat)
        return out


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
        b, n, d = x.shape
        q, k, v = (
            project(x).reshape(b, n, self.heads, d // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        mixed = scores.softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return out


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
        x = x + self.attention(self.attention_norm(x))
        hidden = nn.functional.gelu(self.up(self.feedforward_norm(x)))
        out: Tensor = x + self.down(hidden)
        return out


class ViT(nn.Module):
    """Patches behind a class token, positions added, blocks, and a class read from the first token."""

    def __init__(self, patches: nn.Module, blocks: nn.Module, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = patches
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens + 1, width))
        self.blocks = blocks
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Float[Tensor, "b k y x"]) -> Float[Tensor, "b w"]:
        patches = self.patches(images)
        first = self.class_token.expand(patches.shape[0], -1, -1)
        x = torch.cat([first, patches], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out
