"""The worked solution of an attention problem: every step in order, and how each entry follows from earlier numbers."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from regard.base.display import show_page
from regard.base.errors import ConfigError, RegardError
from regard.base.formulas import (
    DIGITS,
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
    Matrix,
    Value,
    divide,
    divide_by_sqrt,
    exp,
    format_value,
    multiply,
    subtract,
    sum_values,
    to_floats,
    transpose,
)
from regard.work.problem import ROLES, LinearProjection, Problem

T = TypeVar("T")
Workings = tuple[tuple[Expression | None, ...], ...]  # how each entry is calculated; None if there is nothing to show
TEXTS = tomllib.loads(Path(__file__).with_name("solution_steps.toml").read_text(encoding="utf-8"))
AGREEMENT = 1e-9  # relative to the largest value: far above rounding in float64, far below any mistake


class DisagreementError(RegardError, RuntimeError):
    """Raised if a worked solution differs from what `attend` computes, which is a bug in this package."""


@dataclass(frozen=True)
class SolutionStep:
    """One step of a worked solution, such as the scores.

    key       name of the step, such as "scores"
    head      number of the head, counted from 1; None if there is only one
    symbol    symbol of the matrix
    formula   how the matrix is computed
    values    the matrix
    workings  for each entry the formula, with numbers, that computes it; None for no formula
    """

    key: str
    head: int | None  # counted from 1, None if there is only one
    title: str
    explanation: str
    symbol: Symbol
    formula: Expression
    values: Matrix
    workings: Workings

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values[0])


@dataclass(frozen=True)
class Solution:
    """A worked solution: all calculation steps of an attention problem, in order."""

    problem: Problem
    steps: tuple[SolutionStep, ...]

    def _repr_html_(self) -> str:
        """Return the solution as HTML, which Jupyter shows."""
        from regard.work.writing import html  # imports this module
        from regard.work.writing.document import build_document

        return show_page(html.write(build_document(self), DIGITS))

    def step(self, key: str, head: int | None = None) -> SolutionStep:
        """Return the step with this name, such as "scores".

        head  number of the head, counted from 1; needed if there are several heads
        """
        return next(step for step in self.steps if step.key == key and (head is None or step.head in (None, head)))

    def has(self, key: str) -> bool:
        """Return whether the solution has a step with this name."""
        return any(step.key == key for step in self.steps)

    @property
    def output(self) -> Matrix:
        """The matrix of the last step, which is the result."""
        return self.steps[-1].values

    def weights(self, head: int = 1) -> list[list[float]]:
        """Return the attention weights of a head, counted from 1; rows are queries in either convention."""
        values = self.step("weights", head).values
        return to_floats(values if self.problem.by_rows else transpose(values))


def solve(problem: Problem) -> Solution:
    """Solve an attention problem step by step; raise DisagreementError if the result differs from `attend`.

    In this example q, k and v are the rows 1 and 2, so the score of query 2 and key 2 is 2 * 2.

    >>> from regard.work.files import parse_matrix
    >>> from regard.work.problem import build_problem
    >>> matrices = {name: (parse_matrix("1;2", name),) for name in "qkv"}
    >>> solve(build_problem("example", matrices)).step("scores").values[1][1]
    Fraction(4, 1)
    """
    steps: list[SolutionStep] = []
    several = len(problem.heads) > 1
    outputs = []
    for index in range(len(problem.heads)):
        steps += _solve_head(problem, index, index + 1 if several else None)
        outputs.append(steps[-1])
    if several:
        steps.append(_concat_step(problem, outputs))
    if problem.output_projection is not None:
        steps.append(_output_projection_step(problem, problem.output_projection, steps[-1]))
    solution = Solution(problem, tuple(steps))
    _check_against_attend(solution)
    return solution


def _check_float_range(steps: list[SolutionStep]) -> None:
    """Raise ConfigError if a number is above the largest float, because later steps compute with floats."""
    for step in steps:
        for row in step.values:
            for value in row:
                try:
                    float(value)
                except OverflowError:
                    raise ConfigError(
                        f"{step.key} has a number above {LARGEST_FLOAT:.1e}, the largest that is supported; "
                        "use smaller numbers"
                    ) from None


def _make_step(
    key: str, head: int | None, formula: Expression, values: Matrix, workings: Workings, **words: object
) -> SolutionStep:
    """Return a step of the solution with its texts from solution_steps.toml.

    words  values of the placeholders in these texts
    """
    texts = {name: text.format(**words) for name, text in TEXTS[key].items()}
    symbol = Symbol(texts["symbol"], above=head)
    return SolutionStep(key, head, texts["title"], texts["explanation"], symbol, formula, values, workings)


def _solve_head(problem: Problem, index: int, mark: int | None) -> list[SolutionStep]:
    steps: list[SolutionStep] = []
    vectors: dict[str, Matrix] = {}
    for role in ROLES:
        source = problem.heads[index].role(role)
        if isinstance(source, LinearProjection):
            steps.append(_projection_step(problem, role, source, mark))
            vectors[role] = steps[-1].values
        else:
            vectors[role] = source
    q, k, v = (Symbol(role.upper(), above=mark) for role in ROLES)
    formula, values, workings = _ordered_product(problem, (q, vectors["q"]), (Transpose(k), transpose(vectors["k"])))
    factors = "query r and key c" if problem.by_rows else "key r and query c"
    scores = _make_step("scores", mark, formula, values, workings, factors=factors)
    steps.append(scores)
    _check_float_range(steps)
    if problem.scaled:
        steps.append(_scaling_step(scores, problem.width(index)))
    if problem.is_masked:
        steps.append(_masking_step(problem, steps[-1]))
    steps += _softmax_steps(problem, steps[-1])
    weights = steps[-1]
    formula, values, workings = _ordered_product(problem, (weights.symbol, weights.values), (v, vectors["v"]))
    steps.append(_make_step("output", mark, formula, values, workings, axis=problem.token_axis))
    return steps


def _ordered_product(
    problem: Problem,
    left: tuple[Expression, Matrix],
    right: tuple[Expression, Matrix],
    bias: Callable[[int, int], Value] | None = None,
) -> tuple[Expression, Matrix, Workings]:
    """Return the formula, the values and the calculation of each entry of a matrix product.

    The product is left @ right if tokens are rows, and right @ left if tokens are columns.

    left, right  the factors, each a symbol with its matrix
    bias         bias(row, column) returns the number that is added to this entry; None for no bias
    """
    factors = (left, right) if problem.by_rows else (right, left)
    return Product(tuple(symbol for symbol, _ in factors), dot=False), *matrix_product(
        factors[0][1], factors[1][1], bias
    )


def matrix_product(
    left: Matrix, right: Matrix, bias: Callable[[int, int], Value] | None = None
) -> tuple[Matrix, Workings]:
    """Return the product of two matrices, and for each of its entries the sum of products as a formula.

    bias  bias(row, column) returns the number that is added to this entry; None for no bias
    """
    values: list[tuple[Value, ...]] = []
    workings: list[tuple[Expression, ...]] = []
    for r, row in enumerate(left):
        line: list[Value] = []
        sums: list[Expression] = []
        for c, column in enumerate(transpose(right)):
            pairs = list(zip(row, column, strict=True))
            terms = [multiply(a, b) for a, b in pairs]
            written: list[Expression] = [Product((format_value(a), format_value(b))) for a, b in pairs]
            if bias is not None:
                terms.append(bias(r, c))
                written.append(format_value(bias(r, c)))
            line.append(sum_values(terms))
            sums.append(Sum(tuple(written)))
        values.append(tuple(line))
        workings.append(tuple(sums))
    return tuple(values), tuple(workings)


def weight_symbol(problem: Problem, role: str, mark: int | None) -> Symbol:
    """Return the symbol of projection weights: W_Q if tokens are rows, Omega_q if tokens are columns.

    role  "q", "k" or "v"; for the output projection, "o" if tokens are rows and "c" if they are columns
    mark  number of the head that the symbol shows; None for no number
    """
    return Symbol("W", role.upper(), mark) if problem.by_rows else Symbol("Ω", role, mark)


def bias_symbol(problem: Problem, role: str, mark: int | None) -> Symbol:
    """Return the symbol of a projection bias: b_Q if tokens are rows, beta_q if they are columns, as in textbooks.

    role  "q", "k" or "v"; for the output projection, "o" if tokens are rows and "c" if they are columns
    mark  number of the head that the symbol shows; None for no number
    """
    return Symbol("b", role.upper(), mark) if problem.by_rows else Symbol("β", role, mark)


def _apply_projection(
    problem: Problem, role: str, mark: int | None, data: tuple[Expression, Matrix], projection: LinearProjection
) -> tuple[Expression, Matrix, Workings]:
    """Return the formula, the values and the calculation of each entry of data times weights plus bias.

    role  "q", "k" or "v"; for the output projection, "o" if tokens are rows and "c" if they are columns
    mark  number of the head that the symbols show; None for no number
    data  the symbol and the matrix of the data
    """
    bias = projection.bias
    formula, values, workings = _ordered_product(
        problem,
        data,
        (weight_symbol(problem, role, mark), projection.weights),
        None if bias is None else lambda r, c: bias[c if problem.by_rows else r],
    )
    return Sum((formula, bias_symbol(problem, role, mark))) if bias is not None else formula, values, workings


def _projection_step(problem: Problem, role: str, projection: LinearProjection, mark: int | None) -> SolutionStep:
    assert problem.inputs is not None
    formula, values, workings = _apply_projection(problem, role, mark, (Symbol("X"), problem.inputs), projection)
    return _make_step(role, mark, formula, values, workings, axis=problem.token_axis)


def _scaling_step(scores: SolutionStep, width: int) -> SolutionStep:
    root = Root(Number(width))
    values = tuple(tuple(divide_by_sqrt(value, width) for value in row) for row in scores.values)
    workings = tuple(tuple(Quotient(format_value(value), root) for value in row) for row in scores.values)
    return _make_step("scaled", scores.head, Quotient(scores.symbol, root), values, workings, width=width)


def _masking_step(problem: Problem, before: SolutionStep) -> SolutionStep:
    visible = _flip(problem.visible, problem.by_rows)
    values = tuple(
        tuple(value if seen else HIDDEN for value, seen in zip(row, line, strict=True))
        for row, line in zip(before.values, visible, strict=True)
    )
    formula = FunctionCall("mask", (before.symbol,))
    return _make_step("masked", before.head, formula, values, _no_workings(values), mask=problem.mask)


def _softmax_steps(problem: Problem, before: SolutionStep) -> list[SolutionStep]:
    """Return the steps of the softmax: the largest scores, the exponentials, their sums, and the weights.

    The softmax is along rows, or down columns if a token is a column.

    before  the step before the softmax: the scores, or the scaled or masked scores
    """
    axis, each = problem.token_axis, Word(f"each {problem.token_axis}")
    rows = _flip(before.values, problem.by_rows)
    tops = [max(row, key=float) for row in rows]
    exponentials = tuple(
        tuple(ZERO if value == HIDDEN else exp(subtract(value, top)) for value in row)
        for row, top in zip(rows, tops, strict=True)
    )
    sums = [sum_values(row) for row in exponentials]

    def step(key: str, formula: Expression, values: Matrix, workings: Workings) -> SolutionStep:
        values, workings = _flip(values, problem.by_rows), _flip(workings, problem.by_rows)
        return _make_step(key, before.head, formula, values, workings, axis=axis)

    largest = step(
        "largest",
        FunctionCall("max", (before.symbol, each)),
        tuple((top,) for top in tops),
        tuple(
            (None if top == HIDDEN else FunctionCall("max", tuple(format_value(x) for x in row if x != HIDDEN)),)
            for row, top in zip(rows, tops, strict=True)
        ),
    )
    shifted = step(
        "exponentials",
        Power(Symbol("e"), Difference(before.symbol, largest.symbol)),
        exponentials,
        tuple(tuple(_exponential_working(value, top) for value in row) for row, top in zip(rows, tops, strict=True)),
    )
    totals = step(
        "sums",
        FunctionCall("sum", (shifted.symbol, each)),
        tuple((total,) for total in sums),
        tuple((Sum(tuple(map(format_value, row))),) for row in exponentials),
    )
    softmax = (FunctionCall("softmax", (before.symbol,)), Quotient(shifted.symbol, totals.symbol))
    weights = step(
        "weights",
        Chain(softmax, ("=",)),
        tuple(
            tuple(ZERO if total == 0 else divide(value, total) for value in row)
            for row, total in zip(exponentials, sums, strict=True)
        ),
        tuple(
            tuple(None if total == 0 else Quotient(format_value(value), format_value(total)) for value in row)
            for row, total in zip(exponentials, sums, strict=True)
        ),
    )
    return [largest, shifted, totals, weights]


def _flip(rows: tuple[tuple[T, ...], ...], by_rows: bool) -> tuple[tuple[T, ...], ...]:
    """Transpose a matrix if tokens are columns (by_rows is False); otherwise return it unchanged."""
    return rows if by_rows else tuple(zip(*rows, strict=True))


def _no_workings(values: Matrix) -> Workings:
    return tuple(tuple(None for _ in row) for row in values)


def _exponential_working(value: Value, top: Value) -> Expression | None:
    """Return the formula e^(score - largest score) with its numbers; None if the pair is hidden.

    value, top  the score and the largest score of its row
    """
    if value == HIDDEN:
        return None
    shift = subtract(value, top)
    near = Number(shift if isinstance(shift, Fraction) else float(shift))
    sides = (Difference(format_value(value), format_value(top)), near)
    return Chain(tuple(Power(Symbol("e"), side) for side in sides), ("=" if is_written_exactly(near.value) else "≈",))


def _concat_step(problem: Problem, outputs: list[SolutionStep]) -> SolutionStep:
    parts = [_flip(step.values, problem.by_rows) for step in outputs]
    joined: Matrix = tuple(tuple(value for part in row for value in part) for row in zip(*parts, strict=True))
    values = _flip(joined, problem.by_rows)
    arrangement = "side by side" if problem.by_rows else "one below the other"
    formula = FunctionCall("concat", tuple(step.symbol for step in outputs))
    return _make_step("concat", None, formula, values, _no_workings(values), arrangement=arrangement)


def _output_projection_step(problem: Problem, projection: LinearProjection, before: SolutionStep) -> SolutionStep:
    role = "o" if problem.by_rows else "c"
    formula, values, workings = _apply_projection(problem, role, None, (before.symbol, before.values), projection)
    return _make_step("result", None, formula, values, workings)


def head_vectors(solution: Solution, index: int) -> dict[str, Matrix]:
    """Return the matrices q, k and v of a head by name, with tokens in rows.

    Each is stated by the problem or computed in the solution.

    index  number of the head, counted from 0
    """
    found = {}
    for role in ROLES:
        source = solution.problem.heads[index].role(role)
        matrix = solution.step(role, index + 1).values if isinstance(source, LinearProjection) else source
        found[role] = _flip(matrix, solution.problem.by_rows)
    return found


def _check_against_attend(solution: Solution) -> None:
    """Check that weights and outputs of the solution equal those of `attend`, else raise DisagreementError."""
    problem = solution.problem
    outputs = []
    for index in range(len(problem.heads)):
        q, k, v = (_tensor(matrix)[None, None] for matrix in head_vectors(solution, index).values())
        identity = torch.eye(k.shape[2], dtype=torch.float64)[None, None]  # with v = identity the output is the weights
        for key, values in (("weights", identity), ("output", v)):
            true = attend(q, k, values, mask=problem.mask, beta=None if problem.scaled else 1.0)[0, 0]
            _compare_step(solution, key, index, true)
        outputs.append(true)
    result = torch.cat(outputs, 1)
    projection = problem.output_projection
    if projection is not None:
        result = result @ _tensor(_flip(projection.weights, problem.by_rows))
        if projection.bias is not None:
            result = result + _tensor((projection.bias,))
    _compare_step(solution, solution.steps[-1].key, None, result)


def _compare_step(solution: Solution, key: str, index: int | None, true: Tensor) -> None:
    step = solution.step(key, None if index is None else index + 1)
    difference = float((_tensor(_flip(step.values, solution.problem.by_rows)) - true).abs().max())
    if not difference <= AGREEMENT * max(1.0, float(true.abs().max())):
        raise DisagreementError(
            f"{step.title}: the worked solution and attend differ by {difference:.3g}; "
            "this is a bug in regard, please report it"
        )


def _tensor(matrix: Matrix) -> Tensor:
    return torch.tensor(to_floats(matrix), dtype=torch.float64)
