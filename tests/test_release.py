"""The release check and the audit: their page lists their steps, and each finding is reported."""

import re
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.audit import audit_code, summarize
from tools.release import (
    LARGEST,
    NEEDED,
    STEPS,
    Release,
    ReleaseError,
    check_metadata,
    compare_names,
    required_names,
    write_hashes,
)


def test_the_page_lists_every_step_in_order(root: Path) -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", (root / "docs" / "release.md").read_text("utf-8"), re.M)
    assert rows[1:] == [(step.__name__.replace("_", " "), step.__doc__) for step in STEPS]


def test_the_metadata_is_complete_and_the_version_has_a_heading(tmp_path: Path, root: Path) -> None:
    release = Release(tmp_path, tmp_path, "python")
    check_metadata(release)
    assert f'"{release.version}"' in (root / "regard" / "__init__.py").read_text()


def test_a_missing_and_an_untracked_file_are_reported() -> None:
    with pytest.raises(ReleaseError, match=r"the wheel lacks \['regard/py.typed'\]"):
        compare_names("the wheel", {"regard/py.typed", "regard/a.py"}, {"regard/a.py"})
    with pytest.raises(ReleaseError, match=r"not tracked: \['regard/secret.txt'\]"):
        compare_names("the wheel", {"regard/a.py"}, {"regard/a.py", "regard/secret.txt"})


def test_hashes_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "regard-1.whl").write_bytes(b"abc")
    write_hashes(Release(tmp_path, tmp_path, "python"))
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
    assert (tmp_path / "SHA256SUMS").read_text() == f"{known}  regard-1.whl\n"


def test_an_artefact_that_is_too_large_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    from tools import release as module

    monkeypatch.setattr(module, "run", lambda command, cwd: "regard/a.py\n")
    release = Release(tmp_path, tmp_path, "python")
    content = tmp_path / "a.py"
    content.write_bytes(b"0" * LARGEST)
    with zipfile.ZipFile(tmp_path / "regard-1.whl", "w") as wheel:
        wheel.write(content, "regard/a.py")
    with tarfile.open(tmp_path / "regard-1.tar.gz", "w:gz") as sdist:
        for name in ("regard/a.py", *sorted(NEEDED)):
            sdist.add(content, f"regard-1/{name}")
    with pytest.raises(ReleaseError, match=r"regard-1.whl has 12,\d+,\d+ bytes, at most 12,000,000 are allowed"):
        module.check_contents(release)


def test_a_vulnerability_is_counted_and_what_is_unknown_too() -> None:
    known = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    clean = {"name": "b", "version": "1", "vulns": []}
    unknown = {"name": "c", "version": "1", "skip_reason": "not on PyPI"}
    lines, count = summarize([known, clean, unknown])
    assert count == 1
    assert lines[0] == "a 1: CVE-1, fixed in 2"
    assert lines[1].startswith("pip-audit: 1 vulnerabilities in 2 packages; 1 packages could not be looked up")


def test_bandit_reports_code_that_runs_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bandit")
    (tmp_path / "bad.py").write_text("import os\nos.system(input())\n")
    assert audit_code((str(tmp_path),)) == 1
    assert "bad.py:2: B605" in capsys.readouterr().out


def test_requirements_of_extras_are_left_out_and_names_are_normal() -> None:
    requirements = ["Jinja2>=3.1", "typing_extensions; python_version<'3.12'", "uvicorn>=0.30; extra == 'web'"]
    assert required_names(requirements) == ["jinja2", "typing-extensions"]


def test_the_sdist_includes_what_the_check_needs() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    patterns = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    lacking = {
        name for name in NEEDED if not any(fnmatch(name, each) or name.startswith(f"{each}/") for each in patterns)
    }
    assert not lacking
