"""Who may import whom, read from the imports themselves. Imports go down only."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "regard").rglob("*.py"))

# each part, and the parts it may use besides itself
BELOW: dict[str, set[str]] = {"base": set(), "core": {"base"}, "data": {"base"}, "train": {"base"}}
BELOW["nn"] = {"core", "base"}
BELOW["models"] = {"nn", "core", "base"}
BELOW["see"] = {"core", "base"}
BELOW["integrations"] = {"nn", "core", "see", "base"}
BELOW["conform"] = {"core", "see", "integrations", "base"}
BELOW["recipes"] = {"models", "nn", "core", "see", "data", "train", "base"}
BELOW["lab"] = set(BELOW)
BELOW["work"] = {"core", "lab", "base"}
BELOW["explorer"] = set(BELOW)
BELOW["cli"] = set(BELOW)

DOOR = ("regard.core.attend", "regard.core.channel", "regard.core.cache")  # what stands on the kernels
MAY_USE_SURFACE = {"lab", "work", "explorer", "cli"}  # `import regard` hides what is used, so only the top may
OPTIONAL = {"triton"}  # comes with torch where there is a GPU
IMPORTED_AS = {
    "markdown_it_py": "markdown_it",
    "pillow": "PIL",
}  # where a package has another name than its distribution


@dataclass(frozen=True)
class Import:
    """One import statement: what it names, where, and whether it runs when the module is loaded."""

    module: str
    line: int
    on_load: bool


def imports(module: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, those inside functions and for type checkers too."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while waiting:
        node, on_load = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, on_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from regard.core import kernels` names a module, so the longer name is the one to judge
            yield from (Import(f"{origin}.{alias.name}", node.lineno, on_load) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += [(child, False) for child in node.body] + [(child, on_load) for child in node.orelse]
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            waiting += [(child, on_load and not inside) for child in ast.iter_child_nodes(node)]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module of regard."""
    found = []
    part = module.split(".")[1] if "." in module else ""
    if part == "__main__":
        part = "cli"
    third_party = declared() | OPTIONAL
    for entry in imports(module, source, is_package):
        top, *rest = entry.module.split(".")
        where = f"{module}:{entry.line} imports {entry.module}"
        if top == "torch" and entry.on_load and part in ("cli", ""):
            found.append(f"{where} on loading, so `regard --help` would wait for torch")
        if top != "regard":
            if top not in third_party and top not in sys.stdlib_module_names:
                found.append(f"{where}, which is no dependency of the project")
            continue
        if not part:
            continue  # the surface itself may name everything
        target = rest[0] if rest and rest[0] in BELOW else ""
        if not target and part not in MAY_USE_SURFACE:
            found.append(f"{where}: name the module that has it, not the package")
        if target and target != part and target not in BELOW[part]:
            found.append(f"{where}: {part} stands below {target} or beside it")
        if module.startswith("regard.core.kernels") and entry.module.startswith(DOOR):
            found.append(f"{where}: a kernel may not call the door that chose it")
    return found


def declared() -> set[str]:
    """Packages that the project needs at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # the extra `web` is needed by the server of the explorer alone, which says so where it is missing
    needed = [*project["dependencies"], *project["optional-dependencies"]["web"]]
    names = {re.split(r"[<>=!~ \[]", each)[0].replace("-", "_") for each in needed} | {"pydantic"}  # comes with fastapi
    return {IMPORTED_AS.get(name, name) for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    assert complaints(dotted(path), path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("regard.base.seeds", "from regard.core.masks import causal", "base stands below core"),
        ("regard.core.attend", "def f():\n    import regard.nn", "core stands below nn"),
        ("regard.core.kernels.eager", "from regard.core.attend import attend", "a kernel may not call the door"),
        ("regard.core.kernels.eager", "from ..attend import attend", "a kernel may not call the door"),
        ("regard.core.kernels.eager", "from regard.core import attend", "a kernel may not call the door"),
        ("regard.see.watch", "from regard.models import gpt", "see stands below models"),
        ("regard.train.loop", "if TYPE_CHECKING:\n    from regard.models import gpt", "train stands below models"),
        ("regard.work.first", "from regard.see import rollout", "work stands below see or beside it"),
        ("regard.nn.attention", "from regard import attend", "name the module that has it"),
        ("regard.cli.masks", "import torch", "would wait for torch"),
        ("regard.cli.masks", "class A:\n    from torch import Tensor", "would wait for torch"),
        ("regard", "try:\n    import torch.nn\nexcept ImportError:\n    pass", "would wait for torch"),
        ("regard.core.masks", "import pandas", "no dependency of the project"),
    ],
)
def test_a_planted_climb_is_found(module: str, source: str, words: str) -> None:
    assert any(words in complaint for complaint in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("regard.core.attend", "from regard.core.kernels import run\nimport torch"),
        ("regard.core.cache", "from .attend import attend"),
        ("regard.cli.masks", "def f():\n    import torch\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("regard.explorer.server", "from regard import attend\nfrom regard.lab import sinks"),
    ],
)
def test_imports_that_go_down_are_left_alone(module: str, source: str) -> None:
    assert complaints(module, source) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a docstring at the top of the file"


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {path.name for path in (ROOT / "regard").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert parts <= set(BELOW)


# a path on somebody's machine, or the address of a package index
ELSEWHERE = re.compile(r"(?<![\w.])/(?:work|home|root|opt|mnt|srv|tmp|Users)/|[A-Z]:\\\\|index-url|find-links|file://")
TEXT = {".py", ".md", ".toml", ".txt", ".js", ".css", ".html", ".json", ".yml"}


def test_no_file_names_a_place_outside_the_project() -> None:
    folders = [ROOT / name for name in ("regard", "tests", "bench", "docs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*")] + list(ROOT.glob("*"))
    named = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in files
        if path.is_file() and (path.suffix in TEXT or path.name in ("Makefile", "run")) and path != Path(__file__)
        if (found := ELSEWHERE.search(path.read_text()))
    ]
    assert named == []


@pytest.mark.parametrize("text", ["see /home/ann/x.py", "(/work/y", "pip install --extra-index-url x", "C:\\\\data"])
def test_a_planted_place_is_found(text: str) -> None:
    assert ELSEWHERE.search(text)


@pytest.mark.parametrize("text", ["arXiv:2006.16236", "docs/work/first.md", "regard/work/a.py", "a / b"])
def test_places_inside_the_project_may_be_named(text: str) -> None:
    assert not ELSEWHERE.search(text)
