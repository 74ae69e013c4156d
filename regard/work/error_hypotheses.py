"""Every wrong way to a step that is known: rounding too early, and the slips with a name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from regard.work.attention_steps import STAGES, Array, Start, Values, array, run
from regard.work.common_mistakes import known_slips
from regard.work.problem import Problem
from regard.work.review import PLACES

MOST_ROUNDED = 5  # decimals to which unseen steps may have been rounded
EARLY = "early rounding"


@dataclass(frozen=True)
class ErrorHypothesis:
    """A way in which a step could have come about, and the matrix that it gives."""

    name: str
    words: str
    matrix: Array
    rows: frozenset[int] | None = None  # those that it may have gone wrong in while the others are right; all if None


def ways(
    begin: Start, key: str, slipped: Values, shown: Values, digits: Mapping[str, tuple[int, ...]], own: Array
) -> Iterator[ErrorHypothesis]:
    """Every known wrong way to this step: early rounding of what was written, named slips, rounding unseen."""
    rounded = [step for step in digits if any(digits[step])]
    if rounded:
        yield from _early_by_rows(own, rounded[-1], digits[rounded[-1]])
    unseen = [stage for stage in STAGES[: STAGES.index(key) + 1] if stage not in shown]
    for stage in reversed(unseen):
        for slip in known_slips():
            if slip.stage != stage:
                continue
            where = "" if stage == key else f" (in {PLACES[stage]}, which are not written down)"
            for fixed in (slipped, shown):
                kept = {name: value for name, value in fixed.items() if name != key}
                if (values := run(begin, kept, {stage: slip.compute})) is not None:
                    yield ErrorHypothesis(slip.name, slip.words + where, values[key])
    for stage in reversed([stage for stage in unseen if stage != key]):
        for places in range(MOST_ROUNDED + 1):
            values = values_of(begin, slipped)
            rough = {name: value for name, value in slipped.items() if name != key}
            rough[stage] = np.round(values[stage], places)
            # where nothing is scaled, the scores go into the softmax as they are
            step = "scores" if stage == "scaled" and not begin.scaled else stage
            yield _early(values_of(begin, rough)[key], step, places)


def _early_by_rows(matrix: Array, step: str, digits: tuple[int, ...]) -> Iterator[ErrorHypothesis]:
    """Rounding of what was written: all over, or in those rows alone that were written in fewer digits."""
    yield _early(matrix, step, max(digits))
    for most in sorted(set(digits)):
        rows = frozenset(row for row, given in enumerate(digits) if given <= most)
        yield replace(_early(matrix, step, most), rows=rows)


def _early(matrix: Array, step: str, digits: int) -> ErrorHypothesis:
    kept = "1 digit" if digits == 1 else f"{digits} digits"
    return ErrorHypothesis(
        EARLY,
        f"{PLACES[step]} were rounded to {kept} before they were used; "
        "round at the very end, and carry two digits more until then",
        matrix,
    )


def mixed(problem: Problem, outputs: list[Array]) -> Array:
    joined = np.concatenate(outputs, 1)
    if problem.mixing is None:
        return joined
    bias = 0.0 if problem.mixing.bias is None else np.array([float(each) for each in problem.mixing.bias])
    found: Array = joined @ array(problem.mixing.weights, problem) + bias
    return found


def mixing_ways(problem: Problem, outputs: list[Array], own: list[Array], digits: int) -> Iterator[ErrorHypothesis]:
    if digits:
        yield _early(mixed(problem, own), "output", digits)
    joined = np.concatenate(outputs, 1)
    if problem.mixing is not None:
        weights = array(problem.mixing.weights, problem)
        if weights.shape[0] == weights.shape[1]:
            yield ErrorHypothesis(
                "missing mixing", "these are the heads side by side; the last product is missing", joined
            )
            yield ErrorHypothesis(
                "transposed product", "the mixing weights were turned over before the product", joined @ weights.T
            )
    if len(outputs) > 1 and len({part.shape for part in outputs}) == 1:
        yield ErrorHypothesis(
            "heads in another order", "the heads were joined in the other order", mixed(problem, outputs[::-1])
        )
        interleaved = np.stack(outputs, 2).reshape(joined.shape)
        words = "the numbers of the heads alternate; all of the first head come first, then all of the second"
        yield ErrorHypothesis("heads interleaved", words, mixed(problem, [interleaved]))


def values_of(begin: Start, fixed: Values) -> dict[str, Array]:
    """All stages in the right way, from some fixed ones on."""
    found = run(begin, fixed)
    assert found is not None  # only a slip may make no sense
    return found
