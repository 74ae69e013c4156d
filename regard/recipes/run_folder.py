"""What a folder says of the run in it: the recipe, its settings and its data, as soon as training begins."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError, ConfigError, DataError
from regard.data.folders import files_below
from regard.train.checkpoint import convert_os_errors

RUN = "run.json"
ASIDE = ("data at", "launch")  # what may differ between beginning and going on


def check_can_begin(folder: Path, recipe: str, settings: Any, *, resume: bool) -> None:
    """Raise where the folder holds a run, or another one than goes on; before any data are read, which may take long.

    settings  as JSON has them
    """
    with convert_os_errors(folder):
        kept = read_json_fields(folder / RUN) if (folder / RUN).is_file() else None
    if kept is not None and not resume:
        raise ConfigError(f"{folder} holds a run already; go on with it by --resume, or choose another --folder")
    if kept is not None:
        _check_same(folder, kept, {"recipe": recipe, "settings": settings, "data": kept.get("data")})


def begin_run(folder: Path, recipe: str, settings: Any, data: Path | None, *, resume: bool) -> None:
    """Keep what the run is, or see that it is the one that the folder holds. Its data have been read and found good."""
    check_can_begin(folder, recipe, settings, resume=resume)
    wanted = {"recipe": recipe, "settings": settings, "data": None if data is None else fingerprint(data, folder)}
    where = None if data is None else str(data.resolve())
    text = json.dumps({**wanted, "data at": where, "launch": launch()}, indent=1) + "\n"
    with convert_os_errors(folder):
        if (folder / RUN).is_file():
            _check_same(folder, read_json_fields(folder / RUN), wanted)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RUN, lambda path: path.write_text(text))


def has_restarted(folder: Path) -> bool:
    """Whether torchrun has started this process again, for the run that the folder holds."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not (folder / RUN).is_file():
        return False
    return bool(read_json_fields(folder / RUN).get("launch") == launch())


def launch() -> str | None:
    """What all processes of one torchrun have in common, however often it starts them; None without it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"of process {os.getppid()}" if name == "none" else name  # which is what torchrun calls those without a name


def _check_same(folder: Path, kept: Any, wanted: Any) -> None:
    changed = sorted(differences(kept, wanted))
    if changed:
        raise ConfigError(
            f"the run in {folder} is another one: {'; '.join(changed[:4])}; go on with what it began with, or choose "
            "another --folder"
        )


def differences(kept: Any, wanted: Any, name: str = "") -> list[str]:
    """Where two trees of settings differ, and how."""
    if isinstance(kept, dict) and isinstance(wanted, dict):
        names = dict.fromkeys([*wanted, *(each for each in kept if each not in ASIDE)])
        inner = ((f"{name}.{each}".removeprefix("."), kept.get(each), wanted.get(each)) for each in names)
        return [text for path, one, other in inner for text in differences(one, other, path)]
    if kept == wanted:
        return []
    name = name.removeprefix("settings.")
    return ["its data are others"] if name == "data" else [f"{name} was {kept!r} and is {wanted!r}"]


def find_data(folder: Path, given: Path | None) -> Path | None:
    """The data of the run in a folder: what is given, else where they were when it began."""
    if given is not None or not (folder / RUN).is_file():
        return given
    kept = read_json_fields(folder / RUN, "data", "data at")
    if kept["data"] is None:
        return None
    where = Path(kept["data at"])
    if not where.exists():
        raise DataError(f"the run in {folder} has its data from {where}, which is not there any more; give --data")
    return where


def fingerprint(data: Path, run: Path) -> str:
    """A word for the files of a data set, their names and what is in them; those of the run itself are none."""
    own = run.resolve()
    files = [file for file in files_below(data) if own not in file.resolve().parents] if data.is_dir() else [data]
    try:
        told = [(file.relative_to(data).as_posix(), _digest(file)) for file in files]
    except OSError as error:
        raise DataError(f"{data} cannot be read: {error}") from None
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def read_json_fields(file: Path, *names: str) -> dict[str, Any]:
    """A file of JSON that a run left, which must say all that is named."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; the run has to be made again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is damaged: it holds no names; the run has to be made again")
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(f"{file} is damaged: it does not say {missing[0]}; the run has to be made again")
    return found
