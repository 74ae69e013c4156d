"""A GPT-2 written with torch alone, in the usual way, with which training of regard is compared."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (each.view(b, n, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).split(d, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class PlainGPT(nn.Module):
    """GPT-2 with tied embeddings. `forward` returns the mean cross-entropy."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads, bias) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def copy_weights(model: nn.Module, plain: PlainGPT) -> None:
    """Copy the weights of regard's GPT into a plain GPT. Both list their parameters in the same order."""
    names = {"attention_norm": "norm1", "feedforward_norm": "norm2", "attention.query_key_value": "qkv",
             "attention.out": "out", "feedforward.up": "up", "feedforward.down": "down"}  # fmt: skip
    state = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = weight
    plain.load_state_dict(state)
