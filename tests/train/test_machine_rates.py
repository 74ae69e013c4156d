"""Rates: stated ones are in order, measured ones are this machine's."""

from dataclasses import replace

import pytest
import torch

from regard.base.errors import ConfigError, UnknownNameError
from regard.train.machine_rates import MACHINES, machine, measured


def test_named_machines_say_where_their_numbers_come_from() -> None:
    for name, rates in MACHINES.items():
        assert machine(name) is rates
        assert rates.name == name
        assert len(rates.source) > 20


def test_arithmetic_is_what_is_reached_in_a_precision() -> None:
    rates = replace(MACHINES["h200"], reached=0.5)
    assert rates.arithmetic(torch.bfloat16) == 0.5 * 989e12
    assert rates.arithmetic(torch.float32) == rates.arithmetic(torch.int64) == 0.5 * 67e12


def test_this_machine_is_measured_in_orders_of_magnitude_that_there_are() -> None:
    rates = measured("cpu")
    assert (rates.name, rates.gpu, rates.reached) == ("measured cpu", False, 1.0)
    assert 1e9 < rates.float32 < 1e13
    assert 1e8 < rates.memory < 1e12
    assert 1e-7 < rates.launch < 1e-3


def test_unknown_machines_and_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="no machine 'h300'; there are h200, h100, a100, cpu and measured"):
        machine("h300")
    with pytest.raises(ConfigError, match=r"Rates\(memory\) must be above 0, not 0"):
        replace(MACHINES["cpu"], memory=0.0)
    with pytest.raises(ConfigError, match=r"Rates\(launch\) is a time in seconds, 0 or more, not -1"):
        replace(MACHINES["cpu"], launch=-1.0)
