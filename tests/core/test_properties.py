"""Every property holds for every kernel, and every fault is caught by the property that is there for it."""

from functools import partial

import pytest
import torch

import regard
from regard.base.errors import KernelRefusedError
from tests.kernels import ALL_KERNELS, CPU_KERNELS
from tests.mutants import MUTANTS, naive
from tests.properties import PROPERTIES, on


def hold(name: str, kernel: str) -> None:
    """The property under one kernel; where that refuses a call, its reasons are the reason to skip."""
    try:
        PROPERTIES[name](partial(regard.attend, kernel=kernel))
    except KernelRefusedError as refusal:
        pytest.skip(f"{kernel} refuses: {'; '.join(refusal.reasons)}")


# properties that ask a kernel for what it must refuse; any other refusal is a failure
REFUSED = {
    "sdpa": {"beta_infinity_is_hard_and_shares_ties"},
    "blocked": {
        "beta_infinity_is_hard_and_shares_ties",
        "outputs_match_the_truth_when_all_is_visible",
        "poison_behind_a_dense_mask_stays_out",
        "blind_rows_of_a_dense_mask_give_zeros",
        "dense_masks_show_where_true",
        "no_keys_give_zeros",
        "nothing_asked_gives_nothing",
        "cache_steps_equal_the_whole",
    },
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_holds_for_the_kernel_that_attend_chooses(name):
    PROPERTIES[name](regard.attend)


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_holds_for_every_kernel(name, kernel):
    if name in REFUSED.get(kernel, ()):
        with pytest.raises(KernelRefusedError):
            PROPERTIES[name](partial(regard.attend, kernel=kernel))
    else:
        PROPERTIES[name](partial(regard.attend, kernel=kernel))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestOnAGPU:
    @pytest.fixture(autouse=True)
    def placed(self):
        with on("cuda"):
            yield

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_holds_for_the_kernel_that_attend_chooses(self, name):
        PROPERTIES[name](regard.attend)

    @pytest.mark.parametrize("kernel", ALL_KERNELS)
    @pytest.mark.parametrize("name", PROPERTIES)
    def test_holds_for_a_kernel_that_may_refuse(self, name, kernel):
        hold(name, kernel)


@pytest.mark.parametrize("name", PROPERTIES)
def test_holds_for_the_naive_attention_that_mutants_start_from(name):
    PROPERTIES[name](naive)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_its_property(name):
    mutant, caught_by = MUTANTS[name]
    with pytest.raises(AssertionError) as caught:
        PROPERTIES[caught_by](mutant)
    assert caught.traceback[-1].path.name == "properties.py", "the mutant broke down before the property could judge it"


def test_every_property_catches_a_mutant():
    assert {caught_by for _, caught_by in MUTANTS.values()} == set(PROPERTIES)


def test_there_are_mutants_enough():
    assert len(MUTANTS) >= 25
