"""Parse mask expressions: `causal() & window(before=3) | global_tokens(1)`. The text is never executed."""

import ast
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from regard.base.errors import ConfigError, RegardError
from regard.base.registry import Registry
from regard.base.validation import suggest

if TYPE_CHECKING:
    from regard.core.masks.algebra import Mask

Maker = Callable[..., "Mask"]
Value = int | float | str | None | list["Value"]

_FARTHEST = 1 << 40  # larger whole numbers are not positions, and could overflow in a tensor
_DEEPEST = 100


def makers() -> Registry[Maker]:
    """Return the functions that a mask expression may call, such as `causal`, by name."""
    from regard.core.masks.forms import FORMS, constructor

    registry: Registry[Maker] = Registry("mask")
    for name in FORMS:
        registry.add(name)(constructor(name))
    return registry


def parse_mask(text: str) -> "Mask":
    """Parse a mask expression such as "causal() & window(before=3)".

    Raises ConfigError that names the invalid part.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{text!r} is not a mask expression ({getattr(error, 'msg', 'it nests too deeply')}); "
            "write for instance causal() & window(before=3)"
        ) from None
    return _mask(tree.body, makers(), _DEEPEST)


def _mask(node: ast.expr, known: Registry[Maker], depth: int) -> "Mask":
    if not depth:
        raise ConfigError(f"the expression nests deeper than {_DEEPEST} levels")
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _mask(left, known, depth - 1) & _mask(right, known, depth - 1)
        case ast.BinOp(left, ast.BitOr(), right):
            return _mask(left, known, depth - 1) | _mask(right, known, depth - 1)
        case ast.UnaryOp(ast.Invert(), part):
            return ~_mask(part, known, depth - 1)
        case ast.Call(ast.Name(name)):
            return _build_call(name, node, known)
        case ast.Name(name):
            known[name]  # an unknown name raises first, with the nearest one
            raise ConfigError(f"{name} is a function that makes a mask; write {name}(...)")
        case ast.BoolOp() | ast.UnaryOp(ast.Not()):
            raise ConfigError(f"masks combine with & | ~, not with and, or, not: {ast.unparse(node)}")
    raise ConfigError(f"{ast.unparse(node)} is not a mask; masks are {', '.join(known)}, combined with & | ~")


def _build_call(name: str, node: ast.Call, known: Registry[Maker]) -> "Mask":
    make = known[name]
    signature = inspect.signature(make)
    settings: dict[str, Value] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ConfigError(f"{name} takes its settings one by one: {ast.unparse(node)}")
        if keyword.arg not in signature.parameters:
            hint = suggest(keyword.arg, signature.parameters)
            there = ", ".join(signature.parameters) or "nothing"
            raise ConfigError(f"{name} has no setting {keyword.arg!r}{hint} (it takes: {there})")
        if keyword.arg in settings:
            raise ConfigError(f"{name} has {keyword.arg}= twice: {ast.unparse(node)}; write it once")
        settings[keyword.arg] = _value(keyword.value)
    values = [_value(argument) for argument in node.args]
    try:
        signature.bind(*values, **settings)
        return make(*values, **settings)
    except RegardError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        taken = ", ".join(signature.parameters)
        raise ConfigError(f"{ast.unparse(node)} does not fit {name}({taken}): {error}") from None


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(int() | float() | str() | None as value) if not isinstance(value, bool):
            if isinstance(value, int) and value > _FARTHEST:
                raise ConfigError(f"{value} is larger than any position; use at most {_FARTHEST}")
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(items):
            return [_value(item) for item in items]
    raise ConfigError(f"{ast.unparse(node)} is not a setting of a mask; use numbers, lists, None or a quoted word")
