"""`CheckOptions`: every option of `check`, with its help text. The command line is derived from it too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number


def _option(text: str, *choices: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `check`. Those from `causal` on declare conventions; None means that they are measured.

    A convention that is declared is expected, and its absence is a fault.
    """

    kind: str | None = _option("found from its arguments by default", "attention", "decoder")
    heads: int | None = _option("Number of heads of a module, if it cannot be read from the module")
    kv_heads: int | None = _option("Number of key heads, if it cannot be read from the module")
    width: int | None = _option("Width of a head, if it cannot be read from the module")
    layout: str | None = _option("Axes of a function, such as 'b n h c'; of a wrapper module 'b n c' or 'n b c'")
    extra: Mapping[str, object] | None = _option(
        "Arguments passed at every call; a decoder's may be functions of tokens"
    )
    vocab: int | None = _option("Vocabulary size of a decoder, if it cannot be read from its embedding")
    only: Iterable[str] = _option("Test this fact only; may be repeated", default=())
    without: Iterable[str] = _option("Leave this fact out; may be repeated", default=())
    seed: int = _option("Seed of the random inputs", default=0)
    quick: bool = _option("Leave out facts that take seconds (torch.compile)", default=False)
    causal: bool | None = _option("No query sees a later key, or some do")
    window_before: int | None = _option("Number of earlier keys that a query sees, besides its own")
    window_after: int | None = _option("Number of later keys that a query sees")
    alignment: str | None = _option("position of fewer queries than keys", "bottom-right", "top-left")
    grouping: str | None = _option("order of key heads, 0 0 1 1 (expected) or 0 1 0 1", "repeat", "tile")
    scale: float | None = _option("Factor of q . k; 1/sqrt(c) is expected by default")
    rotary: str | None = _option("pairing of rotary positions", "half", "interleaved")
    bias: str | None = _option("bias by position; none is expected", "none", "alibi", "any")
    softcap: float | None = _option("Cap of scores that pass through tanh")
    qk_norm: str | None = _option("norm of q and k; none is expected", "rms", "layer", "l2")
    sink: bool | None = _option("One more score per head takes weight and adds no value")
    mask_pattern: str | None = _option(
        "whether heads, rows and lengths see the same band of keys (expected)", "band", "any"
    )
    mask_argument: str | None = _option("Name of the argument that takes a mask")
    mask_polarity: str | None = _option("what True means in a mask", "keep", "drop")
    mask_values: str | None = _option("whether masks are numbers that are added to scores", "boolean", "additive")
    fully_masked_rows: str | None = _option(
        "output of a row that sees no key; zeros are expected", "zeros", "nan", "mean", "unmasked"
    )
    masked_nan: str | None = _option(
        "whether NaN in a hidden key or value stays out of the output (expected)", "blocked", "propagates"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if value is not None and choices and value not in choices:
                raise ConfigError(
                    f"{each.name} is one of {', '.join(map(repr, choices))}, not {value!r}{_nearest(value, choices)}"
                )
        for name in ("causal", "sink"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} is True, False or None to measure it, not {getattr(self, name)!r}")
        for name in ("heads", "kv_heads", "width", "vocab"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads: heads={self.heads}, kv_heads={self.kv_heads}")
        check_integer("seed", self.seed, 0)
        if not isinstance(self.extra, Mapping | None):
            raise ConfigError(f"extra is a dict of arguments by name, not {self.extra!r}")
        if self.layout is not None:
            from regard.see.adapters import check_layout  # imports torch, which `regard --help` does not need

            check_layout(self.layout)
        for name in ("only", "without"):
            if not isinstance(getattr(self, name), Iterable):
                raise ConfigError(f"{name} takes names of facts, as {name}=['scale'], not {getattr(self, name)!r}")
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
    def from_keywords(cls, given: Mapping[str, Any]) -> "CheckOptions":
        """The options; an unknown name raises an error with the nearest known one."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"check has no option {name!r}{_nearest(name, names)} (options: {', '.join(names)})")
        return cls(**given)

    @property
    def windowed(self) -> bool:
        """Whether a window was declared."""
        return self.window_before is not None or self.window_after is not None

    @property
    def after(self) -> int | None:
        """The declared number of visible later keys."""
        return 0 if self.causal else self.window_after

    @property
    def probe_options(self) -> dict[str, Any]:
        """The options of `as_probe` that were passed."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "width": self.width, "layout": self.layout}
        return {name: value for name, value in sizes.items() if value is not None} | dict(self.extra or {})


def _nearest(value: object, choices: Iterable[str]) -> str:
    near = get_close_matches(str(value), list(choices), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
