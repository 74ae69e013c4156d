"""Write the example of a failure as Python code that runs.

Comments at the end of the code show the actual result and the expected result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.conform.attention_under_test import AttentionUnderTest, CallCode
from regard.conform.inputs import QKV, AttentionInputs, rounded_tensor_code, tensor_code
from regard.see.adapters import Probe
from regard.see.measure.probes.functions import read_signature

MAX_NUMBERS = 24  # of a larger output only the worst entry is written
SIMPLE_TYPES = (int, float, str, bool)


@dataclass(frozen=True)
class Raised:
    """The exception that a call of the attention raised. Comparisons use this object in place of the missing output."""

    kind: str
    message: str

    @classmethod
    def from_error(cls, error: Exception) -> "Raised":
        """Create a `Raised` from the type and the first line of the message of an exception."""
        return cls(type(error).__name__, (str(error).strip().splitlines() or [""])[0])

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class AtMost:
    """The largest allowed value of a number. It is used as the expected value if many values are allowed."""

    most: float


@dataclass(frozen=True)
class CallWriter:
    """Writes a call of the attention as Python code.

    The code passes the causal argument, `enable_gqa` and the mask if the inputs need them.
    """

    attention: AttentionUnderTest
    inputs: AttentionInputs

    @property
    def before(self) -> tuple[str, ...]:
        """The lines of the example's code that come before the first call of the attention."""
        return self.attention.code.before

    @property
    def name(self) -> str:
        """The name of the attention function in the code of the example, such as `f`."""
        return self.attention.code.name

    @property
    def keywords(self) -> list[str]:
        """The keyword arguments of a call as Python code.

        They are the causal argument, `enable_gqa` and the mask, as far as the inputs need them.
        """
        a, inputs = self.attention, self.inputs
        given = {**a.causal_keywords(inputs.causal), **a.grouped_keywords(inputs.q, inputs.k)}
        written = [f"{name}={value!r}" for name, value in given.items()]
        if inputs.visible is not None and a.mask is not None:
            written.append(f"{a.mask.name}={a.mask.name}")
        return written

    def __call__(self, q: str = "q", k: str = "k", v: str = "v", *more: str) -> str:
        return f"{self.name}({', '.join([q, k, v, *self.keywords, *more])})"

    def each(self, form: str) -> str:
        """Return the code of a call in which the same change is applied to q, k and v.

        form  a format string such as "{}.contiguous()", in which "{}" is replaced by q, k or v
        """
        return self(*(form.format(name) for name in QKV))

    def weights(self, *more: str) -> str:
        """Return Python code that computes the attention weights, as the output with the identity matrix as v.

        If values must be as wide as keys, the columns of the identity matrix are passed in several calls.

        more  the code of further arguments
        """
        b, _, g, _, j, c, _ = self.inputs.sizes
        cast = "" if self.inputs.dtype == torch.float32 else f", dtype={self.inputs.dtype}"
        if self.attention.free_widths:
            return self("q", "k", f"torch.eye({j}{cast}).repeat({b}, {g}, 1, 1)", *more)
        part = self("q", "k", f"part.repeat({b}, {g}, 1, 1)", *more)
        columns = f"torch.eye({math.ceil(j / c) * c}{cast})[:{j}].split({c}, 1)"
        return f"torch.cat([{part} for part in {columns}], -1)[..., :{j}]"


Seeds = dict[str, tuple[int, float]]  # the seed and the factor of random tensors; -1 draws on from the last seed
WriteLines = Callable[[CallWriter], Sequence[str]]  # the lines of an example; the last one assigns what is wrong


def write_weights(call: CallWriter) -> list[str]:
    """Return Python code that computes the attention weights, as a list of one line."""
    return [f"weights = {call.weights()}"]


def run_lines(a: AttentionUnderTest, inputs: AttentionInputs, write: WriteLines) -> tuple[dict[str, Any], Any]:
    """Execute the code of an example; return all its variables by name, and the value assigned last.

    inputs  q, k and v, which the code uses by these names
    write   function that returns the lines of code, given a `CallWriter`
    """
    call = CallWriter(a, inputs)

    def run(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        q, k, v = (x if x.requires_grad else x.detach().clone() for x in (q, k, v))
        a.last_inputs[:] = [inputs.with_tensors(q=q.detach(), k=k.detach(), v=v.detach())]
        return a.probe.call(q, k, v, **keywords)

    space: dict[str, Any] = {"torch": torch, call.name: run, **{name: getattr(inputs, name).clone() for name in QKV}}
    if inputs.visible is not None and a.mask is not None:
        space[a.mask.name] = a.mask.convert(inputs.visible, inputs.dtype)
    lines = write(call)
    exec("\n".join(lines), space)  # code written by this package, which the report shows  # nosec B102
    return space, space[lines[-1].partition(" = ")[0].strip()]


def write_example(
    a: AttentionUnderTest,
    inputs: AttentionInputs,
    got: object,
    expected: object,
    lines: WriteLines | None = None,
    seeds: Seeds | None = None,
) -> str:
    """Return the Python code of an example that reproduces a failure.

    inputs         the first lines of the code assign q, k and v from these inputs
    got, expected  the value that the last line gives, and the value that the last line should give
    lines          function that returns the lines of code after these assignments, given a `CallWriter`; None for
                   a plain call
    seeds          for a tensor with too many numbers to write out, by name: the random seed, and the factor by which
                   normal random numbers are multiplied
    """
    call = CallWriter(a, inputs)
    written = list(call.before)
    for name in QKV:
        x = getattr(inputs, name)
        if seeds and name in seeds:
            seed, factor = seeds[name]
            written += [f"torch.manual_seed({seed})"] if seed >= 0 else []
            written.append(f"{name} = {randn_code(x, factor)}")
        else:
            written.append(f"{name} = {tensor_code(x)}")
    if inputs.visible is not None and a.mask is not None:
        written.append(f"{a.mask.name} = {tensor_code(a.mask.convert(inputs.visible, inputs.dtype))}")
    written += [f"out = {call()}"] if lines is None else lines(call)
    return "\n".join([*written, *result_comments(written[-1], got, expected)])


def randn_code(x: Tensor, factor: float) -> str:
    """Return Python code that multiplies a factor by a normal random tensor with the shape and dtype of x."""
    cast = "" if x.dtype == torch.float64 else f".to({x.dtype})"
    drawn = f"torch.randn{tuple(x.shape)}".replace(")", ", dtype=torch.float64)")
    return f"{drawn}{cast}" if factor == 1 else f"({drawn} * {factor}){cast}"


def randn_like(x: Tensor, seed: int, factor: float) -> Tensor:
    """Return the tensor that the code of `randn_code` creates after `torch.manual_seed(seed)`."""
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(x.shape, generator=source, dtype=torch.float64) * factor).to(x.dtype)


def result_comments(last: str, got: object, expected: object) -> list[str]:
    """Return comment lines that show what the last line of an example gives and what it should give.

    For large tensors, a line that selects the entry with the largest error comes first.

    last  the last line of the example
    """
    if isinstance(got, Raised):
        return [f"# raises {got}"]
    lines = []
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.numel() > MAX_NUMBERS:
        name = last.partition(" = ")[0]
        error = (got.double() - expected.double()).abs().nan_to_num(torch.inf)
        worst = [int(index) for index in torch.unravel_index(error.argmax(), error.shape)]
        lines.append(f"{name} = {name}[{', '.join(map(str, worst))}].item()")
        got, expected = got[tuple(worst)].item(), expected[tuple(worst)].item()
    digits = 6
    while digits < 17 and _value_code(got, digits) == _value_code(expected, digits):
        digits += 1
    lines.append(f"# gives     {_value_code(got, digits)}")
    if isinstance(expected, AtMost):
        lines.append(f"# should be at most {expected.most:.3g}")
    elif expected is not None:
        lines.append(f"# should be {_value_code(expected, digits)}")
    return lines


def _value_code(value: Any, digits: int) -> str:
    if isinstance(value, Tensor):
        return rounded_tensor_code(value.detach(), digits)
    if isinstance(value, float):
        return repr(float(f"{value:.{digits}g}")) if math.isfinite(value) else f"float({str(value)!r})"
    return repr(value)


def find_call_code(fn: object, a: AttentionUnderTest) -> CallCode:
    """Return the code that calls fn in an example.

    A function that takes q, k and v of shape (b, h, n, c) is called by its own name. Anything else is first wrapped
    with `regard.see.as_probe`, which returns an object whose `call` takes such tensors.
    """
    name = str(getattr(fn, "__name__", ""))
    if isinstance(fn, Probe):
        return CallCode(("# probe: the one that was passed to check", "attend = probe.call"), "attend")
    given = a.declared.probe_options
    own = name if name.isidentifier() else "f"
    if not isinstance(fn, nn.Module) and not given and _is_plain(fn, a):
        return CallCode(() if own == name else (f"# f: the {a.probe.name} that was passed to check",), own)
    shown = "module" if isinstance(fn, nn.Module) else own
    options = "".join(
        f", {key}={value!r}" if isinstance(value, SIMPLE_TYPES) else f", {key}={key}" for key, value in given.items()
    )
    others = [key for key, value in given.items() if not isinstance(value, SIMPLE_TYPES)]
    lines = ["from regard.see import as_probe"]
    if shown != name or others:
        lines.append(f"# {', '.join([shown, *others])}: what was passed to check, {a.probe.name}")
    evaluated = f"{shown}.eval()" if isinstance(fn, nn.Module) else shown
    return CallCode((*lines, f"attend = as_probe({evaluated}{options}).call"), "attend")


def _is_plain(fn: object, a: AttentionUnderTest) -> bool:
    """Return whether an example can call fn(q, k, v) directly, without a wrapper.

    This is the case if fn takes tensors of shape (b, h, n, c) and returns a tensor. It is also the case if fn raises an
    error other than TypeError, so that the example shows this error.
    """
    if not callable(fn) or a.probe.layout != "b h n c" or read_signature(fn).names is not None:
        return False
    inputs = a.random_inputs(6, 6, h=4, e=4, causal=False, dtype=torch.float32)
    try:
        out = fn(inputs.q, inputs.k, inputs.v)
        return isinstance(out, Tensor)
    except TypeError:
        return False  # an argument that the probe fills in
    except Exception:
        return True  # the exception is what will be shown
