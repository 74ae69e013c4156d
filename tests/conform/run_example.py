"""Run the Python example of a failure and compare what it gives with its comments."""

import ast
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor


def run_example(example: str, fn: object) -> tuple[dict[str, Any], str]:
    """The names an example leaves behind when it is pasted where its subject is known, and the name it ends with."""
    space: dict[str, Any] = {"torch": torch, str(getattr(fn, "__name__", "f")): fn}
    space |= {"f": fn, "module": fn, "model": fn}
    exec(example, space)
    last = ast.parse(example).body[-1]
    assert isinstance(last, ast.Assign), example
    assert isinstance(last.targets[0], ast.Name)
    return space, last.targets[0].id


def result_comment(example: str, what: str) -> str | None:
    found = re.search(rf"^# {what} +(.*)$", example, re.MULTILINE)
    return None if found is None else found[1]


def close_values(actual: Any, expected: Any) -> bool:
    """Whether two values are the same but for the digits that were not printed."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return actual.shape == expected.shape and torch.allclose(
            actual.detach().double(), expected.double(), rtol=2e-5, atol=1e-7, equal_nan=True
        )
    if isinstance(actual, float) and isinstance(expected, int | float):
        return math.isclose(actual, expected, rel_tol=2e-5, abs_tol=1e-7) or (actual != actual and expected != expected)
    return bool(actual == expected)


def assert_example_holds(example: str, fn: object) -> None:
    """An example gives what it says it gives, which is not what it says it should be."""
    assert example
    raises = result_comment(example, "raises")
    if raises is not None:
        with pytest.raises(Exception) as raised:
            run_example(example, fn)
        words = (str(raised.value).strip().splitlines() or [""])[0]
        assert f"{type(raised.value).__name__}: {words}" == raises
        return
    space, name = run_example(example, fn)
    gives, should = result_comment(example, "gives"), result_comment(example, "should be")
    assert gives is not None, example
    assert should is not None, example
    assert close_values(space[name], eval(gives, {"torch": torch})), f"{example}\nreally gives {space[name]}"
    if should.startswith("at most "):
        assert not space[name] <= float(should.removeprefix("at most ")), example
        return
    assert gives != should, example
    if "expected" in space:
        assert close_values(select_entry(space["expected"], example), eval(should, {"torch": torch})), example


def select_entry(x: Tensor, example: str) -> Any:
    """The one entry of many that an example writes out."""
    place = re.search(r"^\w+ = \w+\[([\d, ]+)\]\.item\(\)$", example, re.MULTILINE)
    return x if place is None else x[tuple(int(index) for index in place[1].split(","))].item()
