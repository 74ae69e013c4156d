"""The contents of a worked solution in order, independent of the output format: headings, text, formulas, maps."""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.base.errors import ConfigError
from regard.base.formulas import (
    DIGITS,
    Chain,
    Entry,
    Expression,
    FunctionCall,
    MatrixLiteral,
    Number,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    Transpose,
    is_written_exactly,
    text,
)
from regard.work.describe_map import describe_map
from regard.work.exact_numbers import Matrix, Surd, format_value, is_exact
from regard.work.map_picture import AttentionMap, attention_maps
from regard.work.problem import ROLES, HeadMatrices, LinearProjection, Problem
from regard.work.solution import Solution, SolutionStep, bias_symbol, weight_symbol

MAX_ENTRIES = 5000  # entries that can be written out one by one


@dataclass(frozen=True)
class Heading:
    """A heading of a document; level 1 is the title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a document."""

    text: str


@dataclass(frozen=True)
class Formula:
    """A formula on its own line of a document."""

    expression: Expression


@dataclass(frozen=True)
class FormulaList:
    """Formulas one below the other, which show the calculation of each entry of a matrix."""

    expressions: tuple[Expression, ...]


@dataclass(frozen=True)
class MapFigure:
    """A figure of a document that shows an attention map."""

    attention_map: AttentionMap


Block = Heading | Paragraph | Formula | FormulaList | MapFigure


def build_document(solution: Solution, *, digits: int = DIGITS, every_step: bool = True) -> list[Block]:
    """Return a worked solution as a list of document blocks: headings, paragraphs, formulas and attention maps.

    digits      decimals to show, 1 to 15
    every_step  whether to show the calculation of every entry, or only the matrices
    """
    if not 1 <= digits <= 15:
        raise ConfigError(f"digits is {digits}, but should be 1 to 15")
    count = sum(step.shape[0] * step.shape[1] for step in solution.steps)
    if every_step and count > MAX_ENTRIES:
        raise ConfigError(f"{count:,} entries are too many to write out one by one; use steps='brief'")
    problem = solution.problem
    title = f"Worked solution: {problem.name} ({'scaled' if problem.scaled else 'not scaled'})"
    blocks: list[Block] = [Heading(title, 1), Paragraph(_introduction(solution, digits))]
    blocks += _given_matrices(problem, digits)
    blocks += _overview_formulas(problem)
    head: int | None = None
    for at, step in enumerate(solution.steps, 1):
        if step.head != head and step.head is not None:
            blocks.append(Heading(f"Head {step.head}"))
        head = step.head
        blocks += _step_blocks(step, at, digits, every_step)
    blocks.append(Heading("The attention map"))
    for number, attention_map in enumerate(attention_maps(solution), 1):
        text = describe_map(problem, solution.weights(number))
        blocks += [
            MapFigure(attention_map),
            Paragraph(f"{attention_map.title}: {text}" if len(problem.heads) > 1 else text),
        ]
    return blocks


def _introduction(solution: Solution, digits: int) -> str:
    problem = solution.problem
    queries, keys = ("query" if problem.queries == 1 else "queries"), ("key" if problem.keys == 1 else "keys")
    tokens = f"{problem.queries} {queries} and {problem.keys} {keys}"
    if problem.queries == problem.keys:
        tokens = "1 token" if problem.keys == 1 else f"{problem.keys} tokens"
    heads = "one head" if len(problem.heads) == 1 else f"{len(problem.heads)} heads"
    axis = "along each row" if problem.by_rows else "down each column"
    scale = f"divided by the square root of {problem.width(0)}" if problem.scaled else "not scaled"
    mask = f", masked by {problem.mask!r}" if problem.is_masked else ""
    scores = solution.step("scores").values
    exact = "Fractions and square roots are exact. " if any(is_exact(value) for row in scores for value in row) else ""
    return (
        f"{tokens[0].upper()}{tokens[1:]}, {heads}; a token is a {problem.token_axis}, scores are "
        f"{scale}{mask}, and softmax runs {axis}. {exact}Decimals are computed in float64 and rounded to {digits} "
        "places only where they are shown."
    )


def _given_matrices(problem: Problem, digits: int) -> Iterator[Block]:
    yield Heading("Given")
    if problem.inputs is not None:
        yield Formula(_equation(Symbol("X"), problem.inputs, digits))
    for number, head in enumerate(problem.heads, 1):
        yield from _given_head(problem, head, number if len(problem.heads) > 1 else None, digits)
    if problem.output_projection is not None:
        yield from _projection(problem, "o" if problem.by_rows else "c", problem.output_projection, None, digits)


def _given_head(problem: Problem, head: HeadMatrices, mark: int | None, digits: int) -> Iterator[Block]:
    for role in ROLES:
        given = head.role(role)
        if isinstance(given, LinearProjection):
            yield from _projection(problem, role, given, mark, digits)
        else:
            yield Formula(_equation(Symbol(role.upper(), above=mark), given, digits))


def _projection(
    problem: Problem, letter: str, given: LinearProjection, mark: int | None, digits: int
) -> Iterator[Block]:
    yield Formula(_equation(weight_symbol(problem, letter, mark), given.weights, digits))
    if given.bias is not None:
        bias: Matrix = (given.bias,) if problem.by_rows else tuple((each,) for each in given.bias)
        yield Formula(_equation(bias_symbol(problem, letter, mark), bias, digits))


def _equation(symbol: Symbol, grid: Matrix, digits: int) -> Chain:
    return Chain((symbol, matrix(grid)), ("=" if _shown_exactly(grid, digits) else "≈",))


def _shown_exactly(grid: Matrix, digits: int) -> bool:
    return all(isinstance(value, Surd) or is_written_exactly(value, digits) for row in grid for value in row)


def matrix(grid: Matrix) -> MatrixLiteral:
    """Return a matrix as a formula, with exact numbers where they are known."""
    return MatrixLiteral(tuple(tuple(format_value(value) for value in row) for row in grid))


def _overview_formulas(problem: Problem) -> Iterator[Block]:
    """Yield the formulas of every head, and of concatenation and output projection if the problem has them."""
    several = len(problem.heads) > 1
    for number in range(len(problem.heads)):
        yield Formula(_head_formula(problem, number, number + 1 if several else None))
    last: Expression = Symbol("O")
    if several:
        last = FunctionCall("concat", tuple(Symbol("O", above=number + 1) for number in range(len(problem.heads))))
        if problem.output_projection is None:
            yield Formula(Chain((Symbol("H"), last), ("=",)))
    if problem.output_projection is not None:
        letter = "o" if problem.by_rows else "c"
        weights = weight_symbol(problem, letter, None)
        mixed: Expression = Product((last, weights) if problem.by_rows else (weights, last), dot=False)
        if problem.output_projection.bias is not None:
            mixed = Sum((mixed, bias_symbol(problem, letter, None)))
        yield Formula(Chain((Symbol("R"), mixed), ("=",)))


def _head_formula(problem: Problem, number: int, mark: int | None) -> Chain:
    q, k, v, out = (Symbol(letter, above=mark) for letter in "QKVO")
    scores: Expression = Product((q, Transpose(k)) if problem.by_rows else (Transpose(k), q), dot=False)
    scores = Quotient(scores, Root(Number(problem.width(number)))) if problem.scaled else scores
    scores = FunctionCall("mask", (scores,)) if problem.is_masked else scores
    weights = FunctionCall("softmax", (scores,))
    return Chain((out, Product((weights, v) if problem.by_rows else (v, weights), dot=False)), ("=",))


def _step_blocks(step: SolutionStep, at: int, digits: int, every_step: bool) -> Iterator[Block]:
    yield Heading(f"Step {at}. {step.title}", 3)
    yield Paragraph(step.explanation)
    if every_step:
        lines = tuple(
            entry_line(step, r, c, digits)
            for r, row in enumerate(step.workings)
            for c, working in enumerate(row)
            if working is not None
        )
        if lines:
            yield FormulaList(lines)
    yield Formula(_result_formula(step, digits))


def entry_line(step: SolutionStep, r: int, c: int, digits: int) -> Chain:
    """Return the line of a worked solution that shows one entry: its name, its calculation and its value.

    r, c  row and column of the entry, counted from 0
    """
    value, working = step.values[r][c], step.workings[r][c]
    assert working is not None
    sides: list[Expression] = [Entry(step.symbol, _entry_index(step, r, c)), working]
    relations = ["="]
    if is_exact(value) and text(format_value(value)) != text(working):
        sides.append(format_value(value))
        relations.append("=" if isinstance(value, Surd) or is_written_exactly(value, digits) else "≈")
    if isinstance(value, Surd | float):
        sides.append(Number(float(value)))
        relations.append("≈")
    return Chain(tuple(sides), tuple(relations))


def _entry_index(step: SolutionStep, r: int, c: int) -> tuple[int, ...]:
    if step.key in ("largest", "sums"):
        return (max(r, c) + 1,)  # one number per row or column
    return r + 1, c + 1


def _result_formula(step: SolutionStep, digits: int) -> Chain:
    sides: list[Expression] = [step.symbol, step.formula, matrix(step.values)]
    relations = ["=", "=" if _shown_exactly(step.values, digits) else "≈"]
    if any(isinstance(value, Surd) for row in step.values for value in row):
        sides.append(MatrixLiteral(tuple(tuple(Number(float(value)) for value in row) for row in step.values)))
        relations.append("≈")
    return Chain(tuple(sides), tuple(relations))
