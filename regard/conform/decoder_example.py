"""A broken rule of a decoder as Python that runs as it stands, ending in what it gives and what it should be."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.conform.decoder import START, DecoderUnderTest
from regard.conform.example import SIMPLE, AtMost, ending


def shown(d: DecoderUnderTest, tokens: Tensor, lines: list[str], got: object, expected: object = None) -> str:
    """The Python: the tokens, the lines that ask about them, and what the last of these gives and should give."""
    before = [f"# {name_of(d)}: the {d.name} that was handed to check"] if name_of(d) != d.name else []
    others = [name for name, value in d.extra.items() if not isinstance(value, SIMPLE)]
    before += [f"# {', '.join(others)}: what was handed to check by that name"] if others else []
    before += ["model.eval()"] if d.module is not None else []
    lines = [*before, f"tokens = torch.tensor({tokens.tolist()})", *lines]
    return "\n".join([*lines, *ending(lines[-1], got, expected)])


def name_of(d: DecoderUnderTest) -> str:
    if d.module is not None:
        return "model"
    return d.name if d.name.isidentifier() else "f"


def logits(d: DecoderUnderTest, tokens: str = "tokens", *more: str) -> str:
    """The logits of a call, out of what they come wrapped in."""
    return f"{call(d, tokens, *more)}{wrapping(d)}"


def call(d: DecoderUnderTest, tokens: str, *more: str) -> str:
    """A call, with what is handed over every time."""
    said = {START: "0"} if START in d.parameters else {}
    for name, value in d.extra.items():
        said[name] = f"{name}({tokens})" if callable(value) else repr(value) if isinstance(value, SIMPLE) else name
    told = [f"{name}={value}" for name, value in said.items() if not any(each.startswith(f"{name}=") for each in more)]
    return f"{name_of(d)}({', '.join([tokens, *told, *more])})"


def wrapping(d: DecoderUnderTest, cached: bool = False) -> str:
    """What stands behind a call to get at the logits. With a cache there may be more in an answer."""
    key = f"wrapping {cached}"
    if key not in d.words:
        try:
            with torch.no_grad():
                out = d.asked(d.draw(3, 1), **(d.cache.given(None) if cached and d.cache is not None else {}))
        except Exception:
            out = None
        named = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, Mapping) else ""
        out = getattr(out, "logits", out)
        d.words[key] = f"{named}[0]" if isinstance(out, tuple | list) else named
    return d.words[key]


def in_steps(d: DecoderUnderTest, sizes: list[int], tokens: str = "tokens", capacity: int | None = None) -> list[str]:
    """The lines that hand over tokens in steps through a cache, and leave their logits in `steps`."""
    assert d.cache is not None
    parts = f"{tokens}.split({sizes}, 1)"
    if d.cache.argument == START:
        return [
            "start, rows = 0, []",
            f"for part in {parts}:",
            f"    rows.append({logits(d, 'part', f'{START}=start')})",
            "    start += part.shape[1]",
            "steps = torch.cat(rows, 1)",
        ]
    if d.cache.key is None:
        one = logits(d, "part", "cache=cache")
        return [
            f"cache = {name_of(d)}.cache({'' if capacity is None else capacity})",
            f"steps = torch.cat([{one} for part in {parts}], 1)",
        ]
    told = [f"{d.cache.argument}=past", *(f"{name}=True" for name in d.cache.settings)]
    return [
        "past, rows = None, []",
        f"for part in {parts}:",
        f"    out = {call(d, 'part', *told)}",
        f"    past = out{d.cache.place}",
        f"    rows.append(out{wrapping(d, cached=True)})",
        "steps = torch.cat(rows, 1)",
    ]


def distance(x: str, y: str) -> str:
    """How far two are from each other, as written; `far` computes it."""
    return f"off = ({x} - {y}).abs().max().item()"


def far(x: Tensor, y: Tensor, near: float) -> tuple[float, AtMost]:
    """How far two are from each other, and what is allowed."""
    return (x - y).abs().max().item(), AtMost(max(y.abs().max().item(), 1e-3) * near)
