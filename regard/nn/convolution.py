"""Convolutions with batch norm, for the image baselines."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.nn.init import Initializer, constant, fan_in

# initial values of a network of `ConvNorm` with a linear head
INITIALIZERS: Mapping[str, Initializer] = {
    "*.convolution.weight": fan_in(math.sqrt(2)),
    "*norm.weight": constant(1.0),
    "*.running_var": constant(1.0),
    "*.running_mean": constant(0.0),
    "*.num_batches_tracked": constant(0.0),
    "*.bias": constant(0.0),
    "head.weight": fan_in(),
}


class ConvNorm(nn.Module):
    """A 3 x 3 convolution and batch norm. Ioffe and Szegedy 2015, arXiv:1502.03167."""

    def __init__(self, old: int, new: int, *, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(old, new, 3, stride=stride, padding=1, bias=False)  # the norm has a bias
        self.norm = nn.BatchNorm2d(new)

    def forward(self, x: Float[Tensor, "b m y x"]) -> Float[Tensor, "b d rows columns"]:
        return self.norm(self.convolution(x))


def run_blocks_with_batch_norm(blocks: Iterable[nn.Module], x: Tensor, *, recompute: bool = False) -> Tensor:
    """`run_blocks` for blocks with batch norm: running statistics are updated once, also if `recompute` runs twice."""
    for block in blocks:
        if not recompute or not torch.is_grad_enabled():
            x = block(x)
        elif torch.compiler.is_compiling():
            x = checkpoint(block, x, use_reentrant=False)  # compiled code updates statistics in the first pass only
        else:
            x = checkpoint(block, x, use_reentrant=False, context_fn=partial(_recompute_contexts, block))
    return x


def _recompute_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first computation and of the recomputation."""
    return nullcontext(), _restore_statistics(block)


@contextmanager
def _restore_statistics(block: nn.Module) -> Iterator[None]:
    """Restore the running statistics of batch norms on exit."""
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    saved = [dict(norm.named_buffers()) for norm in norms]
    try:
        for norm, buffers in zip(norms, saved, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer.clone())
        yield
    finally:
        for norm, buffers in zip(norms, saved, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
