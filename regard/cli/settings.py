"""`--set name=value`: parse settings on the command line by their type annotations, and list them."""

import ast
import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

from regard.base.config import is_required, override, union_members
from regard.base.errors import ConfigError


def apply_settings(config: Any, texts: list[str]) -> Any:
    """Return the configuration changed by `--set` texts such as "plan.steps=100", in any order.

    If a name occurs twice, the last text is used. Names with fewer dots are set first, such as `plan.optimizer` before
    `plan.optimizer.lr`. If a change makes the configuration invalid, it is tried again after the other changes. If all
    changes that are left make it invalid one by one, they are applied together.
    """
    last = {text.partition("=")[:2]: text for text in texts}
    pending = [last[each] for each in sorted(last, key=lambda each: each[0].count("."))]
    while pending:
        errors: dict[str, ConfigError] = {}
        for text in pending:
            try:
                config = override(config, parse_settings([text], config))
            except ConfigError as error:
                errors[text] = error
        if len(errors) == len(pending):
            try:
                return override(config, parse_settings(pending, config))
            except ConfigError:
                raise next(iter(errors.values())) from None
        pending = list(errors)
    return config


def parse_settings(texts: list[str], config: Any) -> dict[str, Any]:
    """Parse `--set` texts such as "plan.steps=100" and return the values by dotted name.

    config  the configuration, or its class, whose type annotations are used
    """
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set takes name=value, as in --set seed=1, not {text!r}")
        changes[name.strip()] = parse_value(value.strip(), annotation_of(config, name.strip()))
    return changes


def annotation_of(config: Any, path: str) -> Any:
    """Return the type annotation of the setting at a dotted path; None if there is no such setting.

    The error for an unknown setting is raised later, by `regard.base.config.override`.
    """
    *inner, last = path.split(".")
    for name in inner:
        config = getattr(config, name, None)
    kind = config if isinstance(config, type) else type(config)
    return typing.get_type_hints(kind).get(last)


def parse_value(text: str, hint: Any) -> Any:
    """Convert the text of a `--set` value to the type of the setting.

    The result can have a wrong type, which `regard.base.config.override` reports.

    hint  type annotation of the setting
    """
    if hint is str:
        return text
    named = {
        kind.__name__.lower(): kind
        for kind in typing.get_args(hint)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    if text.lower() in named:
        return _build_default(named[text.lower()])
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if typing.get_origin(inner) is not tuple:
            parts = [part.strip().strip("'\"") for part in text.strip("()[]").split(",")]  # names may be quoted
            return tuple(parse_value(part, inner) for part in parts if part)
    return parse_literal(text)


def _build_default(kind: Any) -> Any:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} has settings without a default: {error}") from None


def parse_literal(text: str) -> Any:
    """Convert a text to a Python literal, such as a number; any other text is returned unchanged."""
    named = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting as `regard train list NAME` shows it. Values are texts that `--set` accepts.

    name      dotted name of the setting
    built_in  value for the built-in data; None if there is no such setting or if no text can set it
    real      value for real data; None for the same reasons
    about     description of the setting, from the docstring of its class
    """

    name: str
    built_in: str | None
    real: str | None
    about: str


def list_settings(built_in: Any, real: Any, path: str = "") -> Iterator[Setting]:
    """Yield every setting that `--set` can change; a nested configuration comes before the settings inside it.

    built_in  configuration for the built-in data
    real      configuration for real data
    path      prefix of the names, if the two are nested in other configurations, such as "plan."
    """
    for name in dict.fromkeys(_fields(built_in) + _fields(real)):
        owner = type(built_in if name in _fields(built_in) else real)
        hint = typing.get_type_hints(owner)[name]
        if _holds_configurations(hint):  # no text can set these
            continue
        first, second = (getattr(each, name) if name in _fields(each) else _ABSENT for each in (built_in, real))
        about = "; ".join(part for part in (field_docs(owner).get(name, ""), _choices(hint)) if part)
        if len(union_members(hint)) > 1 or not dataclasses.is_dataclass(hint):
            yield Setting(path + name, format_value(first, hint), format_value(second, hint), about)
        elif about:
            yield Setting(path + name, None, None, about)
        yield from list_settings(first, second, f"{path}{name}.")


_ABSENT = object()


def format_value(value: Any, hint: Any) -> str | None:
    """Convert a value to a text that `--set` accepts. A nested configuration becomes the name of its class.

    hint  type annotation of the setting
    """
    if value is _ABSENT:
        return None
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value and typing.get_origin(hint) is tuple and not isinstance(value[0], tuple):
        return ",".join(str(each) for each in value)
    return str(value)


def field_docs(kind: type) -> dict[str, str]:
    """Return the description of each field of a configuration class, by name, read from the docstring of the class."""
    lines = re.findall(r"^(\w+)  +(\S.*(?:\n  +\S.*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


def _fields(config: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(config) if each.init] if dataclasses.is_dataclass(config) else []


def _holds_configurations(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple and any(
        map(dataclasses.is_dataclass, union_members(typing.get_args(hint)[0]))
    )


def _choices(hint: Any) -> str:
    """Describe the classes that a nested configuration can be set to; "" if there is no choice."""
    kinds = [each for each in union_members(hint) if isinstance(each, type) and dataclasses.is_dataclass(each)]
    names = [
        each.__name__
        for each in kinds
        if not any(field.init and is_required(field) for field in dataclasses.fields(each))
    ]
    if not names or len(union_members(hint)) == 1:
        return ""
    return "takes " + ", ".join(names + ["none"] * (type(None) in union_members(hint)))
