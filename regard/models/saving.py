"""Save and load models: a folder with `config.json` and the weights in safetensors.

The name of the weights file contains a hash of its contents. `config.json` stores that name and is replaced last and
atomically, so that after a crash the folder has either the old model or the new one.
"""

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError
from regard.base.files import describe, exists, file_digest, is_file, is_folder, read_json
from regard.base.tracing import is_meta_or_fake
from regard.base.validation import suggest
from regard.models.hub_cache import REPOSITORY, find_cached, hub_cache, list_cached
from regard.models.model import Config, Model
from regard.models.presets import MODEL_CLASSES, PRESETS, build_from_config, find_pretrained, list_models
from regard.nn.int8 import Int8Linear

CONFIG = "config.json"
FORMAT = "regard-1"
LOCK = ".save.lock"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Save a model in a folder, which is created if it does not exist. A model saved there before is replaced."""
    folder = create_folder(path)
    kind = next((name for name in MODEL_CLASSES if MODEL_CLASSES[name] is type(model)), None)
    if kind is None:
        known = ", ".join(MODEL_CLASSES[name].__name__ for name in MODEL_CLASSES)
        raise CheckpointError(f"{type(model).__name__} could not be loaded again; saved can be: {known}")
    check_can_save(model, "save")
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    # one save at a time: two that overlap would delete each other's weights
    with FileLock(folder / LOCK, thread_local=False, is_singleton=False):
        new = write_atomically(folder / "weights-.safetensors", lambda file: save_file(weights, file), _weights_name)
        about = {"format": FORMAT, "model": kind, "config": to_json(model.config), "weights": new.name}
        text = json.dumps(about, indent=1) + "\n"
        write_atomically(folder / CONFIG, lambda file: file.write_text(text))
        for old in folder.glob("weights-*.safetensors"):
            if old.name != new.name:
                old.unlink()


def check_can_save(model: Model, action: str) -> None:
    """Raise CheckpointError if the model is on the meta device, where tensors have no values, or has int8 weights.

    action  what cannot be done with such a model, such as "save", for the error message
    """
    empty = [name for name, tensor in model.state_dict().items() if is_meta_or_fake(tensor)]
    if empty:
        raise CheckpointError(f"{empty[0]} has no numbers to {action}: the model was built on the meta device")
    if any(isinstance(part, Int8Linear) for part in model.modules()):
        raise CheckpointError(f"the model has int8 weights; {action} the model that was passed to quantize_int8")


def create_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder if it does not exist, and return its path. Raises CheckpointError if it is a file."""
    folder = Path(path)
    if exists(folder, CheckpointError) and not is_folder(folder, CheckpointError):
        raise CheckpointError(f"{folder} is a file; a model is saved as a folder, with {CONFIG} and its weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Model:
    """Load a model saved by regard or Hugging Face, in eval mode and in the dtype it was saved with.

    path    the folder of a model, the name of a pretrained model of `list_models(pretrained=True)`, or the name
            of a model that was downloaded from the Hugging Face Hub
    device  device of the parameters; None is torch's default device

    >>> regard.build("mlp").save("folder")
    >>> type(regard.load("folder")).__name__
    'MLP'
    """
    folder = pretrained_folder(path)
    about = read_config(folder)
    while True:
        try:
            return _load_saved(folder, about, device)
        except CheckpointError:
            older, about = about, read_config(folder)
            if json.dumps(about) == json.dumps(older):  # as text, because NaN is not equal to NaN
                raise
            # another process saved a model here in the meantime


def _load_saved(folder: Path, about: dict[str, Any], device: torch.device | str | None) -> Model:
    """Load a model from its folder. `about` is the content of its config.json."""
    if about.get("format") != FORMAT:
        return _converters().load(folder, about, device=device)
    file = folder / Path(str(about.get("weights"))).name  # a name with a path could reach outside the folder
    weights = read_weights(file)
    if _weights_name(file) != file.name:
        raise CheckpointError(f"{file} is damaged: its contents do not match the hash in its name")
    return build_with_weights(_saved_config(folder, about), weights, str(folder), device)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Load the configuration of a saved model, without its weights. `path` is as in `load`."""
    folder = pretrained_folder(path)
    about = read_config(folder)
    if about.get("format") != FORMAT:
        return _converters().load_config(folder, about)
    return _saved_config(folder, about)


def _saved_config(folder: Path, about: Mapping[str, Any]) -> Config:
    """Return the configuration of a model saved by regard. `about` is the content of its config.json."""
    kind = MODEL_CLASSES[str(about.get("model"))]
    return from_json(f"{folder / CONFIG}: config", kind.Config, about.get("config", {}))


def _converters() -> ModuleType:
    return import_module("regard.models.convert")  # it imports this file


def build_with_weights(
    config: Config, weights: Mapping[str, Tensor], source: str, device: torch.device | str | None = None
) -> Model:
    """Build a model from its configuration and a state dict, in eval mode.

    Raises CheckpointError if they do not fit.

    source  where the weights come from, for error messages
    """
    wanted = build_from_config(config, device="meta").state_dict()
    missing, unknown = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or unknown:
        lists = (("missing", missing), ("unknown", unknown))
        problems = "; ".join(f"{len(names)} {what}: {_list_names(names)}" for what, names in lists if names)
        raise CheckpointError(f"the weights of {source} do not fit its {type(config).__name__}: {problems}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} in {source} is {tuple(tensor.shape)}, but its configuration has {tuple(wanted[name].shape)}"
            )
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise CheckpointError(f"{name} in {source} is {tensor.dtype}, but the model has {wanted[name].dtype}")
    model = build_from_config(config, seed=None, device="meta")
    # in the dtype it was saved with, and copied: in a file tensors are not aligned
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    return model.to(torch.get_default_device() if device is None else device).eval()


def pretrained_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a model, given its path or the name of a pretrained or downloaded model.

    Raises CheckpointError if there is none.
    """
    folder = find_folder(path)
    if folder is None:
        raise unknown_model_error(str(path))
    return folder


def find_folder(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a model, given its path or the name of a pretrained or downloaded model.

    None if there is none.
    """
    folder, name = Path(path), str(path)
    if folder.suffix in PICKLED or exists(folder, CheckpointError):
        return folder
    run = find_pretrained(name)
    return find_cached(name) if run is None else run / "model"


def unknown_model_error(name: str) -> CheckpointError:
    """Return the CheckpointError for a name that is no folder and no known model. Its text lists similar names."""
    missing = f"there is no folder {name!r}"
    if not REPOSITORY.fullmatch(name):
        return CheckpointError(f"{missing}; a model is a folder with {CONFIG} and its weights")
    if name in PRESETS:
        return CheckpointError(
            f"{name!r} is a preset without trained weights, and neither a folder nor in {hub_cache()}; `hf download "
            f"{name}` gets the model of this name from the Hugging Face Hub, regard.load takes the path of a folder "
            f"too, and regard.build({name!r}) has random weights"
        )
    fix = suggest(name, [*list_models(pretrained=True), *list_models(), *list_cached()], most=3) or (
        f"; `regard.list_models(pretrained=True)` lists what ships with the package, and `hf download {name}` gets a "
        "model from the Hugging Face Hub"
    )
    return CheckpointError(f"{missing}, and no model of this name{fix}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model folder. Raises CheckpointError if the folder has none."""
    if folder.suffix in PICKLED:
        raise pickle_error(folder)
    if not is_folder(folder, CheckpointError):
        raise CheckpointError(f"{folder} is not a folder; a model is a folder with {CONFIG} and its weights")
    file = folder / CONFIG
    if not is_file(file, CheckpointError):
        there = _list_names(sorted(each.name for each in folder.iterdir() if each.name != LOCK))
        raise CheckpointError(f"{folder} has no {CONFIG}; it has: {there}")
    about = read_json(file, CheckpointError)
    if not isinstance(about, dict):
        raise CheckpointError(f"{file} should be an object, not {type(about).__name__}")
    return about


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file."""
    if file.suffix in PICKLED:
        raise pickle_error(file)
    if not is_file(file, CheckpointError):
        raise CheckpointError(f"{file} does not exist")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from None


def pickle_error(file: Path) -> CheckpointError:
    """Return the CheckpointError for a pickled checkpoint.

    Such files are refused because reading them can run code.
    """
    return CheckpointError(
        f"{file} is a pickled checkpoint, and unpickling can run any code inside; if you trust it, convert it: "
        "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
    )


def content_hash(file: Path) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a file."""
    return file_digest(file)[:16]


def _weights_name(file: Path) -> str:
    try:
        return f"weights-{content_hash(file)}.safetensors"
    except OSError as error:  # another process may have replaced it
        raise CheckpointError(f"{file} cannot be read: {describe(error)}") from None


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
