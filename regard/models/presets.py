"""Models by name."""

from importlib import import_module
from typing import Any

import torch

from regard.base.config import override
from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.models.model import Config, Model

# one file each, and the class in it
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
KINDS: Registry[type[Model]] = Registry("kind of model")
PRESETS: Registry[Config] = Registry("model")
for _file, _class in _FILES.items():
    _module = import_module(f"regard.models.{_file}")
    KINDS.add(_file)(getattr(_module, _class))
    for _name, _config in _module.PRESETS.items():
        PRESETS.add(_name)(_config)


def build(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Model:
    """The model of that name, freshly initialised; settings of its configuration can be changed: depth=4."""
    if not isinstance(name, str):
        raise ConfigError(f"build takes the name of a model such as 'gpt2', not {name!r}")
    return build_from_config(override(PRESETS[name], overrides), seed=seed, device=device, dtype=dtype)


def build_from_config(
    config: Config,
    *,
    seed: int | None = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The model of a configuration. Without a seed nothing is filled in, for weights that are about to be loaded."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype takes a floating type such as torch.float32, not {dtype!r}")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device takes a device such as 'cpu' or 'cuda', not {device!r}") from None
    with torch.device("meta"):  # no library's default is drawn only to be drawn over
        model = model_class(config)(config)
    model = model.to(dtype)
    if device.type != "meta":
        model = model.to_empty(device=device)
        if seed is not None:
            model.initialise(seed)
    return model


def model_class(config: Config) -> type[Model]:
    for name in KINDS:
        if KINDS[name].Config is type(config):
            return KINDS[name]
    raise ConfigError(f"no model is made from a {type(config).__name__}")
