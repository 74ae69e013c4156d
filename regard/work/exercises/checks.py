"""Checks of exercises: compare an answer's results on random inputs with the solution and with known mistakes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.work.exercises.exercise import Answer, CheckResult, Exercise
from regard.work.exercises.run_answer import RaisedError, perform, shorten

Case = tuple[Any, ...]
Draw = Callable[[np.random.Generator], list[Case]]
TOLERANCE = 1e-6  # an answer can sum in another order, or use float32


@dataclass(frozen=True)
class FunctionCheck:
    """A check that calls a student's function on test cases and compares the results with those of the solution.

    stages     functions that sample test cases. The cases of a function are used only if all results for the function
               before were correct, so that a mistake is recognised by ordinary cases before special ones
    unordered  function that samples cases in which the numbers of a result can have any order; they are sorted before
               they are compared. None if there are no such cases
    kind       the type that results must have; None for any type
    """

    stages: tuple[Draw, ...]
    unordered: Draw | None = None
    kind: type | None = None

    def __call__(self, exercise: Exercise, answer: Answer, generator: np.random.Generator) -> CheckResult | None:
        for stage in self.stages:
            requests = [("call", case) for case in stage(generator)]
            results = [answer(request) for request in requests]
            found = compare_results(exercise, results, requests)
            if found is not None:
                return found
            if self.kind is not None and type(results[0]) is not self.kind:
                name, kind = type(results[0]).__name__, self.kind.__name__
                feedback = f"the items are right, but the result is a {name}; return a {kind}."
                return CheckResult(f"{name} instead of {kind}", feedback)
        if self.unordered is None:
            return None
        requests = [("call", case) for case in self.unordered(generator)]
        return compare_results(exercise, [answer(each) for each in requests], requests, sort_numbers)


def sort_numbers(result: Any) -> Any:
    """Sort an array of numbers in ascending order; return anything else unchanged."""
    array = _as_array(result)
    return result if array is None else np.sort(array)


@dataclass(frozen=True)
class ModuleCheck:
    """A check that builds a student's module, loads the solution's weights, and compares outputs and gradients.

    cases  function that samples pairs of constructor arguments and module inputs
    """

    cases: Draw

    def __call__(self, exercise: Exercise, answer: Answer, generator: np.random.Generator) -> CheckResult | None:
        requests, plain, all_sources = [], [], []
        for arguments, inputs in self.cases(generator):
            built = answer(("build", arguments))
            if isinstance(built, RaisedError):
                return _error_result(exercise, built)
            shapes, trainable = built
            weights = _draw_weights(exercise.solution, arguments, generator)
            sources = match_parameters(weights, shapes)
            if sources is None:
                return _describe_parameters(exercise, weights, shapes, arguments)
            fixed = _names_missing(sources, perform(exercise.solution, ("build", arguments))[1], trainable)
            if fixed:
                feedback = f"{', '.join(fixed)} would never be trained: {'it is' if len(fixed) == 1 else 'they are'}"
                return CheckResult("not a parameter", f"{feedback} not trainable; use nn.Parameter.")
            adapted = {name: torch.cat([weights[each] for each in sources[name]]) for name in shapes}
            adapted = {name: value.reshape(shapes[name]) for name, value in adapted.items()}
            requests.append(("run", arguments, adapted, inputs))
            plain.append(("run", arguments, weights, inputs))
            all_sources.append(sources)
        replies = [answer(request) for request in requests]
        found = compare_results(exercise, [_output(reply) for reply in replies], plain, _output)
        if found is not None:
            return found
        cut = _names_missing(all_sources[0], perform(exercise.solution, plain[0])[1], replies[0][1])
        feedback = f"{', '.join(cut)} would never be trained: no gradient reaches {'it' if len(cut) == 1 else 'them'}"
        advice = "use the parameter itself, without .data or detach()."
        return CheckResult("no gradient", f"{feedback}; {advice}") if cut else None


def _output(reply: Any) -> Any:
    """Return the module's output from the result of a "run" request, which also has names of parameters.

    An error in place of the result is returned unchanged.
    """
    return reply[0] if isinstance(reply, tuple) else reply


def _draw_weights(solution: Any, arguments: Case, generator: np.random.Generator) -> dict[str, Tensor]:
    """Sample random weights for every parameter of the solution's module.

    With the usual gains of 1 and biases of 0, a missing gain or bias would not show.
    """
    shapes, _ = perform(solution, ("build", arguments))
    return {name: torch.from_numpy(generator.normal(0.2, 0.5, shape)) for name, shape in shapes.items()}


def match_parameters(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]] | None:
    """Map the name of each parameter of a student's module to the names of the solution's parameters in it.

    This is one name, or three for a joint layer that projects to queries, keys and values. A convolution is accepted in
    place of a linear layer on patches. Returns None if the parameters do not match.

    weights  parameters of the solution, by name
    shapes   shapes of the student's parameters, by name
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        fused = tuple(f"{role}.{kind}" for role in ("query", "key", "value"))
        if name in weights and _same_layout(tuple(weights[name].shape), shape):
            found[name] = (name,)
        elif all(each in weights and each not in shapes for each in fused):
            if torch.cat([weights[each] for each in fused]).shape != shape:
                return None
            found[name] = fused
        else:
            return None
    return found if {each for sources in found.values() for each in sources} == set(weights) else None


def _same_layout(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether tensors of these two shapes can hold the same numbers in the same order.

    Axes of length 1 are ignored. One tensor can have all axes after the first flattened, as in the weights of a
    convolution and of the linear layer that computes the same.
    """
    flat = [(shape[0], math.prod(shape[1:])) for shape in (one, other) if shape]
    return [n for n in one if n != 1] == [n for n in other if n != 1] or (len(flat) == 2 and flat[0] == flat[1])


def _names_missing(sources: Mapping[str, tuple[str, ...]], expected: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return the names of a student's parameters that should have a property, such as a gradient, but do not.

    sources   for each of the student's parameters, the corresponding parameters of the solution
    expected  names of the solution's parameters that have the property
    found     names of the student's parameters that have the property
    """
    return [name for name, parts in sources.items() if set(parts) & set(expected) and name not in found]


def _describe_parameters(
    exercise: Exercise, weights: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], arguments: Case
) -> CheckResult:
    """Return feedback on a module whose parameters are missing, unexpected or of another shape.

    weights    parameters of the solution, by name
    found      shapes of the student's parameters, by name
    arguments  constructor arguments with which both modules were built
    """
    for mistake in exercise.mistakes:
        if perform(exercise.wrong_solution(mistake), ("build", arguments))[0] == found:
            return CheckResult(mistake.name, mistake.hint)
    missing, extra = [name for name in weights if name not in found], [name for name in found if name not in weights]
    if missing:
        more = f" (it has {', '.join(extra)} instead)" if extra else ""
        return CheckResult(None, f"the module has no {', '.join(missing)}{more}; use the names of the exercise text")
    if extra:
        return CheckResult(None, f"the module has {', '.join(extra)}, which the exercise does not need; remove it")
    name = next(name for name in weights if not _same_layout(tuple(weights[name].shape), found[name]))
    return CheckResult(None, f"{name} should have shape {tuple(weights[name].shape)}, but has shape {found[name]}")


def compare_results(
    exercise: Exercise, results: Sequence[Any], requests: Sequence[Case], transform: Callable[[Any], Any] | None = None
) -> CheckResult | None:
    """Compare the results of a student's answer with those of the solution.

    Returns None if all results are correct, otherwise feedback. The feedback names a known mistake of the exercise if
    the solution with this mistake gives the same results.

    results    the results of the student's answer
    requests   the calls that gave the results; they are repeated on the solution and on the wrong solutions
    transform  function applied to every result before the comparison, such as `sort_numbers`; None for no change
    """

    def outcomes(solution: Any) -> list[Any]:
        return [perform(solution, request) for request in requests]

    def is_same(one: Any, other: Any) -> bool:
        return same_result(one, other) if transform is None else same_result(transform(one), transform(other))

    expected = outcomes(exercise.solution)
    wrong = [index for index, pair in enumerate(zip(results, expected, strict=True)) if not is_same(*pair)]
    if not wrong:
        return None
    unfinished = next((each for each in results if getattr(each, "kind", "") == "NotImplementedError"), None)
    if unfinished is not None:
        return _error_result(exercise, unfinished)
    for mistake in exercise.mistakes:
        pairs = zip(results, outcomes(exercise.wrong_solution(mistake)), strict=True)
        same = [_same_or_both_fail(*pair, is_same) for pair in pairs]
        # a mistake that raises an error in some cases is recognised by its results in the others
        if all(same) and not all(isinstance(results[index], RaisedError) for index in wrong):
            return CheckResult(mistake.name, mistake.hint)
    first = wrong[0]
    if isinstance(results[first], RaisedError):
        return _error_result(exercise, results[first])
    correct = expected[first] if transform is None else transform(expected[first])
    return CheckResult(None, f"{describe_difference(results[first], correct)}. No known mistake gives this.")


def _same_or_both_fail(one: Any, other: Any, is_same: Callable[[Any, Any], bool]) -> bool:
    return isinstance(one, RaisedError) == isinstance(other, RaisedError) and (
        isinstance(one, RaisedError) or is_same(one, other)
    )


def _error_result(exercise: Exercise, error: RaisedError) -> CheckResult:
    name = exercise.function_name
    match error.kind:
        case "NotImplementedError":
            return CheckResult("to do", "it is not written yet")
        case "NotCallable":
            return CheckResult(None, f"{name} is {error.message}, which is not callable; write a function")
        case "NotAModule":
            return CheckResult(None, f"{name} is {error.message}; write a class that subclasses nn.Module")
    return CheckResult("error", f"it fails with {error}")


def same_result(one: Any, other: Any) -> bool:
    """Return whether two results are equal: numbers and arrays within a tolerance, everything else exactly.

    An error is never equal to anything.
    """
    if isinstance(one, RaisedError) or isinstance(other, RaisedError):
        return False
    if isinstance(one, Tensor | np.ndarray | float) or isinstance(other, Tensor | np.ndarray | float):
        first, second = _as_array(one), _as_array(other)
        if first is None or second is None or first.shape != second.shape:
            return False
        return bool(np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same_result(a, b) for a, b in zip(one, other, strict=True))
    try:
        return bool(one == other)
    except ValueError:  # arrays inside other containers
        return False


def _as_array(value: Any) -> "np.ndarray | None":
    """Convert numbers, an array or a tensor to a float64 array; return None if that is impossible."""
    try:
        if isinstance(value, Tensor):
            return value.detach().double().numpy()
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def describe_difference(result: Any, expected: Any) -> str:
    """Describe how a result differs from the expected one: by shape, by its most different entry, or as a whole."""
    first, second = _as_array(result), _as_array(expected)
    if result is None:
        return "it returns None: is there a return statement?"
    if isinstance(expected, Tensor | np.ndarray) and first is not None and second is not None:
        if first.shape != second.shape:
            return f"the result should have shape {second.shape}, but has shape {first.shape}"
        far = np.abs(first - second)
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(far), math.inf, far))), far.shape)
        entry = f" at {[int(index) for index in at]}" if far.ndim else ""
        return f"the result should be {second[at]:.6g}{entry}, but is {first[at]:.6g}"
    return f"the result should be {shorten(expected)}, but is {shorten(result)}"
