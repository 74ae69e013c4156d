"""A family of Hugging Face models: how its config.json and the names of its weights correspond to ours."""

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
    """How one model_type of Hugging Face corresponds to one of our architectures. Converts in both directions.

    config         our configuration class
    architectures  Hugging Face's class names, each with the settings of ours that it implies; the first is the default
    fields         the settings that both configurations have
    names          our names of modules and tensors, and theirs
    prefix         start of the names of their weights in a full model; a base model's names lack it
    fixed          settings of theirs for which we support only this value
    tied           their names of tensors that are copies, and of the tensors that they must equal
    ignored        patterns of their names of tensors that are not needed
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
        """Our configuration from Hugging Face's config.json."""
        expect(hf, **self.fixed)
        return self.config(**self.read_settings(hf))

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        """The settings of our configuration from Hugging Face's config.json."""
        return {**read_fields(self.fields, hf), **self.architectures[get_architecture(hf, *self.architectures)]}

    def write_config(self, config: Config, model_type: str) -> dict[str, Any]:
        """Hugging Face's config.json for our configuration. Raises ConfigError if it cannot express a setting."""
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
        """The settings of Hugging Face's config.json for our configuration."""
        fitting = [name for name, implied in self.architectures.items() if _has_settings(config, implied)]
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # ours has no special tokens
        return {"architectures": fitting[-1:], **special, **write_fields(self.fields, config)}

    def read_weights(
        self, weights: Mapping[str, Tensor], ours: Mapping[str, Tensor], config: Config, source: str
    ) -> dict[str, Tensor]:
        """The state dict of our model from Hugging Face's weights.

        ours    state dict of our model on the meta device, for names and shapes
        source  where the weights come from, for errors
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
        """Convert older or partial variants of Hugging Face's weights to one form, before names are translated."""
        return weights

    def write_weights(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Hugging Face's weights from the state dict of our model."""
        return write_weights(self.names, weights, config)


def resolve_defaults(config: Any) -> Any:
    """The configuration with every None replaced by the value it stands for, so that two can be compared."""
    defaults = {"ff_width": 4 * config.width, "decoder_depth": config.depth, "head_width": config.width // config.heads}
    changes = {name: value for name, value in defaults.items() if getattr(config, name, value) is None}
    if isinstance(getattr(config, "mixer", None), DotProductAttention):
        changes["mixer"] = config.mixer.resolve(config)
    return replace(config, **changes)


def list_differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """The settings in which two configurations of one class differ."""
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
