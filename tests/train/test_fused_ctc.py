"""The CTC kernel against torch's CTC loss in float64: compiled on a GPU, by Triton's interpreter on a CPU."""

import pytest
import torch
from torch.nn import functional

from regard.train import fused_ctc
from regard.train.objectives import ctc

pytest.importorskip("triton", reason="triton is not installed; it has wheels for Linux only")
# the interpreter computes with NumPy, which warns about the logarithm of probability 0 and about inf - inf
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LENGTHS = torch.tensor([23, 19, 13, 7, 1, 5]), torch.tensor([6, 4, 6, 1, 0, 2])


def make_batch(vocab: int, blank: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = 3 * torch.randn(6, 23, vocab), torch.randint(0, vocab - 1, (6, 6))
    targets[0, 1:3] = targets[0, 0]  # equal neighbours, which need blanks between them
    targets[1, 1] = targets[1, 0]
    return logits, targets + (targets >= blank)


@pytest.mark.parametrize(("vocab", "blank"), [(11, 0), (5, 3), (2, 0)])
def test_loss_and_gradient_are_those_of_float64(vocab: int, blank: int) -> None:
    logits, targets = make_batch(vocab, blank)
    exact = logits.double().requires_grad_()
    truth = functional.ctc_loss(
        exact.log_softmax(-1).transpose(0, 1), targets, ROWS, LENGTHS, blank=blank, reduction="sum"
    )
    (wanted,) = torch.autograd.grad(truth * 0.3, exact)
    mine = logits.to(DEVICE).requires_grad_()
    loss = fused_ctc.fused_ctc(mine, targets.to(DEVICE), ROWS.to(DEVICE), LENGTHS.to(DEVICE), blank)
    (gradient,) = torch.autograd.grad(loss * 0.3, mine)
    torch.testing.assert_close(loss.cpu().double(), truth.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=0, atol=2e-5)
    assert not gradient[3, 7:].any(), "rows after the last one have no gradient"


def test_a_sequence_without_an_alignment_has_an_infinite_loss() -> None:
    logits, targets = make_batch(11, 0)
    rows = ROWS.clone()
    rows[2] = 5  # for six tokens
    loss = fused_ctc.fused_ctc(*(x.to(DEVICE) for x in (logits, targets, rows, LENGTHS)), 0)
    assert loss == torch.inf


def test_the_kernel_is_used_on_a_gpu_only_and_for_few_tokens() -> None:
    logits, targets = make_batch(11, 0)
    assert fused_ctc.is_supported(logits.to(DEVICE), targets) == torch.cuda.is_available()
    assert not fused_ctc.is_supported(torch.zeros(1, 1, 5000, device=DEVICE), targets)


@pytest.mark.cuda
def test_the_objective_gives_the_same_loss_on_a_gpu() -> None:
    logits, targets = make_batch(11, 0)
    truth = ctc(logits, targets, rows=ROWS, lengths=LENGTHS)
    found = ctc(logits.cuda(), targets.cuda(), rows=ROWS.cuda(), lengths=LENGTHS.cuda())
    torch.testing.assert_close(found.total.cpu(), truth.total)
    assert int(found.count) == int(truth.count)
