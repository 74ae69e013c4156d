"""What came of runs, as it is kept: one JSON file a claim in the user's cache folder, and one with the package.

A result names the run that made it, as a command and as a call, and the source file of its claim by its hash: once that
file has changed, the result is one of another claim, to be made again.
"""

import dataclasses
import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import regard
from regard.base.errors import CheckpointError, ConfigError
from regard.lab.claim import Claim, Numbers, Outcome, Sheet, Verdict

FORMAT = "regard-lab-1"
SHIPPED = Path(__file__).parent / "results.json"
NOT_RUN, AGAIN = "not run yet", "to be run again"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run with all it takes to make it again."""

    id: str
    verdict: Verdict
    numbers: Numbers
    setup: dict[str, Any]
    seconds: float
    command: str
    call: str  # Python that gives the outcome, once `claims` is imported
    source: str  # hash of the claim's file
    version: str = regard.__version__
    torch_version: str = torch.__version__
    threads: int = field(default_factory=torch.get_num_threads)
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    figure: str | None = None

    def fresh(self, claim: Claim) -> bool:
        """Whether the claim is still the one that was run."""
        return self.source == fingerprint(claim)

    @property
    def smoke(self) -> bool:
        """Whether the run was a quick one."""
        return "--smoke" in shlex.split(self.command)

    def sheet(self, claim: Claim) -> list[tuple[Sheet, Verdict]]:
        """The sheets' wrong answers with what these numbers say of them."""
        return [(sheet, sheet.judge(self.numbers)) for sheet in claim.sheet]


@cache  # of the file that was loaded: one that is edited during a run is another claim
def fingerprint(claim: Claim) -> str:
    """The hash of the file a claim is written in."""
    return hashlib.sha256(Path(str(claim.module.__file__)).read_text(encoding="utf-8").encode()).hexdigest()


def result_of(outcome: Outcome, figure: Path | None = None) -> Result:
    """The outcome as it is kept."""
    claim, setup = outcome.claim, outcome.setup
    numbers = _plain(outcome.numbers, f"the numbers of {claim.id}")
    return Result(
        id=claim.id,
        verdict=outcome.verdict,
        numbers=numbers,
        setup=_plain(dataclasses.asdict(setup), f"the setup of {claim.id}"),
        seconds=outcome.seconds,
        command=command(claim, setup),
        call=call(claim, setup),
        source=fingerprint(claim),
        figure=None if figure is None else str(figure.absolute()),
    )


def changes(default: Any, setup: Any, prefix: str = "") -> dict[str, Any]:
    """What a setup has otherwise than another, by name; a dotted name reaches into a nested one."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(setup):
        one, other = getattr(default, each.name), getattr(setup, each.name)
        if dataclasses.is_dataclass(other) and type(one) is type(other):
            found |= changes(one, other, f"{prefix}{each.name}.")
        elif one != other:
            found[prefix + each.name] = other
    return found


def _asked(claim: Claim, setup: Any) -> tuple[bool, dict[str, Any]]:
    """Whether the setup is the quick one, and what else was changed: the shortest way to ask for it."""
    quick = changes(claim.module.SMOKE, setup)
    slow = changes(claim.module.Setup(), setup)
    return (True, quick) if len(quick) < len(slow) else (False, slow)


def command(claim: Claim, setup: Any) -> str:
    """The command that runs the claim with this setup."""
    smoke, changed = _asked(claim, setup)
    words = ["regard", "lab", "run", claim.id] + ["--smoke"] * smoke
    for name, value in changed.items():
        words += ["--seed", str(value)] if name == "seed" else ["--set", f"{name}={spelled(value)}"]
    return shlex.join(words)


def call(claim: Claim, setup: Any) -> str:
    """The Python that gives the outcome, once `claims` is imported."""
    smoke, changed = _asked(claim, setup)
    seed = changed.pop("seed", None)
    inside = [_code(changed)] if changed else []
    inside += [f"seed={seed}"] if seed is not None else []
    inside += ["smoke=True"] if smoke else []
    one = f"claims()[{_code(claim.id)}]"
    return f"{one}.run({one}.setup({', '.join(inside)}))"


def spelled(value: Any) -> str:
    """A setting as `--set name=...` reads it."""
    if isinstance(value, tuple | list):
        return ",".join(map(spelled, value)) if value else "()"
    return str(value)


def _code(value: Any) -> str:
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case str():
            return json.dumps(value, ensure_ascii=False)
        case tuple():
            return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
        case dict():
            return "{" + ", ".join(f"{_code(name)}: {_code(item)}" for name, item in value.items()) + "}"
    return repr(value)


def _plain(value: Any, where: str) -> Any:
    """The value in terms of JSON, or an error that names the place of what is not."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(item, f"{where}[{at}]") for at, item in enumerate(value)]
        case dict():
            odd = [name for name in value if not isinstance(name, str)]
            if odd:
                raise ConfigError(f"{where} are kept as JSON, where names are text, but one is {odd[0]!r}")
            return {name: _plain(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise ConfigError(f"{where} cannot be kept as JSON: it is of type {type(value).__name__}; use plain numbers")


def jsonable(value: Any) -> Any:
    """The value with numbers that JSON lacks, inf and nan, as {"float": "inf"}."""
    if isinstance(value, dict):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(found: dict[str, Any]) -> Any:
    return float(found["float"]) if set(found) == {"float"} and isinstance(found["float"], str) else found


def default_folder() -> Path:
    """Where results are kept unless told otherwise."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    # the standard behind that name says: what is no absolute path is to be ignored
    return (Path(told) if Path(told).is_absolute() else Path.home() / ".cache") / "regard" / "lab"


def open_result(folder: Path) -> Path:
    """The folder, made if it was not there; an error, before anything is run, where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"results cannot be kept in {folder}: {reason}; choose another with --results") from None
    return folder


def save_result(result: Result, folder: Path) -> Path:
    """Write a result into the folder; the file is there as a whole or not at all."""
    path = open_result(folder) / f"{result.id}.json"
    _write(path, {"format": FORMAT, **dataclasses.asdict(result)})
    return path


def keep_shipped(results: Mapping[str, Result], ids: set[str]) -> None:
    """Write results into the file that comes with the package; of `ids`, those not made now stay as they are."""
    merged = {name: result for name, result in shipped_results().items() if name in ids} | dict(results)
    told = {name: dataclasses.asdict(merged[name]) | {"figure": None} for name in sorted(merged)}
    _write(SHIPPED, {"format": FORMAT, "results": told})


def _write(path: Path, value: Any) -> None:
    text = json.dumps(jsonable(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def kept(claim: Claim, folder: Path) -> Result | None:
    """The latest result of a run here, if there was one."""
    path = folder / f"{claim.id}.json"
    return _result(_read(path), path) if path.is_file() else None


def shipped_results() -> dict[str, Result]:
    """The results that come with the package."""
    if not SHIPPED.is_file():
        return {}
    return {name: _result(found, SHIPPED) for name, found in _read(SHIPPED).get("results", {}).items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=_numbers)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise _damaged(path, f"its format is not {FORMAT}")
    return found


def _result(found: dict[str, Any], path: Path) -> Result:
    try:
        return Result(**{**found, "verdict": Verdict(**found["verdict"])})
    except (TypeError, KeyError, ConfigError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is no result of the lab: {reason}; delete it, and run its claim again")


def latest_result(claim: Claim, folder: Path, with_package: Mapping[str, Result]) -> Result | None:
    """The result to show: the last run here, unless the package's is of the claim as it is now and that one is not.

    A quick run here says less than the package's full one and does not stand in its place.
    """
    here, there = kept(claim, folder), with_package.get(claim.id)
    if here is None or (there is not None and there.fresh(claim) and (here.smoke or not here.fresh(claim))):
        return there
    return here


def verdict_word(claim: Claim, result: Result | None) -> str:
    """The verdict of the latest result, or why there is none."""
    if result is None:
        return NOT_RUN
    return result.verdict.word if result.fresh(claim) else AGAIN
