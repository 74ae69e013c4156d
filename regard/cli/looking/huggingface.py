"""Models of Hugging Face that regard does not read itself: loaded by transformers, where it is installed."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.base.errors import CheckpointError, ConfigError

ARGUMENTS = ("input_ids", "decoder_input_ids")


def model_type_of(folder: str) -> str | None:
    """The model_type that a folder names, where it is one that only transformers may know; else None."""
    from regard.models.convert import FAMILIES
    from regard.models.saving import FORMAT, read_config

    about = read_config(Path(folder))
    kind = str(about.get("model_type", ""))
    return None if about.get("format") == FORMAT or not kind or kind in FAMILIES else kind


@dataclass(frozen=True)
class Theirs:
    """A model of transformers, with what has to be known to ask it."""

    model: Any
    code: str
    imports: str

    @property
    def kind(self) -> str:
        return "pair" if self.model.config.is_encoder_decoder else "text"

    @property
    def vocab(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def most(self) -> int | None:
        """The longest text by its configuration; None where it names no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)


def load_theirs(folder: str, model_type: str, device: str) -> Theirs:
    """The model in a folder, of the class that its config.json names."""
    from regard.integrations.torchvision import let_torchvision_load
    from regard.models.convert import FAMILIES
    from regard.models.saving import read_config

    let_torchvision_load()
    try:
        transformers = import_module("transformers")  # no dependency: it may be there or not
    except ImportError:
        raise ConfigError(
            f"{folder} is a {model_type}, which regard does not read itself (it reads: {', '.join(FAMILIES)}); "
            "install transformers to look at it: pip install transformers"
        ) from None
    name = class_named(transformers, read_config(Path(folder)).get("architectures"))
    progress = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(transformers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except Exception as error:  # a folder may be broken in any way, and each has an error of its own
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load {folder} as a {model_type}: {first}") from None
    finally:
        if progress:
            transformers.utils.logging.enable_progress_bar()
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{folder} is a {model_type}, which is asked by {model.main_input_name}, not by text; run it from Python "
            "inside `with regard.watch(model) as seen:`"
        )
    on = "" if device == "cpu" else f".to({device!r})"
    code = f"model = {name}.from_pretrained({folder!r}){on}.eval()"
    return Theirs(model.to(device).eval(), code, f"from transformers import {name}")


def class_named(transformers: ModuleType, architectures: object) -> str:
    """The first of the classes in a config.json, where transformers has it; else the one that finds out by itself."""
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    found = getattr(transformers, name, None)
    whole = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return name if whole else "AutoModel"
