"""What a claim is: a question, a run that measures, and a verdict that the numbers decide.

A file of the lab has

    a docstring     the question in its first line, then Claim:, Measures:, Budget:, Source:
    MATHS           the formula, in the little TeX that `regard.lab.formula` reads
    Setup           a frozen dataclass whose defaults finish within the budget; `seed` is one of its fields
    SMOKE           a Setup that finishes in three seconds
    run             (setup, attention=attend) -> plain numbers by name
    verdict         numbers -> Verdict on the claim; they are finite, for any other number refutes it unasked
    SHEET           wrong answers of the source sheets, each with the verdict on it and what is right
    draw            numbers -> a matplotlib figure

`attention` is what the run asks for attention, so that a broken one can be handed in: every verdict can flip.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.base.config import override
from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.lab.seeds_interval import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = dict[str, Any]  # floats, whole numbers, texts and lists of them: what JSON can hold
Attention = Callable[..., Tensor]
CHAPTERS = {"attention": "Attention", "heads": "Heads and self-attention", "transformers": "Transformers"}
SUPPORTED, REFUTED, UNCLEAR = "supported", "refuted", "unclear"


@dataclass(frozen=True)
class Verdict:
    """What the numbers say of a statement: supported, refuted or unclear, and a sentence with the numbers in it."""

    word: str
    sentence: str

    def __post_init__(self) -> None:
        if self.word not in (SUPPORTED, REFUTED, UNCLEAR):
            raise ConfigError(f"a verdict is {SUPPORTED}, {REFUTED} or {UNCLEAR}, not {self.word!r}")


def judged(holds: bool, sentence: str) -> Verdict:
    """Supported or refuted."""
    return Verdict(SUPPORTED if holds else REFUTED, sentence)


def weighed(holds: bool, margins: Iterable[Estimate], sentence: str) -> Verdict:
    """Supported, refuted, or unclear where an interval over seeds is too wide to tell.

    holds    whatever is no mean over seeds: counted, exact, or the worst of them all
    margins  by how much each mean is on the side that the claim says
    """
    given = list(margins)
    if not holds or any(margin.below for margin in given):
        return Verdict(REFUTED, sentence)
    return Verdict(SUPPORTED if all(margin.above for margin in given) else UNCLEAR, sentence)


def finite(verdict: Callable[[Numbers], Verdict], numbers: Numbers) -> Verdict:
    """What a verdict says of numbers; where one is not finite it is not asked, for NaN is neither small nor large."""
    odd = next(_not_finite(numbers), None)
    if odd is None:
        return verdict(numbers)
    where, value = odd
    return Verdict(REFUTED, f"The number {where} is {value}, where every number of a run is to be finite.")


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Where inf and NaN are, and which of them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite(item, f"{where}, {name}" if where else f'"{name}"')
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{at}]")


@dataclass(frozen=True)
class Sheet:
    """A wrong answer of a source sheet: what it says, the verdict on it, and what is right."""

    source: str
    says: str
    verdict: Callable[[Numbers], Verdict]
    right: str

    def judge(self, numbers: Numbers) -> Verdict:
        """What the numbers of a run say of that answer."""
        return finite(self.verdict, numbers)


@dataclass(frozen=True)
class Claim:
    """One file of the lab, read."""

    id: str
    chapter: str
    question: str
    claim: str
    measures: str
    budget: float  # seconds on two cores
    source: str
    module: ModuleType

    @property
    def maths(self) -> str:
        return str(self.module.MATHS)

    @property
    def sheet(self) -> tuple[Sheet, ...]:
        return tuple(getattr(self.module, "SHEET", ()))

    def setup(self, settings: Mapping[str, Any] | None = None, *, seed: int | None = None, smoke: bool = False) -> Any:
        """The setup of a run, with settings changed by name."""
        made = override(self.module.SMOKE if smoke else self.module.Setup(), settings or {})
        return made if seed is None else replace(made, seed=seed)

    def run(self, setup: Any, **rest: Any) -> "Outcome":
        start = time.perf_counter()
        numbers = self.module.run(setup, **rest)
        seconds = time.perf_counter() - start
        return Outcome(self, setup, numbers, self.judge(numbers), seconds)

    def judge(self, numbers: Numbers) -> Verdict:
        """What the numbers of a run say of the claim."""
        return finite(self.module.verdict, numbers)

    def draw(self, numbers: Numbers) -> "Figure":
        figure: Figure = self.module.draw(numbers)
        return figure


@dataclass(frozen=True)
class Outcome:
    """A run and what came out of it."""

    claim: Claim
    setup: Any
    numbers: Numbers
    verdict: Verdict
    seconds: float

    @property
    def sheet(self) -> list[tuple[Sheet, Verdict]]:
        return [(sheet, sheet.judge(self.numbers)) for sheet in self.claim.sheet]


@cache
def claims() -> Registry[Claim]:
    """Every claim by its id, in the order of chapters and then of names."""
    found: Registry[Claim] = Registry("claim")
    for chapter in CHAPTERS:
        package = import_module(f"regard.lab.{chapter}")
        for entry in iter_modules(package.__path__):
            claim = _read(chapter, import_module(f"regard.lab.{chapter}.{entry.name}"))
            found.add(claim.id)(claim)
    return found


_FIELDS = ("Claim", "Measures", "Budget", "Source")


def _read(chapter: str, module: ModuleType) -> Claim:
    text = module.__doc__ or ""
    question, _, rest = text.partition("\n")
    fields = dict(re.findall(rf"^({'|'.join(_FIELDS)}): (.*?)(?=^\w+: |\Z)", rest, re.S | re.M))
    missing = [name for name in _FIELDS if name not in fields]
    if missing or not question.endswith("?"):
        raise ConfigError(f"{module.__name__} has no {', '.join(missing) or 'question in its first line'}")
    told = {name: " ".join(value.split()) for name, value in fields.items()}
    budget = re.fullmatch(r"([\d.]+) seconds?", told["Budget"])
    if budget is None:
        raise ConfigError(f"{module.__name__} has the budget {told['Budget']!r}, but a number of seconds is expected")
    return Claim(
        id=module.__name__.rpartition(".")[2].replace("_", "-"),
        chapter=chapter,
        question=question,
        claim=told["Claim"],
        measures=told["Measures"],
        budget=float(budget[1]),
        source=told["Source"],
        module=module,
    )
