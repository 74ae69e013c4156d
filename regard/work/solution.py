"""The worked solution: every step of attention in order, every entry with how it comes of the numbers before it."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from regard.base.errors import ConfigError, RegardError
from regard.base.formulas import (
    Chain,
    Difference,
    Expression,
    FunctionCall,
    Number,
    Power,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    Transpose,
    Word,
    is_written_exactly,
)
from regard.base.validation import LARGEST_FLOAT
from regard.core.attend import attend
from regard.work.exact_numbers import (
    HIDDEN,
    ZERO,
    Grid,
    Value,
    divided,
    exponential,
    floats,
    format_value,
    less,
    over_root,
    times,
    total,
    transposed,
)
from regard.work.problem import ROLES, Problem, Projection

Workings = tuple[tuple[Expression | None, ...], ...]
WORDS = {"q": "queries", "k": "keys", "v": "values"}
AGREEMENT = 1e-9  # of the largest value: far above rounding in float64, far below any mistake


class DisagreementError(RegardError, RuntimeError):
    """A worked solution that is not what `attend` computes: a fault of this package."""


@dataclass(frozen=True)
class Step:
    """One step: what it is called, its formula, its values, and how each entry comes of earlier numbers."""

    key: str
    head: int | None  # counted from 1, None where there is only one
    title: str
    words: str
    symbol: Symbol
    formula: Expression
    values: Grid
    workings: Workings

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values[0])


@dataclass(frozen=True)
class Solution:
    """All steps of a problem, in order."""

    problem: Problem
    steps: tuple[Step, ...]

    def step(self, key: str, head: int | None = None) -> Step:
        """The step of that name; `head` counts from 1 and is needed where there are several."""
        return next(step for step in self.steps if step.key == key and (head is None or step.head in (None, head)))

    def has(self, key: str) -> bool:
        return any(step.key == key for step in self.steps)

    @property
    def output(self) -> Grid:
        """What comes out in the end."""
        return self.steps[-1].values

    def weights(self, head: int = 1) -> list[list[float]]:
        """The attention map of a head; rows are queries, whatever the convention."""
        values = self.step("weights", head).values
        return floats(values if self.problem.by_rows else transposed(values))


def solve(problem: Problem) -> Solution:
    """The worked solution, which has been compared with `attend`."""
    steps: list[Step] = []
    several = len(problem.heads) > 1
    outputs = []
    for number in range(len(problem.heads)):
        made = _solve_head(problem, number, number + 1 if several else None)
        steps += made
        outputs.append(made[-1])
    if several:
        steps.append(_joined(problem, outputs))
    if problem.mixing is not None:
        steps.append(_mixed(problem, problem.mixing, steps[-1]))
    solution = Solution(problem, tuple(steps))
    _compare(solution)
    return solution


def _within_floats(steps: list[Step]) -> None:
    """An error for a step whose numbers no float holds: exponentials are floats."""
    for step in steps:
        for row in step.values:
            for value in row:
                try:
                    float(value)
                except OverflowError:
                    raise ConfigError(
                        f"{step.key} has a number above {LARGEST_FLOAT:.1e}, the largest that can be worked with here; "
                        "take smaller numbers"
                    ) from None


def _solve_head(problem: Problem, number: int, mark: int | None) -> list[Step]:
    by_rows, width = problem.by_rows, problem.width(number)
    steps: list[Step] = []
    vectors: dict[str, Grid] = {}
    for role in ROLES:
        given = problem.heads[number].role(role)
        if isinstance(given, Projection):
            step = _projected(problem, role, given, mark)
            steps.append(step)
            vectors[role] = step.values
        else:
            vectors[role] = given
    q, k, v = (Symbol(role.upper(), above=mark) for role in ROLES)
    turned = transposed(vectors["k"])
    left, right = (vectors["q"], turned) if by_rows else (turned, vectors["q"])
    letters = (q, Transpose(k)) if by_rows else (Transpose(k), q)
    values, workings = multiplied(left, right)
    scores = Step(
        key="scores",
        head=mark,
        title="Scores: every query with every key",
        words=f"Entry [r,c] is the dot product of {'query r and key c' if by_rows else 'key r and query c'}.",
        symbol=Symbol("S", above=mark),
        formula=Product(letters, dot=False),
        values=values,
        workings=workings,
    )
    steps.append(scores)
    _within_floats(steps)
    if problem.scaled:
        steps.append(_scaled(scores, width))
    if problem.hides:
        steps.append(_masked(problem, steps[-1]))
    steps += _softmax(problem, steps[-1])
    weights = steps[-1]
    left, right = (weights.values, vectors["v"]) if by_rows else (vectors["v"], weights.values)
    values, workings = multiplied(left, right)
    steps.append(
        Step(
            key="output",
            head=mark,
            title="Output: the values, weighted",
            words=f"Each {_line(problem)} is the sum of all values, each times its weight.",
            symbol=Symbol("O", above=mark),
            formula=Product((weights.symbol, v) if by_rows else (v, weights.symbol), dot=False),
            values=values,
            workings=workings,
        )
    )
    return steps


def _line(problem: Problem) -> str:
    return problem.convention.removesuffix("s")


def multiplied(left: Grid, right: Grid, bias: Callable[[int, int], Value] | None = None) -> tuple[Grid, Workings]:
    """A product of matrices, and each of its entries as a sum of products."""
    columns = transposed(right)
    values: list[tuple[Value, ...]] = []
    workings: list[tuple[Expression | None, ...]] = []
    for r, row in enumerate(left):
        line: list[Value] = []
        sums: list[Expression | None] = []
        for c, column in enumerate(columns):
            pairs = list(zip(row, column, strict=True))
            terms = [times(a, b) for a, b in pairs]
            written: list[Expression] = [Product((format_value(a), format_value(b))) for a, b in pairs]
            if bias is not None:
                terms.append(bias(r, c))
                written.append(format_value(bias(r, c)))
            line.append(total(terms))
            sums.append(Sum(tuple(written)))
        values.append(tuple(line))
        workings.append(tuple(sums))
    return tuple(values), tuple(workings)


def weight_symbol(problem: Problem, role: str, mark: int | None) -> Symbol:
    """W_Q in rows, Omega_q in columns, as each school writes it."""
    return Symbol("W", role.upper(), mark) if problem.by_rows else Symbol("Ω", role, mark)


def bias_symbol(problem: Problem, role: str, mark: int | None) -> Symbol:
    return Symbol("b", role.upper(), mark) if problem.by_rows else Symbol("β", role, mark)


def _product(problem: Problem, letter: str, mark: int | None, data: Symbol, biased: bool) -> Expression:
    weights = weight_symbol(problem, letter, mark)
    formula: Expression = Product((data, weights) if problem.by_rows else (weights, data), dot=False)
    return Sum((formula, bias_symbol(problem, letter, mark))) if biased else formula


def _applied(problem: Problem, data: Grid, given: Projection) -> tuple[Grid, Workings]:
    left, right = (data, given.weights) if problem.by_rows else (given.weights, data)
    bias = given.bias
    if bias is None:
        return multiplied(left, right)
    return multiplied(left, right, lambda r, c: bias[c if problem.by_rows else r])


def _projected(problem: Problem, role: str, given: Projection, mark: int | None) -> Step:
    assert problem.inputs is not None
    values, workings = _applied(problem, problem.inputs, given)
    return Step(
        key=role,
        head=mark,
        title=f"{WORDS[role].capitalize()}: what the inputs become",
        words=f"Each {_line(problem)} of the inputs becomes one of the {WORDS[role]}.",
        symbol=Symbol(role.upper(), above=mark),
        formula=_product(problem, role, mark, Symbol("X"), given.bias is not None),
        values=values,
        workings=workings,
    )


def _scaled(scores: Step, width: int) -> Step:
    root = Root(Number(width))
    return Step(
        key="scaled",
        head=scores.head,
        title="Scaled scores",
        words=f"Every score is divided by the root of the width of a query, {width}.",
        symbol=Symbol("Z", above=scores.head),
        formula=Quotient(scores.symbol, root),
        values=tuple(tuple(over_root(value, width) for value in row) for row in scores.values),
        workings=tuple(tuple(Quotient(format_value(value), root) for value in row) for row in scores.values),
    )


def _masked(problem: Problem, before: Step) -> Step:
    seen = problem.visible if problem.by_rows else tuple(zip(*problem.visible, strict=True))
    return Step(
        key="masked",
        head=before.head,
        title="Masked scores",
        words=f"The mask {problem.mask!r} hides some pairs: their scores become minus infinity.",
        symbol=Symbol("M", above=before.head),
        formula=FunctionCall("mask", (before.symbol,)),
        values=tuple(
            tuple(value if visible else HIDDEN for value, visible in zip(row, line, strict=True))
            for row, line in zip(before.values, seen, strict=True)
        ),
        workings=tuple(tuple(None for _ in row) for row in before.values),
    )


def _softmax(problem: Problem, before: Step) -> list[Step]:
    """Largest score, exponentials, their sums, and weights, along rows or down columns."""
    by_rows, mark = problem.by_rows, before.head
    line = _line(problem)
    rows = before.values if by_rows else transposed(before.values)
    tops = [max(row, key=float) for row in rows]
    shifts = [
        [HIDDEN if value == HIDDEN else less(value, top) for value in row] for row, top in zip(rows, tops, strict=True)
    ]
    exponentials = tuple(tuple(map(exponential, row)) for row in shifts)
    sums = [total(row) for row in exponentials]
    weights = tuple(
        tuple(ZERO if amount == 0 else divided(value, amount) for value in row)
        for row, amount in zip(exponentials, sums, strict=True)
    )

    m, e, t = (Symbol(letter, above=mark) for letter in ("m", "E", "t"))
    top_workings: Workings = tuple(
        (
            FunctionCall("max", tuple(format_value(value) for value in row if value != HIDDEN))
            if top != HIDDEN
            else None,
        )
        for row, top in zip(rows, tops, strict=True)
    )
    column = tuple((top,) for top in tops)
    totals = tuple((amount,) for amount in sums)
    return [
        Step(
            key="largest",
            head=mark,
            title=f"The largest score of each {line}",
            words="It is taken away before the exponentials, which changes no weight and keeps every number small.",
            symbol=m,
            formula=FunctionCall("max", (before.symbol, Word(f"each {line}"))),
            values=column if by_rows else transposed(column),
            workings=_turned(top_workings, by_rows),
        ),
        Step(
            key="exponentials",
            head=mark,
            title="Exponentials",
            words=f"Every score less the largest of its {line}, as a power of e.",
            symbol=e,
            formula=Power(Symbol("e"), Difference(before.symbol, m)),
            values=exponentials if by_rows else transposed(exponentials),
            workings=_turned(
                tuple(tuple(_raised(value, top) for value in row) for row, top in zip(rows, tops, strict=True)), by_rows
            ),
        ),
        Step(
            key="sums",
            head=mark,
            title="Their sums",
            words=f"The exponentials of each {line}, added up.",
            symbol=t,
            formula=FunctionCall("sum", (e, Word(f"each {line}"))),
            values=totals if by_rows else transposed(totals),
            workings=_turned(tuple((Sum(tuple(map(format_value, row))),) for row in exponentials), by_rows),
        ),
        Step(
            key="weights",
            head=mark,
            title="Weights: the attention map",
            words=f"Every exponential over the sum of its {line}, so that each {line} adds up to 1.",
            symbol=Symbol("A", above=mark),
            formula=Chain((FunctionCall("softmax", (before.symbol,)), Quotient(e, t)), ("=",)),
            values=weights if by_rows else transposed(weights),
            workings=_turned(
                tuple(
                    tuple(Quotient(format_value(value), format_value(amount)) if amount != 0 else None for value in row)
                    for row, amount in zip(exponentials, sums, strict=True)
                ),
                by_rows,
            ),
        ),
    ]


def _turned(workings: Workings, by_rows: bool) -> Workings:
    return workings if by_rows else tuple(zip(*workings, strict=True))


def _raised(value: Value, top: Value) -> Expression | None:
    """e to a score less the largest, or None for a hidden pair."""
    if value == HIDDEN:
        return None
    shift = less(value, top)
    near = Number(shift if isinstance(shift, Fraction) else float(shift))
    sides = (Difference(format_value(value), format_value(top)), near)
    return Chain(tuple(Power(Symbol("e"), side) for side in sides), ("=" if is_written_exactly(near.value) else "≈",))


def _joined(problem: Problem, outputs: list[Step]) -> Step:
    side_by_side = problem.by_rows
    grids = [step.values if side_by_side else transposed(step.values) for step in outputs]
    values: Grid = tuple(tuple(value for part in parts for value in part) for parts in zip(*grids, strict=True))
    values = values if side_by_side else transposed(values)
    return Step(
        key="joined",
        head=None,
        title="The heads, joined",
        words=f"The outputs of the heads {'side by side' if side_by_side else 'one below the other'}.",
        symbol=Symbol("H"),
        formula=FunctionCall("join", tuple(step.symbol for step in outputs)),
        values=values,
        workings=tuple(tuple(None for _ in row) for row in values),
    )


def _mixed(problem: Problem, given: Projection, before: Step) -> Step:
    values, workings = _applied(problem, before.values, given)
    letter = "o" if problem.by_rows else "c"
    return Step(
        key="result",
        head=None,
        title="The result: heads mixed",
        words="One last product lets every number depend on every head.",
        symbol=Symbol("R"),
        formula=_product(problem, letter, None, before.symbol, given.bias is not None),
        values=values,
        workings=workings,
    )


def vectors_of(solution: Solution, number: int) -> dict[str, Grid]:
    """q, k and v of a head counted from 0, rows first, as given or as worked out."""
    found = {}
    for role in ROLES:
        given = solution.problem.heads[number].role(role)
        grid = solution.step(role, number + 1).values if isinstance(given, Projection) else given
        found[role] = grid if solution.problem.by_rows else transposed(grid)
    return found


def _compare(solution: Solution) -> None:
    """Raise unless weights and outputs are those of the one attention there is."""
    problem = solution.problem
    outputs = []
    for number in range(len(problem.heads)):
        q, k, v = (_tensor(grid) for grid in vectors_of(solution, number).values())
        beta = None if problem.scaled else 1.0
        one_hot = torch.eye(k.shape[2], dtype=torch.float64)[None, None]  # values that give back the weights
        weights = attend(q, k, one_hot, mask=problem.mask, beta=beta)
        out = attend(q, k, v, mask=problem.mask, beta=beta)
        outputs.append(out[0, 0])
        for key, true in (("weights", weights), ("output", out)):
            _agree(solution, key, number, true[0, 0])
    together = torch.cat(outputs, 1)
    if problem.mixing is not None:
        weights_out = torch.tensor(floats(problem.mixing.weights), dtype=torch.float64)
        together = together @ (weights_out if problem.by_rows else weights_out.T)
        if problem.mixing.bias is not None:
            together = together + torch.tensor([float(each) for each in problem.mixing.bias], dtype=torch.float64)
    _agree(solution, solution.steps[-1].key, None, together)


def _agree(solution: Solution, key: str, number: int | None, true: Tensor) -> None:
    step = solution.step(key, None if number is None else number + 1)
    ours = torch.tensor(floats(step.values), dtype=torch.float64)
    ours = ours if solution.problem.by_rows else ours.T
    off = float((ours - true).abs().max())
    if not off <= AGREEMENT * max(1.0, float(true.abs().max())):
        raise DisagreementError(
            f"{step.title}: the worked solution and attend differ by {off:.3g}; "
            "this is a fault of regard, please report it"
        )


def _tensor(grid: Grid) -> Tensor:
    return torch.tensor(floats(grid), dtype=torch.float64)[None, None]
