"""The ground the tests stand on is tested too: shape checks that bite, and step aside where they should."""

import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import jaxtyping
import pytest
import torch

from tests.slow import QUICK_CASES, SLOW, find_without_quick_case, select_quick

SOURCE = '''
"""A module with annotations, some of which lie."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    left: Float[Tensor, "a b"]
    right: Float[Tensor, "b"]

    def __and__(self, other: "Pair") -> "Pair":
        return self if isinstance(other, Pair) else NotImplemented


@dataclass(frozen=True)
class Texts:
    left: str
    right: str


@dataclass(frozen=True)
class Numbers:
    left: int
    right: int


def transpose(x: Float[Tensor, "a b"]) -> Float[Tensor, "b a"]:
    return x.mT


def lied(x: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
    return x.mT


def outer(x: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
    return lied(x)


def refuses(x: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
    if x.ndim != 2:
        raise ValueError(f"x has {x.ndim} axes, but needs 2")
    return x


def summed(numbers: list[float]) -> float:
    return sum(numbers)


def scaled(x: Float[Tensor, "a b"], by: float) -> Float[Tensor, "a b"]:
    return Pair(x * by, x[0]).left
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The source above, loaded as regard's own modules are."""
    if not sys.modules["tests.conftest"].SHAPES_CHECKED:
        pytest.skip("beartype is not installed")
    import regard.core

    (tmp_path / "annotated.py").write_text(SOURCE)
    monkeypatch.setattr(regard.core, "__path__", [*regard.core.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "regard.core.annotated", raising=False)
    return importlib.import_module("regard.core.annotated")


def test_a_wrong_annotation_is_caught(module: ModuleType) -> None:
    assert module.transpose(torch.zeros(3, 5)).shape == (5, 3)
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        module.lied(torch.zeros(3, 5))
    with pytest.raises(jaxtyping.TypeCheckError, match="lied"):
        module.outer(torch.zeros(3, 5))


def test_fields_of_a_dataclass_are_checked_together(module: ModuleType) -> None:
    module.Pair(torch.zeros(3, 5), torch.zeros(5))
    with pytest.raises(jaxtyping.TypeCheckError, match="right"):
        module.Pair(torch.zeros(3, 5), torch.zeros(3))


def test_classes_with_equal_code_are_checked_by_their_own_annotations(module: ModuleType) -> None:
    assert module.Texts("a", "b").left == "a"
    assert module.Numbers(1, 2).right == 2
    with pytest.raises(jaxtyping.TypeCheckError, match="left"):
        module.Numbers("a", "b")


def test_a_call_like_an_earlier_one_but_of_another_shape_is_checked(module: ModuleType) -> None:
    assert module.lied(torch.zeros(3, 3)).shape == (3, 3)
    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
            module.lied(torch.zeros(3, 5))
        with pytest.raises(jaxtyping.TypeCheckError):
            module.transpose(torch.zeros(3, 5, dtype=torch.int64))


def test_an_error_of_the_function_itself_comes_first(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="x has 1 axes, but needs 2"):
        module.refuses(torch.zeros(3))
    with pytest.raises(TypeError, match="unsupported operand"):
        module.Pair(torch.zeros(3, 5), torch.zeros(5)) & 1


def test_an_int_is_welcome_where_a_float_is(module: ModuleType) -> None:
    assert module.scaled(torch.ones(3, 5), 2).sum() == 30


def test_checking_draws_no_number_of_the_tests(module: ModuleType) -> None:
    before = random.getstate()
    assert module.summed([1.0, 2.0, 3.0]) == 6
    assert random.getstate() == before


def test_nothing_is_checked_inside_a_compiled_function(module: ModuleType) -> None:
    run = torch.compile(lambda x: module.scaled(module.outer(x), 2), fullgraph=True, backend="eager")
    assert run(torch.ones(3, 5)).shape == (5, 3)


def test_a_function_of_which_every_case_is_slow_is_found() -> None:
    cases = [("tests/a.py::test_x[1]", True), ("tests/a.py::test_x[2]", False), ("tests/a.py::test_y", True)]
    assert find_without_quick_case(cases) == ["tests/a.py::test_y"]
    assert find_without_quick_case([(next(iter(SLOW)), True)]) == []


def test_few_tests_are_slow_as_a_whole_and_each_exists(root: Path) -> None:
    assert len(SLOW) <= 40
    for name in SLOW:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (root / file).read_text(), name
        assert select_quick([name, f"{name}[case]"]) == set()


@pytest.mark.parametrize("start", QUICK_CASES)
def test_some_of_many_similar_cases_run_and_all_of_few(start: str) -> None:
    function = f"{start}::test_x" if start.endswith(".py") else f"{start}test_a.py::test_x"
    most = QUICK_CASES[start]
    many, few = ([f"{function}{k}[{number}]" for number in range(k)] for k in (3 * most + 1, most))
    chosen = select_quick([*many, *few])
    assert len(chosen & set(many)) == most
    assert many[0] in chosen
    assert set(few) <= chosen


def test_quick_cases_have_every_value_of_every_parameter_where_there_are_enough() -> None:
    kernels, masks = ("eager", "sdpa", "blocked", "reference"), "abcdefghijklmnopqrst"
    names = [f"tests/core/test_truth.py::test_x[{mask}-{kernel}]" for mask in masks for kernel in kernels]
    chosen = [name.partition("[")[2].removesuffix("]").split("-") for name in select_quick(names)]
    assert len(chosen) == QUICK_CASES["tests/core/test_truth.py"] < len(names)
    assert {mask for mask, _ in chosen} == set(masks)
    assert Counter(kernel for _, kernel in chosen) == dict.fromkeys(kernels, len(chosen) // len(kernels))
