"""Other projects' models: their configurations and weights in our terms, and ours in theirs.

One file for each family, with three functions: `config` (their config.json to our configuration), `rules` (names and
layouts of weights, both ways) and, where we write it too, `about` (our configuration to their config.json). A fourth,
`cleaned`, brings the variants of one family's weights to one form.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.base.registry import Registry
from regard.models.files import CONFIG, PICKLED, assembled, pickled, read_weights, write_atomically
from regard.models.foreign import rules
from regard.models.model import Config, Model

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


def load(folder: Path, about: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Model:
    """The model of a Hugging Face folder whose config.json is `about`."""
    config, family, source = load_config(folder, about), _family(str(about["model_type"])), str(folder)
    weights = read_folder(folder)
    if hasattr(family, "cleaned"):
        weights = family.cleaned(weights, config)
    return assembled(config, rules.read(family.rules(config), weights, source), source, device)


def load_config(folder: Path, about: Mapping[str, Any]) -> Config:
    """Our configuration for a Hugging Face folder whose config.json is `about`."""
    if "model_type" not in about:
        raise CheckpointError(f"{folder / CONFIG} has neither our format nor a model_type; it is unknown what it is")
    return _family(str(about["model_type"])).config(about)


def export(
    model: Model, path: str | os.PathLike[str], *, model_type: str | None = None, shard: int | None = None
) -> None:
    """Write a folder that Hugging Face's transformers loads: config.json and the weights.

    model_type  which of their families, where the model would fit several; None takes the first that it fits
    shard       the most bytes of one file; None writes one file
    """
    kind, about = _described(model, model_type)
    family = _family(kind)
    weights = rules.write(family.rules(model.config), model.state_dict())
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = _shards(weights, shard)
    names = [WEIGHTS] if len(parts) == 1 else [
        f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)
    ]  # fmt: skip
    for name, part in zip(names, parts, strict=True):
        write_atomically(folder / name, partial(_save, part))
    if len(parts) > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        write_atomically(folder / INDEX, lambda file: file.write_text(index))
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    text = json.dumps({**about, "model_type": kind, "dtype": dtype}, indent=1) + "\n"
    write_atomically(folder / CONFIG, lambda file: file.write_text(text))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, in one file or in several with an index."""
    if (folder / WEIGHTS).is_file():
        return read_weights(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        try:
            where = json.loads((folder / INDEX).read_text())["weight_map"]
            files = sorted(set(where.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files") from None
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= read_weights(folder / Path(file).name)  # a name with a path could reach outside the folder
        lacking = sorted(set(where) - set(weights))
        if lacking:
            raise CheckpointError(f"{folder / INDEX} promises {lacking[0]}, but {where[lacking[0]]} does not have it")
        return weights
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLED:
            raise pickled(file)
    raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def _save(weights: dict[str, Tensor], file: Path) -> None:
    save_file(weights, file, {"format": "pt"})  # transformers refuses files that do not say so


def _family(model_type: str) -> ModuleType:
    return import_module(f"regard.models.foreign.{FAMILIES[model_type]}")


def _described(model: Model, wanted: str | None) -> tuple[str, dict[str, Any]]:
    """The family that takes this model, and its config.json; the reasons of all that do not, if none does."""
    reasons = []
    for kind in FAMILIES if wanted is None else [wanted]:
        family = _family(kind)
        if not hasattr(family, "about"):
            reasons.append(f"{kind}: read only")
            continue
        try:
            return kind, family.about(model.config)
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
