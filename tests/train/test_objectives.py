"""Losses as sums and counts, exact against torch's means, and shares that add up."""

import pytest
import torch
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.train.objectives import IGNORED, cross_entropy, ctc


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [IGNORED, 2])
def test_cross_entropy_gives_the_mean_and_gradient_of_torch(smoothing: float, ignored: int) -> None:
    logits = torch.randn(3, 5, 7, requires_grad=True)
    targets = torch.randint(0, 7, (3, 5))
    targets[0, 1] = targets[2, 4] = ignored
    loss = cross_entropy(logits, targets, smoothing=smoothing, ignored=ignored)
    truth = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, ignore_index=ignored
    )
    assert int(loss.count) == int((targets != ignored).sum())
    torch.testing.assert_close(loss.total / loss.count, truth)
    (mine,) = torch.autograd.grad(loss.total / loss.count, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(truth, logits)
    torch.testing.assert_close(mine, theirs)
    assert not mine[2, 4].any()


def test_label_smoothing_follows_its_formula() -> None:
    logits, targets = torch.randn(11, 7), torch.randint(0, 7, (11,))
    logs = logits.log_softmax(-1)
    expected = -(0.7 * logs[torch.arange(11), targets] + 0.3 * logs.mean(-1)).sum()
    torch.testing.assert_close(cross_entropy(logits, targets, smoothing=0.3).total, expected)


def test_losses_of_micro_batches_add_up_to_that_of_the_batch() -> None:
    logits, targets = torch.randn(9, 5), torch.randint(0, 5, (9,))
    targets[:3] = IGNORED
    whole = cross_entropy(logits, targets)
    shares = [cross_entropy(logits[rows], targets[rows]) for rows in (slice(0, 4), slice(4, 9))]
    assert [int(each.count) for each in shares] == [1, 5]
    torch.testing.assert_close(sum(each.total for each in shares) / 6, whole.total / whole.count)


def test_a_batch_of_ignored_targets_has_loss_and_count_0() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    loss = cross_entropy(logits, torch.full((4,), IGNORED))
    loss.total.backward()
    assert (loss.total.item(), int(loss.count)) == (0, 0)
    assert not logits.grad.any()


def test_invalid_arguments_of_cross_entropy_raise_an_error() -> None:
    with pytest.raises(ShapeError, match=r"targets is \(3, 4\), but logits is \(3, 5, 7\) and needs .* \(3, 5\)"):
        cross_entropy(torch.randn(3, 5, 7), torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="smoothing must be at least 0 and at most 1, not 2"):
        cross_entropy(torch.randn(5, 7), torch.zeros(5, dtype=torch.int64), smoothing=2)


def every_alignment(logits: torch.Tensor, tokens: list[int], blank: int) -> torch.Tensor:
    """The likelihood of tokens as a sum over all alignments."""
    logs, total = logits.log_softmax(-1), torch.zeros(())
    for string in torch.cartesian_prod(*[torch.arange(logits.shape[1])] * logits.shape[0]).tolist():
        read = [t for before, t in zip([None, *string], string, strict=False) if t not in (before, blank)]
        if read == tokens:
            total = total + logs[torch.arange(len(string)), string].sum().exp()
    return total


@pytest.mark.parametrize("blank", [0, 3])
def test_ctc_is_the_sum_over_all_alignments(blank: int) -> None:
    logits = torch.randn(2, 5, 4)
    targets, rows, lengths = torch.tensor([[1, 1, 2], [2, 9, 9]]), torch.tensor([5, 3]), torch.tensor([3, 1])
    loss = ctc(logits, targets, rows=rows, lengths=lengths, blank=blank)
    expected = every_alignment(logits[0], [1, 1, 2], blank).log() + every_alignment(logits[1, :3], [2], blank).log()
    assert int(loss.count) == 4
    torch.testing.assert_close(loss.total, -expected)


def test_ctc_raises_an_error_if_there_is_no_alignment() -> None:
    logits, lengths = torch.randn(2, 3, 4), torch.tensor([1, 3])
    with pytest.raises(ShapeError, match=r"sequence 1 has 3 rows, but its 3 tokens need 4: one each and a blank"):
        ctc(logits, torch.tensor([[1, 0, 0], [2, 2, 1]]), rows=torch.tensor([3, 3]), lengths=lengths)
    with pytest.raises(ConfigError, match="blank=4 must be a token of the logits, from 0 to 3"):
        ctc(logits, torch.ones(2, 3, dtype=torch.int64), rows=torch.tensor([3, 3]), lengths=lengths, blank=4)
