"""Settings typed on the command line: name=value, in the types that the setting has."""

import ast
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from regard.base.config import override
from regard.base.errors import ConfigError


def applied(config: Any, texts: list[str]) -> Any:
    """The configuration with what `--set` texts change, in whatever order they were typed.

    The last of a name counts, and a part comes before what is in it. One that is refused waits for the others; those
    that still are may need each other, and are tried at once.
    """
    last = {text.partition("=")[:2]: text for text in texts}
    waiting = [last[each] for each in sorted(last, key=lambda each: each[0].count("."))]
    while waiting:
        refused: dict[str, ConfigError] = {}
        for text in waiting:
            try:
                config = override(config, read_settings([text], config))
            except ConfigError as error:
                refused[text] = error
        if len(refused) == len(waiting):
            try:
                return override(config, read_settings(waiting, config))
            except ConfigError:
                raise next(iter(refused.values())) from None
        waiting = list(refused)
    return config


def read_settings(texts: list[str], config: Any) -> dict[str, Any]:
    """The changes that `--set` texts ask of a configuration or a class of them; a dotted name reaches into it."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set takes name=value, as in --set seed=1, not {text!r}")
        found[name.strip()] = read_value(value.strip(), hint_of(config, name.strip()))
    return found


def hint_of(config: Any, path: str) -> Any:
    """The annotation of a setting, None where there is none; what is wrong with the name is told when it is set."""
    *inner, last = path.split(".")
    for name in inner:
        config = getattr(config, name, None)
    kind = config if isinstance(config, type) else type(config)
    return typing.get_type_hints(kind).get(last)


def read_value(text: str, hint: Any) -> Any:
    """A value as its annotation wants it, as far as its text can tell; what does not fit is refused when it is set."""
    if hint is str:
        return text
    named = {
        kind.__name__.lower(): kind
        for kind in typing.get_args(hint)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    if text.lower() in named:
        return _with_defaults(named[text.lower()])
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if typing.get_origin(inner) is not tuple:
            parts = [part.strip().strip("'\"") for part in text.strip("()[]").split(",")]  # with or without quotes
            return tuple(read_value(part, inner) for part in parts if part)
    return literal(text)


def _with_defaults(kind: Any) -> Any:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} cannot be made of nothing: {error}") from None


def literal(text: str) -> Any:
    named = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting as a table shows it; values are as `--set` takes them.

    built_in  its value for built-in data; None where there is no such setting, or where it holds others and no text
              makes it
    real      its value for real data
    about     what its class says about it
    """

    name: str
    built_in: str | None
    real: str | None
    about: str


def listed(built_in: Any, real: Any, path: str = "") -> Iterator[Setting]:
    """Every setting that `--set` reaches in one of two configurations; one that holds others comes before them."""
    for name in dict.fromkeys(_fields(built_in) + _fields(real)):
        owner = type(built_in if name in _fields(built_in) else real)
        hint = typing.get_type_hints(owner)[name]
        if _holds_configurations(hint):  # no text makes one of these
            continue
        first, second = (getattr(each, name) if name in _fields(each) else _ABSENT for each in (built_in, real))
        choice = _choice(hint)
        about = "; ".join(part for part in (sentences(owner).get(name, ""), choice) if part)
        if len(_options(hint)) > 1 or not dataclasses.is_dataclass(hint):
            yield Setting(path + name, spelled(first, hint), spelled(second, hint), about)
        elif about:
            yield Setting(path + name, None, None, about)
        yield from listed(first, second, f"{path}{name}.")


_ABSENT = object()


def spelled(value: Any, hint: Any) -> str | None:
    """A value as `--set` takes it; a nested configuration by the name of its class."""
    if value is _ABSENT:
        return None
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value and typing.get_origin(hint) is tuple and not isinstance(value[0], tuple):
        return ",".join(str(each) for each in value)
    return str(value)


def sentences(kind: type) -> dict[str, str]:
    """What the docstring of a configuration says about its settings, by name."""
    found = re.findall(r"^(\w+)  +(\S.*(?:\n  +\S.*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _fields(config: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(config) if each.init] if dataclasses.is_dataclass(config) else []


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _holds_configurations(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple and any(map(dataclasses.is_dataclass, _options(typing.get_args(hint)[0])))


def _choice(hint: Any) -> str:
    """Which kinds of a nested configuration a name alone makes, where there are several."""
    kinds = [each for each in _options(hint) if isinstance(each, type) and dataclasses.is_dataclass(each)]
    names = [each.__name__ for each in kinds if not any(map(_required, dataclasses.fields(each)))]
    if not names or len(_options(hint)) == 1:
        return ""
    return "takes " + ", ".join(names + ["none"] * (type(None) in _options(hint)))


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
