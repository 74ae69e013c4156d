"""Another project's config.json, read with care: what is unknown is refused, not ignored.

A setting that is left out or null has its usual value, where there is one. All that is read is checked for its type: a
damaged file must end in an error that names the setting.
"""

import math
from collections.abc import Mapping
from typing import Any

from regard.base.errors import CheckpointError


def needed(about: Mapping[str, Any], name: str) -> Any:
    """A setting that must be there."""
    if about.get(name) is None:
        raise CheckpointError(f"config.json of this {about.get('model_type')} lacks {name}")
    return about[name]


def whole(about: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    """A whole number, not below 0; one without a usual value must be there."""
    value = needed(about, name) if usual is None or about.get(name) is not None else usual
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong(about, name, "a whole number of 0 or more")
    return value


def whole_or_none(about: Mapping[str, Any], name: str, usual: int | None = None) -> int | None:
    """A whole number or None; here null is None, and only what is left out has the usual value."""
    return whole(about, name) if about.get(name) is not None else None if name in about else usual


def real(about: Mapping[str, Any], name: str, usual: float | None = None) -> float:
    """A finite number; one without a usual value must be there."""
    value = needed(about, name) if usual is None or about.get(name) is not None else usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(about, name, "a number")
    return float(value)


def flag(about: Mapping[str, Any], name: str, usual: bool) -> bool:
    value = usual if about.get(name) is None else about[name]
    if not isinstance(value, bool):
        raise wrong(about, name, "true or false")
    return value


def words(about: Mapping[str, Any], name: str) -> list[str]:
    """A list of words; left out it is empty."""
    value = [] if about.get(name) is None else about[name]
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise wrong(about, name, "a list of words")
    return list(value)


def part(about: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object inside, its settings under their full names, such as rope_parameters.factor; left out it is empty."""
    value = {} if about.get(name) is None else about[name]
    if not isinstance(value, Mapping):
        raise wrong(about, name, "an object with settings")
    return {"model_type": about.get("model_type"), **{f"{name}.{inner}": each for inner, each in value.items()}}


def classes(about: Mapping[str, Any]) -> int:
    """As many as have labels; transformers means 2 where nothing is said."""
    labels = about.get("id2label")
    if labels is None:
        return whole(about, "num_labels", 2)
    if not isinstance(labels, Mapping):
        raise wrong(about, "id2label", "an object from numbers to labels")
    return len(labels)


def expect(about: Mapping[str, Any], **usual: Any) -> None:
    """Raise where a setting is not the one that our model has; left out means usual."""
    for name, value in usual.items():
        if about.get(name, value) != value:
            raise CheckpointError(
                f"config.json of this {about.get('model_type')} says {name}={about[name]!r}; only {value!r} is served"
            )


def choice(about: Mapping[str, Any], name: str, ours: Mapping[str, str], default: str) -> str:
    """A setting by our name for it."""
    value = default if about.get(name) is None else about[name]
    if not isinstance(value, str) or value not in ours:
        raise CheckpointError(
            f"config.json of this {about.get('model_type')} says {name}={value!r}; known are {', '.join(ours)}"
        )
    return ours[value]


def wrong(about: Mapping[str, Any], name: str, wanted: str) -> CheckpointError:
    """The refusal of a setting that is of another type."""
    return CheckpointError(
        f"config.json of this {about.get('model_type')} says {name}={about.get(name)!r}, which should be {wanted}"
    )
