"""Models in the cache folder of the Hugging Face Hub, where `hf download` and transformers store them.

The files of a model `org/name` are in `models--org--name/snapshots/COMMIT`, where COMMIT is the content of the file
`models--org--name/refs/main`. Nothing is downloaded here.
"""

import os
import re
from pathlib import Path

from regard.base.errors import CheckpointError
from regard.base.files import is_file, is_folder, read_text

LONGEST_REF = 1000  # bytes of a commit's name
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # a name on the Hub: gpt2, openai-community/gpt2


def hub_cache() -> Path:
    """Return the cache folder of the Hugging Face Hub: $HF_HUB_CACHE, else $HF_HOME/hub, else the default.

    The default is ~/.cache/huggingface/hub, with $XDG_CACHE_HOME in place of ~/.cache if it is set.
    """
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{user_cache}/huggingface")).expanduser() / "hub"


def find_cached(name: str) -> Path | None:
    """Return the folder of a model downloaded from the Hugging Face Hub, by its name there.

    None if it is not cached.
    """
    if not REPOSITORY.fullmatch(name):
        return None
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    ref = repository / "refs" / "main"
    if not is_file(ref, CheckpointError):
        return None
    snapshot = repository / "snapshots" / read_text(ref, CheckpointError, LONGEST_REF).strip()
    return snapshot if is_folder(snapshot, CheckpointError) else None


def list_cached() -> list[str]:
    """Return the names of all models downloaded from the Hugging Face Hub, sorted."""
    found = (folder.name.removeprefix("models--").replace("--", "/") for folder in hub_cache().glob("models--*"))
    return sorted(name for name in found if find_cached(name) is not None)
