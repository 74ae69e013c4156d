"""Claims of the lab: a question, a run that measures, and a verdict computed from the numbers.

The file of a claim has

    a docstring     the question in its first line, then Claim:, Measures:, Budget:, Source:
    MATHS           the formula in LaTeX, as `regard.base.formulas.parse_latex` reads it
    Setup           a frozen dataclass whose defaults finish within the budget; `seed` is one of its fields
    SMOKE           a Setup that finishes in three seconds
    run             (setup, attention=attend) -> numbers by name
    verdict         numbers -> Verdict on the claim
    @wrong_answer   optional: numbers -> Verdict on a wrong answer of a course sheet
    draw            numbers -> a matplotlib figure

`attention` is the attention function under test: tests pass broken ones, and the verdict must become "refuted". A
number that is inf or NaN refutes every claim.
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
from typing import Any

from torch import Tensor

from regard.base.config import override
from regard.base.display import show_page
from regard.base.errors import ConfigError
from regard.base.formulas import Expression, parse_latex
from regard.base.registry import Registry
from regard.lab.drawing import Figure
from regard.lab.seeds_interval import Estimate

Numbers = dict[str, Any]  # values that JSON can hold: numbers, text, lists and dictionaries
Attention = Callable[..., Tensor]
CHAPTERS = {"attention": "Attention", "heads": "Heads and self-attention", "transformers": "Transformers"}
SUPPORTED, REFUTED, UNCLEAR = "supported", "refuted", "unclear"


@dataclass(frozen=True)
class Verdict:
    """A verdict on a statement, and a sentence with the numbers that decide it."""

    word: str  # "supported", "refuted" or "unclear"
    sentence: str

    def __post_init__(self) -> None:
        if self.word not in (SUPPORTED, REFUTED, UNCLEAR):
            raise ConfigError(f"a verdict is {SUPPORTED}, {REFUTED} or {UNCLEAR}, not {self.word!r}")


def decide(holds: bool, sentence: str, margins: Iterable[Estimate] = ()) -> Verdict:
    """Return the verdict: supported, refuted, or unclear where an interval over seeds includes zero.

    holds     what is exact or counted, or the worst case over seeds
    sentence  the reason, with its numbers
    margins   by how much each mean over seeds is on the side the claim predicts
    """
    estimates = list(margins)
    if not holds or any(margin.below for margin in estimates):
        return Verdict(REFUTED, sentence)
    return Verdict(SUPPORTED if all(margin.above for margin in estimates) else UNCLEAR, sentence)


def judge_finite(verdict: Callable[[Numbers], Verdict], numbers: Numbers) -> Verdict:
    """Apply a verdict function; refute without calling it if any number is inf or NaN."""
    found = next(_not_finite(numbers), None)
    if found is None:
        return verdict(numbers)
    where, value = found
    return Verdict(REFUTED, f"The number {where} is {value}, but every number of a run must be finite.")


def join_numbers(values: Iterable[float]) -> str:
    """Write numbers as in a sentence: "1, 12 and 4,096", or one number if all are equal."""
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Find values that are inf or NaN, with their positions."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite(item, f"{where}, {name}" if where else f'"{name}"')
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{at}]")


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong answer of a course sheet: what it says, the verdict on it, and the correct answer."""

    source: str
    says: str
    right: str
    verdict: Callable[[Numbers], Verdict]

    def judge(self, numbers: Numbers) -> Verdict:
        """Return the verdict of a run's numbers on this answer."""
        return judge_finite(self.verdict, numbers)


def wrong_answer(source: str, *, says: str, right: str) -> Callable[[Callable[[Numbers], Verdict]], WrongAnswer]:
    """Decorate the function that computes the verdict on a wrong answer.

    source  the sheet and the exercise, such as "000 1.1b"
    says    the wrong answer
    right   the correct answer
    """
    return lambda verdict: WrongAnswer(source, says, right, verdict)


@dataclass(frozen=True)
class Claim:
    """A claim of the lab, parsed from its module."""

    id: str
    chapter: str
    question: str
    claim: str
    measures: str
    budget: float  # seconds on two cores
    source: str
    module: ModuleType

    def _repr_html_(self) -> str:
        """The page that a notebook shows: question, claim and the shipped result."""
        from regard.lab.html_page import claims_page  # imports this module
        from regard.lab.results import shipped_results

        return show_page(claims_page([(self, shipped_results().get(self.id))], self.question))

    @property
    def maths(self) -> str:
        """The formula in LaTeX."""
        return str(self.module.MATHS)

    @property
    def formula(self) -> Expression:
        """The formula as a tree."""
        return parse_latex(self.maths)

    @property
    def wrong_answers(self) -> tuple[WrongAnswer, ...]:
        return tuple(each for each in vars(self.module).values() if isinstance(each, WrongAnswer))

    def setup(self, settings: Mapping[str, Any] | None = None, *, seed: int | None = None, smoke: bool = False) -> Any:
        """Return the setup of a run.

        settings  settings to change, by name
        seed      the random seed; default the setup's own
        smoke     start from the quick setup
        """
        setup = override(self.module.SMOKE if smoke else self.module.Setup(), settings or {})
        return setup if seed is None else replace(setup, seed=seed)

    def run(self, setup: Any, **parts: Any) -> "Outcome":
        """Run the claim.

        setup  from `setup()`
        parts  functions or models to replace, such as attention=my_attention
        """
        start = time.perf_counter()
        numbers = self.module.run(setup, **parts)
        seconds = time.perf_counter() - start
        return Outcome(self, setup, numbers, self.judge(numbers), seconds)

    def judge(self, numbers: Numbers) -> Verdict:
        """Return the verdict of a run's numbers on the claim."""
        return judge_finite(self.module.verdict, numbers)

    def draw(self, numbers: Numbers) -> Figure:
        figure: Figure = self.module.draw(numbers)
        return figure


@dataclass(frozen=True)
class Outcome:
    """The numbers and the verdict of one run."""

    claim: Claim
    setup: Any
    numbers: Numbers
    verdict: Verdict
    seconds: float

    @property
    def wrong_answers(self) -> list[tuple[WrongAnswer, Verdict]]:
        """The sheets' wrong answers with their verdicts."""
        return [(answer, answer.judge(self.numbers)) for answer in self.claim.wrong_answers]


@cache
def claims() -> Registry[Claim]:
    """Return every claim by its id, sorted by chapter and then by name."""
    found: Registry[Claim] = Registry("claim")
    for chapter in CHAPTERS:
        package = import_module(f"regard.lab.{chapter}")
        for entry in iter_modules(package.__path__):
            claim = _parse_claim(chapter, import_module(f"regard.lab.{chapter}.{entry.name}"))
            found.add(claim.id)(claim)
    return found


_FIELDS = ("Claim", "Measures", "Budget", "Source")


def _parse_claim(chapter: str, module: ModuleType) -> Claim:
    question, _, rest = (module.__doc__ or "").partition("\n")
    fields = dict(re.findall(rf"^({'|'.join(_FIELDS)}): (.*?)(?=^\w+: |\Z)", rest, re.S | re.M))
    fields = {name: " ".join(value.split()) for name, value in fields.items()}
    missing = [f"{name}: in its docstring" for name in _FIELDS if name not in fields]
    missing += ["question in the first line of its docstring"] * (not question.endswith("?"))
    missing += [name for name in ("MATHS", "Setup", "SMOKE", "run", "verdict", "draw") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"{module.__name__} has no {', no '.join(missing)}")
    budget = re.fullmatch(r"([\d.]+) seconds?", fields["Budget"])
    if budget is None:
        raise ConfigError(f"{module.__name__} has the budget {fields['Budget']!r}; expected a number of seconds")
    return Claim(
        id=module.__name__.rpartition(".")[2].replace("_", "-"),
        chapter=chapter,
        question=question,
        claim=fields["Claim"],
        measures=fields["Measures"],
        budget=float(budget[1]),
        source=fields["Source"],
        module=module,
    )
