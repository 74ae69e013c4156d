"""A broken rule of a decoder as Python that runs as it stands, ending in what it gives and what it should be."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.conform.decoder import Decoder
from regard.conform.example import AtMost, ending


def shown(d: Decoder, tokens: Tensor, lines: list[str], got: object, expected: object = None) -> str:
    """The Python: the tokens, the lines that ask about them, and what the last of these gives and should give."""
    before = [f"# {name_of(d)}: the {d.name} that was handed to check"] if name_of(d) != d.name else []
    before += ["model.eval()"] if d.module is not None else []
    lines = [*before, f"tokens = torch.tensor({tokens.tolist()})", *lines]
    return "\n".join([*lines, *ending(lines[-1], got, expected)])


def name_of(d: Decoder) -> str:
    if d.module is not None:
        return "model"
    return d.name if d.name.isidentifier() else "f"


def logits(d: Decoder, tokens: str = "tokens", *more: str) -> str:
    """The logits of a call, out of what they come wrapped in."""
    return f"{name_of(d)}({', '.join([tokens, *more])}){wrapping(d)}"


def wrapping(d: Decoder) -> str:
    """What stands behind a call to get at the logits."""
    if "wrapping" not in d.words:
        try:
            with torch.no_grad():
                out = d.run(d.draw(3, 1))
        except Exception:
            out = None
        named = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, Mapping) else ""
        out = getattr(out, "logits", out)
        d.words["wrapping"] = f"{named}[0]" if isinstance(out, tuple | list) else named
    return d.words["wrapping"]


def in_steps(d: Decoder, sizes: list[int], tokens: str = "tokens", capacity: int | None = None) -> list[str]:
    """The lines that hand over tokens in steps through a cache, and leave their logits in `steps`."""
    name, parts = name_of(d), f"{tokens}.split({sizes}, 1)"
    if d.cache_kind == "cache":
        one = logits(d, "part", "cache=cache")
        return [
            f"cache = {name}.cache({'' if capacity is None else capacity})",
            f"steps = torch.cat([{one} for part in {parts}], 1)",
        ]
    named = '["past_key_values"]' if wrapping(d).startswith("[") else ".past_key_values"
    return [
        "past, rows = None, []",
        f"for part in {parts}:",
        f"    out = {name}(part, past_key_values=past, use_cache=True)",
        f"    past = out{named}",
        f"    rows.append(out{wrapping(d)})",
        "steps = torch.cat(rows, 1)",
    ]


def distance(x: str, y: str) -> str:
    """How far two are from each other, as written; `far` computes it."""
    return f"off = ({x} - {y}).abs().max().item()"


def far(x: Tensor, y: Tensor, near: float) -> tuple[float, AtMost]:
    """How far two are from each other, and what is allowed."""
    return (x - y).abs().max().item(), AtMost(max(y.abs().max().item(), 1e-3) * near)
