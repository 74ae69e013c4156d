"""Masks that hold a tensor: their base class, and the boolean matrix."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.axes import format_axis
from regard.base.errors import DeviceError, DtypeError, ShapeError
from regard.base.tracing import can_read_values, outside_inference_mode
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import Mask


class DataMask(Mask):
    """Base class of masks that store one tensor, `data`. Two such masks are equal if their contents are equal.

    If `data` is on the CPU, the cache key of the mask (see `Mask.key`) has its contents, because other code may change
    them through shared memory, as NumPy can. On other devices the key has the id and the version of the tensor.
    """

    data: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def key(self) -> Hashable | None:
        contents = tensor_key(self.data)
        return None if contents is None else (type(self), self.settings(), contents)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Mask:
        return self.with_data(change(self.data))

    def of_sequences(self, index: Tensor) -> Mask:
        return self if self.batch() is None else self.with_data(self.data[index.to(self.data.device)])

    def to(self, device: torch.device) -> Mask:
        if self.data.device == device:
            return self
        if self.data.is_meta:
            raise DeviceError(
                f"{self!r} is on the meta device, which has no values, but q is on {device}; make the mask on {device}"
            )
        if torch.compiler.is_compiling() or (key := self.key()) is None:
            return self.with_data(self.data.to(device))
        # one copy per device and contents, so that its memoised results are found again
        moved: dict[torch.device, tuple[Hashable, Mask]] = self.__dict__.setdefault("_moved", {})
        if device not in moved or moved[device][0] != key:
            with outside_inference_mode():
                moved[device] = (key, self.with_data(self.data.to(device)))
        return moved[device][1]

    @abstractmethod
    def with_data(self, data: Tensor) -> Mask:
        """Return the same mask with `data` in place of its own tensor."""

    def settings(self) -> Hashable:
        """Return the settings of the mask other than its tensor."""
        return ()

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, DataMask)
            and self.settings() == other.settings()
            and (
                self.data is other.data
                or (self.data.shape == other.data.shape and torch.equal(self.data.cpu(), other.data.cpu()))
            )
        )

    def __hash__(self) -> int:
        return hash((type(self), self.data.shape, self.settings()))


def tensor_key(data: Tensor) -> Hashable | None:
    """Return a cache key for a tensor's values: the contents on the CPU, the id and version on other devices.

    None if a change of the values could not be detected.
    """
    if can_read_values(data) and data.device.type == "cpu":
        # a dispatch mode, such as that of fake tensors, would replace the tensor
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            return (data.dtype, data.shape, _digest(data))
    # inference tensors have no version counter
    return None if data.is_inference() else (id(data), data._version)


class Snapshot:
    """A record of a tensor's current values, with which a later change of the values is detected."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.key = tensor_key(data)
        self.array = None
        if can_read_values(data) and data.device.type == "cpu" and data.is_contiguous():
            array = data.detach().numpy()
            if array.nbytes <= _SMALL:
                self.array, self.bytes, self.layout = array, array.tobytes(), _layout(data)

    def is_current(self) -> bool:
        """Return whether the tensor still has the recorded values. False may also mean unknown."""
        if self.array is not None:  # a view of the tensor's memory
            return _layout(self.data) == self.layout and self.array.tobytes() == self.bytes
        return self.key is not None and tensor_key(self.data) == self.key


_SMALL = 4096  # bytes


def _layout(data: Tensor) -> tuple[object, ...]:
    """Return address, sizes, strides and dtype of a tensor; operations such as `t_` and `set_` change them in place."""
    return data.data_ptr(), data.shape, data.stride(), data.dtype


def _digest(data: Tensor) -> bytes:
    """Return the contents of a tensor as a cache key: the bytes if it is small, their BLAKE2 hash if it is large."""
    array = data.contiguous().numpy()
    return array.tobytes() if array.nbytes <= _SMALL else hashlib.blake2b(array.data).digest()


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(DataMask):
    """A boolean matrix as a mask. It is indexed by row and column of the attention call instead of by position."""

    data: Bool[Tensor, "*bh i j"]

    def see(self, grid: Grid) -> Tensor:
        if grid.whole:
            return self.data
        sizes = (*self._leading(), *self.data.shape[-2:])
        indices = (grid.batch, grid.head, grid.row, grid.column)
        where = tuple(at if size > 1 else at * 0 for at, size in zip(indices, sizes, strict=True))
        return self.data.reshape(sizes)[where]

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        letters = ["b", "h", "i", "j"][-self.data.ndim :]
        form = f"mask is {tuple(self.data.shape)} read as ({' '.join(letters)})"
        for letter, name, size, own in zip("ij", "qk", (i, j), self.data.shape[-2:], strict=True):
            if own not in (1, size):
                turned = "; did you mean mask.mT?" if self.data.shape[-2:] == (j, i) else ""
                raise ShapeError(
                    f"mask has {format_axis(letter, own)}, but {name} has {letter}={size}; {form}; "
                    f"a boolean matrix must end in ({i}, {j}), or 1 where all are alike{turned}"
                )
        for letter, wanted, own in zip("bh", (b, h), self._leading(), strict=True):
            if wanted is not None and own not in (1, wanted):
                raise ShapeError(
                    f"mask has {format_axis(letter, own)}, but q has {letter}={wanted}; {form}; use 1 or {wanted} there"
                )

    def _leading(self) -> tuple[int, int]:
        b, h = (1, 1, *self.data.shape[:-2])[-2:]
        return b, h

    def batch(self) -> int | None:
        return self._leading()[0] if self._leading()[0] > 1 else None

    def heads(self) -> int | None:
        return self._leading()[1] if self._leading()[1] > 1 else None

    def opaque(self) -> bool:
        return True

    def by_pair(self) -> str:
        return "a boolean matrix"

    def with_data(self, data: Tensor) -> Mask:
        return DenseMask(data)

    def __repr__(self) -> str:
        return f"matrix{tuple(self.data.shape)}"


def format_data(data: Tensor) -> str:
    """Format the contents of a tensor as text. If it has more than 12 numbers or no values, format its shape only."""
    small = data.numel() <= 12 and can_read_values(data)
    return str(data.tolist()) if small else f"<{' x '.join(map(str, data.shape))}>"


def can_read(data: Tensor) -> bool:
    """Return whether the values can be read cheaply: they are on the CPU, not traced, and not empty."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(data)
    return not traced and data.device.type == "cpu" and data.numel() > 0


def check_strided(what: str, data: Tensor) -> None:
    """Raise DtypeError if the tensor is sparse or nested.

    what  name of the argument in the error message
    """
    if data.layout != torch.strided or data.is_nested:
        kind = "nested" if data.is_nested else str(data.layout)
        raise DtypeError(f"{what} is a {kind} tensor, but takes an ordinary one; call .to_dense() or pad it first")


def as_integers(form: str, name: str, values: object) -> Tensor:
    """Convert values to an int64 tensor, or raise an error that names the argument.

    form  name of the mask function, such as "padding"
    name  name of the argument
    """
    try:
        data = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"{form}({name}) takes whole numbers in rows of one length, not {values!r}") from None
    check_strided(f"{form}({name})", data)
    if data.numel() == 0:
        data = data.long()
    if data.is_floating_point() or data.dtype == torch.bool or data.is_complex():
        raise DtypeError(f"{form}({name}) takes whole numbers, not {data.dtype}")
    return data.long()  # positions and sums with them may not fit a narrower type
