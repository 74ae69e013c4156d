"""What every test stands on: one seed, one thread, no GPU assumed, and shape annotations that are checked.

Annotations such as `Float[Tensor, "b h i c"]` are checked at run time by jaxtyping and beartype, in two ways unlike
their defaults. Inside torch.compile nothing is checked, because their wrappers cannot be traced; a compile test needs
to do nothing for that. And where an argument breaks its annotation, the function is asked first: an error of its own
is what the test sees, so error texts are tested as users meet them. Only if it accepts the argument does the check
fail.
"""

import dataclasses
import functools
import importlib.util
import inspect
import random
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from tests.peers import let_torchvision_load
from tests.slow import find_without_quick_case, select_quick

ROOT = Path(__file__).parent.parent
SHAPES_CHECKED = importlib.util.find_spec("beartype") is not None
_strictly = jaxtyping.jaxtyped


def checked(thing: Any = None, *, typechecker: Any) -> Any:
    """jaxtyping's decorator, which its import hook puts on every function and class, with the two changes above."""
    if thing is None:
        return functools.partial(checked, typechecker=typechecker)
    if torch.compiler.is_compiling():
        return thing  # a function defined inside a traced one
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__, typechecker=typechecker)  # type: ignore[method-assign]
        return thing
    strict = _strictly(thing, typechecker=typechecker)

    @functools.wraps(thing)
    def either(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return thing(*args, **kwargs)
        try:
            return strict(*args, **kwargs)
        except jaxtyping.TypeCheckError as found:
            error = found
        if not hasattr(error, "asked") and thing(*args, **kwargs) is NotImplemented:
            return NotImplemented  # an operator that passes the question on
        error.asked = True  # type: ignore[attr-defined]
        raise error

    return either


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
            if item.nodeid.startswith("tests/lab/test_every_claim.py"):
                # all tests of one claim run in one process, which runs the claim once
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("[")[2]))
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
