"""The plan of a worked solution: headings, sentences, formulas and maps in order, in no format yet."""

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
from regard.work.describe_map import read_map
from regard.work.exact_numbers import Grid, Surd, format_value, is_exact
from regard.work.map_picture import Map, maps
from regard.work.problem import ROLES, Head, Problem, Projection
from regard.work.solution import Solution, Step, bias_symbol, weight_symbol

MOST_LINES = 5000  # entries that are written out one by one


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is the document's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Formula:
    """A formula on lines of its own."""

    expression: Expression


@dataclass(frozen=True)
class Lines:
    """Formulas one below the other: how the entries of a matrix come about."""

    expressions: tuple[Expression, ...]


@dataclass(frozen=True)
class Picture:
    """An attention map."""

    drawn: Map


Block = Heading | Words | Formula | Lines | Picture


def document(solution: Solution, *, digits: int = DIGITS, every_step: bool = True) -> list[Block]:
    """The blocks of a solution, with every entry worked out or with the matrices alone."""
    if not 1 <= digits <= 15:
        raise ConfigError(f"digits is {digits}, but float64 has 15 decimals to show; take 1 to 15")
    count = sum(step.shape[0] * step.shape[1] for step in solution.steps)
    if every_step and count > MOST_LINES:
        raise ConfigError(f"{count:,} entries are too many to write out one by one; ask for steps='brief'")
    problem = solution.problem
    blocks: list[Block] = [Heading(f"Worked solution: {problem.name}", 1), Words(_introduction(solution, digits))]
    blocks += _given(problem, digits)
    blocks += _whole(problem)
    head: int | None = None
    for at, step in enumerate(solution.steps, 1):
        if step.head != head and step.head is not None:
            blocks.append(Heading(f"Head {step.head}"))
        head = step.head
        blocks += _step(step, at, digits, every_step)
    blocks.append(Heading("The map, and what it says"))
    for number, drawn in enumerate(maps(solution), 1):
        said = read_map(problem, solution.weights(number))
        blocks += [Picture(drawn), Words(f"{drawn.title}: {said}" if len(problem.heads) > 1 else said)]
    return blocks


def _introduction(solution: Solution, digits: int) -> str:
    problem = solution.problem
    queries, keys = ("query" if problem.queries == 1 else "queries"), ("key" if problem.keys == 1 else "keys")
    tokens = f"{problem.queries} {queries} and {problem.keys} {keys}"
    if problem.queries == problem.keys:
        tokens = "1 token" if problem.keys == 1 else f"{problem.keys} tokens"
    heads = "one head" if len(problem.heads) == 1 else f"{len(problem.heads)} heads"
    axis = "along each row" if problem.by_rows else "down each column"
    scale = f"divided by the root of {problem.width(0)}" if problem.scaled else "not scaled"
    mask = f", masked by {problem.mask!r}" if problem.hides else ""
    scores = solution.step("scores").values
    exact = "Fractions and roots are exact. " if any(is_exact(value) for row in scores for value in row) else ""
    return (
        f"{tokens[0].upper()}{tokens[1:]}, {heads}; a token is a {problem.convention.removesuffix('s')}, scores are "
        f"{scale}{mask}, and softmax runs {axis}. {exact}Decimals are computed in float64 and rounded to {digits} "
        "places only where they are shown."
    )


def _given(problem: Problem, digits: int) -> Iterator[Block]:
    yield Heading("What is given")
    if problem.inputs is not None:
        yield Formula(_equals(Symbol("X"), problem.inputs, digits))
    for number, head in enumerate(problem.heads, 1):
        yield from _given_head(problem, head, number if len(problem.heads) > 1 else None, digits)
    if problem.mixing is not None:
        yield from _projection(problem, "o" if problem.by_rows else "c", problem.mixing, None, digits)


def _given_head(problem: Problem, head: Head, mark: int | None, digits: int) -> Iterator[Block]:
    for role in ROLES:
        given = head.role(role)
        if isinstance(given, Projection):
            yield from _projection(problem, role, given, mark, digits)
        else:
            yield Formula(_equals(Symbol(role.upper(), above=mark), given, digits))


def _projection(problem: Problem, letter: str, given: Projection, mark: int | None, digits: int) -> Iterator[Block]:
    yield Formula(_equals(weight_symbol(problem, letter, mark), given.weights, digits))
    if given.bias is not None:
        bias: Grid = (given.bias,) if problem.by_rows else tuple((each,) for each in given.bias)
        yield Formula(_equals(bias_symbol(problem, letter, mark), bias, digits))


def _equals(symbol: Symbol, grid: Grid, digits: int) -> Chain:
    return Chain((symbol, matrix(grid)), ("=" if _all_shown(grid, digits) else "≈",))


def _all_shown(grid: Grid, digits: int) -> bool:
    return all(isinstance(value, Surd) or is_written_exactly(value, digits) for row in grid for value in row)


def matrix(grid: Grid) -> MatrixLiteral:
    return MatrixLiteral(tuple(tuple(format_value(value) for value in row) for row in grid))


def _whole(problem: Problem) -> Iterator[Block]:
    """The whole in formulas: every head, then how they are joined and mixed."""
    several = len(problem.heads) > 1
    for number in range(len(problem.heads)):
        yield Formula(_whole_head(problem, number, number + 1 if several else None))
    last: Expression = Symbol("O")
    if several:
        last = FunctionCall("join", tuple(Symbol("O", above=number + 1) for number in range(len(problem.heads))))
        if problem.mixing is None:
            yield Formula(Chain((Symbol("H"), last), ("=",)))
    if problem.mixing is not None:
        letter = "o" if problem.by_rows else "c"
        weights = weight_symbol(problem, letter, None)
        mixed: Expression = Product((last, weights) if problem.by_rows else (weights, last), dot=False)
        if problem.mixing.bias is not None:
            mixed = Sum((mixed, bias_symbol(problem, letter, None)))
        yield Formula(Chain((Symbol("R"), mixed), ("=",)))


def _whole_head(problem: Problem, number: int, mark: int | None) -> Chain:
    q, k, v, out = (Symbol(letter, above=mark) for letter in "QKVO")
    scores: Expression = Product((q, Transpose(k)) if problem.by_rows else (Transpose(k), q), dot=False)
    scores = Quotient(scores, Root(Number(problem.width(number)))) if problem.scaled else scores
    scores = FunctionCall("mask", (scores,)) if problem.hides else scores
    weights = FunctionCall("softmax", (scores,))
    return Chain((out, Product((weights, v) if problem.by_rows else (v, weights), dot=False)), ("=",))


def _step(step: Step, at: int, digits: int, every_step: bool) -> Iterator[Block]:
    yield Heading(f"Step {at}. {step.title}", 3)
    yield Words(step.words)
    if every_step:
        lines = tuple(
            entry_line(step, r, c, digits)
            for r, row in enumerate(step.workings)
            for c, working in enumerate(row)
            if working is not None
        )
        if lines:
            yield Lines(lines)
    yield Formula(_result(step, digits))


def entry_line(step: Step, r: int, c: int, digits: int) -> Chain:
    """One entry: its name, how it comes about, and its value."""
    value, working = step.values[r][c], step.workings[r][c]
    assert working is not None
    sides: list[Expression] = [Entry(step.symbol, _places(step, r, c)), working]
    relations = ["="]
    if is_exact(value) and text(format_value(value)) != text(working):
        sides.append(format_value(value))
        relations.append("=" if isinstance(value, Surd) or is_written_exactly(value, digits) else "≈")
    if isinstance(value, Surd | float):
        sides.append(Number(float(value)))
        relations.append("≈")
    return Chain(tuple(sides), tuple(relations))


def _places(step: Step, r: int, c: int) -> tuple[int, ...]:
    if step.key in ("largest", "sums"):
        return (max(r, c) + 1,)  # one number for each line
    return r + 1, c + 1


def _result(step: Step, digits: int) -> Chain:
    sides: list[Expression] = [step.symbol, step.formula, matrix(step.values)]
    relations = ["=", "=" if _all_shown(step.values, digits) else "≈"]
    if any(isinstance(value, Surd) for row in step.values for value in row):
        sides.append(MatrixLiteral(tuple(tuple(Number(float(value)) for value in row) for row in step.values)))
        relations.append("≈")
    return Chain(tuple(sides), tuple(relations))
