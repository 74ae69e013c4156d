"""The rule that judges results can say no, for each of its reasons, and says yes up to its border."""

import math

import pytest
import torch

from tests.tolerance import GRADIENT, OUTPUT, ULPS_OF_FLOAT64, allowed, error, too_far, ulp

LOW = [torch.float32, torch.float16, torch.bfloat16]
TRUTH = torch.tensor([[0.5, -3.0, 1.0], [0.0, 2.0, 0.25]], dtype=torch.float64)  # exact in every dtype


def off(by: float, dtype: torch.dtype, at: tuple[int, int] = (1, 0)) -> torch.Tensor:
    """The truth in that dtype, with one number, a zero, moved."""
    moved = TRUTH.clone()
    moved[at] += by
    return moved.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_the_truth_itself_is_near_enough(dtype):
    assert too_far(TRUTH.to(dtype), TRUTH.to(dtype), TRUTH, OUTPUT) == ""


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("factor", [OUTPUT, GRADIENT])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_border_is_the_factor_times_the_naive_error_and_an_ulp(dtype, factor, sign):
    naive = off(0.125, dtype)
    border = factor * 0.125 + 3 * torch.finfo(dtype).eps
    assert too_far(off(sign * border, dtype), naive, TRUTH, factor) == ""
    beyond = border * (1 + 2 * torch.finfo(dtype).eps)
    text = f"off by {beyond:.1e} in {dtype}, {border:.1e} is allowed"
    assert too_far(off(sign * beyond, dtype), naive, TRUTH, factor) == text
    assert too_far(off(sign * beyond, dtype, at=(0, 2)), naive, TRUTH, factor + 1) == ""


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_naive_result_without_error_leaves_one_ulp(dtype):
    step = 3 * torch.finfo(dtype).eps
    assert too_far(off(step, dtype), TRUTH.to(dtype), TRUTH, GRADIENT) == ""
    assert too_far(off(1.1 * step, dtype), TRUTH.to(dtype), TRUTH, GRADIENT).startswith("off by ")


@pytest.mark.parametrize("factor", [OUTPUT, GRADIENT])
def test_in_float64_neither_the_naive_error_nor_the_factor_softens_anything(factor):
    border = ULPS_OF_FLOAT64 * 3 * torch.finfo(torch.float64).eps
    naive = off(0.125, torch.float64)
    assert too_far(off(border, torch.float64), naive, TRUTH, factor) == ""
    text = too_far(off(1.01 * border, torch.float64), naive, TRUTH, factor)
    assert text == f"off by {1.01 * border:.1e} in torch.float64, {border:.1e} is allowed"


@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite_is_too_far(bad, dtype):
    text = too_far(off(bad, dtype), off(0.125, dtype), TRUTH, GRADIENT)
    assert text.startswith(f"off by {abs(bad):.1e} in {dtype}, ")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_is_held_against_a_measure_that_is_not_finite(bad):
    text = "the naive result or the truth is not finite, so nothing can be held against it"
    good = TRUTH.float()
    assert too_far(good, off(bad, torch.float32), TRUTH, OUTPUT) == text
    assert too_far(good, good, off(bad, torch.float64), OUTPUT) == text
    assert too_far(off(bad, torch.float32), off(bad, torch.float32), off(bad, torch.float64), OUTPUT) == text
    assert too_far(TRUTH, TRUTH, off(bad, torch.float64), OUTPUT) == text, "in float64"


def test_a_truth_of_zeros_allows_nothing_else():
    zeros = torch.zeros(3, dtype=torch.float64)
    for dtype in [torch.float64, *LOW]:
        assert too_far(zeros.to(dtype), zeros.to(dtype), zeros, GRADIENT) == ""
        tiny = torch.full((3,), torch.finfo(dtype).tiny, dtype=dtype)
        assert too_far(tiny, zeros.to(dtype), zeros, GRADIENT).endswith("0.0e+00 is allowed")


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_truth_in_low_precision_is_none(dtype):
    x = TRUTH.to(dtype)
    assert too_far(x, x, x, OUTPUT) == f"the truth is in {dtype}, not in float64"


def test_shapes_have_to_be_the_same_and_not_only_to_broadcast():
    good, row, column = TRUTH.float(), TRUTH.float()[:1], TRUTH.float()[:, :1]
    for other in (row, column, good.mT, good[None], good.flatten()):
        shape = tuple(other.shape)
        assert too_far(other, good, TRUTH, OUTPUT) == f"the result has shape {shape}, not (2, 3)"
        assert too_far(good, other, TRUTH, OUTPUT) == f"the naive result has shape {shape}, not (2, 3)"
        assert too_far(other, other, TRUTH, OUTPUT) == f"the naive result has shape {shape}, not (2, 3)"


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_result_in_another_dtype_is_refused_however_near(dtype):
    assert too_far(TRUTH, TRUTH.to(dtype), TRUTH, OUTPUT) == f"the result is torch.float64, not {dtype}"
    assert too_far(TRUTH.to(dtype), TRUTH, TRUTH, OUTPUT) == f"the result is {dtype}, not torch.float64"


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_nothing_is_as_good_as_nothing_but_in_its_own_shape_and_dtype(shape):
    truth = torch.zeros(shape, dtype=torch.float64)
    assert too_far(truth.half(), truth.half(), truth, OUTPUT) == ""
    assert too_far(truth[None].half(), truth.half(), truth, OUTPUT).startswith("the result has shape (1, ")
    assert too_far(truth.float(), truth.half(), truth, OUTPUT) == "the result is torch.float32, not torch.float16"


def test_the_measures_are_of_the_largest():
    assert ulp(TRUTH, torch.float32) == 3 * 2**-23, "of the largest magnitude, negative or not"
    assert error(off(-0.125, torch.float32), TRUTH) == 0.125
    assert error(TRUTH + torch.tensor([0.25, 0.125, 0.0]), TRUTH) == 0.25
    assert math.isnan(error(off(math.nan, torch.float32), TRUTH))
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert error(third.half(), third) == abs(third.half().item() - 1 / 3) > 0, "measured in float64"
    assert allowed(off(0.125, torch.float16), TRUTH, 2.0) == 0.25 + 3 * 2**-10
    assert allowed(off(0.125, torch.float64), TRUTH, 2.0) == 16 * 3 * 2**-52


def test_gradients_are_held_less_tightly_than_outputs_and_no_more_than_agreed():
    assert (OUTPUT, GRADIENT, ULPS_OF_FLOAT64) == (2.0, 3.0, 16)
