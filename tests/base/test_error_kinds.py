"""Every exception is a RegardError and a standard Python exception."""

import pytest

from regard.base import errors
from regard.base.errors import RegardError, kernel_refused
from regard.core.masks.expression import parse_mask

KINDS = {
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "DeviceError": ValueError,
    "ConfigError": ValueError,
    "KeywordError": TypeError,
    "DataError": ValueError,
    "UnknownNameError": ValueError,
    "KernelRefusedError": RuntimeError,
    "TrainingError": RuntimeError,
    "CacheError": RuntimeError,
    "CheckpointError": RuntimeError,
    "InterventionError": RuntimeError,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_can_be_caught_as_ours_or_as_pythons(name):
    kind = getattr(errors, name)
    assert issubclass(kind, RegardError)
    assert issubclass(kind, KINDS[name])
    assert kind.__doc__


def test_all_errors_are_tested():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "RegardError"}
    assert defined == set(KINDS)


def test_a_refusal_lists_its_reasons_and_the_kernel_that_would_run():
    refusal = kernel_refused("sdpa", ["it is Monday", "it rains"], ["eager", "reference"])
    assert refusal.kernel == "sdpa"
    assert refusal.reasons == ["it is Monday", "it rains"]
    assert str(refusal) == (
        "kernel 'sdpa' refuses this call:\n  - it is Monday\n  - it rains\nkernel=None would run 'eager'"
    )


def test_a_refusal_says_if_no_other_kernel_can_run():
    text = str(kernel_refused("sdpa", ["it rains"], []))
    assert text.startswith("kernel 'sdpa' refuses this call:\n  - it rains\n")
    assert "no other kernel" in text


def test_a_refusal_of_all_kernels_names_none():
    refusal = kernel_refused(None, ["it rains"], [])
    assert refusal.kernel is None
    assert str(refusal) == "no kernel can serve this call:\n  - it rains"


@pytest.mark.parametrize("name", KINDS)
def test_a_long_message_keeps_its_beginning_and_its_end(name):
    kind = getattr(errors, name)
    text = str(kind("given: " + 10**6 * "(" + "; write it shorter"))
    assert len(text) < errors.LONGEST_MESSAGE + 60
    assert text.startswith("given: ((")
    assert text.endswith("; write it shorter")
    assert "996,025 characters left out" in text
    assert str(kind("short")) == "short"


def test_what_a_user_wrote_is_not_repeated_at_any_length():
    with pytest.raises(errors.ConfigError, match="write for instance") as raised:
        parse_mask(10**5 * "(" + "causal()")
    assert len(str(raised.value)) < errors.LONGEST_MESSAGE + 60
