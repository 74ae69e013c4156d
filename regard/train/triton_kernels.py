"""Triton kernels for training: cross-entropy loss and CTC loss, with their gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cross_entropy_rows(
    LOGITS, TARGETS, LOSSES, stride, vocab, ignored, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row of logits. With GRADIENT, overwrite the logits with the gradient of the loss.

    The gradient is multiplied by `scale`. If the target is `ignored`, loss and gradient are 0. Columns from `vocab` to
    `stride` are padding; the gradient there is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    logits = LOGITS + row * stride
    target = tl.load(TARGETS + row)
    largest, total = -float("inf"), 0.0
    for start in range(0, vocab, BLOCK):
        there = start + columns < vocab
        x = tl.load(logits + start + columns, mask=there, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x))
        # -inf only if all logits so far are -inf, whose exponentials are 0
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2((largest - base) * LOG2E) + tl.sum(tl.exp2((x - base) * LOG2E))
        largest = higher
    # relative to the largest logit: the sum of both would lose digits if logits are large
    log_total = tl.log(total)
    skipped = target == ignored
    own = tl.load(logits + tl.where(skipped, 0, target)).to(tl.float32)
    loss = log_total - (own - largest)
    tl.store(LOSSES + row, tl.where(skipped, 0.0, loss))
    if GRADIENT:
        tl.debug_barrier()  # all threads have read the logit of the target
        factor, inverse = tl.where(skipped, 0.0, scale), 1.0 / total
        for start in range(0, stride, BLOCK):
            at = start + columns
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            gradient = tl.exp2((x - largest) * LOG2E) * inverse - tl.where(at == target, 1.0, 0.0)
            gradient = tl.where(skipped | (at >= vocab), 0.0, gradient * factor)
            tl.store(logits + at, gradient.to(LOGITS.dtype.element_ty), mask=at < stride)


def cross_entropy_and_gradient(
    logits: Tensor, targets: Tensor, vocab: int, ignored: int, scale: float, gradient: bool
) -> Tensor:
    """Return the loss of each row of logits; if `gradient`, overwrite the logits with the gradient times `scale`.

    vocab    number of columns that are logits; the other columns are padding
    ignored  value of the targets that are skipped: their loss and gradient are 0
    """
    rows, stride = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(stride))
    _cross_entropy_rows[(rows,)](
        logits, targets, losses, stride, vocab, ignored, scale, gradient, block,
        num_warps=16 if block >= 8192 else 4,
    )  # fmt: skip
    return losses


@triton.jit
def _add_logs(a, b, c):
    """Return log(exp(a) + exp(b) + exp(c)), elementwise."""
    largest = tl.maximum(a, tl.maximum(b, c))
    base = tl.where(largest == -float("inf"), 0.0, largest)
    return base + tl.log(tl.exp(a - base) + tl.exp(b - base) + tl.exp(c - base))


@triton.jit
def _ctc_sequences(
    LOGS, TARGETS, ROWS, LENGTHS, ALPHAS, LOSSES, GRADIENTS, n, vocab, tokens, blank,
    STATES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Compute the CTC loss of one sequence and its gradient with respect to the logits (forward-backward algorithm).

    State 2k + 1 is token k of the target, and the states before, between and after tokens are blanks.
    """
    b = tl.program_id(0).to(tl.int64)
    states, words = tl.arange(0, STATES), tl.arange(0, WORDS)
    rows, length = tl.load(ROWS + b), tl.load(LENGTHS + b)
    number = (states - 1) // 2
    is_token = (states % 2 == 1) & (number < length)
    real = states <= 2 * length
    token = tl.load(TARGETS + b * tokens + number, mask=is_token, other=blank)
    earlier = tl.load(TARGETS + b * tokens + number - 1, mask=is_token & (number > 0), other=-1)
    skips = is_token & (number > 0) & (token != earlier)  # may follow the token before without a blank
    back1, back2 = tl.maximum(states - 1, 0), tl.maximum(states - 2, 0)
    on1, on2 = tl.minimum(states + 1, STATES - 1), tl.minimum(states + 2, STATES - 1)
    skipped_to = (tl.gather(skips.to(tl.int32), on2, 0) > 0) & (states + 2 < STATES)
    logs, alphas = LOGS + b * n * vocab, ALPHAS + b * n * STATES + states

    alpha = tl.where((states < 2) & real, tl.load(logs + token), -float("inf"))
    tl.store(alphas, alpha)
    for t in range(1, rows):
        one = tl.where(states > 0, tl.gather(alpha, back1, 0), -float("inf"))
        two = tl.where(skips, tl.gather(alpha, back2, 0), -float("inf"))
        alpha = tl.where(real, _add_logs(alpha, one, two) + tl.load(logs + t * vocab + token), -float("inf"))
        tl.store(alphas + t * STATES, alpha)
    last = real & (states >= 2 * length - 1)
    ends = tl.where(last, alpha, -float("inf"))
    largest = tl.max(ends)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    likelihood = base + tl.log(tl.sum(tl.exp(ends - base)))
    tl.store(LOSSES + b, -likelihood)

    beta = tl.where(last, 0.0, -float("inf"))
    for step in range(rows):
        t = rows - 1 - step
        posterior = tl.exp(tl.load(alphas + t * STATES) + beta - likelihood)
        posterior = tl.where(real, posterior, 0.0)
        expected = tl.sum(tl.where(token[:, None] == words[None, :], posterior[:, None], 0.0), 0)
        there = words < vocab
        probability = tl.exp(tl.load(logs + t * vocab + words, mask=there, other=-float("inf")))
        tl.store(GRADIENTS + (b * n + t) * vocab + words, probability - expected, mask=there)
        beta = tl.where(real, beta + tl.load(logs + t * vocab + token), -float("inf"))
        one = tl.where(states + 1 < STATES, tl.gather(beta, on1, 0), -float("inf"))
        two = tl.where(skipped_to, tl.gather(beta, on2, 0), -float("inf"))
        beta = _add_logs(beta, one, two)


def ctc_and_gradient(logs: Tensor, targets: Tensor, rows: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Return the CTC loss of each sequence, and the gradient with respect to the logits whose log-softmax is `logs`.

    logs     log-probabilities (b n w), contiguous float32
    targets  tokens (b t) without blanks
    rows     number of rows of each sequence, at least 1
    lengths  number of tokens of each target
    """
    b, n, vocab = logs.shape
    states = triton.next_power_of_2(2 * targets.shape[1] + 1)
    alphas = torch.empty(b, n, states, dtype=torch.float32, device=logs.device)
    losses, gradients = torch.empty(b, dtype=torch.float32, device=logs.device), torch.zeros_like(logs)
    _ctc_sequences[(b,)](
        logs, targets, rows, lengths, alphas, losses, gradients, n, vocab, targets.shape[1], blank, states,
        triton.next_power_of_2(vocab), num_warps=1,
    )  # fmt: skip
    return losses, gradients
