"""The attention kernels, one file each, and the choice of the kernel for a call."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

import torch
from torch import Tensor

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError, kernel_refused
from regard.base.registry import Registry
from regard.base.tracing import can_read_values
from regard.core.absolute_positions import Positions
from regard.core.input_checks import is_autocasting
from regard.core.kernels import blocked, compiled, eager, flex, sdpa
from regard.core.kernels.prepared import PreparedCalls
from regard.core.kernels.record import close_record, open_record
from regard.core.kernels.request import PreparedCall, Request, in_transform
from regard.core.masks.algebra import Mask


class Kernel(Protocol):
    """The interface of an attention kernel.

    Each module of this package that defines RANK is a kernel. The name of the kernel is the name of the file.

    SUMMARY  what the kernel is, in one line
    RANK     position of the kernel in the output of `explain`, where faster kernels come first
    """

    SUMMARY: str
    RANK: int  # position in explanations, the fastest kernel first

    def refusals(self, request: Request) -> list[str]:
        """Return every reason why this kernel cannot compute the attention call exactly; an empty list if it can."""

    def work(self, request: Request) -> float:
        """Return the estimated cost: the number of scores to compute times the time per score.

        `choose_kernel` compares these costs.
        """

    def memory(self, request: Request) -> int:
        """Return the bytes of memory that the kernel would need in addition to inputs and output."""

    def run(self, request: Request) -> Tensor:
        """Compute the output of an attention call."""


KERNELS: Registry[Kernel] = Registry("kernel")
_files = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
for _file in sorted((file for file in _files if hasattr(file, "RANK")), key=lambda file: file.RANK):
    KERNELS.add(_file.__name__.rpartition(".")[2])(cast(Kernel, _file))

Observer = Callable[[str, Request, Tensor], Tensor | None]
Context = Callable[[], AbstractContextManager[None]]
# per thread and per asynchronous task: the calls of others are not recorded
_observers: ContextVar[tuple[tuple[Observer, Context], ...]] = ContextVar("observers", default=())


def choose_kernel(request: Request) -> str:
    """Return the name of the kernel for an attention call: usually the fused kernel with the least estimated work.

    In two cases the fastest kernel is known without an estimate: `sdpa` for full and causal masks without score terms,
    and `flex` on a GPU for calls with very many query-key pairs. `eager` is chosen if no fused kernel can compute the
    call exactly, and for small calls on a GPU in float32 or with score terms. Raises KernelRefusedError if no kernel
    can compute the call.
    """
    fused = len(sdpa.refusals(request)) == 0
    if fused and request.plain:
        return "sdpa"  # no other kernel is faster
    rounds = sdpa.rounds_bias(request)
    if (rounds or request.q.dtype == torch.float32) and sdpa.is_short(request) and not eager.refusals(request):
        return "eager"  # the most exact, and the request is too small for compiling another to pay
    able = ["flex"] if request.q.device.type == "cuda" and len(flex.refusals(request)) == 0 else []
    if able and (rounds or flex.is_surely_best(request)):
        return "flex"
    # where flex can run, blocked would only copy what flex reads in place
    gathers = fused and len(able) == 0 and len(blocked.own_refusals(request)) == 0
    able += ["sdpa"] if fused else []
    able += ["blocked"] if gathers else []
    if len(able) == 0:
        if reasons := eager.refusals(request):
            raise kernel_refused(None, reasons, [])
        return "eager"
    if able[-1] == "blocked" and torch.compiler.is_compiling():
        # comparing work would specialise the compiled code to one length; the operator of blocked compares when it runs
        return "blocked"
    return able[0] if len(able) == 1 else min(able, key=lambda name: KERNELS[name].work(request))


def run_kernel(request: Request, name: str | None, passed: "Arguments | None" = None) -> Tensor:
    """Run an attention call with the kernel `name`. If `name` is None, `choose_kernel` chooses the kernel.

    Raises KernelRefusedError with the reasons if the named kernel cannot compute the call exactly.

    passed  the arguments mask, beta and positions of `attend`. The chosen kernel is cached for later calls with equal
            arguments. None if the call has other options, such as score terms; then nothing is cached
    """
    chosen = choose_kernel(request) if name is None else None
    if chosen is not None:
        name = chosen
    elif not isinstance(name, str):
        raise ConfigError(f"kernel must be a name such as 'sdpa', or None to choose one, not {name!r}")
    elif reasons := KERNELS[name].refusals(request):
        others = [other for other in KERNELS if not KERNELS[other].refusals(request)]
        raise kernel_refused(name, reasons, [choose_kernel(request)] if others else [])
    if torch.compiler.is_compiling():
        return compiled.masked_attention(request) if chosen == "blocked" else KERNELS[name].run(request)
    if is_observed():  # a call is not prepared here: that would evaluate its mask outside of `unobserved`
        with unobserved():
            out = KERNELS[name].run(request)
        return notify_observers(name, request, out)
    call = _prepare(name, request, passed) if passed is not None and chosen is not None else None
    return KERNELS[name].run(request) if call is None else call(request.q, request.k, request.v)


def is_observed() -> bool:
    """Return whether `observe_requests` observes attention calls now. False in compiled code."""
    return not torch.compiler.is_compiling() and bool(_observers.get())


@contextmanager
def unobserved() -> Iterator[None]:
    """Context manager: do not report the attention calls inside the `with` block to the observers.

    An observer is a function that was passed to `observe_requests`. Inside the block, the context managers that were
    passed there as `context` are active.
    """
    observers = _observers.get()
    with ExitStack() as stack:
        for _, context in observers:
            stack.enter_context(context())
        _observers.set(())
        stack.callback(_observers.set, observers)
        yield


def notify_observers(name: str, request: Request, out: Tensor) -> Tensor:
    """Report an attention call to the observers (see `observe_requests`). Returns the output, or a replacement by one.

    name  name of the kernel that ran
    out   output of the kernel
    """
    for observer, _ in _observers.get():
        changed = observer(name, request, out)
        out = out if changed is None else changed
    return out


_prepared = PreparedCalls(16)
Arguments = tuple[Mask | Tensor | None, float | None, Positions | None]  # mask, beta and positions as passed


def run_prepared(q: object, k: object, v: object, mask: object, beta: object, positions: object) -> Tensor | None:
    """Compute an attention call with the kernel that was chosen for an equal earlier call. None if there is none.

    The earlier call had the same mask, beta, positions, shapes and dtypes. Both calls have no score terms and no
    dropout. The checks of `attend` and the choice of a kernel are skipped, because they take most of the time of small
    calls. If the result is None, `attend` computes the call in the usual way.
    """
    if torch.compiler.is_compiling() or _observers.get() or in_transform():
        return None
    if not (type(q) is type(k) is type(v) is Tensor and (beta is None or type(beta) is float)):
        return None
    if q.is_nested or k.is_nested or v.is_nested:  # they may have no shape
        return None
    call = _prepared.find(q, k, v, mask, beta, positions)
    if call is None or torch.is_autocast_enabled("cpu" if q.is_cpu else "cuda"):
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph would read the tensors of the prepared call after they were freed
    return call(q, k, v)


def _prepare(name: str, request: Request, passed: Arguments) -> PreparedCall | None:
    """Return a function that computes an attention call again for other q, k and v, and cache the function.

    Returns None, and caches nothing, if this is not possible, for example because the mask is a tensor.
    """
    q, k, v = request.q, request.k, request.v
    mask, beta, positions = passed
    if isinstance(mask, Tensor) or not (beta is None or type(beta) is float):
        return None
    if 0 in request.sizes or not request.positions.consecutive or not can_read_values(q):
        return None
    if q.device.type not in ("cpu", "cuda") or is_autocasting(q) or in_transform():
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # preparing reads values, which a graph cannot
    prepare = getattr(KERNELS[name], "prepare", None)
    learning = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(learning):  # for later calls with gradients
        call: PreparedCall | None = None if prepare is None else prepare(request)
    if call is not None:
        _prepared.remember(q, k, v, mask, beta, positions, call)
    return call


@contextmanager
def recording() -> Iterator[list[str]]:
    """Record the names of the kernels that run inside the `with` block, in order.

    Kernels that run in other threads are not recorded. In compiled code, fused kernels are recorded when they run.
    Kernels that the compiler fuses with other code, such as `eager`, are not recorded.

    >>> with regard.recording() as names:
    ...     out = attend(q, k, v)
    >>> names
    ['sdpa']
    """
    names = open_record()
    try:
        with observe_requests(lambda name, request, out: names.append(name)):
            yield names
    finally:
        close_record(names)


@contextmanager
def observe_requests(observer: Observer, context: Context = nullcontext) -> Iterator[None]:
    """Call `observer(kernel name, request, output)` after every attention call inside the `with` block.

    If the observer returns a tensor, the tensor replaces the output.

    observer  function of the kernel's name, the checked arguments (`Request`) and the output
    context   function that returns a context manager; each kernel runs inside this context manager
    """
    entry = (observer, context)
    _observers.set((*_observers.get(), entry))
    try:
        yield
    finally:
        _observers.set(tuple(other for other in _observers.get() if other is not entry))


@dataclass(frozen=True)
class KernelAnswer:
    """Whether one kernel can compute an attention call, and the cost of the call with this kernel.

    kernel   name of the kernel
    summary  what the kernel is, in one line
    reasons  why the kernel cannot compute the call; empty if it can
    work     estimated number of scores to compute, weighted by the time per score; infinite if the kernel cannot run
    memory   bytes that the kernel needs in addition to inputs and output
    """

    kernel: str
    summary: str
    reasons: tuple[str, ...]
    work: float  # scores, weighted by the time of each; infinite if it refuses
    memory: int  # bytes

    @property
    def able(self) -> bool:
        """Whether the kernel can compute the attention call."""
        return not self.reasons


@dataclass(frozen=True)
class Explanation(TextDisplay):
    """The result of `explain`: which kernel computes an attention call, and why the others do not.

    call     the sizes, dtype, device and beta of the call
    mask     the mask as text
    chosen   name of the chosen kernel; None if no kernel can compute the call
    visible  number of visible query-key pairs
    pairs    number of all query-key pairs
    answers  for each kernel its cost, or its reasons to refuse the call
    """

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
    """List every kernel with its cost for an attention call, or with its reasons to refuse the call."""
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
    """Format a number of bytes with its unit, such as `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
