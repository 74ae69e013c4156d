"""Blocks: attention, then a feed-forward part, each added to what went in; the norm before or after."""

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
from regard.nn.attention import Attention, CachedAttention, check_probability
from regard.nn.norms import norm

ORDERS = ("pre", "post")


class Residual(nn.Module):
    """What is added to the stream of a block: entries dropped, and in training whole sequences (stochastic depth).

    Dropping whole branches is that of Huang et al. 2016, arXiv:1603.09382.
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
            x = (
                x
                * torch.empty(x.shape[0], *(1,) * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
                / keep
            )
        return x


class Block(nn.Module):
    """x + attention, x + attention to a memory if there is one, x + feed-forward.

    order  "pre" normalises what goes into each part, "post" what comes out of each sum, as in 2017
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        feedforward: nn.Module,
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
            raise ConfigError(f"order says where the norm stands, one of {', '.join(ORDERS)}, not {order!r}")
        self.order = order
        self.attention, self.attention_norm = attention, norm(norm_kind, width, eps)
        self.cross, self.cross_norm = cross, None if cross is None else norm(norm_kind, width, eps)
        self.feedforward, self.feedforward_norm = feedforward, norm(norm_kind, width, eps)
        self.residual = Residual(dropout, drop_path)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Tensor | CachedAttention | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "b n d"]:
        attention, cross, cross_norm = self.attention, self.cross, self.cross_norm
        if cross is not None and memory is None:
            raise ConfigError("this block looks at a memory, but none came")
        if cross is None and memory is not None:
            raise ConfigError("this block looks at no memory, but one came; give it cross=Attention(...)")
        x = self._add(x, self.attention_norm, lambda x: attention(x, mask=mask, cache=cache, positions=positions))
        if cross is not None and cross_norm is not None:
            x = self._add(x, cross_norm, lambda x: cross(x, memory, mask=memory_mask))
        return self._add(x, self.feedforward_norm, self.feedforward)

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.order == "pre":
            return x + self.residual(part(norm(x)))
        return norm(x + self.residual(part(x)))

    def stream(self, mask: Mask) -> "BlockStream":
        """The state of a stream through this block."""
        return BlockStream(self, mask)


class BlockStream:
    """A block fed chunk by chunk: rows leave once no token still to come can change them."""

    def __init__(self, block: Block, mask: Mask) -> None:
        if not isinstance(block.attention, Attention) or not block.attention.streams or block.cross is not None:
            raise ConfigError("a stream runs through blocks of self-attention; this one mixes otherwise")
        dropping = (block.residual.dropout, block.residual.drop_path, getattr(block.feedforward, "dropout", 0.0))
        if block.training and any(dropping):
            raise ConfigError("dropout is for training; a stream is exact: call eval() first")
        self.block = block
        self.attention: Attention = block.attention
        self.state: Stream = block.attention.stream(mask)
        self._waiting: Tensor | None = None  # inputs whose attention is not complete

    def push(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b r d"]:
        """Take in n tokens; give out the r that are complete now, possibly none."""
        inner = self.block.attention_norm(x) if self.block.order == "pre" else x
        return self._given(x, self.attention(inner, stream=self.state))

    def finish(self) -> Float[Tensor, "b r d"]:
        """The input has ended: the rows that were still waiting."""
        if self._waiting is None:
            raise ConfigError("nothing was pushed into this stream, so there is nothing to finish")
        return self._given(self._waiting[:, :0], self.attention.project(self.state.finish()))

    def _given(self, new: Tensor, attended: Tensor) -> Tensor:
        waiting = new if self._waiting is None else torch.cat([self._waiting, new], 1)
        ready = attended.shape[1]
        x, self._waiting = waiting[:, :ready], waiting[:, ready:]
        block = self.block
        x = x + block.residual(attended)
        if block.order == "post":
            x = block.attention_norm(x)
        return block._add(x, block.feedforward_norm, block.feedforward)

    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored."""
        return (*self.state.tensors(), *(() if self._waiting is None else (self._waiting,)))


def run_blocks(
    blocks: Iterable[Callable[..., Tensor]], x: Tensor, *, recompute: bool = False, **settings: Any
) -> Tensor:
    """x through all blocks; with `recompute` only block inputs are kept for the backward pass. Chen et al. 2016."""
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(block, x, use_reentrant=False, **settings)
        else:
            x = block(x, **settings)
    return x
