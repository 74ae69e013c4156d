"""Another project's config.json, read with care: what is unknown is refused, not ignored."""

from collections.abc import Mapping
from typing import Any

from regard.base.errors import CheckpointError


def needed(about: Mapping[str, Any], name: str) -> Any:
    """A setting that must be there."""
    if about.get(name) is None:
        raise CheckpointError(f"config.json of this {about.get('model_type')} lacks {name}")
    return about[name]


def expect(about: Mapping[str, Any], **usual: Any) -> None:
    """Raise where a setting is not the one that our model has; left out means usual."""
    for name, value in usual.items():
        if about.get(name, value) != value:
            raise CheckpointError(
                f"config.json of this {about.get('model_type')} says {name}={about[name]!r}; only {value!r} is served"
            )


def choice(about: Mapping[str, Any], name: str, ours: Mapping[str, str], default: str) -> str:
    """A setting by our name for it."""
    value = about.get(name) or default
    if value not in ours:
        raise CheckpointError(
            f"config.json of this {about.get('model_type')} says {name}={value!r}; known are {', '.join(ours)}"
        )
    return ours[value]
