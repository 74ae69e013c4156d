"""What all tests share: one seed, one thread, no GPU required, and shape annotations that are checked.

Annotations such as `Float[Tensor, "b h i c"]` are checked at run time by jaxtyping and beartype, in three ways unlike
their defaults. Inside torch.compile nothing is checked, because their wrappers cannot be traced. A function runs before
its arguments are checked, so that tests see its own errors; if it accepts a wrong argument, the check fails. A call
whose arguments and result have the shapes, dtypes and types of an earlier one is not checked again: that takes most
of the time of small calls.
"""

import dataclasses
import functools
import importlib.util
import inspect
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
import pytest
import torch

from tests.peers import let_torchvision_load
from tests.slow import find_without_quick_case, select_quick

if not torch.cuda.is_available():
    # read when triton is imported: kernels are then run by its interpreter, on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent.parent
SHAPES_CHECKED = importlib.util.find_spec("beartype") is not None
# tests that share cached runs of claims or checks: one process runs each once
ONE_PROCESS = ("tests/lab/", "tests/conform/test_mutants.py")
_strictly = jaxtyping.jaxtyped
_checkers: dict[tuple[str, CodeType], Callable[..., None]] = {}


def checked(thing: Any = None, *, typechecker: Any) -> Any:
    """jaxtyping's decorator, which its import hook puts on every function and class, with the changes above."""
    if thing is None:
        return functools.partial(checked, typechecker=typechecker)
    if torch.compiler.is_compiling():
        return thing  # a function defined inside a traced one
    if thing.__module__.endswith("triton_kernels"):
        return thing  # Triton reads the source of a kernel and the names of its module
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__, typechecker=typechecker)  # type: ignore[method-assign]
        return thing
    name = thing.__qualname__, thing.__code__  # equal dataclasses have equal code
    if name not in _checkers:  # a function inside another is defined at each call of that
        _checkers[name] = make_checker(thing, typechecker)
    check = _checkers[name]

    @functools.wraps(thing)
    def run_and_check(*args: Any, **kwargs: Any) -> Any:
        out = thing(*args, **kwargs)
        if not torch.compiler.is_compiling() and out is not NotImplemented:  # an operator that refuses its operand
            check(out, args, kwargs)
        return out

    return run_and_check


def make_checker(thing: FunctionType, typechecker: Any) -> Callable[..., None]:
    """Return a function that checks the result and the arguments of a call."""
    held = threading.local()
    seen: set[Any] = set()

    def result_of_the_call(*args: Any, **kwargs: Any) -> Any:
        return held.out

    strict: list[Any] = []  # made at the first call: many functions are never called

    def make_strict() -> Any:
        code, closure = result_of_the_call.__code__, result_of_the_call.__closure__
        # jaxtyping evaluates annotations in quotes among the globals of the function
        stand_in = FunctionType(code, thing.__globals__, thing.__name__, None, closure)
        return _strictly(functools.update_wrapper(stand_in, thing), typechecker=typechecker)

    def check(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            kind = (describe(out), *map(describe, args), *kwargs, *map(describe, kwargs.values()))
            if kind in seen:
                return
        except TypeError:  # sizes of a traced tensor cannot be hashed
            kind = None
        held.out = out
        if not strict:
            strict.append(make_strict())
        try:
            strict[0](*args, **kwargs)
        finally:
            del held.out
        if kind is not None:
            seen.add(kind)

    return check


def describe(value: Any, depth: int = 0) -> Any:
    """Return what annotations can distinguish: shape and dtype, a text, and the type of anything else."""
    if depth > 6:  # lists that contain themselves have no end, and some grow without bounds
        raise TypeError("nested too deeply to describe")
    kind = type(value)
    if kind not in _descriptions:
        _descriptions[kind] = next((how for base, how in _descriptions.items() if issubclass(kind, base)), None)
    how = _descriptions[kind]
    return kind if how is None else how(value, depth + 1)


_descriptions: dict[type, Callable[[Any, int], Any] | None] = {
    # a nested tensor has no shape
    torch.Tensor: lambda value, depth: (type(value), value.dtype, None if value.is_nested else value.shape),
    str: lambda value, depth: value,
    tuple: lambda value, depth: (type(value), *(describe(each, depth) for each in value)),
    list: lambda value, depth: (list, *(describe(each, depth) for each in value)),
    dict: lambda value, depth: (dict, *(describe(each, depth) for pair in value.items() for each in pair)),
}


if SHAPES_CHECKED:
    import beartype._check.code.codemain as beartype_code

    # beartype looks at one item of a list at random: not with the generator that belongs to the tests
    beartype_code.getrandbits = random.Random(0).getrandbits  # type: ignore[attr-defined]
    jaxtyping.jaxtyped = checked  # type: ignore[assignment]
    packages = [folder.name for folder in (ROOT / "regard").iterdir() if (folder / "__init__.py").is_file()]
    jaxtyping.install_import_hook(
        [f"regard.{name}" for name in packages if name not in ("cli", "explorer")],
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",  # an int is welcome where a float is
    )


def pytest_report_header() -> str:
    where = "a GPU" if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {where}, shape annotations {'checked' if SHAPES_CHECKED else 'not checked'}"


def pytest_configure() -> None:
    torch.set_num_threads(1)
    let_torchvision_load()


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):  # a selected case always runs
        quick = select_quick([item.nodeid for item in items])
        for item in items:
            if item.nodeid not in quick:
                item.add_marker(pytest.mark.slow)
    cases = [(item.nodeid, item.get_closest_marker("slow") is not None) for item in items]
    # a selection such as tests/x.py::test_y[case] shows only some cases of a function
    if not any("::" in argument for argument in config.args) and (missing := find_without_quick_case(cases)):
        raise pytest.UsageError(f"no case of these tests runs in `make test`; see tests/slow.py: {', '.join(missing)}")
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            shared = next((start for start in ONE_PROCESS if item.nodeid.startswith(start)), None)
            if shared is not None:
                item.add_marker(pytest.mark.xdist_group(shared))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
