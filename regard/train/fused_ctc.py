"""The CTC loss in one GPU kernel, so that a training step can be captured as a CUDA graph.

The CTC loss of torch cannot be captured, because it copies the lengths of the sequences to the CPU.
`regard.train.objectives.ctc` calls this kernel for the inputs that `is_supported` accepts, and torch's loss for others.
"""

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.extras import has_triton

MOST = 1 << 13  # states times tokens that the kernel compares at once


def is_supported(logits: Tensor, targets: Tensor) -> bool:
    """Return whether the kernel supports these inputs: on a GPU, with a small target length times vocabulary size."""
    return logits.is_cuda and has_triton() and (2 * targets.shape[1] + 1) * logits.shape[-1] <= MOST // 4


def fused_ctc(logits: Tensor, targets: Tensor, rows: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Return the CTC loss, summed over the batch. Second derivatives are not supported.

    The arguments are those of `regard.train.objectives.ctc`.
    """
    total: Tensor = _fused_ctc(logits, targets, rows, lengths, blank)[0]
    return total


@torch.library.custom_op("regard::fused_ctc", mutates_args=())
def _fused_ctc(logits: Tensor, targets: Tensor, rows: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    from regard.train import triton_kernels  # needs triton

    logs = logits.float().log_softmax(-1).contiguous()
    losses, gradient = triton_kernels.ctc_and_gradient(logs, targets.contiguous(), rows, lengths, blank)
    return losses.sum(), gradient


@_fused_ctc.register_fake
def _(logits: Tensor, targets: Tensor, rows: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits, dtype=torch.float32)


def _keep_gradient(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


def _scale_gradient(ctx, of_total, _):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        raise ConfigError("fused_ctc can be differentiated once; for create_graph=True use torch's ctc_loss")
    (gradient,) = ctx.saved_tensors
    return (gradient * of_total).to(ctx.dtype), None, None, None, None


_fused_ctc.register_autograd(_scale_gradient, setup_context=_keep_gradient)
