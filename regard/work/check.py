"""A student's steps looked over: where the first slip is, and what it looks like.

Steps are judged in order. What follows from a slip is judged on the student's own numbers, so that only the slip
itself counts as one. A number is right if the true one rounds to it in the digits that were written.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from regard.base.formulas import decimal
from regard.work.attention_steps import STAGES, Array, Start, array, start, terms
from regard.work.error_hypotheses import ErrorHypothesis, mixed, mixing_ways, values_of, ways
from regard.work.problem import Problem
from regard.work.review import Review, ReviewComment
from regard.work.solution import Solution
from regard.work.student_answer import Answer
from regard.work.student_matrix import Paper

Entries = list[tuple[int, int]]
Terms = Callable[[int, int], Array | None]


@dataclass(frozen=True)
class Expected:
    """What a step may hold: what follows from the numbers before it, and how much a slip leaves open in that.

    After a slip a student may also have gone on with the numbers as written, or with the right ones after all.
    """

    right: Array
    open: Array
    also: tuple[Array, ...] = ()

    def wrong(self, given: Paper) -> Entries:
        return [
            (r, c)
            for r, c, cell in given
            if abs(cell.value - self.right[r, c]) > cell.slack + self.open[r, c]
            and not any(cell.matches(float(other[r, c])) for other in self.also)
        ]


@dataclass(frozen=True)
class Verdict:
    """A finding, the matrix that what follows is judged on, and the entries of it that are known only as written."""

    finding: ReviewComment
    matrix: Array
    unsure: Entries


@dataclass
class Trail:
    """One head's steps so far: as the student wrote them, and as its slips make them."""

    begin: Start
    shown: dict[str, Array] = field(default_factory=dict)
    digits: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each row
    slipped: dict[str, Array] = field(default_factory=dict)
    unsure: list[tuple[str, tuple[int, int], float]] = field(default_factory=list)

    def right(self, key: str) -> Array:
        return values_of(self.begin, self.slipped)[key]

    def own(self, key: str) -> Array:
        return values_of(self.begin, self.shown)[key]

    def expected(self, key: str) -> Expected:
        right = self.right(key)
        if not self.slipped:
            return Expected(right, np.zeros_like(right))
        true = self.true(key)
        # whoever laid the scores on their side may go on so, and take the softmax over the other axis rightly
        turned = (true.T,) if self.turned and true.shape[0] == true.shape[1] and key in ("scaled", "weights") else ()
        return Expected(right, self.left_open(key), (self.own(key), true, *turned))

    def true(self, key: str) -> Array:
        """The step as it should be, whatever came before."""
        return values_of(self.begin, {})[key]

    @property
    def turned(self) -> bool:
        """Whether the student's scores are the true ones on their side."""
        slipped = self.slipped.get("scores")
        return slipped is not None and np.array_equal(slipped, self.true("scores").T)

    def follows(self, key: str, given: Paper) -> bool:
        """Whether a step without a slip differs from the true one, as it follows from a slip before."""
        true = self.true(key)
        return bool(self.slipped) and not (given if given.shape == true.shape else given.turned).fits(true)

    def left_open(self, key: str) -> Array:
        """How far a step may move because wrong entries before it are known only in the digits written."""
        right = self.right(key)
        moved = np.zeros_like(right)
        for step, entry, slack in self.unsure:
            nudged = self.slipped[step].copy()
            nudged[entry] += slack
            moved += abs(values_of(self.begin, {**self.slipped, step: nudged})[key] - right)
        return moved

    def judge(self, problem: Problem, key: str, head: int | None, given: Paper) -> ReviewComment | None:
        """The finding about the next step, which is remembered for those after it."""
        exact = values_of(self.begin, self.slipped)
        known = ways(self.begin, key, self.slipped, self.shown, self.digits, self.own(key))
        verdict = judged(
            problem, key, head, given, self.expected(key), known, lambda r, c: terms(self.begin, exact, key, r, c)
        )
        straight = given if given.shape == exact[key].shape else given.turned
        self.shown[key], self.digits[key] = straight.over(self.own(key)), straight.digits_of_rows
        if verdict is None:
            return None
        self.slipped[key] = verdict.matrix
        self.unsure += [(key, entry, straight.cell(entry).slack) for entry in verdict.unsure]
        return verdict.finding


def check(solution: Solution, answer: Answer) -> Review:
    """Every step of the answer judged in order."""
    problem = solution.problem
    right: list[str] = []
    follows: list[str] = []
    findings: list[ReviewComment] = []
    trails = []
    for number in range(len(problem.heads)):
        head = number + 1 if len(problem.heads) > 1 else None
        trail = Trail(start(problem, number))
        for key in STAGES:
            if (key, head) not in answer:
                continue
            given = _paper(problem, answer, key, head)
            found = trail.judge(problem, key, head, given)
            if found is None:
                name = key if head is None else f"{key} of head {head}"
                (follows if trail.follows(key, given) else right).append(name)
            else:
                findings.append(found)
        trails.append(trail)
    if ("result", None) in answer:
        given = _paper(problem, answer, "result", None)
        verdict = _judged_result(problem, trails, given)
        if verdict is None:
            true = mixed(problem, [trail.true("output") for trail in trails])
            (right if given.fits(true) or not findings else follows).append("result")
        else:
            findings.append(verdict.finding)
    return Review(problem.name, tuple(right), tuple(follows), tuple(findings))


def _paper(problem: Problem, answer: Answer, key: str, head: int | None) -> Paper:
    paper = Paper(answer[key, head])
    return paper if problem.by_rows else paper.turned


def _judged_result(problem: Problem, trails: list[Trail], given: Paper) -> Verdict | None:
    outputs, own = [trail.right("output") for trail in trails], [trail.own("output") for trail in trails]
    true = [trail.true("output") for trail in trails]
    moved = np.concatenate([trail.left_open("output") for trail in trails], 1)
    if problem.mixing is not None:
        moved = moved @ abs(array(problem.mixing.weights, problem))
    also = (mixed(problem, own), mixed(problem, true)) if any(trail.slipped for trail in trails) else ()
    digits = max(max(trail.digits.get("output", (0,))) for trail in trails)
    expected = Expected(mixed(problem, outputs), moved, also)
    return judged(
        problem, "result", None, given, expected, mixing_ways(problem, outputs, own, digits), lambda r, c: None
    )


def judged(
    problem: Problem,
    key: str,
    head: int | None,
    given: Paper,
    expected: Expected,
    known: Iterable[ErrorHypothesis],
    terms_of: Terms,
) -> Verdict | None:
    """The verdict about one step, or None where every number in it is right."""
    right = expected.right

    def verdict(wrong: Entries, name: str, words: str, matrix: Array | None = None) -> Verdict:
        (row, column), *also = [written_at(problem, entry) for entry in wrong]
        first = given.cell(wrong[0])
        finding = ReviewComment(key, head, row, column, float(right[wrong[0]]), first.text, name, words, tuple(also))
        if matrix is not None:
            return Verdict(finding, matrix, [])
        # entries that agree in the digits written may have gone on as others too
        return Verdict(finding, given.over(right), [(r, c) for r, c, _ in given])

    if given.shape != right.shape:
        return _on_its_side(problem, key, head, given, right)
    wrong = sorted(expected.wrong(given), key=lambda entry: written_at(problem, entry))
    if not wrong:
        return None
    for way in known:
        # entries that are right but not on this way speak against it, unless it leaves their rows alone
        reached = _in_rows(way, right, {r for r, _ in wrong})
        if reached is not None and given.fits(reached):
            return verdict(wrong, way.name, way.words, reached)
    if given.turned.fits(right):
        return verdict(wrong, MIXED_UP, "rows stand where columns should", right.T)
    return verdict(wrong, *_entry_slip(problem, given, right, wrong, terms_of))


def _in_rows(way: ErrorHypothesis, right: Array, wrong: set[int]) -> Array | None:
    """What a way gives: all of it, or its rows that are wrong among right ones; None where it leaves one alone."""
    if way.rows is None:
        return way.matrix
    here = np.isin(np.arange(len(right)), list(wrong))[:, None]
    return np.where(here, way.matrix, right) if wrong <= way.rows else None


MIXED_UP = "rows and columns mixed up"


def _on_its_side(problem: Problem, key: str, head: int | None, given: Paper, right: Array) -> Verdict:
    """The verdict about a matrix whose very shape is that of the transposed one."""
    straight = given.turned
    wrong = straight.wrong(right)
    came, wanted = (" x ".join(map(str, written_shape(problem, shape))) for shape in (given.shape, right.shape))
    besides = ", and some numbers are off besides" if wrong else ""
    shared = [(r, c, cell) for r, c, cell in given if r < right.shape[0] and c < right.shape[1]]
    differing = (each for each in shared if not each[2].matches(float(right[each[:2]])))
    r, c, cell = next(differing, None) or next(iter(shared or straight))
    row, column = written_at(problem, (r, c))
    words = f"this is {came}, but should be {wanted}: rows stand where columns should{besides}"
    finding = ReviewComment(key, head, row, column, float(right[r, c]), cell.text, MIXED_UP, words, ())
    return Verdict(finding, straight.over(right) if wrong else right, wrong)


def written_shape(problem: Problem, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns as the student's matrix has them."""
    return shape if problem.by_rows else shape[::-1]


def written_at(problem: Problem, entry: tuple[int, int]) -> tuple[int, int]:
    """Row and column as the student's matrix has them, counted from 1."""
    r, c = entry
    return (r + 1, c + 1) if problem.by_rows else (c + 1, r + 1)


def _entry_slip(problem: Problem, given: Paper, right: Array, wrong: Entries, terms_of: Terms) -> tuple[str, str]:
    """What a wrong entry looks like, where no slip explains the whole step."""
    if all(given.cell(at).matches(-float(right[at])) for at in wrong):
        return "sign", f"{'this entry has' if len(wrong) == 1 else 'these entries have'} the other sign"
    if all(given.cell(at).cuts_off(float(right[at])) for at in wrong):
        return "digits cut off", "the further digits were left out; round instead: up from a half on"
    first = wrong[0]
    cell, expected = given.cell(first), float(right[first])
    found = terms_of(*first)
    for at, term in enumerate([] if found is None else found.tolist(), 1):
        if cell.matches(expected - 2 * term):
            return "sign", f"product {at} of the sum, {decimal(term)}, went in with the other sign"
        if cell.matches(expected - term):
            return "missing term", f"product {at} of the sum, {decimal(term)}, is missing"
    for r, c in np.ndindex(*right.shape):
        if cell.matches(float(right[r, c])) and (r, c) != first:
            row, column = written_at(problem, (r, c))
            return "copied from another entry", f"this is the number that belongs at [{row},{column}]"
    if len(wrong) > 1 and 2 * len(wrong) > sum(1 for _ in given):
        return "unexplained", "most numbers are off, and no slip that is known here explains them; begin with the first"
    return "arithmetic", "this number is off and no other slip explains it; work out this entry once more"
