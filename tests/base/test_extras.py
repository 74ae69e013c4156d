"""Optional dependencies: an error names the extra to install, and that extra installs what is missing."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.base.errors import ConfigError, MissingExtraError
from regard.base.extras import import_optional
from regard.cli.explore import serve
from regard.integrations.huggingface import register
from regard.recipes.bleu import bleu
from regard.train.log import MetricsLog

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def optional_imports() -> list[tuple[str, str, str]]:
    """The file, the module and the extra of every call of import_optional in the package."""
    return [
        (str(path.relative_to(ROOT)), node.args[0].value, node.args[1].value)
        for path in sorted((ROOT / "regard").rglob("*.py"))
        if "import_optional" in (source := path.read_text())  # parsing every file takes seconds
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_optional"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[1], ast.Constant)
    ]


@pytest.mark.parametrize(("file", "module", "extra"), optional_imports())
def test_the_named_extra_installs_the_package(file: str, module: str, extra: str) -> None:
    packages = {re.split(r"[<>=\[]", each)[0] for each in EXTRAS[extra]}
    assert module.startswith("regard.") or module.rpartition(".")[2] in packages, file


def test_every_extra_for_users_is_named_by_an_error() -> None:
    development = {"test", "docs", "peers"}
    assert {extra for _, _, extra in optional_imports()} | {"parquet"} == set(EXTRAS) - development


@pytest.mark.parametrize(
    ("missing", "call", "extra"),
    [
        ("uvicorn", lambda folder: serve("127.0.0.1", 0, False), "web"),
        ("fastapi", lambda folder: serve("127.0.0.1", 0, False), "web"),
        ("transformers", lambda folder: register(), "huggingface"),
        ("sacrebleu", lambda folder: bleu(["a"], ["a"]), "translate"),
        ("tensorboard", lambda folder: MetricsLog(folder, 0, tensorboard=True), "tensorboard"),
    ],
)
def test_an_error_names_the_extra(
    missing: str, call: Callable[[Path], object], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name in ("torch.utils.tensorboard", "regard.explorer.api")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    words = rf"needs the package {missing}, which is not installed: pip install 'regard\[{extra}\]'$"
    with pytest.raises(MissingExtraError, match=words) as raised:
        call(tmp_path)
    assert isinstance(raised.value, ImportError)
    assert isinstance(raised.value, ConfigError)


def test_an_installed_package_is_imported() -> None:
    assert import_optional("json", "web", "a test") is sys.modules["json"]
