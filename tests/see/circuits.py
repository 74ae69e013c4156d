"""A Transformer of attention only, with weights set by hand, so that the job of each head is known.

The residual stream has one part for each of: the token, the position, a constant 1, the previous token, a copy of the
first token, and the prediction. All parts are one-hot. The heads:

layer 0  head 0 copies the previous token; head 1 copies the first token; head 2 gives equal weights and writes nothing
layer 1  head 0 is an induction head: it looks for the position whose previous token is the current token, and copies
         that token into the prediction; head 1 reads the first token again and writes nothing; head 2 is as above

Heads 0 of both layers are a circuit of two steps: the second reads what the first wrote, as keys.
"""

import torch
from torch import Tensor, nn

from regard.core.masks import causal
from regard.nn.attention import Attention

TOKENS, CONTEXT, HEADS, WIDTH = 11, 17, 3, 17  # WIDTH of a head holds a token or a position
SHARP = 12.0  # the score of a match
TOKEN, POSITION = slice(0, 11), slice(11, 28)
ONE = slice(28, 29)
PREVIOUS, FIRST, PREDICTION = slice(29, 40), slice(40, 51), slice(51, 62)
PREVIOUS_HEAD, FIRST_HEAD, CONSTANT_HEAD = (
    ("blocks.0.attention", 0),
    ("blocks.0.attention", 1),
    ("blocks.0.attention", 2),
)
INDUCTION_HEAD = ("blocks.1.attention", 0)


class AttentionBlock(nn.Module):
    """x + attention(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(PREDICTION.stop, HEADS, head_width=WIDTH, bias=False, beta=1.0)
        nn.init.zeros_(self.attention.query_key_value.weight)
        nn.init.zeros_(self.attention.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(x, mask=causal())
        return out

    def set_head(self, head: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Set the weights of one head: q, k and v are (c d), out is (d c)."""
        rows = self.attention.query_key_value.weight.data.view(3, HEADS, WIDTH, -1)
        for at, weight in enumerate((q, k, v)):
            rows[at, head] = weight
        self.attention.out.weight.data[:, head * WIDTH : (head + 1) * WIDTH] = out


class Circuit(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.unembed = nn.Linear(PREDICTION.stop, TOKENS, bias=False)
        self.unembed.weight.data.copy_(10 * select(PREDICTION)[:TOKENS])

    def forward(self, tokens: Tensor) -> Tensor:
        b, n = tokens.shape
        x = torch.zeros(b, n, PREDICTION.stop, dtype=self.unembed.weight.dtype)
        x[..., TOKEN] = nn.functional.one_hot(tokens, TOKENS).to(x.dtype)
        x[..., POSITION] = torch.eye(CONTEXT, dtype=x.dtype)[:n]
        x[..., ONE] = 1
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.unembed(x)
        return out


def select(part: slice, factor: float = 1.0) -> Tensor:
    """The matrix (c d) that reads one part of the residual stream; its transpose writes it."""
    found = torch.zeros(WIDTH, PREDICTION.stop)
    for at, column in enumerate(range(part.start, part.stop)):
        found[at, column] = factor
    return found


def build_circuit(shuffled: bool = False) -> Circuit:
    """The model, in float64.

    shuffled  exchange what the heads read at random, so that no head has its job and no circuit remains
    """
    model = Circuit()
    nothing = torch.zeros(WIDTH, PREDICTION.stop)
    earlier = torch.zeros(WIDTH, PREDICTION.stop)  # the query at position i asks for position i - 1
    earlier[: CONTEXT - 1, POSITION.start + 1 : POSITION.stop] = torch.eye(CONTEXT - 1) * SHARP
    first = select(POSITION)
    first[1:] = 0
    constant = select(ONE, SHARP)
    zero, one = model.blocks
    assert isinstance(zero, AttentionBlock)
    assert isinstance(one, AttentionBlock)
    zero.set_head(0, earlier, select(POSITION), select(TOKEN), select(PREVIOUS).T)
    zero.set_head(1, constant, first, select(TOKEN), select(FIRST).T)
    zero.set_head(2, nothing, nothing, select(TOKEN), nothing.T)
    asked, offered = select(TOKEN, SHARP), select(PREVIOUS)
    # the first position has no previous token, and copied itself: one more column of q . k hides it
    asked[TOKENS, ONE], offered[TOKENS, POSITION.start] = SHARP, -2
    one.set_head(0, asked, offered, select(TOKEN), select(PREDICTION).T)
    one.set_head(1, constant, first, select(FIRST), nothing.T)
    one.set_head(2, nothing, nothing, select(TOKEN), nothing.T)
    if shuffled:
        draws = torch.Generator().manual_seed(0)
        for block in (zero, one):
            weight = block.attention.query_key_value.weight.data
            weight[:] = weight[:, torch.randperm(PREDICTION.stop, generator=draws)]
    return model.double().eval()
