"""How what a student wrote is looked over: by what it gives, beside the solution and every known slip."""

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.work.exercises.exercise import Check, CheckResult, Exercise, PlantedMistake

Case = tuple[Any, ...]
NEAR = 1e-6  # a student may sum in another order, or in float32 on the way


@dataclass(frozen=True)
class Failed:
    """An exception instead of an answer: its type, where in the student's own code, and what it said."""

    kind: str
    place: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}{self.place}: {self.words}" if self.words else f"{self.kind}{self.place}"


CELL = "cell "  # what the file of a notebook's cell is called, before its number


def failed(error: BaseException, own: str | None) -> Failed:
    """The exception as it is told, with the innermost line that is in the file of that name."""
    lines = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    words = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        lines, words = [(error.filename or "", error.lineno)], error.msg
    within = [(file, line) for file, line in lines if file == own or file.startswith(CELL)]
    if not within:
        return Failed(type(error).__name__, "", words)
    file, line = within[-1]
    return Failed(type(error).__name__, f" in line {line}{f' of {file}' * file.startswith(CELL)}", words)


def attempt(written: Any, case: Case) -> Any:
    """What a call gives, on inputs of its own, or how it failed."""
    try:
        with np.errstate(all="ignore"):
            return written(*copy.deepcopy(case))
    except NotImplementedError as error:
        return error
    except (Exception, SystemExit) as error:  # whatever a student's code does, it is reported
        return failed(error, _file(written))


def _file(written: Any) -> str | None:
    code = getattr(written, "__code__", None) or getattr(getattr(written, "forward", None), "__code__", None)
    return None if code is None else code.co_filename


def by_answers(*stages: Callable[[], list[Case]]) -> Check:
    """A check that calls what was written on each case and compares what it gives.

    stages  sets of cases, ordinary ones first: the next set is tried once the one before is right, so that a slip is
            recognised in ordinary cases whatever happens in extreme ones
    """

    def check(exercise: Exercise, written: Any) -> CheckResult | None:
        if not callable(written):
            return CheckResult(
                None, f"{exercise.writes} is {spelled(written)}, which cannot be called; write a function"
            )
        for cases in stages:
            asked = cases()
            given = [attempt(written, case) for case in asked]
            found = compared(given, asked, exercise.solution, exercise.slips)
            if found is not None:
                return found
        return None

    return check


def in_any_order(cases: Callable[[], list[Case]]) -> Check:
    """A check that compares what comes back as sorted numbers, for cases in which equals may change places."""

    def ordered(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *case: np.sort(np.asarray(make(*case), dtype=np.float64))

    def check(exercise: Exercise, written: Any) -> CheckResult | None:
        asked = cases()
        given = [attempt(ordered(written), case) for case in asked]
        slips = tuple(PlantedMistake(slip.name, slip.hint, ordered(slip.wrong)) for slip in exercise.slips)
        return compared(given, asked, ordered(exercise.solution), slips)

    return check


def of_kind(kind: type, cases: Callable[[], list[Case]]) -> Check:
    """A check that answers are of this very type, where a like one would not do for what comes after."""

    def check(exercise: Exercise, written: Any) -> CheckResult | None:
        came = type(attempt(written, cases()[0]))
        if came is kind:
            return None
        words = f"the answer has the right items, but is a {came.__name__}; a {kind.__name__} is asked for."
        return CheckResult(f"{came.__name__} instead of {kind.__name__}", words)

    return check


def one_after_the_other(*checks: Check) -> Check:
    """The finding of the first check that has one."""

    def check(exercise: Exercise, written: Any) -> CheckResult | None:
        found = (each(exercise, written) for each in checks)
        return next((finding for finding in found if finding is not None), None)

    return check


def by_outputs(builds: Sequence[Case], cases: Callable[[], list[Case]]) -> Check:
    """A check for modules: one of each build is made, given the weights of the solution's, and called on its case.

    builds  the arguments that modules are made with; one may be a function that makes an argument anew
    cases   one for each build
    """

    def check(exercise: Exercise, written: Any) -> CheckResult | None:
        if not (isinstance(written, type) and issubclass(written, nn.Module)):
            return CheckResult(None, f"{exercise.writes} is {spelled(written)}; write a class that is an nn.Module")
        ours = [_made(exercise.solution, build) for build in builds]
        theirs = [attempt_module(written, build) for build in builds]
        for module in theirs:
            if isinstance(module, NotImplementedError | Failed):
                return troubled(module)
        for mine, module in zip(ours, theirs, strict=True):
            other = _other_parameters(exercise, mine, module, builds[0])
            if other is not None:
                return other
        asked = cases()
        given = [attempt(_loaded(module, mine), case) for module, mine, case in zip(theirs, ours, asked, strict=True)]

        def at(make: Callable[..., Any]) -> Callable[..., Any]:
            """Outputs of a class, as a function of the number of the case."""

            def call(number: int) -> Any:  # one whose parameters differ fails to load, and a failure is like no other
                return _loaded(_made(make, builds[number]), ours[number])(*asked[number])

            return call

        numbers = [(number,) for number in range(len(asked))]
        slips = tuple(PlantedMistake(slip.name, slip.hint, at(slip.wrong)) for slip in exercise.slips)
        found = compared(given, numbers, at(exercise.solution), slips)
        return _unlearned(ours[0], theirs[0], asked[0]) if found is None else found

    return check


def _unlearned(ours: nn.Module, theirs: nn.Module, case: Case) -> CheckResult | None:
    """The finding about parameters that no gradient reaches, though the outputs are right."""
    wanted, came = (_reached(module, case) for module in (ours, theirs))
    cut = [name for name in wanted if name not in came]
    words = f"{', '.join(cut)} would never be learned: no gradient reaches {'it' if len(cut) == 1 else 'them'}"
    return CheckResult("no gradient", f"{words}; use the parameter itself, without .data or detach().") if cut else None


def _reached(module: nn.Module, case: Case) -> list[str]:
    """The names of the parameters that a loss on the output would change."""
    module.requires_grad_(True)
    out = module(*copy.deepcopy(case))
    if not out.requires_grad:
        return []
    out.square().sum().backward()
    grads = {name: each.grad for name, each in module.named_parameters()}
    # where a parameter changes nothing, as a bias of keys does, rounding leaves a little
    return [name for name, grad in grads.items() if grad is not None and float(grad.abs().max()) > 1e-9]


def _made(make: Callable[..., Any], build: Case) -> nn.Module:
    torch.manual_seed(len(build))
    module: nn.Module = make(*(part() if callable(part) else part for part in build)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():  # gains of 1 and biases of 0 would hide what is left out
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def attempt_module(written: Any, build: Case) -> Any:
    state = torch.get_rng_state()
    try:
        return _made(written, build)
    except NotImplementedError as error:
        return error
    except (Exception, SystemExit) as error:
        return failed(error, _file(written))
    finally:
        torch.set_rng_state(state)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _learned(module: nn.Module) -> list[str]:
    """The names of what an optimiser would change."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _loaded(module: nn.Module, source: nn.Module) -> nn.Module:
    module.load_state_dict(source.state_dict())
    return module.requires_grad_(False)


def _other_parameters(exercise: Exercise, ours: nn.Module, theirs: nn.Module, build: Case) -> CheckResult | None:
    """The finding about parameters that are missing, too many or of another shape."""
    wanted, came = _shapes(ours), _shapes(theirs)
    if wanted == came:
        fixed = [name for name in _learned(ours) if name not in _learned(theirs)]
        words = f"{', '.join(fixed)} would never be learned: {'it is' if len(fixed) == 1 else 'they are'} no parameter"
        return CheckResult("not a parameter", f"{words}; use nn.Parameter, not a buffer.") if fixed else None
    for slip in exercise.slips:
        if _shapes(_made(slip.wrong, build)) == came:
            return CheckResult(slip.name, slip.hint)
    missing, extra = [name for name in wanted if name not in came], [name for name in came if name not in wanted]
    if missing:
        more = f" (it has {', '.join(extra)} instead)" if extra else ""
        return CheckResult(None, f"the module has no {', '.join(missing)}{more}; keep the names that the text gives")
    if extra:
        return CheckResult(None, f"the module has {', '.join(extra)}, which is not asked for; leave it out")
    name = next(name for name in wanted if wanted[name] != came[name])
    return CheckResult(None, f"{name} should be of shape {wanted[name]}, but is {came[name]}")


def compared(
    given: Sequence[Any],
    asked: Sequence[Case],
    solution: Callable[..., Any],
    slips: Iterable[PlantedMistake],
) -> CheckResult | None:
    """What is wrong with the answers that were given, or None."""
    right = [attempt(solution, case) for case in asked]
    wrong = [number for number, (one, other) in enumerate(zip(given, right, strict=True)) if not same(one, other)]
    if not wrong:
        return None
    unwritten = next((each for each in given if isinstance(each, NotImplementedError)), None)
    if unwritten is not None:
        return troubled(unwritten)
    for slip in slips:
        if all(same(one, attempt(slip.wrong, case)) for one, case in zip(given, asked, strict=True)):
            return CheckResult(slip.name, slip.hint)
    first = wrong[0]
    if isinstance(given[first], Failed):
        return troubled(given[first])
    return CheckResult(None, f"{difference(given[first], right[first])}. No slip is known that gives this.")


def troubled(problem: "NotImplementedError | Failed") -> CheckResult:
    """The finding about code that is not there yet, or that fails."""
    if isinstance(problem, Failed):
        return CheckResult("error", f"it fails with {problem}")
    return CheckResult("still to do", "it is still to be written")


def same(one: Any, other: Any) -> bool:
    """Whether two answers are the same: numbers and arrays nearly, all else exactly. A failure is like no other."""
    if isinstance(one, Failed) or isinstance(other, Failed):
        return False
    if isinstance(one, Tensor | np.ndarray | float) or isinstance(other, Tensor | np.ndarray | float):
        first, second = as_array(one), as_array(other)
        if first is None or second is None or first.shape != second.shape:
            return False
        return bool(np.allclose(first, second, rtol=NEAR, atol=NEAR, equal_nan=True))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def as_array(value: Any) -> "np.ndarray | None":
    """Numbers as an array of float64, or None where they are none."""
    try:
        if isinstance(value, Tensor):
            return value.detach().double().numpy()
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def difference(given: Any, right: Any) -> str:
    """The first thing in which an answer differs from the right one."""
    first, second = as_array(given), as_array(right)
    if given is None:
        return "it gives None: is there a return?"
    if isinstance(right, Tensor | np.ndarray) and first is not None and second is not None:
        if first.shape != second.shape:
            return f"the answer should be of shape {second.shape}, but is of shape {first.shape}"
        far = np.abs(first - second)
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(far), math.inf, far))), far.shape)
        place = f" at {[int(number) for number in at]}" if far.ndim else ""
        return f"the answer should be {second[at]:.6g}{place}, but is {first[at]:.6g}"
    return f"the answer should be {spelled(right)}, but is {spelled(given)}"


def spelled(value: Any) -> str:
    """A value in short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
