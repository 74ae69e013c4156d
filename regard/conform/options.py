"""What its owner says of an attention, so that another convention is not called a fault."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number

CHOICES: dict[str, tuple[str, ...]] = {
    "alignment": ("top-left", "bottom-right"),
    "grouping": ("repeat", "tile"),
    "rotary": ("half", "interleaved"),
    "bias": ("none", "alibi", "any"),
    "qk_norm": ("rms", "layer", "l2"),
    "view": ("band", "any"),
    "mask_polarity": ("keep", "drop"),
    "mask_values": ("boolean", "additive"),
    "blind_rows": ("zero", "nan", "mean", "unmasked"),
    "poison": ("stays out", "reaches"),
}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Everything that can be declared. None leaves it to be found out.

    causal         no query sees a later key
    window_before  earlier keys that a query sees besides itself
    window_after   later keys that it sees
    alignment      where queries stand when there are fewer of them than keys: "bottom-right" or "top-left"
    grouping       which key head serves which query head: "repeat" 0 0 1 1 (expected), or "tile" 0 1 0 1
    scale          the factor of q . k; None expects 1 / sqrt(c)
    rotary         the pairing of rotary positions inside: "half" or "interleaved"
    bias           "none" (expected), "alibi", or "any" where scores depend on positions in a way of their own
    softcap        the cap of scores pressed by tanh
    qk_norm        how q and k are normalised inside: "rms", "layer", or "l2" to length one; None expects no norm
    sink           True where one more score in each head takes weight and gives nothing
    view           "band" (expected), or "any" where heads, rows or lengths see other keys on purpose
    mask_argument  the name of the argument that takes a mask of (b h i j)
    mask_polarity  what True means there, and in an argument for padded keys: "keep" or "drop"
    mask_values    whether a mask is "boolean", or "additive": numbers added to the scores
    blind_rows     what a row gives that sees nothing: "zero" (expected), "nan", "mean", or "unmasked"
    poison         whether NaN in a key or value that nobody may see "stays out" (expected) or "reaches" the output
    """

    causal: bool | None = None
    window_before: int | None = None
    window_after: int | None = None
    alignment: str | None = None
    grouping: str | None = None
    scale: float | None = None
    rotary: str | None = None
    bias: str | None = None
    softcap: float | None = None
    qk_norm: str | None = None
    sink: bool | None = None
    view: str | None = None
    mask_argument: str | None = None
    mask_polarity: str | None = None
    mask_values: str | None = None
    blind_rows: str | None = None
    poison: str | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                near = get_close_matches(str(value), choices, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}{hint}")
        for name in ("causal", "sink"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} is True, False or None to find it out, not {getattr(self, name)!r}")
        for name in ("window_before", "window_after"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, "neighbours")
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None and not check_number(name, getattr(self, name)) > 0:
                raise ConfigError(f"{name} is a positive number, not {getattr(self, name)!r}")
        if self.causal and self.window_after:
            raise ConfigError(
                f"causal=True shows no later key, but window_after={self.window_after} shows some; declare one of them"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Declared":
        """The declarations among keyword arguments, with the nearest name for one that does not exist."""
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"nothing called {name!r} can be declared{hint} (there are: {', '.join(names)})")
        return cls(**given)

    @property
    def windowed(self) -> bool:
        return self.window_before is not None or self.window_after is not None

    @property
    def after(self) -> int | None:
        """Later keys in sight, where something was declared about them."""
        return 0 if self.causal else self.window_after
