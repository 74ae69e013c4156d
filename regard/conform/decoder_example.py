"""Decoder calls as Python code: the code of an example is what the checker runs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.conform.decoder import START, DecoderUnderTest
from regard.conform.example import SIMPLE_TYPES, AtMost, result_comments
from regard.conform.fact import Failure
from regard.conform.tolerance import equal

TOLERANCE = 2e-4  # of the largest logit: float32 rounding through a few layers


def fail(
    d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], got: object, expected: object = None
) -> Failure:
    """The failure with its example: the tokens, the lines, and what the last line gives and should give."""
    before = [f"# {d.name_in_code}: the {d.name} that was passed to check"] if d.name_in_code != d.name else []
    others = [name for name, value in d.extra.items() if not isinstance(value, SIMPLE_TYPES)]
    before += [f"# {', '.join(others)}: what was passed to check by that name"] if others else []
    before += ["model.eval()"] if d.module is not None else []
    lines = [*before, f"tokens = torch.tensor({tokens.tolist()})", *lines]
    return Failure(words, "\n".join([*lines, *result_comments(lines[-1], got, expected)]))


def compare_logits(d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], x: str, y: str) -> Failure | None:
    """The failure if the logits `x` differ from `y` by more than rounding. Both are code, evaluated after the lines.

    words  of the failure; {} in them is the difference
    """
    got, expected = d.run_code(tokens, [*lines, f"both = {x}, {y}"])["both"]
    if difference(got, expected) <= 1:
        return None
    error = (got - expected).abs().max().item()
    most = max(expected.abs().max().item(), 1e-3) * TOLERANCE
    lines = [*lines, f"error = ({x} - {y}).abs().max().item()"]
    return fail(d, words.format(f"{error:.1e}"), tokens, lines, error, AtMost(most) if error > most else 0.0)


def compare_bits(d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str]) -> Failure | None:
    """The failure if `first` and `second`, which the lines assign, are not equal bit for bit."""
    space = d.run_code(tokens, lines)
    first, second = space["first"], space["second"]
    if equal(first, second):
        return None
    words = words.format(f"{(first - second).abs().max():.1e}")
    return fail(d, words, tokens, [*lines, "same = torch.equal(first, second)"], False, True)


def difference(x: Tensor, y: Tensor) -> float:
    """The difference of two logits in units of the tolerance; infinity if there is a NaN."""
    if x.shape != y.shape:
        return float("inf")
    scale = max(y.abs().max().item(), 1e-3) * TOLERANCE
    return ((x - y).abs().nan_to_num(torch.inf).max() / scale).item()


def change_code(d: DecoderUnderTest, at: str) -> list[str]:
    """The lines that make `other`: the same tokens, with others at one position or slice."""
    return ["other = tokens.clone()", f"other[{at}] = (other[{at}] + 1) % {d.vocab}"]


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
    return f"{d.name_in_code}({', '.join([tokens, *keywords, *more])})"


def _unwrap_code(d: DecoderUnderTest, cached: bool = False) -> str:
    """The code that gets the logits from the output of a call. With a cache the output may have more entries."""

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


def padding_code(d: DecoderUnderTest, lengths: list[int], n: int, side: str) -> dict[str, str]:
    """The arguments for sequences padded to n tokens on one side, each as code; positions count real tokens."""
    left = "" if side == "right" else f", side={side!r}, width={n}"
    if d.padding_argument == "padding":
        return {"padding": f"masks.padding(torch.tensor({lengths}){left})"}
    position, real = torch.arange(n)[None, :], torch.tensor(lengths)[:, None]
    kept = (position < real if side == "right" else position >= n - real).long()
    given = {str(d.padding_argument): f"torch.tensor({kept.tolist()})"}
    if side == "left" and d.positions_argument is not None:
        given[d.positions_argument] = f"torch.tensor({(kept.cumsum(1) - 1).clamp(min=0).tolist()})"
    return given


def keyword_lines(given: Mapping[str, str]) -> list[str]:
    """The lines that assign arguments to their names."""
    lines = [f"{name} = {code}" for name, code in given.items()]
    return ["from regard.core import masks", *lines] if any("masks." in line for line in lines) else lines


def keyword_logits(d: DecoderUnderTest, tokens: str, given: Mapping[str, str]) -> str:
    """A call that gives logits with these arguments, as code."""
    return logits_code(d, tokens, *(f"{name}={name}" for name in given))


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
        return [
            f"cache = {d.name_in_code}.cache({'' if capacity is None else capacity})",
            f"steps = torch.cat([{logits_code(d, 'part', 'cache=cache')} for part in {parts}], 1)",
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


def logits_in_steps(d: DecoderUnderTest, tokens: Tensor, sizes: list[int]) -> Tensor:
    """The logits of the same tokens, passed in steps through the KV cache."""
    steps: Tensor = d.run_code(tokens, steps_code(d, sizes))["steps"]
    return steps
