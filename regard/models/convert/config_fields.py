"""Read and write the settings of a Hugging Face config.json. A value that regard does not support raises an error.

A setting that is missing or null gets the default of transformers, if there is one. The type of every value is checked,
so that the error for a damaged file names the setting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.base.errors import CheckpointError, ConfigError
from regard.base.validation import LARGEST_FLOAT, LARGEST_INTEGER

HFConfig = Mapping[str, Any]


def get_int(hf: HFConfig, name: str, default: int | None = None) -> int:
    """Return the setting `name` of a config.json, which must be a whole number of 0 or more.

    `default` replaces a setting that is missing or null. If it is None, the setting is required.
    """

    def is_size(value: Any) -> bool:
        return type(value) is int and 0 <= value <= LARGEST_INTEGER

    return int(_get(hf, name, default, is_size, "a whole number of 0 or more, and no larger than a size can be"))


def get_optional_int(hf: HFConfig, name: str, default: int | None = None) -> int | None:
    """Return the setting `name` of a config.json, a whole number of 0 or more, or None if it is null.

    `default` replaces a setting that is missing.
    """
    return get_int(hf, name) if hf.get(name) is not None else None if name in hf else default


def get_float(hf: HFConfig, name: str, default: float | None = None) -> float:
    """Return the setting `name` of a config.json, which must be a finite number.

    `default` replaces a setting that is missing or null. If it is None, the setting is required.
    """
    return float(_get(hf, name, default, _is_finite_number, "a number"))


def get_bool(hf: HFConfig, name: str, default: bool) -> bool:
    """Return the setting `name` of a config.json, which must be true or false.

    `default` replaces a setting that is missing or null.
    """
    return bool(_get(hf, name, default, lambda value: isinstance(value, bool), "true or false"))


def get_strings(hf: HFConfig, name: str) -> list[str]:
    """Return the setting `name` of a config.json, which must be a list of strings.

    A setting that is missing or null gives an empty list.
    """
    return list(_get(hf, name, [], _is_list_of_words, "a list of words"))


def get_section(hf: HFConfig, name: str) -> dict[str, Any]:
    """Return the settings of the nested object `name` of a config.json, by full names such as rope_parameters.factor.

    The result also has model_type, for error messages. If the object is missing, the result has only model_type.
    """
    inner = _get(hf, name, {}, lambda value: isinstance(value, Mapping), "an object with settings")
    return {"model_type": hf.get("model_type"), **{f"{name}.{each}": value for each, value in inner.items()}}


def get_num_labels(hf: HFConfig, name: str, default: int) -> int:
    """Return the number of labels of a config.json: the length of id2label if it exists, else the setting `name`.

    If both are missing, return `default`.
    """
    labels = hf.get("id2label")
    if labels is not None and not isinstance(labels, Mapping):
        raise wrong_type(hf, "id2label", "an object from numbers to labels")
    return get_int(hf, name, default) if labels is None else len(labels)


def write_labels(name: str, classes: int) -> dict[str, Any]:
    """Return the settings id2label and label2id for a number of classes: the labels are LABEL_0, LABEL_1 and so on.

    name  not used; every `write` function of a `Field` has this argument
    """
    labels = {f"LABEL_{number}": number for number in range(classes)}
    return {"id2label": {str(number): label for label, number in labels.items()}, "label2id": labels} if labels else {}


def get_architecture(hf: HFConfig, *known: str) -> str:
    """Return the class name of the model: the first entry of `architectures`, or known[0] if that is missing.

    known  the supported class names; any other raises CheckpointError
    """
    name = (get_strings(hf, "architectures") or [known[0]])[0]
    if name not in known:
        raise CheckpointError(
            f"config.json of this {hf.get('model_type')} is of a {name}; supported are {', '.join(known)}"
        )
    return name


def expect(hf: HFConfig, **supported: Any) -> None:
    """Raise CheckpointError if a config.json has another value than the supported one. It may lack the setting.

    supported  the settings to check, each with the only value that is supported
    """
    for name, value in supported.items():
        if hf.get(name, value) != value:
            raise CheckpointError(
                f"config.json of this {hf.get('model_type')} says {name}={hf[name]!r}; only {value!r} is supported"
            )


def wrong_type(hf: HFConfig, name: str, wanted: str) -> CheckpointError:
    """Return the CheckpointError for a setting of a config.json that is not of the `wanted` type."""
    return CheckpointError(
        f"config.json of this {hf.get('model_type')} says {name}={hf.get(name)!r}, which should be {wanted}"
    )


def _get(hf: HFConfig, name: str, default: Any, is_valid: Callable[[Any], bool], wanted: str) -> Any:
    value = default if hf.get(name) is None else hf[name]
    if value is None:
        raise CheckpointError(f"config.json of this {hf.get('model_type')} lacks {name}")
    if not is_valid(value):
        raise wrong_type(hf, name, wanted)
    return value


def _is_finite_number(value: Any) -> bool:
    # integers are compared, as isfinite overflows for large ones
    return type(value) in (int, float) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


@dataclass(frozen=True)
class NameTable:
    """A table for a setting whose values are names, such as activation functions, that differ from regard's names.

    names  maps Hugging Face's names to regard's
    """

    names: Mapping[str, str]

    def read(self, hf: HFConfig, name: str, default: str) -> str:
        """Return regard's name for the value of the setting `name` in a config.json.

        default  Hugging Face's value if the setting is missing
        """
        known = f"one of {', '.join(self.names)}"
        return self.names[_get(hf, name, default, lambda value: isinstance(value, str) and value in self.names, known)]

    def write(self, name: str, ours: str) -> dict[str, Any]:
        """Return {name: value} for a config.json, where value is Hugging Face's name for `ours`."""
        theirs = next((theirs for theirs, value in self.names.items() if value == ours), None)
        if theirs is None:
            raise ConfigError(f"it has no {name} for {ours!r}")
        return {name: theirs}


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
    """A setting that exists in both a Hugging Face configuration and regard's configuration.

    name     Hugging Face's name of the setting
    read     function that reads the setting from a config.json, such as `get_int`
    default  transformers' default; None if the setting is required
    write    function that is called with `name` and regard's value and returns the settings to write to config.json;
             by default {name: value}
    """

    name: str
    read: Callable[..., Any] = get_int
    default: Any = None
    write: Callable[[str, Any], dict[str, Any]] = lambda name, value: {name: value}


def name_field(name: str, table: NameTable, default: str) -> Field:
    """Return the `Field` of a setting whose values are names; a `NameTable` translates them."""
    return Field(name, table.read, default, table.write)


Fields = Mapping[str, Field]  # fields by regard's names
SIZES = {
    "width": Field("hidden_size"),
    "depth": Field("num_hidden_layers"),
    "heads": Field("num_attention_heads"),
    "ff_width": Field("intermediate_size"),
}


def read_fields(fields: Fields, hf: HFConfig) -> dict[str, Any]:
    """Read settings from a Hugging Face config.json and return them by regard's names.

    fields  the `Field` of each setting, by regard's name
    """
    return {ours: field.read(hf, field.name, field.default) for ours, field in fields.items()}


def write_fields(fields: Fields, config: Any) -> dict[str, Any]:
    """Return settings of regard's configuration as settings of a Hugging Face config.json.

    fields  the `Field` of each setting, by regard's name
    """
    written: dict[str, Any] = {}
    for ours, field in fields.items():
        written |= field.write(field.name, getattr(config, ours))
    return written
