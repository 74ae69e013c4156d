"""The folder of a run. Its run.json has the recipe, the settings and a hash of the data.

A run that is resumed must have the same ones.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError, ConfigError, DataError
from regard.base.files import exists, file_digest, read_json
from regard.data.folders import walk_files
from regard.train.checkpoint import RESUMABLE, convert_os_errors

RUN_FILE = "run.json"
UNCOMPARED_FIELDS = ("data at", "launch")  # fields that may differ when a run is resumed


def check_can_begin(folder: Path, recipe: str, settings: Any, *, resume: bool) -> None:
    """Check that a run can be written to the folder, else raise ConfigError.

    An error is raised if the folder has a run and `resume` is False, or if it has a run with other settings.

    settings  the settings as JSON values
    """
    with convert_os_errors(folder):
        kept = read_json(folder / RUN_FILE, CheckpointError, "recipe") if (folder / RUN_FILE).is_file() else None
    if kept is not None and not resume:
        raise ConfigError(f"{folder} has a run already; continue it with --resume, or choose another --folder")
    if kept is not None:
        _check_same(folder, kept, {"recipe": recipe, "settings": settings, "data": kept.get("data")})


def begin_run(folder: Path, recipe: str, settings: Any, data: Path | None, *, resume: bool) -> None:
    """Write run.json, which describes the run. Called after the data have been read.

    If the file exists, check that it describes the same run, else raise ConfigError.
    """
    check_can_begin(folder, recipe, settings, resume=resume)
    wanted = {"recipe": recipe, "settings": settings, "data": None if data is None else fingerprint(data, folder)}
    where = None if data is None else str(data.resolve())
    text = json.dumps({**wanted, "data at": where, "launch": launch_id()}, indent=1) + "\n"
    with convert_os_errors(folder):
        if (folder / RUN_FILE).is_file():
            _check_same(folder, read_json(folder / RUN_FILE, CheckpointError, "recipe"), wanted)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RUN_FILE, lambda path: path.write_text(text))


def has_restarted(folder: Path) -> bool:
    """Return whether torchrun restarted this process after the run in the folder began, so that the run has to be
    resumed.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not (folder / RUN_FILE).is_file():
        return False
    return bool(read_json(folder / RUN_FILE, CheckpointError, "recipe").get("launch") == launch_id())


def launch_id() -> str | None:
    """Return an id that all processes started by one torchrun share, also after a restart; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"of process {os.getppid()}" if name == "none" else name  # torchrun's id if none is set


def _check_same(folder: Path, kept: Any, wanted: Any) -> None:
    changed = sorted(differences(kept, wanted))
    if changed:
        raise ConfigError(
            f"the run in {folder} is different: {'; '.join(changed[:4])}. Resume it with its own settings, of which "
            f"{', '.join(sorted(RESUMABLE))} may change, or choose another --folder"
        )


def differences(kept: Any, wanted: Any, name: str = "") -> list[str]:
    """Describe the differences between the settings of a saved run and of a run that resumes it.

    Settings that can be changed when a run is resumed are not compared.

    kept    the settings saved in the folder, a nested dictionary or a value in it
    wanted  the settings of the run that resumes
    name    path of `kept` and `wanted` in the whole settings; "" for the whole settings
    """
    if isinstance(kept, dict) and isinstance(wanted, dict):
        names = dict.fromkeys([*wanted, *(each for each in kept if each not in UNCOMPARED_FIELDS)])
        inner = ((f"{name}.{each}".removeprefix("."), kept.get(each), wanted.get(each)) for each in names)
        return [text for path, one, other in inner for text in differences(one, other, path)]
    if kept == wanted or name.rpartition(".")[2] in RESUMABLE:
        return []
    name = name.removeprefix("settings.")
    return ["its data are different"] if name == "data" else [f"{name} was {kept!r} and is {wanted!r}"]


def find_data(folder: Path, given: Path | None) -> Path | None:
    """Return the path of a run's data: `given`, or the path that was saved when the run started.

    Returns None for built-in data. Raises DataError if the saved path does not exist any more.
    """
    if given is not None or not (folder / RUN_FILE).is_file():
        return given
    kept = read_json(folder / RUN_FILE, CheckpointError, "data", "data at")
    if kept["data"] is None:
        return None
    if not isinstance(kept["data at"], str):
        raise CheckpointError(
            f"{folder / RUN_FILE} is damaged: 'data at' is {kept['data at']!r}, not a path; pass --data"
        )
    where = Path(kept["data at"])
    if not exists(where):
        raise DataError(f"the run in {folder} used the data in {where}, which do not exist any more; pass --data")
    return where


def fingerprint(data: Path, run: Path) -> str:
    """Return a hash of the names and contents of all data files. Files in the folder of the run are left out."""
    try:
        own = run.resolve()
        files = [file for file in walk_files(data) if own not in file.resolve().parents] if data.is_dir() else [data]
        digests = [(file.relative_to(data).as_posix(), file_digest(file, "blake2b")) for file in files]
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise DataError(f"{data} cannot be read: {error}") from None
    return hashlib.blake2b(repr(digests).encode(), digest_size=8).hexdigest()
