"""Checks of q, k and v, with errors that say which axis does not fit."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from regard.base.axes import LEGEND, format_axis, format_shape
from regard.base.errors import DeviceError, DtypeError, ShapeError
from regard.base.tracing import assume_constant_result

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LETTERS = {"q": "b h i c", "k": "b g j c", "v": "b g j e"}


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check that q, k and v fit together. Returns q, k and v, cast to the dtype of autocast if autocast is enabled.

    Raises ShapeError, DtypeError or DeviceError if q, k and v do not fit together.
    """
    fit = fits(q, k, v)
    if not fit:
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_tensor(name, x)
    if is_autocasting(q):
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(low), k.to(low), v.to(low)
    if not fit:
        _check_together(q, k, v)
    return q, k, v


def fits(q: object, k: object, v: object) -> bool:
    """Return whether q, k and v pass all checks of `check_inputs`. Faster than `check_inputs`; raises no error."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if q.is_nested or k.is_nested or v.is_nested:  # they may have no shape
        return False
    shape, of_k, of_v, dtype = q.shape, k.shape, v.shape, q.dtype
    if not len(shape) == len(of_k) == len(of_v) == 4 or not dtype is k.dtype is v.dtype:
        return False
    (b, h, _, c), (kb, g, j, kc), (vb, vg, vj, _) = shape, of_k, of_v
    sizes = b == kb == vb and c == kc and g == vg and j == vj and h > 0 and g > 0 and c > 0 and h % g == 0
    together = (q.is_cpu and k.is_cpu and v.is_cpu) or q.device == k.device == v.device
    return sizes and together and dtype in DTYPES and q.layout is k.layout is v.layout is torch.strided


def check_has_values(name: str, x: object, q: Tensor) -> None:
    """Raise DeviceError if x is a tensor on the meta device, where tensors have no values, and q is on another device.

    name  name of x in the error message
    """
    if isinstance(x, Tensor) and x.device.type == "meta" and q.device.type != "meta":
        raise DeviceError(f"{name} is on the meta device and has no values, but q is on {q.device}; make it there")


def is_autocasting(x: Tensor) -> bool:
    """Return whether autocast is enabled for this tensor's device. False for float64, which autocast does not cast."""
    kind = x.device.type
    return x.dtype != torch.float64 and _has_autocast(kind) and torch.is_autocast_enabled(kind)


def disable_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context manager in which autocast is off for this tensor's device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


# older compilers cannot trace the call
@assume_constant_result
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _check_tensor(name: str, x: Tensor) -> None:
    letters = LETTERS[name]
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"{name} must be a tensor read as ({letters}), not {type(x).__name__}; "
            f"make it one with torch.as_tensor({name})"
        )
    if x.is_nested:
        raise DtypeError(f"{name} is a nested tensor; call {name}.to_padded_tensor(0) and pass mask=padding(lengths)")
    if x.ndim != 4:
        meaning = ", ".join(LEGEND[letter] for letter in letters.split())
        raise ShapeError(
            f"{name} has {x.ndim} axes, {tuple(x.shape)}, but is read as ({letters}): {meaning}; "
            f"{_reshape(name, x.ndim)}"
        )
    if x.layout != torch.strided:
        raise DtypeError(f"{name} is {x.layout}, but attention needs all its numbers; call {name}.to_dense() first")
    if x.is_complex():
        raise DtypeError(f"{name} is {x.dtype}, but attention needs real numbers; take {name}.real or {name}.abs()")
    if not x.is_floating_point():
        raise DtypeError(f"{name} is {x.dtype}, but attention needs floating numbers; call {name}.float() first")
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise DtypeError(f"{name} is {x.dtype}, but attention takes {known}; call {name}.bfloat16() first")


def _reshape(name: str, axes: int) -> str:
    if axes == 3:
        return f"for one head write {name}[:, None], for one sequence {name}[None]"
    if axes == 2:
        return f"for one sequence and one head write {name}[None, None]"
    return f"reshape {name} to four axes"


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    b, h, _, c = q.shape
    g, j = k.shape[1:3]
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise DtypeError(
                f"{name} is {x.dtype}, but q is {q.dtype}; convert one of them, for instance {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise DeviceError(
                f"{name} is on {x.device}, but q is on {q.device}; move one of them, for instance {name}.to(q.device)"
            )
        if x.shape[0] != b:
            raise _mismatch(name, x, 0, "q", b, f"repeat or slice {name} to {b} sequences")
    if k.shape[3] != c:
        raise _mismatch("k", k, 3, "q", c, f"project k and q to one width, for instance {c}")
    if v.shape[1] != g:
        raise _mismatch("v", v, 1, "k", g, "k and v come in pairs, so give both as many heads")
    if v.shape[2] != j:
        raise _mismatch("v", v, 2, "k", j, "k and v come in pairs, so give both as many positions")
    for letter, size, name, x in (("h", h, "q", q), ("g", g, "k", k), ("c", c, "q", q)):
        if size == 0:
            seen = format_shape(name, x.shape, LETTERS[name])
            raise ShapeError(f"{name} has {format_axis(letter, 0)}, but there must be at least one; {seen}")
    if h % g:
        raise ShapeError(
            f"q has {format_axis('h', h)}, which is not a multiple of k's {format_axis('g', g)}; "
            f"{format_shape('q', q.shape, 'b h i c')}, {format_shape('k', k.shape, 'b g j c')}; "
            f"choose g among the divisors of {h}"
        )


def _mismatch(name: str, x: Tensor, axis: int, other: str, size: int, fix: str) -> ShapeError:
    letters = LETTERS[name]
    letter = letters.split()[axis]
    return ShapeError(
        f"{name} has {format_axis(letter, x.shape[axis])}, but {other} has {letter}={size}; "
        f"{format_shape(name, x.shape, letters)}; {fix}"
    )
