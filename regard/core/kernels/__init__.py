"""The attention kernels, one file each, and the choice of the kernel for a call."""

import math
from collections.abc import Callable, Hashable, Iterator
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
from regard.core.input_checks import fits
from regard.core.kernels import blocked, compiled, eager, flex, sdpa
from regard.core.kernels.cpu_flash import flash_attention
from regard.core.kernels.record import close_record, open_record
from regard.core.kernels.request import STEEP_BETA, PreparedCall, Request, in_unsupported_transform
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.causal import Causal
from regard.core.masks.plan_cache import Memo, joint_key


class Kernel(Protocol):
    """The interface of an attention kernel.

    Each module of this package that defines RANK is a kernel with its file name.
    """

    SUMMARY: str
    RANK: int  # position in explanations, the fastest kernel first

    def refusals(self, request: Request) -> list[str]:
        """Return every reason why this kernel cannot compute the attention call exactly.

        The list is empty if it can.
        """

    def work(self, request: Request) -> float:
        """Return the estimated cost: the number of scores to compute times the time per score.

        The lowest cost is chosen.
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
    """Return the name of the kernel for an attention call: the fused kernel with the least estimated work.

    `eager` is chosen if no fused kernel can compute the call exactly, and for small float32 calls on a GPU.
    Raises KernelRefusedError if no kernel can compute the call.
    """
    fused = len(sdpa.refusals(request)) == 0
    if fused and request.plain:
        return "sdpa"  # no other kernel is faster
    if sdpa.is_small_float32(request) and not eager.refusals(request):
        return "eager"  # the most exact, and the request is too small for compiling another to pay
    able = ["flex"] if request.q.device.type == "cuda" and len(flex.refusals(request)) == 0 else []
    if able and flex.is_surely_best(request):
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


def run_kernel(request: Request, name: str | None, remember: Mask | None = None) -> Tensor:
    """Run an attention call with the kernel `name`. If `name` is None, `choose_kernel` chooses the kernel.

    Raises KernelRefusedError with the reasons if the named kernel cannot compute the call exactly.

    remember  the mask, if the call has no other options: the choice of kernel is then cached for later calls
    """
    chosen = choose_kernel(request) if name is None else None
    if chosen is not None:
        name = chosen
    elif not isinstance(name, str):
        raise ConfigError(f"kernel must be a name such as 'sdpa', or None to choose one, not {name!r}")
    elif reasons := KERNELS[name].refusals(request):
        others = [other for other in KERNELS if not KERNELS[other].refusals(request)]
        raise kernel_refused(name, reasons, [choose_kernel(request)] if others else [])
    if chosen == "blocked" and torch.compiler.is_compiling():
        return compiled.masked_attention(request)
    if remember is not None and chosen is not None and not torch.compiler.is_compiling():
        _remember(remember, chosen, request)
    if not is_observed():
        return KERNELS[name].run(request)
    with unobserved():
        out = KERNELS[name].run(request)
    return notify_observers(name, request, out)


def is_observed() -> bool:
    """Return whether attention calls are observed now, by `observe_requests`. Those of compiled code are not."""
    return not torch.compiler.is_compiling() and bool(_observers.get())


@contextmanager
def unobserved() -> Iterator[None]:
    """Context manager: run kernels without reporting them, inside the context of each observer."""
    observers = _observers.get()
    with ExitStack() as stack:
        for _, context in observers:
            stack.enter_context(context())
        _observers.set(())
        stack.callback(_observers.set, observers)
        yield


def notify_observers(name: str, request: Request, out: Tensor) -> Tensor:
    """Report an attention call to the observers and return its output, which they may replace.

    name  name of the kernel that ran
    """
    for observer, _ in _observers.get():
        changed = observer(name, request, out)
        out = out if changed is None else changed
    return out


_prepared: Memo[PreparedCall] = Memo(16)


def run_prepared(q: object, k: object, v: object, mask: object, beta: object) -> Tensor | None:
    """Compute a simple attention call on the CPU without building a `Request`; return None for any other call.

    Simple calls are those without a mask, causal calls, and calls whose mask and sizes were prepared by an earlier
    call. This takes a fraction of the usual time for small calls. After None, `attend` takes the usual path
    with all checks.
    """
    if torch.compiler.is_compiling() or _observers.get() or not (mask is None or isinstance(mask, Mask)):
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    ordinary = type(q) is type(k) is type(v) is Tensor and fits(q, k, v) and q.device.type == "cpu"
    if not ordinary or in_unsupported_transform(q.device) or torch.is_autocast_enabled("cpu"):
        return None
    (i, c), (j, e) = q.shape[2:], v.shape[2:]
    factor = c**-0.5 if beta is None else beta if isinstance(beta, float) else 0.0
    if not i or not j or not len(q) or not 0.0 < factor <= STEEP_BETA:
        return None
    if mask is None or (type(mask) is Causal and i in (1, j)):
        dense = c == e and q.stride(3) == k.stride(3) == v.stride(3) == 1
        hides = mask is not None and i > 1  # the last query sees all keys
        return flash_attention(q, k, v, None, hides, factor) if dense else None
    call = _prepared.peek(_call_key(mask, q, k))
    return None if call is None else call(q, k, v, factor)


def _call_key(mask: Mask, q: Tensor, k: Tensor) -> Hashable | None:
    """Return the cache key of a prepared call: mask, sizes and dtype. None if the call must not be cached."""
    return None if mask.by_pair() else joint_key(mask, (q.shape[:3], k.shape[1:3], q.dtype))


def _remember(mask: Mask, name: str, request: Request) -> None:
    """Cache the chosen kernel and its prepared call, for later CPU calls with the same mask, sizes and dtype."""
    if request.q.device.type != "cpu" or not can_read_values(request.q) or 0 in request.sizes:
        return
    call = sdpa.prepare(request) if name == "sdpa" else blocked.prepare(request) if name == "blocked" else None
    if call is not None:
        _prepared.get(_call_key(mask, request.q, request.k), mask, lambda: call)


@contextmanager
def recording() -> Iterator[list[str]]:
    """Record the names of the kernels that run inside the `with` block, in order. Other threads are not recorded.

    Compiled code records its fused kernels when they run. Kernels that the compiler fuses into its own code,
    such as `eager`, are not recorded.

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
    context   function that returns a context manager, which is entered around each kernel run
    """
    entry = (observer, context)
    _observers.set((*_observers.get(), entry))
    try:
        yield
    finally:
        _observers.set(tuple(other for other in _observers.get() if other is not entry))


@dataclass(frozen=True)
class KernelAnswer:
    """Whether one kernel can compute an attention call, and its cost.

    reasons  why the kernel cannot compute the call; empty if it can
    work     estimated number of scores to compute, weighted by the time per score; infinite if it cannot run
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
