"""Models of Hugging Face that regard cannot load itself: loaded by transformers, if it is installed."""

from pathlib import Path
from types import ModuleType

from regard.base.errors import CheckpointError, ConfigError
from regard.base.extras import import_optional
from regard.cli.looking.models import LoadedModel


def foreign_model_type(folder: str) -> str | None:
    """Return the model_type of a Hugging Face folder that regard cannot load itself; None for all other folders."""
    from regard.models.convert import FAMILIES
    from regard.models.saving import FORMAT, read_config

    config = read_config(Path(folder))
    kind = str(config.get("model_type", ""))
    return None if config.get("format") == FORMAT or not kind or kind in FAMILIES else kind


def load_transformers_model(folder: str, model_type: str, device: str) -> LoadedModel:
    """Load a Hugging Face folder with transformers, with the class that its config.json names.

    model_type  the model_type in config.json, for error messages
    """
    from regard.integrations.torchvision import let_torchvision_load
    from regard.models.convert import FAMILIES
    from regard.models.saving import read_config

    let_torchvision_load()
    purpose = f"{folder} is a {model_type}, which regard cannot load itself (it can load: {', '.join(FAMILIES)}); it"
    transformers = import_optional("transformers", "huggingface", purpose)
    name = choose_class(transformers, read_config(Path(folder)).get("architectures"))
    progress = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(transformers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except Exception as error:  # transformers has no common error for damaged folders
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load {folder} as a {model_type}: {first}") from None
    finally:
        if progress:
            transformers.utils.logging.enable_progress_bar()
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{folder} is a {model_type}, whose input is {model.main_input_name}, not text; run it from Python "
            "inside `with regard.watch(model) as seen:`"
        )
    on = "" if device == "cpu" else f".to({device!r})"
    return LoadedModel(
        name=folder,
        folder=Path(folder),
        model=model.to(device).eval(),
        weights="from the folder",
        code=f"model = {name}.from_pretrained({folder!r}){on}.eval()",
        imports=f"from transformers import {name}",
        kind="pair" if model.config.is_encoder_decoder else "text",
        vocab=model.get_input_embeddings().num_embeddings,
        max_length=getattr(model.config, "max_position_embeddings", None),
        input_names=("input_ids", "decoder_input_ids"),
    )


def choose_class(transformers: ModuleType, architectures: object) -> str:
    """Return the first class name in "architectures" of a config.json, if transformers has it; else AutoModel."""
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return name if is_model else "AutoModel"
