"""Create models by name: `list_models`, `build`."""

from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regard.base.config import override
from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.models.model import Config, Model

# the file of each architecture, and the class in it
_FILES = {
    "transformer": "Transformer",
    "gpt": "GPT",
    "bert": "BERT",
    "vit": "ViT",
    "davit": "DaViT",
    "speech": "Speech",
    "rnn": "RNN",
    "mlp": "MLP",
    "cnn": "CNN",
    "resnet": "ResNet",
}
MODEL_CLASSES: Registry[type[Model]] = Registry("architecture")
ZOO = Path(__file__).parent / "zoo"  # pretrained models, one folder each: a finished run, with its model inside
PRESETS: Registry[Config] = Registry("model")
for _file, _class in _FILES.items():
    _module = import_module(f"regard.models.{_file}")
    MODEL_CLASSES.add(_file)(getattr(_module, _class))
    for _name, _config in _module.PRESETS.items():
        PRESETS.add(_name)(_config)


def list_models(pattern: str | None = None, *, pretrained: bool = False) -> list[str]:
    """Return the names of models, sorted.

    pattern     a glob pattern such as "gpt2*"; None is all
    pretrained  False lists the presets, for `build`; True lists models that ship with trained weights, for
                `load`

    >>> regard.list_models("gpt2*")
    ['gpt2', 'gpt2-large', 'gpt2-medium', 'gpt2-xl']
    """
    names = [file.parts[-3] for file in ZOO.glob("*/model/config.json")] if pretrained else list(PRESETS)
    return sorted(name for name in names if pattern is None or fnmatchcase(name, pattern))


def find_pretrained(name: str) -> Path | None:
    """Return the folder of a pretrained model that ships with the package; None for any other name."""
    return ZOO / name if name in list_models(pretrained=True) else None


def build(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Model:
    """Build a model by name with initial weights. `list_models()` lists the names.

    seed       seed of the initial weights
    device     device of the parameters; None is torch's default device, also inside `with torch.device(...)`
    dtype      dtype of the parameters
    overrides  settings of the configuration, such as depth=4

    >>> regard.build("gpt2", depth=2).parameter_count
    53561088
    """
    if not isinstance(name, str):
        raise ConfigError(f"build takes the name of a model such as 'gpt2', not {name!r}")
    return build_from_config(override(PRESETS[name], overrides), seed=seed, device=device, dtype=dtype)


def build_from_config(
    config: Config,
    *,
    seed: int | None = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Build a model from its configuration, with initial weights.

    seed    seed of the initial weights; None leaves them uninitialised, for weights that are loaded afterwards
    device  device of the parameters; None is torch's default device
    dtype   dtype of the parameters
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype takes a floating-point type such as torch.float32, not {dtype!r}")
    try:
        device = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device takes a device such as 'cpu' or 'cuda', not {device!r}") from None
    try:
        with torch.device("meta"):  # skips torch's default initialisation
            model = model_class(config)(config)
        model = model.to(dtype)
        if device.type != "meta":
            model = model.to_empty(device=device)
    except (RuntimeError, MemoryError) as error:
        if any(words in str(error) for words in ("overflow", "can't allocate memory", "out of memory")):
            raise ConfigError(
                f"the model does not fit into memory: {config}; choose a smaller width or depth"
            ) from None
        raise
    if device.type != "meta" and seed is not None:
        model.init_weights(seed)
    return model


def model_class(config: Config) -> type[Model]:
    """Return the model class for this type of configuration."""
    for name in MODEL_CLASSES:
        if MODEL_CLASSES[name].Config is type(config):
            return MODEL_CLASSES[name]
    raise ConfigError(f"no model is built from a {type(config).__name__}")
