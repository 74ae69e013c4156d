"""The kernels, one file each, and the choice between them."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

import torch
from torch import Tensor

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError, kernel_refused
from regard.base.registry import Registry
from regard.core.kernels import blocked, eager, flex, sdpa
from regard.core.kernels.request import Request


class Kernel(Protocol):
    """The interface of a kernel file. Every file of this folder with a RANK is a kernel of its name."""

    SUMMARY: str
    RANK: int  # its position in explanations, the fastest first

    def refusals(self, request: Request) -> list[str]:
        """Every reason why this kernel cannot compute the request exactly; an empty list if it can."""

    def work(self, request: Request) -> float:
        """Number of scores it would compute, weighted by the time of each. The kernel with the smallest is chosen."""

    def memory(self, request: Request) -> int:
        """Bytes of memory it would need beyond inputs and output."""

    def run(self, request: Request) -> Tensor:
        """Compute the attention output."""


KERNELS: Registry[Kernel] = Registry("kernel")
_files = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
for _file in sorted((file for file in _files if hasattr(file, "RANK")), key=lambda file: file.RANK):
    KERNELS.add(_file.__name__.rpartition(".")[2])(cast(Kernel, _file))

Observer = Callable[[str, Request, Tensor], None]
Context = Callable[[], AbstractContextManager[None]]
_observers: list[tuple[Observer, Context]] = []


def choose_kernel(request: Request) -> str:
    """The name of the fused kernel with the least work among those that can run the request, else `eager`."""
    if request.plain and not sdpa.refusals(request):
        return "sdpa"  # no other kernel is faster
    if sdpa.is_small_float32(request) and not eager.refusals(request):
        return "eager"  # the most exact, and the request is too small for compiling another to pay
    able = ["flex"] if len(flex.refusals(request)) == 0 else []
    if able and flex.is_surely_best(request):
        return "flex"
    able += ["sdpa"] if len(sdpa.refusals(request)) == 0 else []
    # where flex can run, blocked would only copy what flex reads in place
    able += ["blocked"] if "flex" not in able and len(blocked.refusals(request)) == 0 else []
    if len(able) == 0:
        if reasons := eager.refusals(request):
            raise kernel_refused(None, reasons, [])
        return "eager"
    if torch.compiler.is_compiling():
        return able[0]  # comparing work would specialise the compiled code to one length
    return min(able, key=lambda name: KERNELS[name].work(request))


def run_kernel(request: Request, name: str | None) -> Tensor:
    """Run the named kernel, or the chosen one if `name` is None.

    A named kernel that cannot compute the request exactly raises an error with its reasons.
    """
    if name is None:
        name = choose_kernel(request)
    elif not isinstance(name, str):
        raise ConfigError(f"kernel must be a name such as 'sdpa', or None to choose one, not {name!r}")
    elif reasons := KERNELS[name].refusals(request):
        others = [other for other in KERNELS if not KERNELS[other].refusals(request)]
        raise kernel_refused(name, reasons, [choose_kernel(request)] if others else [])
    if torch.compiler.is_compiling() or not _observers:
        return KERNELS[name].run(request)
    with ExitStack() as stack:
        for _, context in _observers:
            stack.enter_context(context())
        out = KERNELS[name].run(request)
    for observer, _ in _observers:
        observer(name, request, out)
    return out


@contextmanager
def recording() -> Iterator[list[str]]:
    """Record the names of the kernels that run inside the `with` block, in order.

    >>> with regard.recording() as names:
    ...     attend(q, k, v)
    >>> names
    ['sdpa']
    """
    names: list[str] = []
    with observe_requests(lambda name, request, out: names.append(name)):
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
class KernelAnswer:
    """Whether one kernel can run a request, and its cost."""

    kernel: str
    summary: str
    reasons: tuple[str, ...]
    work: float  # scores, weighted by the time of each; infinite if it refuses
    memory: int  # bytes

    @property
    def able(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Explanation(TextDisplay):
    """The chosen kernel, the reasons of kernels that refuse, visible pairs and costs."""

    call: str
    mask: str
    chosen: str | None
    visible: int
    pairs: int
    answers: tuple[KernelAnswer, ...]

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


def explain(request: Request) -> Explanation:
    """List every kernel with its cost, or with its reasons to refuse."""
    b, h, g, i, j, c, e = request.sizes
    answers = []
    for name in KERNELS:
        kernel = KERNELS[name]
        reasons = tuple(kernel.refusals(request))
        work, memory = (math.inf, 0) if reasons else (kernel.work(request), kernel.memory(request))
        answers.append(KernelAnswer(name, kernel.SUMMARY, reasons, work, memory))
    return Explanation(
        call=f"b={b} h={h} g={g} i={i} j={j} c={c} e={e}, {request.q.dtype} on {request.q.device}, "
        f"beta={request.beta:g}",
        mask=repr(request.mask),
        chosen=choose_kernel(request) if any(answer.able for answer in answers) else None,
        visible=request.visible_pairs,
        pairs=b * h * i * j,
        answers=tuple(answers),
    )


def format_bytes(size: int) -> str:
    """A number of bytes with its unit: `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
