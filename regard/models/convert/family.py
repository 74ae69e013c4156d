"""`Family`: the converter between one model type of Hugging Face and one architecture of regard."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields as dataclass_fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert.config_fields import Fields, HFConfig, expect, get_architecture, read_fields, write_fields
from regard.models.convert.weight_rules import WeightTable, find_rule, read_weights, write_weights
from regard.models.gpt import DotProductAttention
from regard.models.model import Config


@dataclass(frozen=True, kw_only=True)
class Family:
    """The converter between one Hugging Face model_type and one architecture of regard, in both directions.

    config         regard's configuration class
    architectures  Hugging Face's class names, each with the regard settings that it implies; the first is the
                   default
    fields         the settings that both configurations have
    names          table from regard's names of modules and tensors to Hugging Face's
    prefix         start of the weight names of a full model, such as "bert."; in a checkpoint of the base model
                   (BertModel) the names lack it
    fixed          Hugging Face settings, each with the only value that is supported
    tied           table from the name of a tensor to the name of the tensor that it must equal, both of Hugging Face
    ignored        patterns of Hugging Face names of tensors that are not needed
    """

    config: type[Config]
    architectures: Mapping[str, Mapping[str, Any]]
    fields: Fields
    names: WeightTable
    prefix: str
    fixed: HFConfig = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def read_config(self, hf: HFConfig) -> Config:
        """Convert a Hugging Face config.json to regard's configuration."""
        expect(hf, **self.fixed)
        return self.config(**self.read_settings(hf))

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        """Return the settings of regard's configuration, read from a Hugging Face config.json."""
        return {**read_fields(self.fields, hf), **self.architectures[get_architecture(hf, *self.architectures)]}

    def write_config(self, config: Config, model_type: str) -> dict[str, Any]:
        """Convert regard's configuration to a Hugging Face config.json.

        Raises ConfigError if the config.json cannot express a setting.
        """
        if not isinstance(config, self.config):
            raise ConfigError(f"it is built from a {self.config.__name__}, not {type(config).__name__}")
        config = resolve_defaults(config)
        if getattr(config, "ff_width", None) == 0:
            raise ConfigError("this has ff_width=0, blocks without a feed-forward network, where it has one")
        hf = {"model_type": model_type, **self.write_settings(config), **self.fixed}
        different = list_differences(config, resolve_defaults(self.read_config(hf)))
        if different:
            raise ConfigError(f"this has {'; '.join(different)}")
        return hf

    def write_settings(self, config: Any) -> dict[str, Any]:
        """Return the settings of a Hugging Face config.json for regard's configuration."""
        fitting = [name for name, implied in self.architectures.items() if _has_settings(config, implied)]
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # ours has no special tokens
        return {"architectures": fitting[-1:], **special, **write_fields(self.fields, config)}

    def read_weights(
        self, weights: Mapping[str, Tensor], ours: Mapping[str, Tensor], config: Config, source: str
    ) -> dict[str, Tensor]:
        """Convert Hugging Face's weights to the state dict of regard's model.

        ours    state dict of regard's model on the meta device, for names and shapes
        source  where the weights come from, for error messages
        """
        missing = "" if any(name.startswith(self.prefix) for name in weights) else self.prefix
        theirs = self.clean_weights({f"{missing}{name}": tensor for name, tensor in weights.items()}, config)
        used = {name for each in ours for name in find_rule(self.names, each).theirs}
        for copy, original in self.tied.items():
            if copy in theirs and copy not in used:
                tensor = theirs.pop(copy)
                if not torch.equal(tensor, theirs.setdefault(original, tensor)):
                    raise CheckpointError(f"{copy} is not {original}; only tied weights are supported")
        # a published checkpoint often has the heads of its pretraining, although its architecture has none of them
        heads = [
            rule if isinstance(rule, str) else rule.theirs[0] for ours, rule in self.names.items() if "*" not in ours
        ]
        unneeded = (*self.ignored, *(f"{name}*" for name in heads))
        kept = {
            name: tensor
            for name, tensor in theirs.items()
            if name in used or not any(fnmatchcase(name, pattern) for pattern in unneeded)
        }
        return read_weights(self.names, kept, ours, source)

    def clean_weights(self, weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Convert older or incomplete variants of Hugging Face's weights to Hugging Face's current format.

        This base class returns them unchanged. The names are translated to regard's afterwards.
        """
        return weights

    def write_weights(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Convert the state dict of regard's model to Hugging Face's weights."""
        return write_weights(self.names, weights, config)


def resolve_defaults(config: Any) -> Any:
    """Return the configuration with the default in place of each None that stands for one.

    Two configurations can then be compared. A None that has a meaning of its own, such as window=None, stays.
    """
    defaults = {"ff_width": 4 * config.width, "decoder_depth": config.depth, "head_width": config.width // config.heads}
    changes = {name: value for name, value in defaults.items() if getattr(config, name, value) is None}
    if isinstance(getattr(config, "mixer", None), DotProductAttention):
        changes["mixer"] = config.mixer.resolve(config)
    return replace(config, **changes)


def list_differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Return the settings in which two configurations of the same class differ, as text.

    path  prefix of the names, for nested configurations
    """
    found: list[str] = []
    for name in (each.name for each in dataclass_fields(ours)):
        a, b = getattr(ours, name), getattr(theirs, name)
        if is_dataclass(a) and type(a) is type(b):
            found += list_differences(a, b, f"{path}{name}.")
        elif a != b:
            found.append(f"{path}{name}={a!r} where it has {b!r}")
    return found


def _has_settings(config: Any, settings: Mapping[str, Any]) -> bool:
    return all(getattr(config, name) == value for name, value in settings.items())
