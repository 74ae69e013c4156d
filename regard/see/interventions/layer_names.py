"""Select the attention calls that an edit changes: by the name of a layer, a unique suffix of the name, or an index."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from regard.base.errors import ConfigError, UnknownNameError
from regard.base.validation import check_integer


@dataclass(frozen=True)
class LayerChoice:
    """Selects the attention calls that an edit changes.

    path    path of the module that makes the call; None for any
    number  which of the calls of this module inside the `with` block, counted from 1 as in the names of `watch`; None
            for every call
    index   which of all attention calls of a forward pass, counted from 0; None for any
    """

    path: str | None = None
    number: int | None = None
    index: int | None = None

    def includes(self, path: str, number: int, index: int) -> bool:
        """Return whether an attention call is selected.

        path    path of the module that makes the call
        number  number of the call among those of this module inside the `with` block, from 1
        index   index of the call among all attention calls of its forward pass, from 0
        """
        return self.path in (None, path) and self.number in (None, number) and self.index in (None, index)


def choose_layer(layer: str | int, paths: Sequence[str]) -> LayerChoice:
    """Convert the argument `layer` of an edit to a `LayerChoice`.

    layer  name of an attention call as `watch` records it, where `name:2` is the second call inside the `with`
           block; a suffix of the name that only one module has; or the index of the call in a forward pass
    paths  paths of all modules of the model
    """
    if not isinstance(layer, str):
        return LayerChoice(index=check_integer("layer, if it is an index,", layer, 0))
    stem, colon, number = layer.rpartition(":")
    name = stem if colon and number.isdigit() else layer
    found = [path for path in paths if path == name] or [path for path in paths if path.endswith(f".{name}")]
    if len(found) > 1:
        raise ConfigError(f"layer={layer!r} fits {len(found)} modules: {', '.join(found[:5])}; write more of the name")
    if not found:
        raise UnknownNameError(f"the model has no module {layer!r}{suggest_names(name, paths)}")
    return LayerChoice(found[0], int(number) if name == stem and colon else None)


def suggest_names(name: str, names: Sequence[str]) -> str:
    """Return the end of an error message for a wrong name: the most similar names, or some names if none is similar."""
    shown = [each for each in names if name in each][:3] or get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, shown))}?" if shown else f"; it has {', '.join(names[:8])}"
