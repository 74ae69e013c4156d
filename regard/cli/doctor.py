"""`regard doctor`: report versions, devices, usable kernels, extras, memory and disk space of this installation."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typer

import regard
from regard.cli.output import JsonOption, show, show_json

OK, MISSING, PROBLEM = "ok", "missing", "problem"
MARKS = {OK: "ok  ", MISSING: "--  ", PROBLEM: "FAIL"}


class Finding(NamedTuple):
    """One line of the report of `regard doctor`.

    section  heading under which the line is printed
    name     what was examined, such as a package or a device
    state    OK, MISSING or PROBLEM
    detail   what was found, such as a version
    """

    section: str
    name: str
    state: str
    detail: str


def command(json: JsonOption = False) -> None:
    """Check versions, devices, kernels, extras and disk space.

    Example: regard doctor
    """
    findings = [*find_packages(), *find_torchvision(), *find_devices(), *find_kernels(), *find_space()]
    if json:
        show_json([finding._asdict() for finding in findings])
    else:
        section = ""
        for finding in findings:
            if finding.section != section:
                show(("\n" if section else "") + finding.section)
                section = finding.section
            typer.echo(f"  {MARKS[finding.state]} {finding.name:<16} {finding.detail}")
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


def find_packages() -> Iterator[Finding]:
    """Yield a finding for Python, for regard, for each package it requires, and for each package of its extras."""
    yield Finding("versions", "python", OK, f"{platform.python_version()}, {sys.executable}")
    yield Finding("versions", "regard", OK, f"{regard.__version__}, {Path(regard.__file__).parent}")
    try:
        wanted = metadata.requires("regard") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "versions", "requirements", MISSING, "regard is not installed; run `pip install -e .` to check them"
        )
        wanted = []
    for requirement in wanted:
        found = re.match(r"([\w.-]+)(?:>=([\w.]+))?(?:.*extra == '(\w+)')?", requirement)
        assert found
        name, least, extra = found.groups()
        if extra not in ("test", "docs"):  # these two are for the developers of regard
            yield judge_package(name, least or "0", extra)


def judge_package(name: str, least: str, extra: str | None) -> Finding:
    """Return a Finding that says whether a package is installed in a version that is new enough.

    least  the oldest version that is supported
    extra  the extra of regard that needs the package, such as "web"; None if every installation needs it
    """
    section = f"extra {extra}" if extra else "versions"
    cure = f"`pip install '{f'regard[{extra}]' if extra else f'{name}>={least}'}'`"
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(section, name, MISSING if extra else PROBLEM, f"not installed; {cure}")
    if _numbers(have) < _numbers(least):
        return Finding(section, name, PROBLEM, f"{have} is older than {least}; {cure}")
    return Finding(section, name, OK, have)


def find_torchvision() -> Iterator[Finding]:
    """Yield a finding on whether torchvision can be imported; it has to be built for the installed torch.

    transformers and timm import torchvision.
    """
    if find_spec("torchvision") is None:
        yield Finding("torchvision", "torchvision", MISSING, "not installed; transformers and timm use it for images")
        return
    import torch

    from regard.integrations.torchvision import can_import

    have = metadata.version("torchvision")
    if can_import():
        yield Finding("torchvision", "torchvision", OK, have)
        return
    yield Finding(
        "torchvision", "torchvision", PROBLEM,
        f"{have} was built for another torch than {torch.__version__} and cannot be imported; "
        "`pip install --force-reinstall --no-deps torchvision` from the source that torch came from, or call "
        "regard.integrations.torchvision.let_torchvision_load() before importing transformers or timm",
    )  # fmt: skip


def find_devices() -> Iterator[Finding]:
    """Yield a finding for the CPU with its memory, for each GPU, and for the compiler of torch.compile."""
    import torch

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    memory = f", {total / 2**30:.1f} GiB of memory" if total else ""
    yield Finding("devices", "cpu", OK, f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads{memory}")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        free, size = (amount / 2**30 for amount in torch.cuda.mem_get_info(number))
        detail = f"{found.name}, capability {found.major}.{found.minor}, {free:.1f} of {size:.1f} GiB free"
        yield Finding("devices", f"cuda:{number}", OK, detail)
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or driver"
        yield Finding("devices", "cuda", MISSING, reason)
    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", OK, "Apple GPU")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    yield Finding(
        "devices", "torch.compile", OK if compiler else MISSING,
        f"C++ compiler {compiler}" if compiler else "no C++ compiler, which torch.compile needs on a CPU; install g++",
    )  # fmt: skip


def find_kernels() -> Iterator[Finding]:
    """Yield a finding for each attention kernel on each device: whether it can run a causal sliding window.

    If a kernel cannot run it, the finding says why not.
    """
    import torch

    from regard.core.attend import explain
    from regard.core.masks import causal, window

    for device in ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        q = torch.zeros(1, 4, 1024, 64, dtype=dtype, device=device)
        explanation = explain(q, q, q, mask=causal() & window(before=127))
        for answer in explanation.answers:
            state, detail = (OK, answer.summary) if answer.able else (MISSING, "; ".join(answer.reasons))
            yield Finding(f"kernels on {device}, causal window", answer.kernel, state, detail)
        if explanation.chosen is None:
            yield Finding(f"kernels on {device}, causal window", "any", PROBLEM, "no kernel can run")


def find_space() -> Iterator[Finding]:
    """Yield a finding for the free disk space of the current folder and of the Hugging Face cache."""
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, folder in (("here", Path.cwd()), ("Hugging Face", cache)):
        present = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
        free = shutil.disk_usage(present).free / 2**30
        note = "" if present == folder else " (does not exist yet)"
        yield Finding("disk", name, OK if free > 1 else PROBLEM, f"{free:.1f} GiB free in {folder}{note}")


def _numbers(version: str) -> tuple[int, ...]:
    """Parse the numbers of a version string, such as (2, 5, 1), so that versions can be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))
