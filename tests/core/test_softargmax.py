"""The soft choice: exp(beta s) / sum exp(beta s), at every inverse temperature, for every kind of score."""

import math

import pytest
import torch
from torch import Tensor

from regard import softargmax
from regard.base.errors import ConfigError, DtypeError

INF = math.inf


def by_hand(scores: list[float], beta: float) -> list[float]:
    """The definition over a list, with nothing but `math`."""
    seen = [s for s in scores if s > -INF]
    if beta == INF:
        share = 1 / max(scores.count(max(seen, default=0.0)), 1)
        return [share if seen and s == max(seen) else 0.0 for s in scores]
    top = max((beta * s for s in seen), default=0.0)
    total = sum(math.exp(beta * s - top) for s in seen)
    return [math.exp(beta * s - top) / total if s > -INF else 0.0 for s in scores]


@pytest.mark.parametrize(
    ("beta", "weights"), [(0.01, [0.246, 0.249, 0.251, 0.254]), (100, [0, 0, 0, 1]), (1, [0.032, 0.087, 0.237, 0.644])]
)
def test_scores_of_one_to_four(beta, weights):
    assert softargmax(torch.tensor([1.0, 2.0, 3.0, 4.0]), beta).tolist() == pytest.approx(weights, abs=5e-4)


def test_a_large_beta_is_one_hot_at_the_largest():
    assert softargmax(torch.tensor([1.0, 2.0, 3.0, 4.0]), 100).argmax() == 3
    assert softargmax(torch.tensor([1.0, 2.0, 3.0, 4.0]), 1e4).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("beta", [0, 0.3, 1, 2.5, -0.7, 40.0, INF])
@pytest.mark.parametrize(
    "scores",
    [
        [0.0],
        [3.0, 3.0, 3.0],
        [1.0, 5.0, 2.0, 5.0, -4.0],
        [-INF, 2.0, -INF, 1.0, 2.0],
        [-INF, -INF, -INF],
        [-INF, -7.0, -INF],
        [1e4, 1e4 - 1, -1e4],
        [1e-30, -1e-30, 0.0],
    ],
    ids=str,
)
def test_every_beta_is_what_the_definition_says(scores, beta):
    out = softargmax(torch.tensor(scores, dtype=torch.float64), beta).tolist()
    assert out == pytest.approx(by_hand(scores, beta), rel=1e-13, abs=1e-300)


def test_beta_one_is_the_softmax_and_the_default():
    scores = torch.randn(3, 7)
    assert torch.equal(softargmax(scores), scores.softmax(-1))
    assert torch.equal(softargmax(scores, 1.0), scores.softmax(-1))


def test_beta_zero_is_the_mean_of_what_is_visible():
    scores = torch.tensor([9.0, -INF, -3.0, 0.0, -INF])
    assert softargmax(scores, 0.0).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_at_infinity_ties_share_whatever_the_scale(scale):
    out = softargmax(torch.tensor([2.0, 5.0, 3.0, 5.0, 5.0]) * scale, INF)
    assert out.tolist() == pytest.approx([0, 1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, -2.0, 1e30, -1e30, INF])
@pytest.mark.parametrize(
    "wrong", [[1.0, math.nan, 2.0], [-INF, math.nan, -INF], [1.0, INF, 2.0], [INF, INF, -INF]], ids=str
)
def test_nan_and_plus_infinity_make_their_row_nan(wrong, beta):
    scores = torch.tensor([wrong, [1.0, -INF, 2.0]], requires_grad=True)
    out = softargmax(scores, beta)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    out[1].sum().backward()
    assert scores.grad[1].isfinite().all()


def test_a_negative_beta_prefers_the_smallest():
    out = softargmax(torch.tensor([1.0, 2.0, -INF, 3.0]), -2.0)
    assert out.tolist() == pytest.approx(by_hand([1.0, 2.0, -INF, 3.0], -2.0))
    assert out.argmax() == 0
    assert out[2] == 0


@pytest.mark.parametrize("beta", [0.0, 0.4, -0.4, INF])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_the_axis_is_the_one_named(axis, beta):
    scores = torch.randn(3, 5, 7, dtype=torch.float64).round()
    scores[scores < -1] = -INF
    out = softargmax(scores, beta, axis)
    assert out.shape == scores.shape
    rows, expected = out.movedim(axis, -1).reshape(-1, scores.shape[axis]), scores.movedim(axis, -1)
    for row, own in zip(rows, expected.reshape(-1, scores.shape[axis]), strict=True):
        assert row.tolist() == pytest.approx(by_hand(own.tolist(), beta), rel=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1, -2.0, 1e30, INF])
def test_invisible_scores_weigh_exactly_nothing(beta):
    out = softargmax(torch.tensor([[1.0, -INF, 2.0], [-INF, -INF, -INF], [-INF, 0.5, -INF]]), beta)
    assert out[0, 1] == 0
    assert out[1].tolist() == [0, 0, 0]
    assert out[2].tolist() == [0, 1, 0]
    assert out[0].sum() == pytest.approx(1)


@pytest.mark.parametrize("beta", [0.0, 0.3, INF])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)], ids=str)
def test_nothing_comes_of_nothing(shape, beta):
    out = softargmax(torch.zeros(shape, requires_grad=True), beta)
    assert out.shape == shape
    assert out.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, INF])
def test_the_dtype_is_kept(dtype, beta):
    out = softargmax(torch.tensor([1, 2, -INF, 2], dtype=dtype), beta)
    assert out.dtype == dtype
    assert out.double().tolist() == pytest.approx(by_hand([1, 2, -INF, 2], beta), abs=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64], ids=str)
def test_only_floating_numbers_are_taken(dtype):
    with pytest.raises(DtypeError, match=f"scores are {dtype}; softargmax takes floating numbers"):
        softargmax(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("beta", [math.nan, -INF, "sharp", None, True, torch.tensor([1.0, 2.0])], ids=str)
def test_a_beta_that_means_nothing_is_refused(beta):
    with pytest.raises(ConfigError, match="beta is "):
        softargmax(torch.zeros(3), beta)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, -0.8, 3])
@pytest.mark.parametrize("axis", [-1, 0])
def test_gradients_are_those_of_finite_differences(beta, axis):
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: softargmax(s, beta, axis), scores)
    assert torch.autograd.gradgradcheck(lambda s: softargmax(s, beta, axis), scores)


@pytest.mark.parametrize("beta", [0.0, 0.4, 2.0, -0.8])
def test_the_gradient_is_the_covariance_of_the_weights(beta):
    """dw_k / ds_l = beta (w_k [k = l] - w_k w_l), with nothing for what is invisible and no NaN anywhere."""
    scores = torch.tensor([0.3, -INF, 1.2, -0.5], dtype=torch.float64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda s: softargmax(s, beta), scores)
    w = softargmax(scores.detach(), beta)
    expected = beta * (torch.diag(w) - torch.outer(w, w))
    assert torch.allclose(jacobian, expected, atol=1e-15)
    assert not jacobian[1].any()
    assert not jacobian[:, 1].any()


def test_a_blind_row_gets_zero_gradients():
    scores = torch.full((2, 3), -INF)
    scores[1] = 1.0
    scores.requires_grad_()
    softargmax(scores, 0.7)[:, 0].sum().backward()
    assert scores.grad[0].tolist() == [0, 0, 0]
    assert scores.grad[1].any()


def test_large_scores_do_not_overflow():
    for size in (1e30, 3e38):
        out = softargmax(torch.tensor([size, -size, size]), 1.0)
        assert out.tolist() == [0.5, 0, 0.5]


def test_the_scores_are_left_as_they_were():
    scores = torch.tensor([1.0, -INF, 2.0])
    before = scores.clone()
    for beta in (0.0, 0.3, INF):
        softargmax(scores, beta)
    assert torch.equal(scores, before)


def shifted(scores: Tensor, by: float) -> Tensor:
    return softargmax(scores + by, 0.5)


def test_only_differences_count():
    scores = torch.randn(3, 7, dtype=torch.float64)
    assert torch.allclose(shifted(scores, 0.0), shifted(scores, 11.0), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1e5, 1e30, 1e38, 1e300])
def test_a_large_beta_is_sharp_and_never_nan(beta, dtype):
    scores = torch.tensor([[1.0, 3.0, 3.0, -math.inf], [-math.inf] * 4, [-5.0, -5.0, -5.0, -5.0]], dtype=dtype)
    largest, smallest = softargmax(scores, beta), softargmax(scores, -beta)
    nothing, alike = [0.0] * 4, [0.25] * 4
    assert largest.tolist() == [[0.0, 0.5, 0.5, 0.0], nothing, alike]
    assert smallest.tolist() == [[1.0, 0.0, 0.0, 0.0], nothing, alike]


def test_hard_choice_lets_a_gradient_of_zero_through():
    scores = torch.tensor([1.0, 3.0, -math.inf], requires_grad=True)
    softargmax(scores, math.inf).sum().backward()
    assert scores.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [1.0, 1.5, 100.0, 9e3, 1e30, -1.0, -2.0, -9e3])
def test_scores_near_the_largest_float_do_not_overflow(dtype, beta):
    largest = torch.finfo(dtype).max
    scores = torch.tensor([largest, -largest, largest / 2, largest], dtype=dtype, requires_grad=True)
    weights = softargmax(scores, beta)
    expected = [0.5, 0.0, 0.0, 0.5] if beta > 0 else [0.0, 1.0, 0.0, 0.0]
    assert weights.tolist() == expected
    assert not torch.autograd.grad(weights[0], scores)[0].isnan().any()
