"""Convert models of Hugging Face to models of regard, and back: configurations and weights.

Each file that is named after an architecture has its converters, which are instances of `Family`. `convert.timm`
converts weights of timm.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError, ConfigError, ShapeError, UnknownNameError
from regard.base.files import read_json
from regard.base.registry import Registry
from regard.models.convert import bart, bert, gpt2, llama, t5, vit
from regard.models.convert.family import Family
from regard.models.model import Config, Model
from regard.models.presets import build_from_config
from regard.models.saving import (
    CONFIG,
    PICKLED,
    build_with_weights,
    check_can_save,
    create_folder,
    pickle_error,
    read_weights,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

FAMILIES: Registry[Family] = Registry("model_type")  # converters by the model_type of a config.json
for _file in (gpt2, llama, bert, vit, bart, t5):
    for _name, _family in _file.FAMILIES.items():
        FAMILIES.add(_name)(_family)


def find_family(model_type: str) -> Family:
    """Return the converter for a Hugging Face model_type. Raises UnknownNameError if the type is not supported."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    # the same letters in another order are a slip; most other names that are similar are families of their own
    letters = sorted(filter(str.isalnum, model_type.lower()))
    near = [name for name in FAMILIES if sorted(filter(str.isalnum, name)) == letters]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(
        f"model_type {model_type!r} cannot be converted{hint} (there are: {', '.join(FAMILIES)}). Others run in "
        "transformers with attn_implementation='regard', after regard.integrations.huggingface.register()"
    )


def load(folder: Path, hf: Mapping[str, Any], *, device: torch.device | str | None = None) -> Model:
    """Load the model in a Hugging Face folder. `hf` is the content of its config.json."""
    config, family, source = load_config(folder, hf), find_family(str(hf["model_type"])), str(folder)
    empty = build_from_config(config, device="meta").state_dict()
    return build_with_weights(config, family.read_weights(read_folder(folder), empty, config, source), source, device)


def load_config(folder: Path, hf: Mapping[str, Any]) -> Config:
    """Convert the config.json of a Hugging Face folder to a configuration of regard. `hf` is its content."""
    if "model_type" not in hf:
        raise CheckpointError(f"{folder / CONFIG} has neither our format nor a model_type, so its model is unknown")
    family = find_family(str(hf["model_type"]))
    try:
        return family.read_config(hf)
    except (ConfigError, ShapeError, ArithmeticError) as error:  # the types are right, but the values do not fit
        raise CheckpointError(f"{folder / CONFIG} has settings that no model can have: {error}") from None


def export(model: Model, path: str | os.PathLike[str], *, model_type: str | None = None) -> None:
    """Write a folder that Hugging Face's transformers loads: config.json and model.safetensors.

    model_type  the model_type to export to; None takes the first that fits the model

    An earlier model in the folder is replaced. Each file is written atomically, but not both together: after a
    crash, the new weights can be next to the old config.json. Then export again, or export to a new folder.
    """
    kind, hf = _export_config(model, model_type)
    check_can_save(model, "export")
    weights = FAMILIES[kind].write_weights(model.state_dict(), model.config)
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
    """Read all weights of a Hugging Face folder, from one safetensors file or from several with an index."""
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
    """Return the file name of each tensor, from the index of a folder with several safetensors files."""
    try:
        where = read_json(folder / INDEX, CheckpointError)["weight_map"]
        if all(isinstance(file, str) for file in where.values()):
            return dict(where)
    except (KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files")


def _export_config(model: Model, wanted: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model_type to export a model to, and the content of its config.json.

    Raises ConfigError with the reasons if no model_type fits.

    wanted  the model_type; None takes the first that fits
    """
    reasons = []
    for kind in FAMILIES if wanted is None else [wanted]:
        try:
            return kind, find_family(kind).write_config(model.config, kind)
        except ConfigError as error:
            reasons.append(f"{kind}: {error}")
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    raise ConfigError(f"this {type(model).__name__} cannot be exported to Hugging Face:{listed}")
