"""Validation of whole and real numbers."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from regard.base.errors import ConfigError, RegardError
from regard.base.validation import check_integer, check_number, check_range


def said(thunk, *args, **settings):
    with pytest.raises(ConfigError) as caught:
        thunk(*args, **settings)
    assert isinstance(caught.value, RegardError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "an inner error would be shown too"
    return str(caught.value)


class Indexed:
    """A whole number of a kind that nobody has heard of."""

    def __index__(self) -> int:
        return 7


WHOLE = [7, np.int64(7), np.int8(7), np.uint16(7), np.array(7), torch.tensor(7), Indexed()]


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: type(value).__name__)
def test_integers_of_all_types_become_int(value):
    number = check_integer("size", value, 0)
    assert number == 7
    assert type(number) is int


@pytest.mark.parametrize("least", [-2, 0, 1, 5])
def test_the_minimum_is_allowed_and_smaller_numbers_are_not(least):
    assert check_integer("size", least, least) == least
    assert check_integer("size", 10**12, least) == 10**12
    assert said(check_integer, "size", 10**30, least) == f"size is {10**30}, which is too large for a position or size"
    text = f"chunks(size) is {least - 1}, but must be at least {least}"
    assert said(check_integer, "chunks(size)", least - 1, least) == text
    assert said(check_integer, "chunks(size)", np.int64(least - 1), least) == text, (
        "numpy's repr is not what was written"
    )


def test_the_error_says_what_is_counted():
    text = "window(before) is -1, but must be at least 0: it counts neighbours"
    assert said(check_integer, "window(before)", -1, 0, "neighbours") == text


NOT_WHOLE = [
    *(True, False, np.True_, np.False_),
    *(2.0, np.float32(2), Fraction(4, 2), Decimal(2), 2 + 0j, math.inf, math.nan),
    *("2", b"2", None, [2], (2,), np.array([2]), np.array([2, 3]), np.array(2.0)),
    *(torch.tensor(2.0), torch.tensor([2, 3]), torch.tensor([], dtype=torch.long)),
]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_values_that_are_not_integers_raise_an_error(value):
    assert said(check_integer, "window(before)", value, 0) == f"window(before) takes a whole number, not {value!r}"


REAL = [2, 2.0, np.float32(2), np.float64(2), np.float16(2), np.int64(2), Fraction(2)]


@pytest.mark.parametrize("value", REAL, ids=lambda value: type(value).__name__)
def test_real_numbers_of_all_types_become_float(value):
    number = check_number("beta", value)
    assert number == 2
    assert type(number) is float


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, 1e-320, math.inf, -math.inf, np.float32("inf")])
def test_real_numbers_keep_their_value(value):
    assert check_number("beta", value) == value
    assert math.copysign(1, check_number("beta", value)) == math.copysign(1, value)


def test_halves_are_not_rounded():
    assert check_number("beta", Fraction(1, 3)) == 1 / 3
    assert check_number("beta", np.float32(0.1)) == float(np.float32(0.1)) != 0.1


NOT_REAL = [True, False, math.nan, "1", b"1", None, [1.0], (1.0,), 1 + 0j, Decimal(1)]


@pytest.mark.parametrize("value", NOT_REAL, ids=repr)
def test_values_that_are_not_real_numbers_raise_an_error(value):
    assert said(check_number, "softcap(cap)", value) == f"softcap(cap) is {value!r}, but takes one real number"
    text = f"dropout is {value!r}, but takes one real number, the probability of dropping a weight"
    assert said(check_number, "dropout", value, "the probability of dropping a weight") == text


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.tensor(1), np.array(1.0)], ids=repr)
def test_the_error_for_a_scalar_tensor_names_item(value):
    text = f"softcap(cap) is {value!r}, but takes one real number; call .item() on it"
    assert said(check_number, "softcap(cap)", value) == text
    text = f"beta is {value!r}, but takes one real number, the inverse temperature; call .item() on it"
    assert said(check_number, "beta", value, "the inverse temperature") == text
    assert check_number("beta", value.item()) == 1.0


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), np.float32("nan"), np.True_], ids=repr)
def test_tensors_and_arrays_with_several_elements_raise_an_error(value):
    assert said(check_number, "beta", value).startswith(f"beta is {value!r}, but takes one real number")


@pytest.mark.parametrize("value", [0, 0.5, 1], ids=repr)
def test_a_number_inside_its_range_is_returned(value):
    assert check_range("dropout", value, 0, 1) == value


def test_the_error_for_a_number_outside_its_range_names_both_ends():
    assert said(check_range, "dropout", 2, 0, 1) == "dropout must be at least 0 and at most 1, not 2"
    assert said(check_range, "dropout", 1, 0, 1, below=True) == "dropout must be at least 0 and below 1, not 1"
    assert said(check_range, "lr", 0, 0, above=True) == "lr must be above 0, not 0"
