"""The kernels, one file each, and the choice between them."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from regard.base.errors import ConfigError, kernel_refused
from regard.base.registry import Registry
from regard.core import reference
from regard.core.kernels import blocked, eager, flex, sdpa
from regard.core.kernels.request import Request


class Kernel(Protocol):
    """What a kernel file offers."""

    SUMMARY: str

    def refusals(self, call: Request) -> list[str]:
        """Every reason why this kernel cannot compute exactly what is asked; none means that it can."""

    def work(self, call: Request) -> float:
        """Score entries it would compute, weighted by how long one takes it: the smallest is chosen."""

    def memory(self, call: Request) -> int:
        """Bytes it would need beyond inputs and output."""

    def run(self, call: Request) -> Tensor:
        """The attention."""


class _Reference:
    """The float64 definition, as a kernel."""

    SUMMARY = "the definition in float64: the truth, and slow"

    refusals = staticmethod(eager.refusals)

    @staticmethod
    def run(call: Request) -> Tensor:
        return reference.reference(call)

    @staticmethod
    def work(call: Request) -> float:
        return 25 * eager.work(call)

    @staticmethod
    def memory(call: Request) -> int:
        b, h, _, i, j, _, _ = call.sizes
        return 9 * b * h * i * j * 8 // 2


KERNELS: Registry[Kernel] = Registry("kernel")
for _kernel in (flex, sdpa, blocked, eager, _Reference):
    KERNELS.add(_kernel.__name__.rpartition(".")[2].strip("_").lower())(cast(Kernel, _kernel))

Observer = Callable[[str, Request, Tensor], None]
Context = Callable[[], AbstractContextManager[None]]
_observers: list[tuple[Observer, Context]] = []


def choose(call: Request) -> str:
    """The fused kernel with the least work among those that can serve, else the eager one."""
    if call.plain and not sdpa.refusals(call):
        return "sdpa"  # nothing here is faster, so the others need not be asked
    if sdpa.short_in_float32(call) and not eager.refusals(call):
        return "eager"  # the most exact, and so small that compiling another would never pay
    able = ["flex"] if len(flex.refusals(call)) == 0 else []
    if able and flex.surely_best(call):
        return "flex"
    able += ["sdpa"] if len(sdpa.refusals(call)) == 0 else []
    # where flex can serve, blocked would only copy what flex reads in place
    able += ["blocked"] if "flex" not in able and len(blocked.refusals(call)) == 0 else []
    if len(able) == 0:
        if reasons := eager.refusals(call):
            raise kernel_refused(None, reasons, [])
        return "eager"
    if torch.compiler.is_compiling():
        return able[0]  # comparing work would tie the compiled code to one length; the order is the usual one
    return min(able, key=lambda name: KERNELS[name].work(call))


def run(call: Request, name: str | None) -> Tensor:
    """The attention by the named kernel, or by the one chosen. A named one that cannot serve raises its reasons."""
    if name is None:
        name = choose(call)
    elif not isinstance(name, str):
        raise ConfigError(f"kernel is a name such as 'sdpa', or None to choose, not {name!r}")
    elif reasons := KERNELS[name].refusals(call):
        others = [other for other in KERNELS if not KERNELS[other].refusals(call)]
        raise kernel_refused(name, reasons, [choose(call)] if others else [])
    if torch.compiler.is_compiling() or not _observers:
        return KERNELS[name].run(call)
    with ExitStack() as stack:
        for _, context in _observers:
            stack.enter_context(context())
        out = KERNELS[name].run(call)
    for observer, _ in _observers:
        observer(name, call, out)
    return out


@contextmanager
def recording() -> Iterator[list[str]]:
    """The names of the kernels that run inside, in order."""
    names: list[str] = []
    with observe_requests(lambda name, call, out: names.append(name)):
        yield names


@contextmanager
def observe_requests(observer: Observer, context: Context = nullcontext) -> Iterator[None]:
    """Call the observer after every attention call inside, with the name of the kernel, the request and the output.

    context  makes a context manager in which each kernel runs
    """
    entry = (observer, context)
    _observers.append(entry)
    try:
        yield
    finally:
        _observers[:] = [other for other in _observers if other is not entry]


@dataclass(frozen=True)
class Answer:
    """One kernel's answer to a call."""

    kernel: str
    summary: str
    reasons: tuple[str, ...]
    work: float  # entries, weighted by the time each takes; infinite where it refuses
    memory: int  # bytes

    @property
    def able(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Explanation:
    """Which kernel would run, why each other would not, what is visible and what it would cost."""

    call: str
    mask: str
    chosen: str | None
    visible: int
    pairs: int
    answers: tuple[Answer, ...]

    def __str__(self) -> str:
        share = self.visible / self.pairs if self.pairs else 0.0
        lines = [self.call, f"mask {self.mask}: {self.visible:,} of {self.pairs:,} pairs visible ({share:.1%})"]
        for answer in self.answers:
            mark = "->" if answer.kernel == self.chosen else "  "
            if answer.able:
                cost = f"work {answer.work:.3g} entries, memory {format_bytes(answer.memory)}"
                lines.append(f"{mark} {answer.kernel:<10} {'runs' if mark == '->' else 'could run'}: {cost}")
            else:
                lines.append(f"{mark} {answer.kernel:<10} refuses: {'; '.join(answer.reasons)}")
        return "\n".join(lines)


def explain(call: Request) -> Explanation:
    b, h, g, i, j, c, e = call.sizes
    answers = []
    for name in KERNELS:
        kernel = KERNELS[name]
        reasons = tuple(kernel.refusals(call))
        work, memory = (math.inf, 0) if reasons else (kernel.work(call), kernel.memory(call))
        answers.append(Answer(name, kernel.SUMMARY, reasons, work, memory))
    return Explanation(
        call=f"b={b} h={h} g={g} i={i} j={j} c={c} e={e}, {call.q.dtype} on {call.q.device}, beta={call.beta:g}",
        mask=repr(call.mask),
        chosen=choose(call) if any(answer.able for answer in answers) else None,
        visible=call.visible_pairs,
        pairs=b * h * i * j,
        answers=tuple(answers),
    )


def format_bytes(size: int) -> str:
    """Bytes as people read them."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
