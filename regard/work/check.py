"""Check a student's steps: find the first mistake, and the hypothesis that explains it.

Steps are checked in order. A step after a mistake is checked against the student's own numbers (error carried
forward), so that a mistake counts once. A written number is correct if it equals the true number rounded to as many
digits as were written.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from regard.base.formulas import decimal
from regard.work.attention_steps import (
    STEPS,
    Array,
    HeadInputs,
    correct_steps,
    dot_product_terms,
    head_inputs,
    to_array,
)
from regard.work.error_hypotheses import ErrorHypothesis, apply_output_projection, result_hypotheses, step_hypotheses
from regard.work.problem import Problem
from regard.work.review import Review, ReviewComment
from regard.work.solution import Solution
from regard.work.student_answer import StudentMatrix, StudentSteps

Entries = list[tuple[int, int]]
Terms = Callable[[int, int], Array | None]
TRANSPOSED = "rows and columns exchanged"
MAX_EXCHANGED = 5  # all orders of up to this many rows or columns are tried


@dataclass(frozen=True)
class Expected:
    """The values accepted in one step of a student's calculation.

    Before the first mistake only the correct values are accepted. After a mistake the step can also be calculated
    from the wrong values, either exactly (`matrix`) or from the rounded numbers that the student wrote.

    matrix        the correct values; after a mistake, the values calculated exactly from the wrong ones
    tolerance     for each entry, how far `matrix` can be from the exact value, which is unknown because the student's
                  wrong numbers are known only as rounded; 0 before the first mistake
    alternatives  the other matrices whose entries are accepted after a mistake
    """

    matrix: Array
    tolerance: Array
    alternatives: tuple[Array, ...] = ()

    def wrong_entries(self, written: StudentMatrix) -> Entries:
        """Return the entries of a student's matrix that match none of the accepted values."""
        return [
            (r, c)
            for r, c, cell in written
            if abs(cell.value - self.matrix[r, c]) > cell.tolerance + self.tolerance[r, c]
            and not any(cell.matches(float(other[r, c])) for other in self.alternatives)
        ]


@dataclass(frozen=True)
class StepVerdict:
    """What is wrong in one step of a student's calculation, and the values that later steps should be calculated from.

    comment    what is wrong
    matrix     the values of the step with the mistake, from which later steps should be calculated
    uncertain  entries (row, column) of `matrix` that are known only to the digits that the student wrote
    """

    comment: ReviewComment
    matrix: Array
    uncertain: Entries


@dataclass
class HeadProgress:
    """The steps of one head that were checked so far in a student's calculation.

    The keys of `written`, `digits` and `mistaken` are names of steps.

    written    the matrix of each checked step, as the student wrote it
    digits     the largest number of decimals written in each row of these matrices
    mistaken   the matrix of each step with a mistake: the values that the mistake gives
    uncertain  entries of `mistaken` that are known only to the digits written: the step, the (row, column), and the
               largest rounding error
    """

    head: HeadInputs
    written: dict[str, Array] = field(default_factory=dict)
    digits: dict[str, tuple[int, ...]] = field(default_factory=dict)  # decimals written in each row
    mistaken: dict[str, Array] = field(default_factory=dict)
    uncertain: list[tuple[str, tuple[int, int], float]] = field(default_factory=list)

    def carried_forward(self, step: str) -> Array:
        """Return the matrix of a step that results from the student's mistakes, calculated without rounding."""
        return correct_steps(self.head, self.mistaken)[step]

    def from_written(self, step: str) -> Array:
        """Return the matrix of a step as the student wrote it.

        If the student did not write it, it is calculated from the steps that the student wrote.
        """
        return correct_steps(self.head, self.written)[step]

    def true(self, step: str) -> Array:
        """Return the matrix of a step in the correct solution, independent of the student's earlier steps."""
        return correct_steps(self.head, {})[step]

    def expected(self, step: str) -> Expected:
        """Return the values that are accepted in a step, given the student's earlier steps (error carried forward)."""
        matrix = self.carried_forward(step)
        if not self.mistaken:
            return Expected(matrix, np.zeros_like(matrix))
        true = self.true(step)
        alternatives = [self.from_written(step), true]
        # a student who transposed the scores can keep them so, and correctly take the softmax over the other axis
        scores = self.mistaken.get("scores")
        if scores is not None and np.array_equal(scores, self.true("scores").T) and step in ("scaled", "weights"):
            alternatives += [true.T] * (true.shape[0] == true.shape[1])
        return Expected(matrix, self.tolerance(step), tuple(alternatives))

    def differs_from_true(self, step: str, written: StudentMatrix) -> bool:
        """Return whether an earlier step has a mistake and the written step differs from the correct solution."""
        true = self.true(step)
        return bool(self.mistaken) and not (written if written.shape == true.shape else written.transposed).matches(
            true
        )

    def tolerance(self, step: str) -> Array:
        """Return for each entry of `carried_forward` how far it can be from the exact value.

        The exact value is unknown, because the student's earlier wrong numbers are known only as rounded.
        """
        matrix = self.carried_forward(step)
        tolerance = np.zeros_like(matrix)
        for name, entry, slack in self.uncertain:
            varied = self.mistaken[name].copy()
            varied[entry] += slack
            tolerance += abs(correct_steps(self.head, {**self.mistaken, name: varied})[step] - matrix)
        return tolerance

    def check_step(self, problem: Problem, step: str, head: int | None, written: StudentMatrix) -> ReviewComment | None:
        """Check the next step of a student's calculation and store it for checking later steps.

        Returns a comment about the mistake, or None if the step is correct.

        step     name of the step, such as "scores"
        head     number of the head, counted from 1; None if there is only one
        written  the matrix that the student wrote, with tokens in rows
        """
        exact = correct_steps(self.head, self.mistaken)
        own = self.from_written(step)
        hypotheses = step_hypotheses(self.head, step, self.mistaken, self.written, self.digits, own)
        verdict = judge_step(
            problem,
            step,
            head,
            written,
            self.expected(step),
            hypotheses,
            lambda r, c: dot_product_terms(self.head, exact, step, r, c),
        )
        upright = written if written.shape == exact[step].shape else written.transposed
        self.written[step], self.digits[step] = upright.fill_gaps(own), upright.row_digits
        if verdict is None:
            return None
        self.mistaken[step] = verdict.matrix
        self.uncertain += [(step, entry, upright.cell(entry).tolerance) for entry in verdict.uncertain]
        return verdict.comment


def check(solution: Solution, answer: StudentSteps) -> Review:
    """Check every step of a student's answer in order, and return the review."""
    problem = solution.problem
    correct: list[str] = []
    carried_forward: list[str] = []
    comments: list[ReviewComment] = []
    progress = []
    for index in range(len(problem.heads)):
        head = index + 1 if len(problem.heads) > 1 else None
        current = HeadProgress(head_inputs(problem, index))
        for step in STEPS:
            if (step, head) not in answer:
                continue
            written = _tokens_in_rows(problem, answer[step, head])
            comment = current.check_step(problem, step, head, written)
            if comment is None:
                name = step if head is None else f"{step} of head {head}"
                (carried_forward if current.differs_from_true(step, written) else correct).append(name)
            else:
                comments.append(comment)
        progress.append(current)
    if ("result", None) in answer:
        written = _tokens_in_rows(problem, answer["result", None])
        verdict = _judge_result(problem, progress, written)
        if verdict is None:
            true = apply_output_projection(problem, [each.true("output") for each in progress])
            (correct if written.matches(true) or not comments else carried_forward).append("result")
        else:
            comments.append(verdict.comment)
    return Review(problem.name, problem.scaled, tuple(correct), tuple(carried_forward), tuple(comments))


def _tokens_in_rows(problem: Problem, matrix: StudentMatrix) -> StudentMatrix:
    return matrix if problem.by_rows else matrix.transposed


def _judge_result(problem: Problem, progress: list[HeadProgress], written: StudentMatrix) -> StepVerdict | None:
    outputs, own, true = (
        [getattr(each, source)("output") for each in progress] for source in ("carried_forward", "from_written", "true")
    )
    tolerance = np.concatenate([each.tolerance("output") for each in progress], 1)
    if problem.output_projection is not None:
        tolerance = tolerance @ abs(to_array(problem.output_projection.weights, problem))
    alternatives = tuple(apply_output_projection(problem, each) for each in (own, true))
    digits = max(max(each.digits.get("output", (0,))) for each in progress)
    expected = Expected(
        apply_output_projection(problem, outputs),
        tolerance,
        alternatives if any(each.mistaken for each in progress) else (),
    )
    hypotheses = result_hypotheses(problem, outputs, own, digits)
    return judge_step(problem, "result", None, written, expected, hypotheses, lambda r, c: None)


def judge_step(
    problem: Problem,
    step: str,
    head: int | None,
    written: StudentMatrix,
    expected: Expected,
    hypotheses: Iterable[ErrorHypothesis],
    terms: Terms,
) -> StepVerdict | None:
    """Return the verdict on one step of a student's calculation; None if every number in it is correct.

    head        number of the head, counted from 1; None if there is only one
    expected    the values that count as correct
    hypotheses  possible mistakes, each with the matrix that the step would have
    terms       terms(row, column) returns the products whose sum is this entry, or None if it is not a dot product
    """
    matrix = expected.matrix

    def verdict(mistake: str, explanation: str, explained: Array | None = None) -> StepVerdict:
        (row, column), *also = [_written_position(problem, entry) for entry in wrong]
        number = written.cell(wrong[0]).text
        comment = ReviewComment(
            step, head, row, column, float(matrix[wrong[0]]), number, mistake, explanation, tuple(also)
        )
        if explained is not None:
            return StepVerdict(comment, explained, [])
        # entries that agree in the digits written may have continued as other numbers too
        return StepVerdict(comment, written.fill_gaps(matrix), [(r, c) for r, c, _ in written])

    if written.shape != matrix.shape:
        return _judge_transposed(problem, step, head, written, matrix)
    wrong = sorted(expected.wrong_entries(written), key=lambda entry: _written_position(problem, entry))
    if not wrong:
        return None
    for hypothesis in hypotheses:
        # a hypothesis that changes correct entries is unlikely, unless it can be limited to the other rows
        explained = _affected_rows(hypothesis, matrix, {r for r, _ in wrong})
        if explained is not None and written.matches(explained):
            return verdict(hypothesis.name, hypothesis.explanation, explained)
    if written.transposed.matches(matrix):
        return verdict(TRANSPOSED, "rows are where columns should be", matrix.T)
    if (moved := _find_order(problem, written, matrix)) is not None:
        return verdict(*moved)
    return verdict(*_explain_entries(problem, written, matrix, wrong, terms))


def _affected_rows(hypothesis: ErrorHypothesis, matrix: Array, wrong: set[int]) -> Array | None:
    """Return the matrix that a step would have if the student made a possible mistake.

    If the mistake can be made in single rows (`hypothesis.rows`), the result has the values after the mistake only in
    the wrong rows, and the expected values in the other rows. The result is None if one of the wrong rows is not among
    these rows.

    hypothesis  the possible mistake
    matrix      the expected values of the step
    wrong       indices of the rows in which the student's matrix has wrong entries
    """
    if hypothesis.rows is None:
        return hypothesis.matrix
    affected = np.isin(np.arange(len(matrix)), list(wrong))[:, None]
    return np.where(affected, hypothesis.matrix, matrix) if wrong <= hypothesis.rows else None


def _judge_transposed(
    problem: Problem, step: str, head: int | None, written: StudentMatrix, matrix: Array
) -> StepVerdict:
    """Return the verdict on a student's matrix whose rows and columns are swapped; `matrix` has the expected values."""
    upright = written.transposed
    wrong = upright.wrong_entries(matrix)
    shapes = [shape if problem.by_rows else shape[::-1] for shape in (written.shape, matrix.shape)]
    found, wanted = (" x ".join(map(str, shape)) for shape in shapes)
    shared = [(r, c, cell) for r, c, cell in written if r < matrix.shape[0] and c < matrix.shape[1]]
    differing = (each for each in shared if not each[2].matches(float(matrix[each[:2]])))
    r, c, cell = next(differing, None) or next(iter(shared or upright))
    row, column = _written_position(problem, (r, c))
    more = ", and some numbers are wrong too" if wrong else ""
    explanation = f"this is {found}, but should be {wanted}: rows are where columns should be{more}"
    comment = ReviewComment(step, head, row, column, float(matrix[r, c]), cell.text, TRANSPOSED, explanation, ())
    return StepVerdict(comment, upright.fill_gaps(matrix) if wrong else matrix, wrong)


def _find_order(problem: Problem, written: StudentMatrix, matrix: Array) -> tuple[str, str, Array] | None:
    """Explain a student's matrix whose numbers are all right but whose rows, or columns, are in another order.

    Returns the name and the explanation of the mistake, and the correct matrix in the student's order. Returns None if
    no order gives the student's matrix. A matrix with more than 5 rows (or columns) is not tried in other row (or
    column) orders.

    matrix  the expected values of the step
    """
    for axis in (0, 1):
        if matrix.shape[axis] > MAX_EXCHANGED:
            continue
        for order in permutations(range(matrix.shape[axis])):
            moved = matrix.take(order, axis)
            if written.matches(moved):
                what = "rows" if (axis == 0) == problem.by_rows else "columns"
                numbers = ", ".join(str(at + 1) for at in order)
                return f"{what} in another order", f"these are the {what} {numbers}, in this order", moved
    return None


def _written_position(problem: Problem, entry: tuple[int, int]) -> tuple[int, int]:
    """Return the row and the column of an entry in the matrix as the student wrote it, counted from 1."""
    r, c = entry
    return (r + 1, c + 1) if problem.by_rows else (c + 1, r + 1)


def _explain_entries(
    problem: Problem, written: StudentMatrix, matrix: Array, wrong: Entries, terms: Terms
) -> tuple[str, str]:
    """Return the name and the explanation of a mistake in single entries of a matrix.

    This function is called if no error hypothesis about the whole step explains the wrong entries.

    matrix  the expected values of the step
    wrong   the wrong entries as (row, column)
    terms   terms(row, column) returns the products whose sum is this entry, or None if it is not a dot product
    """
    if all(written.cell(entry).matches(-float(matrix[entry])) for entry in wrong):
        return "sign", f"{'this entry has' if len(wrong) == 1 else 'these entries have'} the wrong sign"
    if all(written.cell(entry).truncates(float(matrix[entry])) for entry in wrong):
        return "digits cut off", "the further digits were cut off; round instead"
    if len(wrong) > 1 and 2 * len(wrong) > sum(1 for _ in written):
        return "unexplained", "most numbers are wrong, and no known mistake explains them; begin with the first"
    first = wrong[0]
    cell, expected = written.cell(first), float(matrix[first])
    products = terms(*first)
    for number, term in enumerate([] if products is None else products.tolist(), 1):
        if cell.matches(expected - 2 * term):
            return "sign", f"product {number} of the sum, {decimal(term)}, has the wrong sign"
        if cell.matches(expected - term):
            return "missing term", f"product {number} of the sum, {decimal(term)}, is missing"
    for r, c in np.ndindex(*matrix.shape):
        if cell.matches(float(matrix[r, c])) and (r, c) != first:
            row, column = _written_position(problem, (r, c))
            return "copied from another entry", f"this is the number that belongs at [{row},{column}]"
    return "arithmetic", "this number is wrong, and no other mistake explains it; calculate this entry again"
