"""Checks for exercises: run an answer, compare its results with the solution and with every known mistake."""

import copy
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.work.exercises.exercise import Check, CheckResult, Exercise

Case = tuple[Any, ...]
Function = Callable[..., Any]
TOLERANCE = 1e-6  # an answer may sum in another order, or use float32
CELL = "cell "  # the file name of a notebook cell in a traceback, followed by its number


@dataclass(frozen=True)
class RaisedError:
    """An exception that an answer raised: its type, the line in the student's own code, and its message."""

    kind: str
    location: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}{self.location}: {self.message}" if self.message else f"{self.kind}{self.location}"


def describe_error(error: BaseException, student_file: str | None) -> RaisedError:
    """Describe an exception, with the innermost line that is in the student's file or notebook."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        lines, message = [(error.filename or "", error.lineno)], error.msg
    own = [(file, line) for file, line in lines if file == student_file or file.startswith(CELL)]
    if not own:
        return RaisedError(type(error).__name__, "", message)
    file, line = own[-1]
    return RaisedError(type(error).__name__, f" in line {line}{f' of {file}' * file.startswith(CELL)}", message)


def call_answer(function: Any, case: Case, answer: Any = None) -> Any:
    """Call a function on a copy of the arguments; return its result or the error it raised.

    answer  the student's function or class, if `function` is a wrapper around it
    """
    try:
        with np.errstate(all="ignore"):
            return function(*copy.deepcopy(case))
    except NotImplementedError as error:
        return error
    except (Exception, SystemExit) as error:  # whatever a student's code raises is reported
        own = function if answer is None else answer
        code = getattr(own, "__code__", None) or getattr(getattr(own, "forward", None), "__code__", None)
        return describe_error(error, None if code is None else code.co_filename)


def check_outputs(*stages: Callable[[], list[Case]], transform: Function | None = None) -> Check:
    """Build a check that calls an answer on each case and compares the results.

    stages     lists of cases, ordinary ones first: the next list is tried when the one before is correct, so that a
               mistake is recognised in ordinary cases whatever happens in extreme ones
    transform  applied to every result before the comparison
    """

    def wrap(function: Function) -> Function:
        return function if transform is None else lambda *case: transform(function(*case))

    def check(exercise: Exercise, answer: Any) -> CheckResult | None:
        if not callable(answer):
            return CheckResult(
                None, f"{exercise.function_name} is {shorten(answer)}, which is not callable; write a function"
            )
        for cases in (stage() for stage in stages):
            results = [call_answer(wrap(answer), case, answer) for case in cases]
            found = compare_results(exercise, results, cases, wrap)
            if found is not None:
                return found
        return None

    return check


def check_sorted_outputs(cases: Callable[[], list[Case]]) -> Check:
    """Build a check that compares sorted results, for cases in which equal numbers may change places."""
    return check_outputs(cases, transform=lambda result: np.sort(np.asarray(result, dtype=np.float64)))


def check_type(kind: type, cases: Callable[[], list[Case]]) -> Check:
    """Build a check that results have exactly this type."""

    def check(exercise: Exercise, answer: Any) -> CheckResult | None:
        found = type(call_answer(answer, cases()[0]))
        if found is kind:
            return None
        feedback = f"the items are right, but the result is a {found.__name__}; return a {kind.__name__}."
        return CheckResult(f"{found.__name__} instead of {kind.__name__}", feedback)

    return check


def run_checks(*checks: Check) -> Check:
    """Build a check that runs several checks in order and returns the first mistake found."""

    def check(exercise: Exercise, answer: Any) -> CheckResult | None:
        results = (each(exercise, answer) for each in checks)
        return next((result for result in results if result is not None), None)

    return check


def check_module(arguments: Sequence[Case], cases: Callable[[], list[Case]]) -> Check:
    """Build a check for a module class: construct it, load the weights of the solution, compare the outputs.

    arguments  constructor arguments of each module; an argument may be a function that builds a fresh value
    cases      the inputs of each module
    """

    def check(exercise: Exercise, answer: Any) -> CheckResult | None:
        if not (isinstance(answer, type) and issubclass(answer, nn.Module)):
            return CheckResult(
                None, f"{exercise.function_name} is {shorten(answer)}; write a class that subclasses nn.Module"
            )
        references = [_build_module(exercise.solution, each) for each in arguments]
        modules = [_try_build_module(answer, each) for each in arguments]
        for reference, module in zip(references, modules, strict=True):
            if isinstance(module, NotImplementedError | RaisedError):
                return _error_result(module)
            found = _check_parameters(exercise, reference, module, arguments[0])
            if found is not None:
                return found
        inputs = cases()
        loaded = [_load_weights(module, reference) for module, reference in zip(modules, references, strict=True)]
        results = [call_answer(module, case) for module, case in zip(loaded, inputs, strict=True)]

        def outputs(module_class: Function) -> Function:
            """The outputs of a class as a function of the index of the case; fails if parameters differ."""
            return lambda index: _load_weights(_build_module(module_class, arguments[index]), references[index])(
                *inputs[index]
            )

        found = compare_results(exercise, results, [(index,) for index in range(len(inputs))], outputs)
        return _check_gradients(references[0], modules[0], inputs[0]) if found is None else found

    return check


def _check_gradients(reference: nn.Module, module: nn.Module, case: Case) -> CheckResult | None:
    """Report parameters that no gradient reaches, although the outputs are correct."""
    expected, found = (_parameters_with_gradient(each, case) for each in (reference, module))
    cut = [name for name in expected if name not in found]
    feedback = f"{', '.join(cut)} would never be trained: no gradient reaches {'it' if len(cut) == 1 else 'them'}"
    return (
        CheckResult("no gradient", f"{feedback}; use the parameter itself, without .data or detach().") if cut else None
    )


def _parameters_with_gradient(module: nn.Module, case: Case) -> list[str]:
    module.requires_grad_(True)
    out = module(*copy.deepcopy(case))
    if not out.requires_grad:
        return []
    out.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    # the gradient of a parameter without effect, such as the bias of the keys, is a rounding error
    return [name for name, grad in gradients.items() if grad is not None and float(grad.abs().max()) > 1e-9]


def _build_module(module_class: Function, arguments: Case) -> nn.Module:
    torch.manual_seed(len(arguments))
    module: nn.Module = module_class(*(each() if callable(each) else each for each in arguments)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():  # with gains of 1 and biases of 0 a missing one would not show
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def _try_build_module(answer: Any, arguments: Case) -> Any:
    state = torch.get_rng_state()
    try:
        return call_answer(lambda: _build_module(answer, arguments), (), answer)
    finally:
        torch.set_rng_state(state)


def _load_weights(module: nn.Module, source: nn.Module) -> nn.Module:
    module.load_state_dict(source.state_dict())
    return module.requires_grad_(False)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _check_parameters(
    exercise: Exercise, reference: nn.Module, module: nn.Module, arguments: Case
) -> CheckResult | None:
    """Report parameters that are missing, unexpected, frozen or of another shape."""
    expected, found = _shapes(reference), _shapes(module)
    if expected == found:
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        fixed = [name for name, _ in reference.named_parameters() if name not in trained]
        feedback = f"{', '.join(fixed)} would never be trained: {'it is' if len(fixed) == 1 else 'they are'} not"
        return CheckResult("not a parameter", f"{feedback} trainable; use nn.Parameter.") if fixed else None
    for mistake in exercise.mistakes:
        if _shapes(_build_module(exercise.wrong_solution(mistake), arguments)) == found:
            return CheckResult(mistake.name, mistake.hint)
    missing, extra = [name for name in expected if name not in found], [name for name in found if name not in expected]
    if missing:
        more = f" (it has {', '.join(extra)} instead)" if extra else ""
        return CheckResult(None, f"the module has no {', '.join(missing)}{more}; use the names of the exercise text")
    if extra:
        return CheckResult(None, f"the module has {', '.join(extra)}, which the exercise does not need; remove it")
    name = next(name for name in expected if expected[name] != found[name])
    return CheckResult(None, f"{name} should have shape {expected[name]}, but has shape {found[name]}")


def compare_results(
    exercise: Exercise, results: Sequence[Any], cases: Sequence[Case], wrap: Callable[[Function], Function]
) -> CheckResult | None:
    """Compare the results of an answer with those of the solution, then with those of each known mistake.

    wrap  turns the solution or a wrong solution into a function of a case
    """
    expected = [call_answer(wrap(exercise.solution), case) for case in cases]
    wrong = [index for index, pair in enumerate(zip(results, expected, strict=True)) if not same_result(*pair)]
    if not wrong:
        return None
    unfinished = next((each for each in results if isinstance(each, NotImplementedError)), None)
    if unfinished is not None:
        return _error_result(unfinished)
    for mistake in exercise.mistakes:
        function = wrap(exercise.wrong_solution(mistake))
        if all(same_result(one, call_answer(function, case)) for one, case in zip(results, cases, strict=True)):
            return CheckResult(mistake.name, mistake.hint)
    first = wrong[0]
    if isinstance(results[first], RaisedError):
        return _error_result(results[first])
    return CheckResult(None, f"{describe_difference(results[first], expected[first])}. No known mistake gives this.")


def _error_result(error: "NotImplementedError | RaisedError") -> CheckResult:
    if isinstance(error, RaisedError):
        return CheckResult("error", f"it fails with {error}")
    return CheckResult("to do", "it is not written yet")


def same_result(one: Any, other: Any) -> bool:
    """Whether two results are equal: numbers and arrays within a tolerance, all else exactly; errors never are."""
    if isinstance(one, RaisedError) or isinstance(other, RaisedError):
        return False
    if isinstance(one, Tensor | np.ndarray | float) or isinstance(other, Tensor | np.ndarray | float):
        first, second = _as_array(one), _as_array(other)
        if first is None or second is None or first.shape != second.shape:
            return False
        return bool(np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same_result(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _as_array(value: Any) -> "np.ndarray | None":
    """Numbers as a float64 array, or None if the value has none."""
    try:
        if isinstance(value, Tensor):
            return value.detach().double().numpy()
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def describe_difference(result: Any, expected: Any) -> str:
    """Describe the largest difference between a result and the expected one."""
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


def shorten(value: Any) -> str:
    """The repr of a value, cut to 120 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
