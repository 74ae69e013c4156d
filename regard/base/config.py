"""Configurations as frozen dataclasses: override settings by name with type checks, convert to and from JSON."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

from regard.base.errors import ConfigError
from regard.base.validation import suggest

T = TypeVar("T")


def override(config: T, changes: Mapping[str, Any]) -> T:
    """Return a copy of a configuration with some fields changed. Raises ConfigError for unknown names and wrong types.

    changes  new values by name; a dotted name such as `model.depth` changes a nested configuration
    """
    direct: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(type(config))
    for path, value in changes.items():
        name, dot, rest = path.partition(".")
        _check_name(config, name)
        if dot:
            nested.setdefault(name, {})[rest] = value
        else:
            direct[name] = coerce(f"{type(config).__name__}.{name}", value, hints[name])
    for name, changed in nested.items():
        inner = direct.get(name, getattr(config, name))
        if not dataclasses.is_dataclass(inner):
            raise ConfigError(
                f"{name}.{next(iter(changed))} is not a setting: {name} is {inner!r}, which has no settings"
            )
        direct[name] = override(inner, changed)
    return dataclasses.replace(config, **direct)  # type: ignore[type-var]


def to_json(value: Any) -> Any:
    """Convert a value to types that `json.dumps` accepts.

    A dataclass becomes a dictionary that has the name of the class under "kind".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        if "kind" in fields:
            raise ConfigError(
                f"{type(value).__name__} has a setting called 'kind', which is reserved for the name of its class"
            )
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(what: str, kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a configuration of class `kind` from `data`, the output of `to_json`.

    Raises ConfigError if `data` does not fit the class.

    what  the source of `data`, such as a file name, for error messages
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what} must be an object with the settings of {kind.__name__}, not {data!r}")
    if data.get("kind", kind.__name__) != kind.__name__:
        raise ConfigError(f"{what} has the settings of {data['kind']}, not of {kind.__name__}")
    settings = {name: value for name, value in data.items() if name != "kind"}
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(fields))
    if unknown:
        raise ConfigError(f"{what} has {', '.join(unknown)}, which {kind.__name__} does not have")
    needed = [name for name, field in fields.items() if is_required(field) and name not in settings]
    if needed:
        raise ConfigError(f"{what} lacks {', '.join(needed)}, which {kind.__name__} needs")
    return kind(**{name: coerce(f"{what}: {name}", value, hints[name]) for name, value in settings.items()})


def coerce(what: str, value: Any, hint: Any) -> Any:
    """Convert a value to its annotated type: integers to float, lists to tuples.

    Raises ConfigError if the value does not match the annotation.

    what  the name of the value in error messages
    hint  the type annotation
    """
    errors: list[ConfigError] = []
    for option in union_members(hint):
        try:
            converted = _convert(what, value, option)
        except ConfigError as error:  # the form is right, but a part of it is wrong
            errors.append(error)
            continue
        if converted is not _NO_MATCH:
            return converted
    raise errors[0] if errors else ConfigError(f"{what} takes {_describe(hint)}, not {value!r}")


_NO_MATCH = object()


def _convert(what: str, value: Any, option: Any) -> Any:
    origin = typing.get_origin(option)
    if origin is tuple and isinstance(value, tuple | list):
        inner = typing.get_args(option)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(coerce(what, item, inner[0]) for item in value)
        if len(inner) != len(value):
            return _NO_MATCH
        return tuple(coerce(what, item, each) for item, each in zip(value, inner, strict=True))
    if origin is not None:
        return _NO_MATCH
    if isinstance(value, Mapping) and isinstance(option, type) and dataclasses.is_dataclass(option):
        return from_json(what, option, value) if value.get("kind") == option.__name__ else _NO_MATCH
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # larger than any float
            return _NO_MATCH
    if isinstance(value, bool) and option is not bool:
        return _NO_MATCH
    return value if isinstance(value, option) else _NO_MATCH


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union annotation such as int | None. Returns (hint,) for any other annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe_type(option: Any) -> str:
    inner = typing.get_args(option)
    if typing.get_origin(option) is not tuple:
        return str(getattr(option, "__name__", option))
    if inner[-1] is Ellipsis:
        return f"a list of values, each {_describe(inner[0])}"
    return f"{len(inner)} values ({', '.join(map(_describe, inner))})"


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a real number", str: "a word", bool: "True or False"}
    words = [names.get(option) or _describe_type(option) for option in union_members(hint)]
    return " or ".join("None" if word == "NoneType" else word for word in words)


def _check_name(config: object, name: str) -> None:
    known = [field.name for field in dataclasses.fields(config) if field.init]  # type: ignore[arg-type]
    if name not in known:
        hint = suggest(name, known)
        raise ConfigError(f"{type(config).__name__} has no setting {name!r}{hint} (there are: {', '.join(known)})")


def is_required(field: "dataclasses.Field[Any]") -> bool:
    """Return whether a dataclass field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
