"""Transformer blocks: attention and a feed-forward network with residual connections and norms."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from regard.base.errors import ConfigError
from regard.core.cache import Cache, Stream
from regard.core.masks.algebra import Mask
from regard.nn.attention import Attention, KeysValues, check_probability
from regard.nn.norms import norm

ORDERS = ("pre", "post")


class Residual(nn.Module):
    """Dropout and stochastic depth on a residual branch, applied in training only.

    dropout    dropout probability of each entry of the branch
    drop_path  stochastic depth: for each sequence, the probability that the whole branch is set to zero. Huang et al.
               2016, arXiv:1603.09382
    """

    def __init__(self, dropout: float = 0.0, drop_path: float = 0.0) -> None:
        super().__init__()
        check_probability("dropout", dropout)
        check_probability("drop_path", drop_path)
        self.dropout, self.drop_path = dropout, drop_path

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        if not self.training:
            return x
        if self.dropout:
            x = functional.dropout(x, self.dropout)
        if self.drop_path:
            keep = 1.0 - self.drop_path
            x = x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep) / keep
        return x


class Block(nn.Module):
    """A Transformer block: attention, cross-attention if there is any, and a feed-forward network.

    Each of these branches is added to its input x (residual connection).

    attention    self-attention, or another module that is called as `attention(x, mask=, cache=, positions=)`
    feedforward  module applied to each token; None for an attention-only block
    cross        cross-attention to a memory; None for no cross-attention
    norm_kind    "layer" (LayerNorm) or "rms" (RMSNorm)
    order        "pre" applies a norm to the input of each branch, "post" to the sum of x and the branch, as in Vaswani
                 et al. 2017
    dropout      dropout probability of the entries of each branch, in training only
    drop_path    stochastic depth: for each sequence, the probability that a branch is set to zero, in training only

    >>> block = Block(32, Attention(32, 4), FeedForward(32, 64))
    >>> block(torch.randn(2, 5, 32), mask=causal()).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        feedforward: nn.Module | None,
        *,
        cross: Attention | None = None,
        norm_kind: str = "layer",
        eps: float = 1e-5,
        order: str = "pre",
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ConfigError(f"order is one of {', '.join(ORDERS)}, where the norm is applied, not {order!r}")
        self.order = order
        self.attention, self.attention_norm = attention, norm(norm_kind, width, eps)
        self.cross, self.cross_norm = cross, None if cross is None else norm(norm_kind, width, eps)
        self.feedforward = feedforward
        self.feedforward_norm = None if feedforward is None else norm(norm_kind, width, eps)
        self.residual = Residual(dropout, drop_path)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Tensor | KeysValues | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "b n d"]:
        attention, cross, cross_norm = self.attention, self.cross, self.cross_norm
        if cross is not None and memory is None:
            raise ConfigError("this block has cross-attention; pass a memory")
        if cross is None and memory is not None:
            raise ConfigError("this block has no cross-attention for the memory; build it with cross=Attention(...)")
        x = self._add(x, self.attention_norm, lambda x: attention(x, mask=mask, cache=cache, positions=positions))
        if cross is not None and cross_norm is not None:
            x = self._add(x, cross_norm, lambda x: cross(x, memory, mask=memory_mask))
        return self.feed_forward(x)

    def feed_forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Apply the feed-forward network with its residual connection.

        Returns x unchanged in an attention-only block.
        """
        if self.feedforward is None or self.feedforward_norm is None:
            return x
        return self._add(x, self.feedforward_norm, self.feedforward)

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.order == "pre":
            return x + self.residual(part(norm(x)))
        return norm(x + self.residual(part(x)))

    def stream(self, mask: Mask) -> "BlockStream":
        """Return a new state for streaming: passing tokens through this block in parts.

        mask  the mask of its self-attention
        """
        return BlockStream(self, mask)


class BlockStream:
    """The state of streaming through a Transformer block, to which tokens are passed in parts.

    The output of a token is returned as soon as no later token can change this output.
    """

    def __init__(self, block: Block, mask: Mask) -> None:
        if not isinstance(block.attention, Attention) or not block.attention.streams or block.cross is not None:
            raise ConfigError("a stream needs a block with self-attention only")
        dropping = (block.residual.dropout, block.residual.drop_path, getattr(block.feedforward, "dropout", 0.0))
        if block.training and any(dropping):
            raise ConfigError("dropout is active in training; call eval() before streaming")
        self.block = block
        self.attention: Attention = block.attention
        self.state: Stream = block.attention.stream(mask)
        self._waiting: Tensor | None = None  # inputs whose attention is not complete

    def push(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b r d"]:
        """Append n tokens. Returns the r outputs that have become complete with this call; r may be 0."""
        inner = self.block.attention_norm(x) if self.block.order == "pre" else x
        return self._finish_rows(x, self.attention(inner, stream=self.state))

    def finish(self) -> Float[Tensor, "b r d"]:
        """End the stream and return the r outputs that were not complete yet."""
        if self._waiting is None:
            raise ConfigError("nothing was pushed into this stream, so there is nothing to finish")
        return self._finish_rows(self._waiting[:, :0], self.attention.project(self.state.finish()))

    def _finish_rows(self, new: Tensor, attended: Tensor) -> Tensor:
        waiting = new if self._waiting is None else torch.cat([self._waiting, new], 1)
        ready = attended.shape[1]
        x, self._waiting = waiting[:, :ready], waiting[:, ready:]
        block = self.block
        x = x + block.residual(attended)
        if block.order == "post":
            x = block.attention_norm(x)
        return block.feed_forward(x)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the stream stores."""
        return (*self.state.tensors(), *(() if self._waiting is None else (self._waiting,)))


def run_blocks(
    blocks: Iterable[Callable[..., Tensor]], x: Tensor, *, recompute: bool = False, **settings: Any
) -> Tensor:
    """Apply all blocks in order and return the result.

    recompute  whether to use activation checkpointing (gradient checkpointing): only the input of each block is kept
               for the backward pass, which computes the block again. Chen et al. 2016, arXiv:1604.06174
    settings   keyword arguments that every block is called with
    """
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(block, x, use_reentrant=False, **settings)
        else:
            x = block(x, **settings)
    return x
