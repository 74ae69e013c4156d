"""Write decoder calls as Python code. The checker executes this code, and shows it as the example of a failure."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.conform.decoder import START, DecoderUnderTest
from regard.conform.example import SIMPLE_TYPES, AtMost, result_comments
from regard.conform.fact import Failure
from regard.conform.tolerance import equal

TOLERANCE = 2e-4  # share of the largest logit: float32 rounding through a few layers


def fail(
    d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], got: object, expected: object = None
) -> Failure:
    """Return the `Failure` of a decoder, whose example is Python code that reproduces it.

    words     describes what was found
    tokens    the tokens of the example; its first line assigns them to `tokens`
    lines     the lines of code after this assignment
    got       the value that the last line gives
    expected  the value that the last line should give
    """
    before = [f"# {d.name_in_code}: the {d.name} that was passed to check"] if d.name_in_code != d.name else []
    others = [name for name, value in d.extra.items() if not isinstance(value, SIMPLE_TYPES)]
    before += [f"# {', '.join(others)}: what was passed to check by that name"] if others else []
    before += ["model.eval()"] if d.module is not None else []
    lines = [*before, f"tokens = torch.tensor({tokens.tolist()})", *lines]
    return Failure(words, "\n".join([*lines, *result_comments(lines[-1], got, expected)]))


def compare_logits(d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str], x: str, y: str) -> Failure | None:
    """Return a failure if the logits `x` differ from `y` by more than rounding, else None.

    words  describes the failure; {} in this text is replaced by the difference
    lines  lines of Python code that are executed first
    x, y   Python expressions of the logits
    """
    got, expected = d.run_code(tokens, [*lines, f"both = {x}, {y}"])["both"]
    if difference(got, expected) <= 1:
        return None
    error = (got - expected).abs().max().item()
    most = max(expected.abs().max().item(), 1e-3) * TOLERANCE
    lines = [*lines, f"error = ({x} - {y}).abs().max().item()"]
    return fail(d, words.format(f"{error:.1e}"), tokens, lines, error, AtMost(most) if error > most else 0.0)


def compare_bits(d: DecoderUnderTest, words: str, tokens: Tensor, lines: list[str]) -> Failure | None:
    """Return a failure if the tensors `first` and `second` are not equal bit for bit, else None.

    words  describes the failure; {} in this text is replaced by the difference
    lines  lines of Python code that assign `first` and `second`
    """
    space = d.run_code(tokens, lines)
    first, second = space["first"], space["second"]
    if equal(first, second):
        return None
    words = words.format(f"{(first - second).abs().max():.1e}")
    return fail(d, words, tokens, [*lines, "same = torch.equal(first, second)"], False, True)


def difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference between two logit tensors, divided by the tolerance.

    The tolerance is TOLERANCE times the largest absolute logit of `y`. The result is infinity if a difference is NaN or
    the shapes differ.
    """
    if x.shape != y.shape:
        return float("inf")
    scale = max(y.abs().max().item(), 1e-3) * TOLERANCE
    return ((x - y).abs().nan_to_num(torch.inf).max() / scale).item()


def change_code(d: DecoderUnderTest, at: str) -> list[str]:
    """Return Python code that copies `tokens` to `other` and changes the tokens at an index.

    at  the code of the index, such as ":, 3:"
    """
    return ["other = tokens.clone()", f"other[{at}] = (other[{at}] + 1) % {d.vocab}"]


def logits_code(d: DecoderUnderTest, tokens: str = "tokens", *more: str) -> str:
    """Return Python code that calls the decoder and gets the logits.

    tokens  the code of the first argument
    more    the code of further arguments, such as "cache=cache"
    """
    return f"{call_code(d, tokens, *more)}{_unwrap_code(d)}"


def call_code(d: DecoderUnderTest, tokens: str, *more: str) -> str:
    """Return Python code that calls the decoder with tokens and with the arguments that every call needs.

    tokens  the code of the first argument
    more    the code of further arguments, such as "cache=cache"
    """
    given = {START: "0"} if START in d.parameters else {}
    for name, value in d.extra.items():
        simple = repr(value) if isinstance(value, SIMPLE_TYPES) else name
        given[name] = f"{name}({tokens})" if callable(value) else simple
    keywords = [f"{x}={value}" for x, value in given.items() if not any(each.startswith(f"{x}=") for each in more)]
    return f"{d.name_in_code}({', '.join([tokens, *keywords, *more])})"


def _unwrap_code(d: DecoderUnderTest, cached: bool = False) -> str:
    """Return the Python code, such as `.logits[0]`, that selects the logits from the output of a call.

    cached  whether the call uses the KV cache, which may add entries to the output
    """

    def find() -> str:
        try:
            with torch.no_grad():
                keywords = d.cache.keywords(None) if cached and d.cache is not None else {}
                out = d.call(d.random_tokens(3, 1), **keywords)
        except Exception:  # the function of the user may raise any exception
            out = None
        named = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, Mapping) else ""
        return f"{named}[0]" if isinstance(getattr(out, "logits", out), tuple | list) else named

    found: str = d.once(("unwrap", cached), find)
    return found


def padding_code(d: DecoderUnderTest, lengths: list[int], n: int, side: str) -> dict[str, str]:
    """Return the arguments that a call needs for padded sequences, such as the attention mask: Python code by name.

    If position ids are passed, they count the real tokens only.

    lengths  number of real tokens of each sequence
    n        length with padding
    side     side of the padding: "left" or "right"
    """
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
    """Return lines of Python code that assign each argument to a variable of the same name.

    given  the code of each argument, by the name of the argument
    """
    lines = [f"{name} = {code}" for name, code in given.items()]
    return ["from regard.core import masks", *lines] if any("masks." in line for line in lines) else lines


def keyword_logits(d: DecoderUnderTest, tokens: str, given: Mapping[str, str]) -> str:
    """Return Python code that calls the decoder with the variables that `keyword_lines` assigns, and gets the logits.

    tokens  the code of the first argument
    given   the code of each argument, by the name of the argument
    """
    return logits_code(d, tokens, *(f"{name}={name}" for name in given))


def steps_code(d: DecoderUnderTest, sizes: list[int], tokens: str = "tokens", capacity: int | None = None) -> list[str]:
    """Return Python code that passes tokens through the KV cache in several steps.

    The code concatenates the logits of all steps and assigns them to `steps`.

    sizes     number of tokens of each step
    tokens    the code of the tokens
    capacity  number of tokens that the cache can hold, if the decoder's method `cache()` takes this number
    """
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
    """Return the logits of tokens that are passed in several steps through the KV cache.

    sizes  number of tokens of each step
    """
    steps: Tensor = d.run_code(tokens, steps_code(d, sizes))["steps"]
    return steps
