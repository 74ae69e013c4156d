"""Release check: build the wheel and the sdist, and test them in a fresh environment.

    python -m tools.release --out dist

docs/release.md has one line for each function in STEPS. The artefacts (wheel and sdist), their SHA-256 hashes and the
list of components (SBOM in CycloneDX format) are written to the folder `--out`.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST = 12 * 10**6  # bytes of an artefact
# files of the sdist besides the package, one of each kind
NEEDED = {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "Makefile", "zensical.toml", "tests/conftest.py"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# commands that run from another folder, and a word of their output
COMMANDS: dict[tuple[str, ...], str] = {
    ("--version",): "regard",
    ("doctor",): "torch",
    ("masks", "causal() & window(before=2)", "--queries", "5"): "██",
    ("count", "birthplace"): "parameters",
    ("lab", "show", "beta"): "beta",
    ("work", "three-tokens"): "softmax",
    ("explore", "--export", "page"): "index.html",
    ("check", "torch.nn.functional:scaled_dot_product_attention", "--quick", "--only", "scale"): "scale",
}


class ReleaseError(Exception):
    """Raised if a step of the release check fails."""


@dataclass
class Release:
    """The release that is checked, and the folders of the check.

    out          folder of the artefacts (wheel and sdist)
    scratch      folder for temporary files, such as the fresh environment
    base_python  Python that creates the fresh environment
    version      version of the package
    """

    out: Path
    scratch: Path
    base_python: str
    version: str = ""

    @property
    def python(self) -> str:
        return str(self.scratch / "environment" / "bin" / "python")

    def artefact(self, suffix: str) -> Path:
        (found,) = self.out.glob(f"regard-*{suffix}")
        return found


def demand(true: bool, words: str) -> None:
    """Raise ReleaseError with the message `words` if `true` is False."""
    if not true:
        raise ReleaseError(words)


def run(command: Sequence[str], cwd: Path, *, fails: bool = False) -> str:
    """Run a command in the folder `cwd` and return its output; raise ReleaseError if it fails.

    fails  whether the command is expected to fail; then success raises ReleaseError
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"PYTHONUTF8": "1", "NO_COLOR": "1", "COLUMNS": "100", "MPLBACKEND": "agg"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    demand(bool(done.returncode) is fails, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check_metadata(release: Release) -> str:
    """The version has a heading in CHANGELOG.md; the metadata has authors, addresses, classifiers and a licence."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "regard" / "__init__.py").read_text(), re.M)
    demand(found is not None, "regard/__init__.py has no __version__")
    assert found
    release.version = found[1]
    demand(
        re.search(rf"^## .*{re.escape(release.version)}", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M) is not None,
        f"CHANGELOG.md has no heading for {release.version}",
    )
    wanted = ("description", "readme", "requires-python", "license", "authors", "keywords", "classifiers", "urls")
    missing = [key for key in wanted if not PROJECT.get(key)]
    demand(not missing, f"pyproject.toml lacks {missing}")
    unfilled = [name for name, address in PROJECT["urls"].items() if "example.org" in address]
    return f"version {release.version}" + (f"; TO DO before an upload: addresses of {unfilled}" if unfilled else "")


def build(release: Release) -> str:
    """The sdist is built from the repository, and the wheel from the sdist."""
    if release.out.is_dir():
        for old in release.out.glob("regard-*"):
            old.unlink()
    run([sys.executable, "-m", "build", "--outdir", str(release.out), str(ROOT)], ROOT)
    return ", ".join(f"{release.artefact(each).name}" for each in (".whl", ".tar.gz"))


def check_contents(release: Release) -> str:
    """Wheel and sdist contain every tracked file of the package and no other file, and are smaller than 12 MB."""
    tracked = set(run(["git", "ls-files", "regard"], ROOT).split("\n")) - {""}
    with zipfile.ZipFile(release.artefact(".whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    compare_names("the wheel", tracked, names)
    with tarfile.open(release.artefact(".tar.gz")) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    compare_names("the sdist", tracked, {name for name in inside if name.startswith("regard/")})
    demand(inside >= NEEDED, f"the sdist lacks {sorted(NEEDED - inside)}")
    sizes = {suffix: release.artefact(suffix).stat().st_size for suffix in (".whl", ".tar.gz")}
    for suffix, size in sizes.items():
        demand(size < LARGEST, f"{release.artefact(suffix).name} has {size:,} bytes, at most {LARGEST:,} are allowed")
    return f"{len(names)} files; " + ", ".join(f"{suffix} {size / 1e6:.1f} MB" for suffix, size in sizes.items())


def compare_names(what: str, expected: set[str], found: set[str]) -> None:
    """Raise ReleaseError if the set of file names in an artefact differs from the expected set.

    what  name of the artefact, for the error message
    """
    demand(expected <= found, f"{what} lacks {sorted(expected - found)[:8]}")
    demand(found <= expected, f"{what} has files that are not tracked: {sorted(found - expected)[:8]}")


def install(release: Release) -> str:
    """The wheel installs into a fresh environment, without extras, with the versions of constraints.txt, in 130 MB."""
    run([release.base_python, "-m", "venv", str(release.scratch / "environment")], ROOT)
    pip = [release.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "-c", str(ROOT / "constraints.txt"), str(release.artefact(".whl"))], release.scratch)
    size = run([release.python, str(ROOT / "tools" / "installed_size.py")], release.scratch).splitlines()[-1].split()
    demand(float(size[0]) <= 130, f"the installation adds {size[0]} MB to torch and numpy, at most 130 MB are allowed")
    return f"{run([release.python, '--version'], release.scratch).strip()}; {size[0]} MB beyond torch and numpy"


def use(release: Release) -> str:
    """In another folder, the package and all its subpackages can be imported, have types, and the commands run."""
    elsewhere = release.scratch / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import importlib, pathlib, regard, torch;"
        "folder = pathlib.Path(regard.__file__).parent;"
        "assert 'site-packages' in str(folder), folder;"
        "assert (folder / 'py.typed').is_file();"
        "[getattr(regard, name) for name in regard.__all__];"
        "q = torch.randn(1, 2, 5, 8);"
        "print(regard.__version__, tuple(regard.attend(q, q, q, mask=regard.causal()).shape))"
    )
    shown = run([release.python, "-c", code], elsewhere)
    demand(shown == f"{release.version} (1, 2, 5, 8)\n", f"expected the version and a shape, not {shown}")
    for arguments, word in COMMANDS.items():
        shown = run([release.python, "-m", "regard", *arguments], elsewhere)
        demand(word in shown, f"`regard {' '.join(arguments)}` does not print {word!r}:\n{shown}")
    demand((elsewhere / "page" / "index.html").stat().st_size > 10_000, "the exported explorer is empty")
    shown = run([release.python, "-m", "regard", "explore", "--no-browser"], elsewhere, fails=True)
    demand("pip install 'regard[web]'" in shown, f"a missing extra is not named:\n{shown}")
    return f"{len(COMMANDS) + 1} commands"


def write_sbom(release: Release) -> str:
    """The components of the fresh environment and what each requires are written as CycloneDX."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    code = (
        "import json, importlib.metadata as m;"
        "print(json.dumps([(d.name, d.version, d.requires or []) for d in m.distributions()]))"
    )
    listed = json.loads(run([release.python, "-c", code], release.scratch))
    components = {}
    for name, version, _ in listed:
        kind = ComponentType.APPLICATION if name == "regard" else ComponentType.LIBRARY
        purl = PackageURL("pypi", None, normalize(name), version)
        components[normalize(name)] = Component(
            name=name, version=version, type=kind, purl=purl, bom_ref=purl.to_string()
        )
    bom = Bom(components=[each for name, each in components.items() if name != "regard"])
    bom.metadata.component = components["regard"]
    for name, _, requirements in listed:
        needed = [components[each] for each in required_names(requirements) if each in components]
        bom.register_dependency(components[normalize(name)], needed)
    file = release.out / f"regard-{release.version}.cdx.json"
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    file.write_text(text + "\n", encoding="utf-8")
    return f"{file.name}, {len(listed)} components"


def normalize(name: str) -> str:
    """Return the name of a distribution as package indexes write it: lower case, with hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_names(requirements: Sequence[str]) -> list[str]:
    """Return the names of the requirements that apply without extras."""
    plain = [each for each in requirements if "extra ==" not in each]
    return [normalize(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in plain]


def write_hashes(release: Release) -> str:
    """SHA256SUMS has the hash of each artefact; `sha256sum --check SHA256SUMS` verifies them."""
    files = sorted(release.out.glob("regard-*"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (release.out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return f"SHA256SUMS, {len(lines)} files"


STEPS: tuple[Callable[[Release], str], ...] = (
    check_metadata,
    build,
    check_contents,
    install,
    use,
    write_sbom,
    write_hashes,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every step of the release check; stop at the first one that fails. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the artefacts")
    parser.add_argument("--python", default=sys.executable, help="Python of the fresh environment")
    chosen = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="regard-release-"))
    release = Release(chosen.out.resolve(), scratch, chosen.python)
    try:
        for step in STEPS:
            print(f"{step.__name__.replace('_', ' '):<15}", end=" ", flush=True)
            print(step(release), flush=True)
    except ReleaseError as error:
        print(f"FAILED\n{error}")
        return 1
    finally:
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
