"""The public surface, name by name: adding or losing one is a decision, so it is written here too."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.core.masks.forms import FORMS
from regard.core.scores import TERMS

SURFACE = {
    "__version__",
    *("attend", "explain", "softargmax", "recording", "channel_attend", "linear_attend"),
    *("Mask", "Positions", "RegardError"),
    *("sinusoidal", "rotary", "grid_positions"),
    *("DynamicCache", "SlidingWindowCache", "StaticCache", "Stream"),
    *("build", "list_models", "load", "generate"),
    *("watch", "intervene", "check", "Report", "conformance", "show"),
    *FORMS,  # every mask
    *TERMS,  # every score term
}
PACKAGES = {found.name for found in pkgutil.iter_modules(regard.__path__) if found.ispkg}
NAMES = sorted(SURFACE - {"__version__"})


def test_the_surface_is_what_is_written_here() -> None:
    assert sorted(regard.__all__) == sorted(SURFACE | PACKAGES)
    assert dir(regard) == sorted(regard.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(regard, name))


def untyped(thing: Any) -> list[str]:
    """Parameters and results without an annotation."""
    if inspect.isclass(thing):
        members = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
        functions = [(key, getattr(value, "__func__", value)) for key, value in members]
        return [f"{key}.{gap}" for key, value in functions if inspect.isfunction(value) for gap in untyped(value)]
    signature = inspect.signature(thing)
    gaps = [name for name, each in signature.parameters.items() if each.annotation is each.empty and name != "self"]
    return [gap for gap in gaps if gap != "cls"] + (
        [] if signature.return_annotation is not signature.empty else ["->"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_typed(name: str) -> None:
    assert untyped(getattr(regard, name)) == []


def test_a_missing_annotation_would_be_found() -> None:
    class Lax:
        def method(self, x): ...  # type: ignore[no-untyped-def]

    assert untyped(Lax) == ["method.x", "method.->"]


def test_type_checkers_see_the_names_that_exist() -> None:
    tree = ast.parse(Path(regard.__file__).read_text())
    declared = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for name in NAMES:
        module = declared.get(name)
        assert module, f"import {name} in the TYPE_CHECKING block of regard/__init__.py"
        assert getattr(importlib.import_module(module), name) is getattr(regard, name)


def test_no_public_name_is_any_to_mypy(tmp_path: Path) -> None:
    """`make check` has filled the cache of mypy, so this takes a second."""
    shown = [*NAMES, "nn.Attention", "see.statistics", "work.grade", "integrations.huggingface.register"]
    snippet = tmp_path / "snippet.py"
    # `windw` does not exist
    snippet.write_text("\n".join(["import regard", *(f"reveal_type(regard.{name})" for name in shown), "regard.windw"]))
    root = Path(regard.__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", snippet], cwd=root, capture_output=True, text=True)
    kinds = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(kinds) == len(shown), done.stdout
    untyped = [name for name, kind in zip(shown, kinds, strict=True) if kind == "Any"]
    assert not untyped, f"import {untyped} in the TYPE_CHECKING block of regard/__init__.py"
    assert 'Module has no attribute "windw"' in done.stdout


def test_attend_imports_no_compiler_and_nothing_for_pages_pictures_or_commands() -> None:
    heavy = (
        "jinja2",
        "matplotlib",
        "rich",
        "typer",
        "PIL",
        "triton",
        "transformers",
        "torch._dynamo",
        "torch._inductor",
    )
    code = f"import sys, torch, regard; regard.attend; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_importing_regard_does_not_import_torch() -> None:
    code = "import sys, regard; regard.__version__; dir(regard); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(regard.__file__).parent.parent).returncode == 0


FIRST = """
import importlib, pkgutil, sys
import regard
names = [found.name for found in pkgutil.walk_packages(regard.__path__, "regard.") if found.name != "regard.__main__"]
names = [name for name in names if name.count(".") < 2 or name.split(".")[1] in sys.argv[1:]]
for name in names:
    for loaded in [other for other in sys.modules if other.startswith("regard.")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        if "triton" not in str(error):  # it comes with torch only where there is a GPU
            print(f"{name}: {error}")
"""


UPPER = ("see", "conform", "lab", "work", "cli", "data", "nn", "models")


@pytest.mark.parametrize("parts", [("base", "core"), pytest.param(UPPER, marks=pytest.mark.slow)], ids=str)
def test_every_module_can_be_the_first_to_be_imported(parts: tuple[str, ...]) -> None:
    """Packages themselves always; what is in them where it is quick."""
    root = Path(regard.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", FIRST, *parts], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_every_package_is_reachable_by_attribute() -> None:
    code = "import regard, sys; sys.exit(regard.nn.__name__ != 'regard.nn' or not regard.models.__doc__)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(regard.__file__).parent.parent).returncode == 0
    for name in PACKAGES:
        assert getattr(regard, name) is importlib.import_module(f"regard.{name}")


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'attention'"):
        _ = regard.attention
    with pytest.raises(ImportError):
        from regard import attention  # noqa: F401
