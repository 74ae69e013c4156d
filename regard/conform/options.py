"""`CheckOptions`: every option of `check`, with its help text. The options of `regard check` are generated from it."""

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number, suggest

LAYOUTS = ("b h n c", "b n h c", "n b h c", "b n c", "n b c", "n c")


def _option(text: str, *choices: str, default: Any = None, least: int = 1) -> Any:
    """Return a dataclass field for an option of `check`.

    text     help text
    choices  allowed values; empty if all are allowed
    default  default of the option
    least    smallest value of an integer option
    """
    return field(default=default, metadata={"help": text, "choices": choices, "least": least})


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `check`.

    The options from `causal` on declare conventions of the attention. If the attention does not follow a declared
    convention, the check fails. None means that the convention is not declared and is measured. The help texts of some
    options name the value that is expected in this case; another measured value is reported as a failure or as a
    difference from our policy.
    """

    kind: str | None = _option("found from its arguments by default", "attention", "decoder")
    heads: int | None = _option("Number of heads of a module, if it cannot be read from the module")
    kv_heads: int | None = _option("Number of key heads, if it cannot be read from the module")
    width: int | None = _option("Width of a head, if it cannot be read from the module")
    layout: str | None = _option("axes of q, k and v, or of the input of a wrapper module", *LAYOUTS)
    extra: Mapping[str, object] | None = _option(
        "Arguments passed at every call; a decoder's may be functions of tokens"
    )
    vocab: int | None = _option("Vocabulary size of a decoder, if it cannot be read from its embedding")
    only: Iterable[str] = _option("Test this fact only; may be repeated", default=())
    without: Iterable[str] = _option("Leave this fact out; may be repeated", default=())
    seed: int = _option("Seed of the random inputs", default=0, least=0)
    quick: bool = _option("Leave out facts that take seconds (torch.compile)", default=False)
    causal: bool | None = _option("Whether no query sees a later key")
    window_before: int | None = _option("Number of earlier keys that a query sees, besides its own", least=0)
    window_after: int | None = _option("Number of later keys that a query sees", least=0)
    alignment: str | None = _option("how fewer queries than keys are aligned", "bottom-right", "top-left")
    grouping: str | None = _option("order of key heads, 0 0 1 1 (expected) or 0 1 0 1", "repeat", "tile")
    scale: float | None = _option("Factor of q . k; 1/sqrt(c) is expected by default")
    rotary: str | None = _option("pairing of rotary positions", "half", "interleaved")
    bias: str | None = _option("bias by position; none is expected", "none", "alibi", "any")
    softcap: float | None = _option("Cap of scores that pass through tanh")
    qk_norm: str | None = _option("norm of q and k; none is expected", "rms", "layer", "l2")
    sink: bool | None = _option("Attention sink: one more logit per head, without a value")
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
            if (value := getattr(self, each.name)) is not None:
                _check_value(each, value)
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads: heads={self.heads}, kv_heads={self.kv_heads}")
        if not isinstance(self.extra, Mapping | None):
            raise ConfigError(f"extra is a dict of arguments by name, not {self.extra!r}")
        if self.causal and self.window_after:
            raise ConfigError(
                f"causal=True shows no later key, but window_after={self.window_after} shows some; declare one of them"
            )

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> "CheckOptions":
        """Create the options from keyword arguments; for an unknown name, raise ConfigError with a suggestion."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"check has no option {name!r}{suggest(name, names)} (options: {', '.join(names)})")
        return cls(**given)

    @property
    def windowed(self) -> bool:
        """Whether the options declare a sliding-window mask."""
        return self.window_before is not None or self.window_after is not None

    @property
    def after(self) -> int | None:
        """The largest declared number of later keys that a query sees: 0 if causal, None if there is no limit."""
        return 0 if self.causal else self.window_after

    @property
    def probe_options(self) -> dict[str, Any]:
        """The options to pass to `as_probe`: sizes, layout and extra arguments, as far as they are set."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "width": self.width, "layout": self.layout}
        return {name: value for name, value in sizes.items() if value is not None} | dict(self.extra or {})


def _check_value(option: "Field[Any]", value: Any) -> None:
    """Check that the value of an option has the right type and is one of the choices, else raise ConfigError."""
    name, choices, kind = option.name, option.metadata["choices"], option.type
    if choices and value not in choices:
        raise ConfigError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}{suggest(value, choices)}")
    if kind == bool | None and not isinstance(value, bool):
        raise ConfigError(f"{name} is True, False or None to measure it, not {value!r}")
    if kind in (int, int | None):
        check_integer(name, value, option.metadata["least"])
    if kind == float | None and not check_number(name, value) > 0:
        raise ConfigError(f"{name} is a positive number, not {value!r}")
    if kind == Iterable[str] and not isinstance(value, Iterable):
        raise ConfigError(f"{name} takes names of facts, as {name}=['scale'], not {value!r}")
