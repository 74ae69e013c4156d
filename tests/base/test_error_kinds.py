"""Every error is regard's own and one of Python's kinds, so that either can be caught."""

import pytest

from regard.base import errors
from regard.base.errors import RegardError, kernel_refused

KINDS = {
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "DeviceError": ValueError,
    "ConfigError": ValueError,
    "DataError": ValueError,
    "UnknownNameError": ValueError,
    "KernelRefusedError": RuntimeError,
    "TrainingError": RuntimeError,
    "CacheError": RuntimeError,
    "CheckpointError": RuntimeError,
}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_can_be_caught_as_regards_or_as_pythons(name):
    kind = getattr(errors, name)
    assert issubclass(kind, RegardError)
    assert issubclass(kind, KINDS[name])
    assert kind.__doc__


def test_no_error_is_left_out_here():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "RegardError"}
    assert defined == set(KINDS)


def test_a_refusal_lists_its_reasons_and_who_would_run():
    refusal = kernel_refused("sdpa", ["it is Monday", "it rains"], ["eager", "reference"])
    assert refusal.kernel == "sdpa"
    assert refusal.reasons == ["it is Monday", "it rains"]
    assert str(refusal) == (
        "kernel 'sdpa' refuses this call:\n  - it is Monday\n  - it rains\nkernel=None would run 'eager'"
    )


def test_a_refusal_with_no_way_out_says_so():
    text = str(kernel_refused("sdpa", ["it rains"], []))
    assert text.startswith("kernel 'sdpa' refuses this call:\n  - it rains\n")
    assert "no other kernel" in text


def test_a_refusal_of_all_names_nobody():
    refusal = kernel_refused(None, ["it rains"], [])
    assert refusal.kernel is None
    assert str(refusal) == "no kernel can serve this call:\n  - it rains"
