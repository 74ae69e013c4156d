"""Loss functions (cross-entropy, CTC) that return a sum and a count, so that means over micro-batches are exact."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_range
from regard.train import fused_ctc
from regard.train.task import Loss

IGNORED = -100  # the target that is skipped, torch's `ignore_index`


def cross_entropy(
    logits: Float[Tensor, "*n w"], targets: Int[Tensor, "*n"], *, smoothing: float = 0.0, ignored: int = IGNORED
) -> Loss:
    """Return the cross-entropy loss, summed over the targets that are not `ignored`, and the number of these targets.

    smoothing  label smoothing: the part of each target that is spread over all classes (Szegedy et al. 2015,
               arXiv:1512.00567)
    ignored    value of the targets that are skipped (torch's `ignore_index`)
    """
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets is {tuple(targets.shape)}, but logits is {tuple(logits.shape)} and needs targets of shape "
            f"{tuple(logits.shape[:-1])}"
        )
    check_range("smoothing", smoothing, 0, 1)
    total = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignored, label_smoothing=smoothing, reduction="sum"
    )
    return Loss(total, (targets != ignored).sum())


def ctc(
    logits: Float[Tensor, "b n w"],
    targets: Int[Tensor, "b t"],
    *,
    rows: Int[Tensor, "b"],
    lengths: Int[Tensor, "b"],
    blank: int = 0,
) -> Loss:
    """Return the CTC loss (connectionist temporal classification, Graves et al. 2006), summed over the batch.

    rows     number of time steps (rows of logits) of each sequence, without padding
    lengths  number of tokens of each target; their sum is the `count` of the returned `Loss`
    blank    the blank token
    """
    if not 0 <= blank < logits.shape[-1]:
        raise ConfigError(f"blank={blank} must be a token of the logits, from 0 to {logits.shape[-1] - 1}")
    capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
    needed = lengths + _repeats(targets, lengths)
    # no value can be read while a CUDA graph is captured; the loss of a sequence that is too short is infinite
    short = [] if capturing else (rows < needed).nonzero().flatten().tolist()
    if short:
        first = short[0]
        raise ShapeError(
            f"sequence {first} has {rows[first]} rows, but its {lengths[first]} tokens need {needed[first]}: one each "
            "and a blank between equal neighbours; use shorter targets or more rows"
        )
    if fused_ctc.is_supported(logits, targets):
        return Loss(fused_ctc.fused_ctc(logits, targets, rows, lengths, blank), lengths.sum())
    # the sum over alignments needs at least float32
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    total = functional.ctc_loss(scores, targets, rows, lengths, blank=blank, reduction="sum")
    return Loss(total, lengths.sum())


def _repeats(targets: Int[Tensor, "b t"], lengths: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
    """Return, for each target sequence, the number of tokens that equal the token before them."""
    inside = torch.arange(1, targets.shape[1], device=targets.device) < lengths[:, None]
    return ((targets[:, 1:] == targets[:, :-1]) & inside).sum(1)
