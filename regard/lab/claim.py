"""Claims of the lab: a question, a run that measures, and a verdict computed from the numbers.

The file of a claim has

    a docstring     the question in its first line, then Claim:, Measures:, Finding:, Budget:, Source:
    MATHS           the formula in LaTeX, as `regard.base.formulas.parse_latex` reads it
    Setup           a frozen dataclass whose defaults finish within the budget; `seed` is one of its fields
    SMOKE           a Setup that finishes in three seconds
    run             (setup, attention=attend) -> numbers by name
    verdict         numbers -> `decide(...)`
    draw            numbers -> a matplotlib figure

`Finding:` is a jinja2 template of the sentence that the verdict prints. Its variables are n, the measured numbers,
and the keyword arguments that `verdict` passed to `decide`.

`attention` is the attention function under test: tests pass broken ones, and the verdict must become "refuted". A
number that is inf or NaN refutes every claim.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from regard.base.config import override
from regard.base.display import show_page
from regard.base.errors import ConfigError
from regard.base.formulas import Expression, parse_latex
from regard.base.registry import Registry
from regard.lab.drawing import Figure
from regard.lab.errata import WrongAnswer, judge_wrong_answers, wrong_answers
from regard.lab.settings import check_settings
from regard.lab.templates import render
from regard.lab.verdict import REFUTED, UNCLEAR, Decision, Numbers, Verdict, judge_finite

CHAPTERS = {"attention": "Attention", "heads": "Heads and self-attention", "transformers": "Transformers"}


@dataclass(frozen=True)
class Claim:
    """A lab claim: a statement about attention with code that measures and judges it, read from its module.

    id                         name of the claim, such as "beta"
    chapter                    the package of the module: "attention", "heads" or "transformers"
    claim                      the text after `Claim:` in the module's docstring
    measures, finding, source  the texts after these words in the docstring
    budget                     time limit of a run in seconds, on two cores
    """

    id: str
    chapter: str
    question: str
    claim: str
    measures: str
    finding: str
    budget: float  # seconds on two cores
    source: str
    module: ModuleType

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the question, the claim and the result shipped with the package."""
        from regard.lab.html_page import claims_page  # imports this module
        from regard.lab.results import shipped_results

        return show_page(claims_page([(self, shipped_results().get(self.id))], self.question))

    @property
    def maths(self) -> str:
        """The formula of the claim in LaTeX."""
        return str(self.module.MATHS)

    @property
    def formula(self) -> Expression:
        """The formula of the claim as an expression tree."""
        return parse_latex(self.maths)

    @property
    def wrong_answers(self) -> tuple[WrongAnswer, ...]:
        """The wrong answers of the course's exercise sheets that this claim refutes."""
        return tuple(each for each in wrong_answers() if each.claim == self.id)

    def setup(self, settings: Mapping[str, Any] | None = None, *, seed: int | None = None, smoke: bool = False) -> Any:
        """Return the setup to run the claim with.

        settings  fields of the setup to change, by name
        seed      the random seed; None keeps that of the setup
        smoke     start from the quick setup, which runs in a few seconds
        """
        setup = override(self.module.SMOKE if smoke else self.module.Setup(), settings or {})
        setup = setup if seed is None else replace(setup, seed=seed)
        check_settings(setup)
        return setup

    def run(self, setup: Any, **parts: Any) -> "Outcome":
        """Run the claim and return its measured numbers, its verdict and the seconds it took.

        setup  as `Claim.setup` returns it
        parts  functions or models to replace, such as attention=my_attention
        """
        start = time.perf_counter()
        numbers = self.module.run(setup, **parts)
        seconds = time.perf_counter() - start
        return Outcome(self, setup, numbers, self.judge(numbers, training_steps(setup)), seconds)

    def judge(self, numbers: Numbers, steps: int | None = None) -> Verdict:
        """Return the verdict on the claim for measured numbers.

        A model that was trained for too few steps cannot refute a claim about trained models: if `steps` is smaller
        than the steps of the quick setup, "refuted" becomes "unclear".

        numbers  the measured numbers by name, as `run` of the module returns them
        steps    number of training steps of the run; None if nothing was trained
        """
        verdict, least = judge_finite(self._judge, numbers), training_steps(self.module.SMOKE)
        if verdict.word != REFUTED or steps is None or steps >= least:
            return verdict
        return Verdict(UNCLEAR, f"{verdict.sentence} This setup does not decide: it needs at least {least} steps.")

    def _judge(self, numbers: Numbers) -> Verdict:
        decision: Decision = self.module.verdict(numbers)
        sentence = render(self.finding, n=numbers, **decision.shown)
        missing = f" This setup does not decide: {decision.missing}." if decision.missing else ""
        return Verdict(decision.word, sentence + missing)

    def draw(self, numbers: Numbers) -> Figure:
        """Draw the figure of the claim from its measured numbers."""
        figure: Figure = self.module.draw(numbers)
        return figure


@dataclass(frozen=True)
class Outcome:
    """The result of running a lab claim: its setup, measured numbers, verdict and duration."""

    claim: Claim
    setup: Any
    numbers: Numbers
    verdict: Verdict
    seconds: float

    @property
    def wrong_answers(self) -> list[tuple[WrongAnswer, Verdict]]:
        """The wrong answers of the exercise sheets that this run can judge, each with its verdict."""
        return judge_wrong_answers(self.claim.id, self.numbers, self.verdict)


@cache
def claims() -> Registry[Claim]:
    """Return all lab claims by id, sorted by chapter and then by name."""
    found: Registry[Claim] = Registry("claim")
    for chapter in CHAPTERS:
        package = import_module(f"regard.lab.{chapter}")
        for entry in iter_modules(package.__path__):
            claim = _parse_claim(chapter, import_module(f"regard.lab.{chapter}.{entry.name}"))
            found.add(claim.id)(claim)
    return found


def training_steps(setup: Any) -> int:
    """Return the number of training steps of a claim's setup, or 0 if nothing is trained."""
    steps: int = getattr(getattr(setup, "training", setup), "steps", 0)
    return steps


_FIELDS = ("Claim", "Measures", "Finding", "Budget", "Source")


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
        finding=fields["Finding"],
        budget=float(budget[1]),
        source=fields["Source"],
        module=module,
    )
