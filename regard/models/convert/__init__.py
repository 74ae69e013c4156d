"""Other projects' models: their configurations and weights in our terms, and ours in theirs.

One file for each family, with three functions: `config` (their config.json to our configuration), `rules` (names and
layouts of weights, both ways) and, where we write it too, `about` (our configuration to the config.json of a
model_type). A fourth,
`cleaned`, brings the variants of one family's weights to one form.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError, ConfigError, ShapeError
from regard.base.registry import Registry
from regard.base.tracing import is_meta_or_fake
from regard.base.validation import check_integer
from regard.models.convert import weight_rules
from regard.models.model import Config, Model
from regard.models.saving import CONFIG, PICKLED, assembled, made_folder, pickled, read_weights

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model(-[0-9a-f]{16})?-\d{5}-of-\d{5}\.safetensors")  # as transformers names them, and as we do

# the model_type of a config.json, and the file that reads it
FAMILIES: Registry[str] = Registry("model_type")
for _type, _file in {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "bert": "bert",
    "vit": "vit",
    "bart": "bart",
    "marian": "marian",
}.items():
    FAMILIES.add(_type)(_file)


def load(folder: Path, about: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Model:
    """The model of a Hugging Face folder whose config.json is `about`."""
    config, family, source = load_config(folder, about), _family(str(about["model_type"])), str(folder)
    weights = read_folder(folder)
    if hasattr(family, "cleaned"):
        weights = family.cleaned(weights, config)
    return assembled(config, weight_rules.read(family.rules(config), weights, source), source, device)


def load_config(folder: Path, about: Mapping[str, Any]) -> Config:
    """Our configuration for a Hugging Face folder whose config.json is `about`."""
    if "model_type" not in about:
        raise CheckpointError(f"{folder / CONFIG} has neither our format nor a model_type; it is unknown what it is")
    family = _family(str(about["model_type"]))
    try:
        config: Config = family.config(about)
    except (ConfigError, ShapeError) as error:  # their settings are of the right types, but no model can have them
        raise CheckpointError(f"{folder / CONFIG} has settings that no model can have: {error}") from None
    return config


def export(
    model: Model, path: str | os.PathLike[str], *, model_type: str | None = None, shard: int | None = None
) -> None:
    """Write a folder that Hugging Face's transformers loads: config.json and the weights.

    model_type  which of their families, where the model would fit several; None takes the first that it fits
    shard       the most bytes of one file; None writes one file

    An earlier export in the folder is replaced. Every file is whole or not there: files of a sharded model are named by
    what they contain, so none is written over, and the index that names them changes in one step, as model.safetensors
    does. What is superseded is removed at the end. But transformers fixes the names of config.json, of the index and of
    model.safetensors, and no file system replaces two files at once: if the machine stops in between, then the new
    weights may stand beside the old config.json, or one form of the weights beside the other, which `read_folder`
    refuses. Export again, or export to a new folder, where nothing can be mixed.
    """
    if shard is not None:
        check_integer("shard", shard, 1, "the bytes of one file")
    kind, about = _described(model, model_type)
    hollow = [name for name, tensor in model.state_dict().items() if is_meta_or_fake(tensor)]
    if hollow:
        raise CheckpointError(f"{hollow[0]} has no numbers to export: the model was built on the meta device")
    weights = weight_rules.write(_family(kind).rules(model.config), model.state_dict())
    folder = made_folder(path)
    superseded = _weight_files(folder)
    parts = _shards(weights, shard)
    if len(parts) == 1:
        kept = {write_atomically(folder / WEIGHTS, partial(_save, weights)).name}
    else:
        kept = {INDEX, *_write_shards(folder, parts)}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    text = json.dumps({**about, "dtype": dtype}, indent=1) + "\n"
    write_atomically(folder / CONFIG, lambda file: file.write_text(text))
    for name in superseded - kept:
        (folder / name).unlink(missing_ok=True)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, in one file or in several with an index."""
    if (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} has both {WEIGHTS} and {INDEX}, which may be of two models; remove the one that is not meant"
        )
    if (folder / WEIGHTS).is_file():
        return read_weights(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        where = _read_index(folder)
        weights: dict[str, Tensor] = {}
        for name in sorted(set(where.values())):
            weights |= read_weights(folder / Path(name).name)  # a name with a path could reach outside the folder
        lacking = sorted(set(where) - set(weights))
        if lacking:
            raise CheckpointError(f"{folder / INDEX} promises {lacking[0]}, but {where[lacking[0]]} does not have it")
        return weights
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLED:
            raise pickled(file)
    raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        where = json.loads((folder / INDEX).read_text())["weight_map"]
        if all(isinstance(file, str) for file in where.values()):
            return dict(where)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files")


def _weight_files(folder: Path) -> set[str]:
    """Names of what an earlier export has written here; other files are left alone."""
    named = {file.name for file in folder.iterdir() if file.is_file() and SHARD.fullmatch(file.name)}
    return named | {name for name in (WEIGHTS, INDEX) if (folder / name).is_file()}


def _write_shards(folder: Path, parts: list[dict[str, Tensor]]) -> list[str]:
    """Write the files, then the index; the names of the files."""
    names = []
    for number, part in enumerate(parts, 1):
        name = partial(_shard_name, f"{number:05d}-of-{len(parts):05d}")
        names.append(write_atomically(folder / "model-.safetensors", partial(_save, part), name).name)
    where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    write_atomically(folder / INDEX, lambda file: file.write_text(index))
    return names


def _shard_name(place: str, file: Path) -> str:
    """Another name for other weights, so that files which an index names are never written over."""
    with file.open("rb") as opened:
        return f"model-{hashlib.file_digest(opened, 'sha256').hexdigest()[:16]}-{place}.safetensors"


def _save(weights: dict[str, Tensor], file: Path) -> None:
    save_file(weights, file, {"format": "pt"})  # transformers refuses files that do not say so


def _family(model_type: str) -> ModuleType:
    return import_module(f"regard.models.convert.{FAMILIES[model_type]}")


def _described(model: Model, wanted: str | None) -> tuple[str, dict[str, Any]]:
    """The family that takes this model, and its config.json; the reasons of all that do not, if none does."""
    reasons = []
    for kind in FAMILIES if wanted is None else [wanted]:
        family = _family(kind)
        if not hasattr(family, "about"):
            reasons.append(f"{kind}: read only")
            continue
        try:
            return kind, family.about(model.config, kind)
        except ConfigError as error:
            reasons.append(f"{kind}: {error}")
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    raise ConfigError(f"this {type(model).__name__} has no form among those of Hugging Face:{listed}")


def _shards(weights: Mapping[str, Tensor], most: int | None) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if most is not None and parts[-1] and held + size > most:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += size
    return parts
