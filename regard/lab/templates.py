"""Text templates of the lab: jinja2 with filters that format numbers, for errata and answers."""

import math
import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache
from typing import Any

import jinja2

from regard.lab.verdict import join_numbers


def round_outward(value: float, digits: int = 1, *, down: bool = False) -> str:
    """Format a bound with few significant digits, rounded so that the formatted bound still holds.

    down  round a lower bound down; otherwise round an upper bound up

    In this example an upper bound is rounded up to one digit.

    >>> round_outward(9.49e-42)
    '1e-41'
    """
    rounding = ROUND_FLOOR if down else ROUND_CEILING
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))):.{digits}g}"


_FILTERS: dict[str, Any] = {
    "fixed": lambda value, digits=2: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{value:.{digits}%}".replace("%", " %"),
    "comma": lambda value: f"{value:,}",
    "short": lambda value, digits=2: (
        f"{value:g}" if value == round(value) and abs(value) < 1e6 else f"{value:.{digits}g}"
    ),
    "at_most": round_outward,
    "at_least": lambda value, digits=1: round_outward(value, digits, down=True),
    "each": lambda values, digits=2: ", ".join(f"{value:.{digits}f}" for value in values),
    "join_numbers": join_numbers,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


class _Environment(jinja2.Environment):
    """A jinja2 environment in which n.keys is the item "keys" of a dict n, not its method `keys`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, Mapping) and attribute in obj else super().getattr(obj, attribute)


@cache
def environment() -> jinja2.Environment:
    """Return the jinja2 environment of the lab's templates.

    The environment has additional filters that format numbers. An undefined name in a template raises an error.
    """
    made = _Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # Markdown  # nosec B701
    made.filters |= _FILTERS
    return made


def render(template: str, **values: Any) -> str:
    """Render a jinja2 template, such as {{ n.weights[0]|fixed(3) }}.

    values  the variables of the template
    """
    text = environment().from_string(template).render(**values)
    # a bound of exactly 0 is not a bound: "by at most 0" becomes "by 0", "equal up to 0" becomes "equal exactly"
    text = re.sub(r"\b(?:at most|by up to) 0(?!\.?\d)", lambda match: "0" if match[0][0] == "a" else "by 0", text)
    return re.sub(r"\bup to 0(?!\.?\d| %)", "exactly", text)


def evaluate(expression: str, **values: Any) -> Any:
    """Evaluate a jinja2 expression, such as n.weights[0]|max < 0.5, and return its value.

    values  the variables of the expression
    """
    return environment().compile_expression(expression, undefined_to_none=False)(**values)
