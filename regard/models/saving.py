"""Models on disk: a folder with `config.json` and the weights it names, in safetensors.

`config.json` is replaced last and in one step, and names the weights by what they contain. Whatever happens on the way,
a folder that held a model holds a whole one: the old or the new.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError
from regard.base.tracing import is_meta_or_fake
from regard.models.model import Config, Model
from regard.models.presets import KINDS, build_from_config, model_class

CONFIG = "config.json"
FORMAT = "regard-1"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write the model into a folder, which is made if it is not there."""
    folder = made_folder(path)
    kind = next((name for name in KINDS if KINDS[name] is type(model)), None)
    if kind is None:
        known = ", ".join(KINDS[name].__name__ for name in KINDS)
        raise CheckpointError(f"{type(model).__name__} could not be loaded again: a folder holds one of {known}")
    hollow = [name for name, tensor in model.state_dict().items() if is_meta_or_fake(tensor)]
    if hollow:
        raise CheckpointError(f"{hollow[0]} has no numbers to save: the model was built on the meta device")
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    kept = write_atomically(folder / "weights-.safetensors", lambda file: save_file(weights, file), named_by_content)
    about = {"format": FORMAT, "model": kind, "config": to_json(model.config), "weights": kept.name}
    text = json.dumps(about, indent=1) + "\n"
    write_atomically(folder / CONFIG, lambda file: file.write_text(text))
    for old in folder.glob("weights-*.safetensors"):
        if old.name != kept.name:
            old.unlink()


def made_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a model is saved as a folder, with {CONFIG} and its weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Model:
    """The model that a folder holds, ours or Hugging Face's, in eval mode and in the dtype it was saved with."""
    folder = Path(path)
    about = read_config(folder)
    if about.get("format") != FORMAT:
        return foreign().load(folder, about, device=device)
    file = folder / Path(str(about.get("weights"))).name  # a name with a path could reach outside the folder
    weights = read_weights(file)
    if named_by_content(file) != file.name:
        raise CheckpointError(f"{file} is damaged: its contents are not those it was named by")
    return assembled(load_config(folder), weights, str(folder), device)


def load_config(path: str | os.PathLike[str]) -> Config:
    """The configuration of the model that a folder holds."""
    folder = Path(path)
    about = read_config(folder)
    if about.get("format") != FORMAT:
        return foreign().load_config(folder, about)
    kind = KINDS[str(about.get("model"))]
    return from_json(f"{folder / CONFIG}: config", kind.Config, about.get("config", {}))


def foreign() -> ModuleType:
    """Other projects' models, which build on this file."""
    return import_module("regard.models.convert")


def assembled(config: Config, weights: Mapping[str, Tensor], source: str, device: torch.device | str = "cpu") -> Model:
    """The model of a configuration with these weights; nothing is made of weights that do not fit."""
    with torch.device("meta"):
        wanted = model_class(config)(config).state_dict()
    missing, unknown = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or unknown:
        lists = (("lacks", missing), ("has besides", unknown))
        told = "; ".join(f"{verb} {len(names)}: {_some(names)}" for verb, names in lists if names)
        raise CheckpointError(f"the weights of {source} are not those of a {type(config).__name__}: it {told}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} in {source} is {tuple(tensor.shape)}, but by its configuration {tuple(wanted[name].shape)}"
            )
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise CheckpointError(f"{name} in {source} is {tensor.dtype}, but the model's is {wanted[name].dtype}")
    model = build_from_config(config, seed=None, device="meta")
    # each in the dtype it was saved with, and copied: a file's layout leaves tensors at odd addresses
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    return model.to(device).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    if folder.suffix in PICKLED:
        raise pickled(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a model is a folder with {CONFIG} and its weights")
    file = folder / CONFIG
    if not file.is_file():
        there = _some(sorted(each.name for each in folder.iterdir()))
        raise CheckpointError(f"{folder} has no {CONFIG}; it has: {there}")
    try:
        about = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(about, dict):
        raise CheckpointError(f"{file} should hold an object, not {type(about).__name__}")
    return about


def read_weights(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    if file.suffix in PICKLED:
        raise pickled(file)
    if not file.is_file():
        raise CheckpointError(f"{file} is not there")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from None


def pickled(file: Path) -> CheckpointError:
    """The refusal of a format that can run code when it is read."""
    return CheckpointError(
        f"{file} is a pickled checkpoint, and unpickling runs whatever code is inside; convert it where you trust it: "
        "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
    )


def named_by_content(file: Path) -> str:
    with file.open("rb") as opened:
        return f"weights-{hashlib.file_digest(opened, 'sha256').hexdigest()[:16]}.safetensors"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
