"""Triton kernels for training."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cross_entropy_rows(
    LOGITS, TARGETS, LOSSES, stride, vocab, smoothing, ignored, scale,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row of logits, and replace the logits by its gradient.

    Columns from `vocab` to `stride` are padding, and their gradient is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    logits = LOGITS + row * stride
    target = tl.load(TARGETS + row)
    largest, total, summed = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        there = start + columns < vocab
        x = tl.load(logits + start + columns, mask=there, other=-float("inf")).to(tl.float32)
        if SMOOTH:
            summed += tl.sum(tl.where(there, x, 0.0))
        higher = tl.maximum(largest, tl.max(x))
        # -inf only if all logits so far are -inf, whose exponentials are 0
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2((largest - base) * LOG2E) + tl.sum(tl.exp2((x - base) * LOG2E))
        largest = higher
    # relative to the largest logit: the sum of both would lose digits if logits are large
    log_total = tl.log(total)
    skipped = target == ignored
    own = tl.load(logits + tl.where(skipped, 0, target)).to(tl.float32)
    loss = (1.0 - smoothing) * (log_total - (own - largest))
    if SMOOTH:
        loss += smoothing * (log_total - (summed / vocab - largest))
    tl.store(LOSSES + row, tl.where(skipped, 0.0, loss))
    if GRADIENT:
        tl.debug_barrier()  # all threads have read the logit of the target
        factor, inverse = tl.where(skipped, 0.0, scale), 1.0 / total
        for start in range(0, stride, BLOCK):
            at = start + columns
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            gradient = tl.exp2((x - largest) * LOG2E) * inverse - tl.where(at == target, 1.0 - smoothing, 0.0)
            if SMOOTH:
                gradient -= smoothing / vocab
            gradient = tl.where(skipped | (at >= vocab), 0.0, gradient * factor)
            tl.store(logits + at, gradient.to(LOGITS.dtype.element_ty), mask=at < stride)


def cross_entropy_and_gradient(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, ignored: int, scale: float, gradient: bool
) -> Tensor:
    """Return the loss of each row of logits; if `gradient`, replace the logits by its gradient times `scale`.

    vocab  number of columns that are logits; the others are padding
    """
    rows, stride = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(stride))
    _cross_entropy_rows[(rows,)](
        logits, targets, losses, stride, vocab, smoothing, ignored, scale, smoothing > 0, gradient, block,
        num_warps=16 if block >= 8192 else 4,
    )  # fmt: skip
    return losses
