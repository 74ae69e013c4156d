"""The questions of the course sheets with their answers, and the claims of the lab, as the page shows them."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from regard.explorer.views.claims import svg_data_url
from regard.explorer.views.document import parse_document
from regard.lab.answers import sheet_questions, sheet_titles
from regard.lab.claim import CHAPTERS, Claim, claims
from regard.lab.html_page import figure_svg
from regard.lab.results import Result, shipped_results, verdict_word

# where an answer is seen happening, by its name; the plane's presets name their questions themselves
VIEWS = {
    "dot-product": "#attention",
    "softmax-role": "#attention",
    "review-attention": "#attention",
    "three-tokens-map": "#attention",
    "three-tokens-output": "#attention",
    "three-tokens-pattern": "#attention",
    "attention-matrix": "#models?show=head&layer=1&head=1",
    "self-attention": "#models",
    "review-scaling": "#attention?b=0.7071",
    "multi-head": "#attention?heads=2",
    "several-heads": "#attention?heads=2",
    "self-attention-with-heads": "#attention?heads=2",
    "head-width": "#attention?heads=2",
    "review-heads": "#lessons?name=heads-and-what-they-can-do",
    "permutation": "#lessons?name=positions",
    "positions-when": "#attention?pos=sinusoidal",
    "positions-absolute-relative": "#attention?pos=rotary",
    "review-mask": "#masks?mask=causal()&keys=12",
    "encoder-decoder": "#masks?mask=causal()&keys=12&against=full()",
    "new-token": "#masks?mask=causal()&keys=12&queries=1",
    "sparse-vision": "#masks?mask=window(before%3D8, after%3D8) | global_tokens(2)&keys=64",
    "vit-positions": "#models?model=digits-vit",
    "vit-head": "#models?model=digits-vit",
}


@cache
def build_sheets() -> list[dict[str, Any]]:
    """Return all exercise sheets as JSON data: each with its title and its questions with answers, in order."""
    results = shipped_results()
    return [
        {
            "sheet": sheet,
            "title": title,
            "questions": [
                _question(place, answer, results.__getitem__) for place, answer in sheet_questions(sheet).items()
            ],
        }
        for sheet, title in sheet_titles().items()
    ]


def _question(place: str, answer: Any, result: Callable[[str], Result]) -> dict[str, Any]:
    return {
        "place": place,
        "question": answer.questions[place],
        "content": parse_document(answer.body(result), f"the answer to {place}"),
        "claims": list(answer.claims),
        "command": answer.command,
        "view": VIEWS.get(answer.name, ""),
        "places": list(answer.questions),
        "errata": [
            {"quote": each.quote, "source": each.source, "place": each.place, "status": each.status,
             "counter_example": each.counter_example, "right": each.right}
            for each in answer.errata(place, result)
        ],
    }  # fmt: skip


@cache
def build_claims() -> list[dict[str, Any]]:
    """Return all lab claims as JSON data, each with its shipped result."""
    results = shipped_results()
    return [_claim(claim, results.get(claim.id)) for claim in map(claims().__getitem__, claims())]


def _claim(claim: Claim, result: Result | None) -> dict[str, Any]:
    return {
        "id": claim.id,
        "chapter": CHAPTERS[claim.chapter],
        "question": claim.question,
        "claim": claim.claim,
        "source": claim.source,
        "measures": claim.measures,
        "verdict": verdict_word(result),
        "sentence": result.verdict.sentence if result else "",
        "command": result.command if result else f"regard lab run {claim.id}",
        "seconds": result.seconds if result else None,
        "numbers": list(_flatten(result.numbers)) if result else [],
    }


def _flatten(numbers: Any, name: str = "") -> Iterator[tuple[str, float | bool | str]]:
    """Yield the name and value of every measured number of a lab result; list entries are numbered from 1.

    Infinities and NaN are yielded as strings, because JSON has no such numbers.
    """
    if isinstance(numbers, dict):
        for key, value in numbers.items():
            yield from _flatten(value, f"{name}, {key}" if name else str(key))
    elif isinstance(numbers, list | tuple):
        for at, value in enumerate(numbers):
            yield from _flatten(value, f"{name} {at + 1}")
    else:
        # JSON has no infinity
        yield name, numbers if not isinstance(numbers, float) or math.isfinite(numbers) else str(numbers)


@cache
def figure_address(name: str) -> str:
    """Draw the figure of a lab claim's shipped result and return it as an SVG data URL."""
    return svg_data_url(figure_svg(claims()[name], shipped_results()[name].numbers, "none"))
