"""Read and write settings of a Hugging Face config.json, checked: an unknown value is refused, not ignored.

A setting that is missing or null has transformers' default, where there is one. Every value is checked for its type,
so that a damaged file ends in an error that names the setting.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.base.errors import CheckpointError, ConfigError

HFConfig = Mapping[str, Any]


def get_int(hf: HFConfig, name: str, default: int | None = None) -> int:
    """A whole number of 0 or more; required if there is no default."""
    value = _get(hf, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong_type(hf, name, "a whole number of 0 or more")
    return value


def get_optional_int(hf: HFConfig, name: str, default: int | None = None) -> int | None:
    """A whole number, or None for null; only a missing setting has the default."""
    return get_int(hf, name) if hf.get(name) is not None else None if name in hf else default


def get_float(hf: HFConfig, name: str, default: float | None = None) -> float:
    """A finite number; required if there is no default."""
    value = _get(hf, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong_type(hf, name, "a number")
    return float(value)


def get_bool(hf: HFConfig, name: str, default: bool) -> bool:
    """True or false."""
    value = _get(hf, name, default)
    if not isinstance(value, bool):
        raise wrong_type(hf, name, "true or false")
    return value


def get_strings(hf: HFConfig, name: str) -> list[str]:
    """A list of words; empty if it is missing."""
    value = _get(hf, name, [])
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise wrong_type(hf, name, "a list of words")
    return list(value)


def get_section(hf: HFConfig, name: str) -> dict[str, Any]:
    """A nested object, its settings under full names such as rope_parameters.factor; empty if it is missing."""
    value = _get(hf, name, {})
    if not isinstance(value, Mapping):
        raise wrong_type(hf, name, "an object with settings")
    return {"model_type": hf.get("model_type"), **{f"{name}.{inner}": each for inner, each in value.items()}}


def get_num_labels(hf: HFConfig) -> int:
    """The number of labels; transformers' default is 2."""
    labels = hf.get("id2label")
    if labels is None:
        return get_int(hf, "num_labels", 2)
    if not isinstance(labels, Mapping):
        raise wrong_type(hf, "id2label", "an object from numbers to labels")
    return len(labels)


def label_names(classes: int) -> dict[str, Any]:
    """The settings id2label and label2id, with transformers' default names."""
    labels = {f"LABEL_{number}": number for number in range(classes)}
    return {"id2label": {str(number): name for name, number in labels.items()}, "label2id": labels}


def get_architecture(hf: HFConfig, *known: str) -> str:
    """The first of `architectures`, which must be known; if it is missing, the first that is known."""
    name = (get_strings(hf, "architectures") or [known[0]])[0]
    if name not in known:
        raise CheckpointError(
            f"config.json of this {hf.get('model_type')} is of a {name}; supported are {', '.join(known)}"
        )
    return name


def expect(hf: HFConfig, **supported: Any) -> None:
    """Raise where a setting does not have the value that our model supports; missing is fine."""
    for name, value in supported.items():
        if hf.get(name, value) != value:
            raise CheckpointError(
                f"config.json of this {hf.get('model_type')} says {name}={hf[name]!r}; only {value!r} is supported"
            )


def wrong_type(hf: HFConfig, name: str, wanted: str) -> CheckpointError:
    """The error for a setting of another type."""
    return CheckpointError(
        f"config.json of this {hf.get('model_type')} says {name}={hf.get(name)!r}, which should be {wanted}"
    )


def _get(hf: HFConfig, name: str, default: Any) -> Any:
    if hf.get(name) is not None:
        return hf[name]
    if default is None:
        raise CheckpointError(f"config.json of this {hf.get('model_type')} lacks {name}")
    return default


@dataclass(frozen=True)
class NameTable:
    """Reads and writes a setting with a table of Hugging Face's names and ours."""

    names: Mapping[str, str]

    def __call__(self, hf: HFConfig, name: str, default: str) -> str:
        value = _get(hf, name, default)
        if not isinstance(value, str) or value not in self.names:
            raise CheckpointError(
                f"config.json of this {hf.get('model_type')} says {name}={value!r}; known are {', '.join(self.names)}"
            )
        return self.names[value]

    def write(self, name: str, ours: str) -> str:
        """Hugging Face's name of our value."""
        theirs = next((theirs for theirs, value in self.names.items() if value == ours), None)
        if theirs is None:
            raise ConfigError(f"it has no {name} {ours!r}")
        return theirs


ACTIVATION = NameTable(
    {
        "gelu": "gelu",
        "gelu_new": "gelu-tanh",
        "gelu_pytorch_tanh": "gelu-tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }
)


@dataclass(frozen=True)
class Field:
    """One setting of a Hugging Face configuration that is also one of ours.

    name     Hugging Face's name
    read     one of the functions above, or a `NameTable`
    default  transformers' default; None if the setting is required
    """

    name: str
    read: Callable[..., Any] = get_int
    default: Any = None


Fields = Mapping[str, Field]  # by our names


def read_fields(fields: Fields, hf: HFConfig) -> dict[str, Any]:
    """Our settings from a config.json."""
    return {ours: field.read(hf, field.name, field.default) for ours, field in fields.items()}


def write_fields(fields: Fields, config: Any) -> dict[str, Any]:
    """The settings of a config.json from our configuration."""
    written: dict[str, Any] = {}
    for ours, field in fields.items():
        value = getattr(config, ours)
        if ours == "ff_width" and value is None and field.read is get_int:
            value = 4 * config.width
        written[field.name] = field.read.write(ours, value) if isinstance(field.read, NameTable) else value
    return written
