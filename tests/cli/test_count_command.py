"""`regard count`."""

import json
from pathlib import Path

from typer.testing import CliRunner

import regard
from regard.cli import app


def ran(*words: str):
    return CliRunner().invoke(app, ["count", *words])


def test_it_prints_a_table() -> None:
    done = ran("birthplace", "--batch", "2")
    assert done.exit_code == 0
    assert "3,323,392" in done.stdout
    assert "birthplace, batch 2" in done.stdout
    assert "multiply-adds" in done.stdout


def test_numbers_as_json() -> None:
    found = json.loads(ran("birthplace", "--length", "64", "--json").stdout)
    assert found["total_parameters"] == 3_323_392 == sum(found["parameters"].values())
    assert found["length"] == 64
    assert found["attention_entries"] == 4 * 8 * 64 * 65 // 2


def test_a_saved_model_is_counted_by_its_folder(tmp_path: Path) -> None:
    regard.build("birthplace", depth=1).save(tmp_path)
    assert json.loads(ran(str(tmp_path), "--json").stdout)["total_parameters"] == 3_323_392 - 3 * 789_760


def test_an_unknown_name_and_a_wrong_length_are_errors_of_one_line() -> None:
    done = ran("brthplace")
    assert done.exit_code == 2
    assert "there is no folder 'brthplace', and no model of this name; did you mean 'birthplace'" in done.stderr
    done = ran("birthplace", "--length", "129")
    assert done.exit_code == 2
    assert "the input has 129 positions, but the context has 128" in done.stderr
