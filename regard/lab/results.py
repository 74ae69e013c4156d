"""Results of claims: one JSON file per claim in the user's cache folder, and the results shipped with the package.

A result stores the numbers of a run, the settings that reproduce it and a fingerprint of the code that ran. The verdict
is computed from the numbers when it is shown. A result whose fingerprint differs from the claim's is out of date.
"""

import ast
import builtins
import dataclasses
import hashlib
import json
import math
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import regard
from regard.base.atomic_write import write_output
from regard.base.errors import CheckpointError, ConfigError
from regard.base.files import read_json
from regard.lab.claim import Claim, Outcome, claims
from regard.lab.errata import WrongAnswer, judge_wrong_answers
from regard.lab.verdict import Numbers, Verdict

FORMAT = "regard-lab-2"
SHIPPED = Path(__file__).parent / "results.json"
NOT_RUN, OUTDATED = "not run yet", "to be run again"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The saved result of running a lab claim: the measured numbers, and what is needed to reproduce them.

    id             id of the claim
    numbers        the measured numbers, by name
    seconds        duration of the run
    fingerprint    hash of the code that computed the numbers
    smoke          whether `settings` are changes of the quick setup instead of the default setup
    settings       the settings that differ from the default or the quick setup
    version        version of regard
    torch_version  version of torch
    threads        number of torch's threads
    created        date and time of the run in UTC
    figure         the file that the figure was drawn to; None without a figure
    """

    id: str
    numbers: Numbers
    seconds: float
    fingerprint: str
    smoke: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    version: str = regard.__version__
    torch_version: str = torch.__version__
    threads: int = field(default_factory=torch.get_num_threads)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    figure: str | None = None

    @property
    def claim(self) -> Claim:
        return claims()[self.id]

    @property
    def current(self) -> bool:
        """Whether the result is up to date: the claim's code has not changed since the result was computed."""
        return self.fingerprint == fingerprint(self.claim)

    @property
    def verdict(self) -> Verdict:
        steps = (value for name, value in self.settings.items() if name.rpartition(".")[2] == "steps")
        return self.claim.judge(self.numbers, next(steps, None))

    @property
    def wrong_answers(self) -> list[tuple[WrongAnswer, Verdict]]:
        """The wrong answers of the exercise sheets about this claim, each with the verdict of these numbers on it."""
        return judge_wrong_answers(self.id, self.numbers, self.verdict)

    @property
    def setup(self) -> Any:
        """The setup, with all settings, with which the result was computed."""
        return self.claim.setup(self.settings, smoke=self.smoke)

    @property
    def command(self) -> str:
        """The command line that reproduces the result."""
        words = ["regard", "lab", "run", self.id] + ["--smoke"] * self.smoke
        for name, value in self.settings.items():
            words += ["--seed", str(value)] if name == "seed" else ["--set", f"{name}={format_setting(value)}"]
        return shlex.join(words)

    @property
    def options(self) -> str:
        """The options in `command`, such as `--smoke --seed 1`; empty for the default setup."""
        return self.command.removeprefix(f"regard lab run {self.id}").strip()

    @property
    def call(self) -> str:
        """The Python expression that runs the claim again with the same setup; it assumes that `claims` is imported."""
        changed = {name: value for name, value in self.settings.items() if name != "seed"}
        inside = [_code(changed)] if changed else []
        inside += [f"seed={self.settings['seed']}"] if "seed" in self.settings else []
        inside += ["smoke=True"] if self.smoke else []
        claim = f"claims()[{_code(self.id)}]"
        return f"{claim}.run({claim}.setup({', '.join(inside)}))"


def make_result(outcome: Outcome, figure: Path | None = None) -> Result:
    """Return the outcome of running a lab claim as a `Result` that can be saved.

    figure  the file that the claim's figure was drawn to
    """
    claim = outcome.claim
    quick, full = (_changes(start, outcome.setup) for start in (claim.module.SMOKE, claim.module.Setup()))
    smoke = len(quick) < len(full)
    return Result(
        id=claim.id,
        numbers=_to_json(outcome.numbers, f"the numbers of {claim.id}"),
        seconds=outcome.seconds,
        fingerprint=fingerprint(claim),
        smoke=smoke,
        settings=_to_json(quick if smoke else full, f"the setup of {claim.id}"),
        figure=None if figure is None else str(figure.absolute()),
    )


def _changes(default: Any, setup: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of `setup` that differ from `default`, by name.

    A setting inside a nested setup has a dotted name, such as "training.steps".
    """
    found: dict[str, Any] = {}
    for name in (prefix + each.name for each in dataclasses.fields(setup)):
        old, new = (getattr(each, name.removeprefix(prefix)) for each in (default, setup))
        if dataclasses.is_dataclass(new):
            found |= _changes(old, new, f"{name}.")
        elif old != new:
            found[name] = new
    return found


@cache  # once per process: the code that runs is the code that was imported
def fingerprint(claim: Claim) -> str:
    """Return a hash of the code and the default settings that compute a lab claim's numbers."""
    defaults = repr(dataclasses.astuple(claim.module.Setup()))  # a setup may inherit its defaults
    source = Path(str(claim.module.__file__)).read_text(encoding="utf-8")
    return hashlib.sha256((defaults + hash_input(source)).encode()).hexdigest()[:16]


def hash_input(source: str) -> str:
    """Return the part of a lab claim's source code that decides the measured numbers, as text to hash.

    This is the syntax tree of `run`, `Setup` and everything in the file that they use. Docstrings, comments,
    formatting, annotations, validation and error messages are left out. Identifiers that are not names of
    Python or torch are numbered in the order of their first use, so renaming them changes nothing.
    """
    defined: dict[str, ast.AST] = {}
    for node in ast.parse(source).body:
        for each in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else (node,):
            name = each.id if isinstance(each, ast.Name) else getattr(each, "name", None)
            if isinstance(name, str):
                defined.setdefault(name, node)
    queue, used = ["run", "Setup"], dict[str, ast.AST]()
    for name in queue:
        if name in defined and name not in used:
            used[name] = defined[name]
            queue += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    numbers: dict[str, str] = {}
    return " ".join(part for node in used.values() for part in _structure(node, numbers))


_LIBRARIES = (
    *(builtins, math, statistics, torch, torch.Tensor, torch.nn, torch.nn.functional, torch.linalg, torch.special),
    *(torch.optim, torch.autograd, str, list, dict, set, tuple, int, float, dataclasses),
)
_LIBRARY_NAMES = frozenset(name for library in _LIBRARIES for name in dir(library))
_IGNORED_FIELDS = {"annotation", "returns", "ctx", "exc", "type_comment", "kind"}
_IDENTIFIER_FIELDS = {"id", "arg", "attr", "name", "asname"}


def _structure(value: Any, numbers: dict[str, str]) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _structure(item, numbers)
    elif isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant):
        return  # a docstring
    elif isinstance(value, ast.FunctionDef) and value.name == "__post_init__":
        return  # the validation of a setup
    elif isinstance(value, ast.AST):
        yield type(value).__name__
        for name, item in ast.iter_fields(value):
            if name in _IDENTIFIER_FIELDS and isinstance(item, str):
                yield item if item in _LIBRARY_NAMES else numbers.setdefault(item, f"#{len(numbers)}")
            elif name not in _IGNORED_FIELDS:
                yield from _structure(item, numbers)
    else:
        yield repr(value)


def format_setting(value: Any) -> str:
    """Format a setting as the value of the command-line option `--set name=value`."""
    if isinstance(value, tuple | list):
        return ",".join(map(format_setting, value)) if value else "()"
    return str(value)


def _code(value: Any) -> str:
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
        case dict():
            return "{" + ", ".join(f"{_code(name)}: {_code(item)}" for name, item in value.items()) + "}"
    return repr(value)


def _to_json(value: Any, where: str) -> Any:
    """Convert tuples to lists, and raise ConfigError for a value that JSON cannot represent.

    where  describes the value in the error message
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_to_json(item, f"{where}[{at}]") for at, item in enumerate(value)]
        case dict() if all(isinstance(name, str) for name in value):
            return {name: _to_json(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise ConfigError(f"{where} cannot be saved as JSON: {value!r}; use plain numbers, and text as names")


def encode_floats(value: Any) -> Any:
    """Replace inf and nan, which JSON lacks, by objects such as {"float": "inf"}, also in nested values."""
    if isinstance(value, dict):
        return {name: encode_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_floats(item) for item in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def decode_floats(found: dict[str, Any]) -> Any:
    """Convert a JSON object such as {"float": "inf"} back to a float; return any other object unchanged."""
    return float(found["float"]) if set(found) == {"float"} and isinstance(found["float"], str) else found


def default_folder() -> Path:
    """Return the folder where lab results are saved: regard/lab in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG standard says that a path that is not absolute is ignored
    return (base if base.is_absolute() else Path.home() / ".cache") / "regard" / "lab"


def make_folder(folder: Path, what: str = "results") -> Path:
    """Create a folder, with its parents, and return it; raise ConfigError if it cannot be created.

    what  what the folder is for, in the error message: "results" or "figures"
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} cannot be saved in {folder}: {error.strerror or error}") from None
    return folder


def save_result(result: Result, folder: Path) -> Path:
    """Write a claim's result to <id>.json in the folder, atomically, and return the path."""
    path = make_folder(folder) / f"{result.id}.json"
    _write(path, [result])
    return path


def save_shipped_results(results: Mapping[str, Result]) -> None:
    """Add or replace results in the file shipped with the package, and remove results of claims that no longer exist.

    results  the new results, by id of the claim
    """
    merged = {name: result for name, result in shipped_results().items() if name in claims()} | dict(results)
    _write(SHIPPED, [dataclasses.replace(merged[name], figure=None) for name in sorted(merged)])


def _write(path: Path, results: list[Result]) -> None:
    """Write results to a JSON file atomically, one per line."""
    lines = [json.dumps(encode_floats(dataclasses.asdict(each)), ensure_ascii=False) for each in results]
    text = f'{{"format": "{FORMAT}", "results": [\n' + ",\n".join(lines) + "\n]}\n"
    write_output(path, lambda file: file.write_text(text, encoding="utf-8"))


def load_result(claim: Claim, folder: Path) -> Result | None:
    """Load the result that the claim last saved in the folder; return None if there is none."""
    path = folder / f"{claim.id}.json"
    return _read(path).get(claim.id) if path.is_file() else None


def shipped_results() -> dict[str, Result]:
    """Load the results shipped with the package, by id of the claim."""
    return _read(SHIPPED) if SHIPPED.is_file() else {}


def _read(path: Path) -> dict[str, Result]:
    try:
        found = read_json(path, CheckpointError, "format", "results", object_hook=decode_floats)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        results = [Result(**each) for each in found["results"]]
    except (CheckpointError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a result of the lab: {error}; delete it and run its claim again"
        ) from None
    return {each.id: each for each in results}


def latest_result(claim: Claim, folder: Path, shipped: Mapping[str, Result]) -> Result | None:
    """Return the result of a claim to show: the local one or the shipped one; None if there is neither.

    The first that exists is returned: a local result that is up to date and not of the quick setup, a shipped result
    that is up to date, any local result, any shipped result.

    folder   the folder of local results
    shipped  the shipped results, by id of the claim
    """
    here, there = load_result(claim, folder), shipped.get(claim.id)
    if here is None or (there is not None and there.current and (here.smoke or not here.current)):
        return there
    return here


def verdict_word(result: Result | None) -> str:
    """Return "supported", "refuted" or "unclear" for a result, or a note that it is missing or out of date."""
    if result is None:
        return NOT_RUN
    return result.verdict.word if result.current else OUTDATED
