"""Convert models of other projects: their configurations and weights to ours, and ours to theirs.

One file for each family, with these functions: `read_config` (their config.json to our configuration), `rules` (names
and layouts of weights, in both directions), `clean_weights` (the variants of one family's weights to one form) and,
where we can export, `write_config` (our configuration to their config.json).
"""

import json
import os
from collections.abc import Mapping
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
from regard.models.convert import weight_rules
from regard.models.model import Config, Model
from regard.models.saving import (
    CONFIG,
    PICKLED,
    build_with_weights,
    check_has_numbers,
    create_folder,
    pickle_error,
    read_weights,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

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


def load(folder: Path, hf: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Model:
    """Load a Hugging Face folder whose config.json is `hf`."""
    config, family, source = load_config(folder, hf), _family(str(hf["model_type"])), str(folder)
    weights = family.clean_weights(read_folder(folder), config)
    return build_with_weights(config, weight_rules.read_weights(family.rules(config), weights, source), source, device)


def load_config(folder: Path, hf: Mapping[str, Any]) -> Config:
    """Our configuration for a Hugging Face folder whose config.json is `hf`."""
    if "model_type" not in hf:
        raise CheckpointError(f"{folder / CONFIG} has neither our format nor a model_type, so its model is unknown")
    try:
        config: Config = _family(str(hf["model_type"])).read_config(hf)
    except (ConfigError, ShapeError) as error:  # the types are right, but the values do not fit each other
        raise CheckpointError(f"{folder / CONFIG} has settings that no model can have: {error}") from None
    return config


def export(model: Model, path: str | os.PathLike[str], *, model_type: str | None = None) -> None:
    """Write a folder that Hugging Face's transformers loads: config.json and model.safetensors.

    model_type  the family to export to; None takes the first that fits the model

    An earlier model in the folder is replaced. Each file is written atomically, but transformers fixes both names, and
    two files cannot be replaced in one step: after a crash, the new weights can be next to the old config.json. Export
    again, or export to a new folder.
    """
    kind, hf = _export_config(model, model_type)
    check_has_numbers(model, "export")
    weights = weight_rules.write_weights(_family(kind).rules(model.config), model.state_dict())
    folder = create_folder(path)
    shards = {INDEX, *_read_index(folder).values()} if (folder / INDEX).is_file() else set()
    metadata = {"format": "pt"}  # transformers refuses files without it
    write_atomically(folder / WEIGHTS, lambda file: save_file(weights, file, metadata))
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    text = json.dumps({**hf, "dtype": dtype}, indent=1) + "\n"
    write_atomically(folder / CONFIG, lambda file: file.write_text(text))
    for name in shards:
        (folder / Path(name).name).unlink(missing_ok=True)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder, from one file or from several with an index."""
    if (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} has both {WEIGHTS} and {INDEX}, which can be of two models; remove one of them"
        )
    if (folder / WEIGHTS).is_file():
        return read_weights(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        where = _read_index(folder)
        weights: dict[str, Tensor] = {}
        for name in sorted(set(where.values())):
            weights |= read_weights(folder / Path(name).name)  # a name with a path could reach outside the folder
        missing = sorted(set(where) - set(weights))
        if missing:
            raise CheckpointError(f"{folder / INDEX} lists {missing[0]}, but {where[missing[0]]} does not have it")
        return weights
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLED:
            raise pickle_error(file)
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


def _family(model_type: str) -> ModuleType:
    return import_module(f"regard.models.convert.{FAMILIES[model_type]}")


def _export_config(model: Model, wanted: str | None) -> tuple[str, dict[str, Any]]:
    """The family that fits this model, and its config.json; an error lists why each family does not."""
    reasons = []
    for kind in FAMILIES if wanted is None else [wanted]:
        family = _family(kind)
        try:
            if not hasattr(family, "write_config"):
                raise ConfigError("read only")
            if not isinstance(model.config, family.CONFIG):
                raise ConfigError(f"it is built from a {family.CONFIG.__name__}, not {type(model.config).__name__}")
            return kind, family.write_config(model.config, kind)
        except ConfigError as error:
            reasons.append(f"{kind}: {error}")
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    raise ConfigError(f"this {type(model).__name__} cannot be exported to Hugging Face:{listed}")
