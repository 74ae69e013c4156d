"""Write a broken rule of a decoder as Python code that runs, with what it gives and what it should give."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.conform.decoder import START, DecoderUnderTest
from regard.conform.example import SIMPLE_TYPES, AtMost, result_comments
from regard.conform.fact import Failure

TOLERANCE = 2e-4  # of the largest logit: float32 rounding through a few layers


def fail(
    d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], got: object, expected: object = None
) -> Failure:
    """The failure with its example: the tokens, the lines, and what the last line gives and should give."""
    before = [f"# {name_code(d)}: the {d.name} that was passed to check"] if name_code(d) != d.name else []
    others = [name for name, value in d.extra.items() if not isinstance(value, SIMPLE_TYPES)]
    before += [f"# {', '.join(others)}: what was passed to check by that name"] if others else []
    before += ["model.eval()"] if d.module is not None else []
    lines = [*before, f"tokens = torch.tensor({tokens.tolist()})", *lines]
    return Failure(words, "\n".join([*lines, *result_comments(lines[-1], got, expected)]))


def fail_difference(
    d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], got: Tensor, expected: Tensor, x: str, y: str
) -> Failure:
    """The failure of two logits that differ; `x` and `y` are their code. {} in the words is the difference."""
    error = (got - expected).abs().max().item()
    most = max(expected.abs().max().item(), 1e-3) * TOLERANCE
    lines = [*lines, f"error = ({x} - {y}).abs().max().item()"]
    return fail(d, words.format(f"{error:.1e}"), tokens, lines, error, AtMost(most) if error > most else 0.0)


def difference(x: Tensor, y: Tensor) -> float:
    """The difference of two logits in units of the tolerance; infinity if there is a NaN."""
    if x.shape != y.shape:
        return float("inf")
    scale = max(y.abs().max().item(), 1e-3) * TOLERANCE
    return ((x - y).abs().nan_to_num(torch.inf).max() / scale).item()


def name_code(d: DecoderUnderTest) -> str:
    """The name of the decoder in an example."""
    if d.module is not None:
        return "model"
    return d.name if d.name.isidentifier() else "f"


def logits_code(d: DecoderUnderTest, tokens: str = "tokens", *more: str) -> str:
    """A call that gives logits, as code."""
    return f"{call_code(d, tokens, *more)}{_unwrap_code(d)}"


def call_code(d: DecoderUnderTest, tokens: str, *more: str) -> str:
    """A call as code, with the arguments of every call."""
    given = {START: "0"} if START in d.parameters else {}
    for name, value in d.extra.items():
        simple = repr(value) if isinstance(value, SIMPLE_TYPES) else name
        given[name] = f"{name}({tokens})" if callable(value) else simple
    keywords = [f"{x}={value}" for x, value in given.items() if not any(each.startswith(f"{x}=") for each in more)]
    return f"{name_code(d)}({', '.join([tokens, *keywords, *more])})"


def _unwrap_code(d: DecoderUnderTest, cached: bool = False) -> str:
    """The code behind a call that gets the logits. With a cache the output may have more entries."""

    def find() -> str:
        try:
            with torch.no_grad():
                keywords = d.cache.keywords(None) if cached and d.cache is not None else {}
                out = d.call(d.random_tokens(3, 1), **keywords)
        except Exception:  # a foreign function may raise anything
            out = None
        named = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, Mapping) else ""
        return f"{named}[0]" if isinstance(getattr(out, "logits", out), tuple | list) else named

    found: str = d.once(("unwrap", cached), find)
    return found


def steps_code(d: DecoderUnderTest, sizes: list[int], tokens: str = "tokens", capacity: int | None = None) -> list[str]:
    """The lines that pass tokens in steps through the KV cache; they leave the logits in `steps`."""
    assert d.cache is not None
    parts = f"{tokens}.split({sizes}, 1)"
    if d.cache.argument == START:
        return [
            "start, rows = 0, []",
            f"for part in {parts}:",
            f"    rows.append({logits_code(d, 'part', f'{START}=start')})",
            "    start += part.shape[1]",
            "steps = torch.cat(rows, 1)",
        ]
    if d.cache.key is None:
        one = logits_code(d, "part", "cache=cache")
        return [
            f"cache = {name_code(d)}.cache({'' if capacity is None else capacity})",
            f"steps = torch.cat([{one} for part in {parts}], 1)",
        ]
    keywords = [f"{d.cache.argument}=past", *(f"{name}=True" for name in d.cache.flags)]
    return [
        "past, rows = None, []",
        f"for part in {parts}:",
        f"    out = {call_code(d, 'part', *keywords)}",
        f"    past = out{d.cache.access_code}",
        f"    rows.append(out{_unwrap_code(d, cached=True)})",
        "steps = torch.cat(rows, 1)",
    ]
