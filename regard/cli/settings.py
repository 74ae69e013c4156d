"""Settings typed on the command line: name=value, in the types that the setting has."""

import ast
import dataclasses
import math
from typing import Any

from regard.base.errors import ConfigError


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
    import typing

    *inner, last = path.split(".")
    for name in inner:
        config = getattr(config, name, None)
    kind = config if isinstance(config, type) else type(config)
    return typing.get_type_hints(kind).get(last)


def read_value(text: str, hint: Any) -> Any:
    """A value as its annotation wants it, as far as its text can tell; what does not fit is refused when it is set."""
    import typing

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
