"""Error hypotheses: possible mistakes in a step of a student's calculation, such as rounding too early.

Each hypothesis has the matrix that the step would have after the mistake.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from regard.work.attention_steps import STEPS, Array, HeadInputs, StepValues, compute_steps, correct_steps, to_array
from regard.work.common_mistakes import common_mistakes
from regard.work.problem import Problem
from regard.work.review import STEP_NOUNS

MAX_ROUNDED_DECIMALS = 5  # a step that is not written down may have been rounded to 0 to 5 decimals


@dataclass(frozen=True)
class ErrorHypothesis:
    """A possible mistake in a step of a student's calculation, and the matrix that it would give.

    rows  indices of rows; the mistake can be made in any of these rows alone. None if it affects all rows
    """

    name: str
    explanation: str
    matrix: Array
    rows: frozenset[int] | None = None


def step_hypotheses(
    head: HeadInputs,
    step: str,
    judged: StepValues,
    written: StepValues,
    digits: Mapping[str, tuple[int, ...]],
    own: Array,
) -> Iterator[ErrorHypothesis]:
    """Yield possible mistakes in one step of a student's calculation, each with the matrix that results from it.

    The order is: early rounding of written steps, common mistakes, and rounding of steps that are not written.

    judged   the matrix of each earlier step with a mistake: the values that the mistake gives
    written  the matrix of each earlier step that the student wrote
    digits   the largest number of decimals in each row of the written steps, by name of the step
    own      the matrix of this step, calculated correctly from the student's written numbers
    """
    rounded = [name for name in digits if any(digits[name])]
    if rounded:
        yield from _rounding_by_rows(own, rounded[-1], digits[rounded[-1]])
    unwritten = [name for name in STEPS[: STEPS.index(step) + 1] if name not in written]
    for name in reversed(unwritten):
        for mistake in common_mistakes():
            if mistake.step != name:
                continue
            where = "" if name == step else f" (in {STEP_NOUNS[name]}, which are not written down)"
            for fixed in (judged, written):
                kept = {each: value for each, value in fixed.items() if each != step}
                if (values := compute_steps(head, kept, {name: mistake.compute})) is not None:
                    yield ErrorHypothesis(mistake.name, mistake.explanation + where, values[step])
    exact = correct_steps(head, judged)
    for name in reversed([name for name in unwritten if name != step]):
        for decimals in range(MAX_ROUNDED_DECIMALS + 1):
            rough = {each: value for each, value in judged.items() if each != step}
            rough[name] = np.round(exact[name], decimals)
            # without a scale, the scores go into the softmax directly
            noun = "scores" if name == "scaled" and not head.scaled else name
            yield _early_rounding(correct_steps(head, rough)[step], noun, decimals)


def _rounding_by_rows(matrix: Array, step: str, digits: tuple[int, ...]) -> Iterator[ErrorHypothesis]:
    """Yield hypotheses that an earlier step was rounded too much: in all rows, or only in the rows with few decimals.

    matrix  the matrix of the later step that is judged, calculated from the rounded numbers
    step    name of the step that was rounded
    digits  the largest number of decimals in each row of the rounded step
    """
    yield _early_rounding(matrix, step, max(digits))
    for most in sorted(set(digits)):
        rows = frozenset(row for row, count in enumerate(digits) if count <= most)
        yield replace(_early_rounding(matrix, step, most), rows=rows)


def _early_rounding(matrix: Array, step: str, digits: int) -> ErrorHypothesis:
    kept = "1 digit" if digits == 1 else f"{digits} digits"
    explanation = (
        f"{STEP_NOUNS[step]} were rounded to {kept} before they were used; "
        "keep two more digits in between and round at the very end"
    )
    return ErrorHypothesis("early rounding", explanation, matrix)


def apply_output_projection(problem: Problem, outputs: list[Array]) -> Array:
    """Concatenate the outputs of the heads and apply the output projection, if the problem has one."""
    joined = np.concatenate(outputs, 1)
    projection = problem.output_projection
    if projection is None:
        return joined
    bias = 0.0 if projection.bias is None else np.array([float(each) for each in projection.bias])
    return joined @ to_array(projection.weights, problem) + bias


def result_hypotheses(
    problem: Problem, outputs: list[Array], own: list[Array], digits: int
) -> Iterator[ErrorHypothesis]:
    """Yield the possible mistakes in the last step: concatenating the heads and applying the output projection.

    outputs  outputs of the heads that result from the student's mistakes, not rounded
    own      outputs of the heads as the student wrote them, or calculated from the numbers that the student wrote
    digits   largest number of decimals in the written outputs
    """
    if digits:
        yield _early_rounding(apply_output_projection(problem, own), "output", digits)
    joined = np.concatenate(outputs, 1)
    if problem.output_projection is not None:
        weights = to_array(problem.output_projection.weights, problem)
        if weights.shape[0] == weights.shape[1]:
            missing = "these are the concatenated heads; the product with the output projection is missing"
            yield ErrorHypothesis("missing output projection", missing, joined)
            transposed = "the output projection was transposed before the product"
            yield ErrorHypothesis("transposed product", transposed, joined @ weights.T)
    if len(outputs) > 1 and len({part.shape for part in outputs}) == 1:
        reverse = apply_output_projection(problem, outputs[::-1])
        yield ErrorHypothesis("heads in another order", "the heads were concatenated in reverse order", reverse)
        interleaved = np.stack(outputs, 2).reshape(joined.shape)
        alternate = "the numbers of the heads alternate; all of the first head come first, then all of the second"
        yield ErrorHypothesis("heads interleaved", alternate, apply_output_projection(problem, [interleaved]))
