"""Predicted beside measured: the bench runs, and its ratios are of the numbers that it shows."""

import json

import pytest

from bench.planning import main

TINY = ["people=12", "held=3", "model.depth=1", "model.width=16", "model.heads=2", "pretraining.batch_size=12"]


def test_a_recipe_is_predicted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--only", "birthplaces", "--steps", "2", "--json"]
    assert main([*words, *(word for each in TINY for word in ("--set", f"birthplaces:{each}"))]) == 0
    told = json.loads(capsys.readouterr().out)
    (line,) = told["results"]
    assert line["name"] == "birthplaces, pretraining"
    memory, time = line["ratios"]
    assert memory == line["predicted_bytes"] / line["bytes"] == pytest.approx(1.0, abs=0.1)
    assert time == line["predicted_seconds"] / line["seconds"] > 0.1
