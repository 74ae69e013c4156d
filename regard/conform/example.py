"""A broken rule as Python that runs as it stands. Its last line is what it gives, and a comment what it should be."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.conform.callable_under_test import GROUPED, CallConvention, Subject
from regard.conform.inputs import Inputs, exact, rounded
from regard.see.adapters import Probe

WRITABLE = 48  # more numbers than these are not written: the one that is farthest off stands for them
SIMPLE = (int, float, str, bool)


@dataclass(frozen=True)
class Raised:
    """In place of an answer: what the call raises."""

    kind: str
    words: str

    @classmethod
    def of(cls, error: Exception) -> "Raised":
        return cls(type(error).__name__, (str(error).strip().splitlines() or [""])[0])


@dataclass(frozen=True)
class AtMost:
    """In place of a number that is expected: the largest one that is allowed."""

    most: float


@dataclass(frozen=True)
class Ask:
    """How a call of the subject is written, with the arguments that these inputs call for."""

    subject: Subject
    inputs: Inputs

    @property
    def before(self) -> list[str]:
        """What has to stand before the first call."""
        return list(self.subject.way.before) if self.subject.way is not None else []

    @property
    def name(self) -> str:
        return self.subject.probe.name if self.subject.way is None else self.subject.way.call

    @property
    def settings(self) -> list[str]:
        """Its keyword arguments."""
        subject, inputs = self.subject, self.inputs
        given = [f"{name}={value!r}" for name, value in subject.causal_given(inputs.causal).items()]
        if inputs.k.shape[1] < inputs.q.shape[1]:
            given += [f"{name}=True" for name in GROUPED if name in subject.probe.parameters]
        if inputs.visible is not None and subject.mask is not None:
            given.append(f"{subject.mask.name}={subject.mask.name}")
        return given

    def __call__(self, q: str = "q", k: str = "k", v: str = "v", *more: str) -> str:
        return f"{self.name}({', '.join([q, k, v, *self.settings, *more])})"

    def weights(self, *more: str) -> str:
        """The weights: the answer where v is the identity, a few columns at a time where v has a fixed width."""
        b, _, g, _, j, c, _ = self.inputs.sizes
        cast = "" if self.inputs.dtype == torch.float32 else f", dtype={self.inputs.dtype}"
        if self.subject.free_widths:
            return self("q", "k", f"torch.eye({j}{cast}).repeat({b}, {g}, 1, 1)", *more)
        part = self("q", "k", f"part.repeat({b}, {g}, 1, 1)", *more)
        columns = f"torch.eye({math.ceil(j / c) * c}{cast})[:{j}].split({c}, 1)"
        return f"torch.cat([{part} for part in {columns}], -1)[..., :{j}]"


Shows = Callable[[Ask], Sequence[str]]  # the lines that make what is complained about; the last one gives it a name


def example(
    subject: Subject, inputs: Inputs, got: object, expected: object, shows: Shows | None, drawn: dict[str, int]
) -> str:
    """The Python. `drawn` holds the seeds of those of q, k and v that have too many numbers to be written."""
    ask = Ask(subject, inputs)
    lines = ask.before
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        if name in drawn:
            lines += [f"torch.manual_seed({drawn[name]})", f"{name} = {drawing(x)}"]
        else:
            lines.append(f"{name} = {exact(x)}")
    if inputs.visible is not None and subject.mask is not None:
        lines.append(f"{subject.mask.name} = {exact(subject.mask.filled(inputs.visible, inputs.dtype))}")
    lines += [f"out = {ask()}"] if shows is None else shows(ask)
    return "\n".join([*lines, *ending(lines[-1], got, expected)])


def drawn_example(subject: Subject, inputs: Inputs, got: object, expected: object, shows: Shows, seed: int = 0) -> str:
    """The Python of a call whose q, k and v are as they were drawn with a seed, one after the other."""
    ask = Ask(subject, inputs)
    drawings = [f"{name} = {drawing(getattr(inputs, name))}" for name in ("q", "k", "v")]
    lines = [*ask.before, f"torch.manual_seed({seed})", *drawings]
    if inputs.visible is not None and subject.mask is not None:
        lines.append(f"{subject.mask.name} = {exact(subject.mask.filled(inputs.visible, inputs.dtype))}")
    lines += shows(ask)
    return "\n".join([*lines, *ending(lines[-1], got, expected)])


def drawing(x: Tensor) -> str:
    """How a tensor of these sizes is drawn."""
    cast = "" if x.dtype == torch.float64 else f".to({x.dtype})"
    return f"torch.randn{tuple(x.shape)}".replace(")", f", dtype=torch.float64){cast}")


def drawn_like(x: Tensor, seed: int) -> Tensor:
    """What that drawing gives."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=source, dtype=torch.float64).to(x.dtype)


def ending(last: str, got: object, expected: object) -> list[str]:
    """What the last line gives, and what it should give."""
    if isinstance(got, Raised):
        return [f"# raises {got.kind}: {got.words}"]
    lines = []
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.numel() > WRITABLE:
        name = last.partition(" = ")[0]
        off = (got.double() - expected.double()).abs().nan_to_num(torch.inf)
        place = [int(index) for index in torch.unravel_index(off.argmax(), off.shape)]
        lines.append(f"{name} = {name}[{', '.join(map(str, place))}].item()")
        got, expected = got[tuple(place)].item(), expected[tuple(place)].item()
    digits = 6
    while digits < 17 and _said(got, digits) == _said(expected, digits):
        digits += 1
    lines.append(f"# gives     {_said(got, digits)}")
    if isinstance(expected, AtMost):
        lines.append(f"# should be at most {expected.most:.3g}")
    elif expected is not None:
        lines.append(f"# should be {_said(expected, digits)}")
    return lines


def _said(value: Any, digits: int) -> str:
    if isinstance(value, Tensor):
        return rounded(value.detach(), digits)
    if isinstance(value, float):
        return repr(float(f"{value:.{digits}g}")) if math.isfinite(value) else f"float({str(value)!r})"
    return repr(value)


def way_of(fn: object, subject: Subject, options: Mapping[str, object], special: bool = False) -> CallConvention:
    """How a call is written: by the function's own name where it takes q, k and v as they are, else by as_probe.

    special  as_probe alone asks in another way than the checker does, which has a probe_of of its own
    """
    name = str(getattr(fn, "__name__", ""))
    if isinstance(fn, Probe):
        return CallConvention(("# probe: the one that was handed to check",), "probe.call")
    given = {key: value for key, value in options.items() if value is not None}
    own = name if name.isidentifier() else "f"
    if not special and not isinstance(fn, nn.Module) and not given and _plain(fn, subject):
        return CallConvention(() if own == name else (f"# f: the {subject.probe.name} that was handed to check",), own)
    shown = "module" if isinstance(fn, nn.Module) else own
    said = "".join(
        f", {key}={value!r}" if isinstance(value, SIMPLE) else f", {key}={key}" for key, value in given.items()
    )
    others = [key for key, value in given.items() if not isinstance(value, SIMPLE)]
    probe = "probe_of" if special else "as_probe"
    lines = ["from regard.conform import probe_of" if special else "from regard.see import as_probe"]
    if shown != name or others:
        lines.append(f"# {', '.join([shown, *others])}: what was handed to check, {subject.probe.name}")
    evaluated = f"{shown}.eval()" if isinstance(fn, nn.Module) else shown
    return CallConvention((*lines, f"attend = {probe}({evaluated}{said}).call"), "attend")


def _plain(fn: object, subject: Subject) -> bool:
    """Whether it answers with a tensor of ours when it is called with q, k and v and nothing else."""
    if not callable(fn) or subject.probe.layout != "b h n c":
        return False
    inputs = subject.draw(6, 6, h=4, e=4, causal=False, dtype=torch.float32)
    try:
        return isinstance(fn(inputs.q, inputs.k, inputs.v), Tensor)
    except TypeError:
        return False  # an argument that the probe fills in
    except Exception:
        return True  # that it raises is what will be shown
