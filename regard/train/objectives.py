"""Losses as sums with their counts, so that means over shares of a batch are those over the whole batch."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_number
from regard.train.task import Loss

IGNORED = -100  # a target that is none, as torch has it


def cross_entropy(
    logits: Float[Tensor, "*n w"], targets: Int[Tensor, "*n"], *, smoothing: float = 0.0, ignored: int = IGNORED
) -> Loss:
    """Minus the log-likelihood of the targets, summed over those that are not `ignored`; they are the count.

    smoothing  how much of each target is given to all classes alike (Szegedy et al. 2015, arXiv:1512.00567)
    """
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets is {tuple(targets.shape)}, but logits is {tuple(logits.shape)}, which is a row of scores for "
            f"each of {tuple(logits.shape[:-1])} targets"
        )
    if not 0 <= check_number("smoothing", smoothing) <= 1:
        raise ConfigError(f"smoothing is the share of a target that all classes get, from 0 to 1, not {smoothing}")
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
    """Minus the log-likelihood of token strings over all their alignments to rows (Graves et al. 2006).

    rows     how many rows of logits each sequence has
    lengths  how many tokens each target has; their sum is the count
    """
    if not 0 <= blank < logits.shape[-1]:
        raise ConfigError(f"blank={blank} is a token, but logits has tokens 0 to {logits.shape[-1] - 1}")
    needed = lengths + _repeats(targets, lengths)
    short = (rows < needed).nonzero().flatten().tolist()
    if short:
        first = short[0]
        raise ShapeError(
            f"sequence {first} has {rows[first]} rows, but its {lengths[first]} tokens need {needed[first]}: one each "
            "and a blank between repeats; use shorter targets or more rows"
        )
    # the sum over alignments is taken in single precision at least
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    total = functional.ctc_loss(scores, targets, rows, lengths, blank=blank, reduction="sum")
    return Loss(total, lengths.sum())


def _repeats(targets: Int[Tensor, "b t"], lengths: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
    """How many tokens of each target equal the one before."""
    inside = torch.arange(1, targets.shape[1], device=targets.device) < lengths[:, None]
    return ((targets[:, 1:] == targets[:, :-1]) & inside).sum(1)
