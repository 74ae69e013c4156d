"""What a piece of work does, counted operation by operation while it runs: arithmetic, traffic, and memory at once."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.base.counting import operation_flops

READ_IN_PART = {"index", "embedding", "gather", "index_select"}  # as much of what they look into as comes out
UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Cost:
    """What operations of one kind cost together: how many, floating-point operations, bytes read and written."""

    calls: float = 0.0
    flops: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Work:
    """Costs by kind of operation and dtype."""

    costs: dict[tuple[str, torch.dtype], Cost] = field(default_factory=dict)

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """This work and so many times another."""
        kinds = dict.fromkeys([*self.costs, *other.costs])
        return Work({kind: _sum(self.costs.get(kind, Cost()), other.costs.get(kind, Cost()), times) for kind in kinds})

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs.values())

    @property
    def moved(self) -> float:
        return sum(cost.moved for cost in self.costs.values())


def _sum(one: Cost, other: Cost, times: float) -> Cost:
    return Cost(
        calls=one.calls + times * other.calls,
        flops=one.flops + times * other.flops,
        moved=one.moved + times * other.moved,
    )


class Tally(TorchDispatchMode):
    """Counts everything that torch does inside.

    work    what was done
    alive   bytes of tensors made inside, each time that there was one more
    beside  the same, but for gradients that parameters had by then
    given   bytes of what was there before and was looked at, but for the model's own tensors
    """

    def __init__(self, model: nn.Module, remembered: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: list[int] = []
        self.beside: list[int] = []
        self._costs: dict[tuple[str, torch.dtype], Cost] = {}
        self._live = self._gradients = 0
        self._known: dict[int, Any] = {}  # by address: alive, so that no other has the address
        self._given: list[int] = []
        self._model = model
        for tensor in [*model.parameters(), *model.buffers(), *remembered]:
            self._known[tensor.untyped_storage()._cdata] = tensor

    @property
    def work(self) -> Work:
        return Work(dict(self._costs))

    @property
    def peak(self) -> int:
        return max(self.alive, default=0)

    @property
    def given(self) -> int:
        return sum(self._given)

    def __enter__(self) -> "Tally":
        hook = self._accumulated
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._model.parameters() if p.requires_grad]
        self._handed: dict[nn.Parameter, int] = {}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, made = _tensors((args, kwargs)), _tensors(out)
        for tensor in read:
            self._look(tensor.untyped_storage())
        fresh = [tensor for tensor in made if self._is_born(tensor.untyped_storage())]
        changed = _changed(func, args, kwargs)
        if not (fresh or changed):
            return out  # a view costs nothing
        name = func._overloadpacket.__name__
        sizes = [_size(tensor) for tensor in read]
        if name in READ_IN_PART:
            most = sum(map(_size, fresh))
            sizes = [min(size, most) for size in sizes]
        moved = 0 if name in UNFILLED else sum(sizes) + sum(map(_size, fresh)) + sum(map(_size, changed))
        kind = name, next((t.dtype for t in [*read, *made] if t.is_floating_point()), torch.int64)
        self._costs[kind] = _sum(
            self._costs.get(kind, Cost()), Cost(1, operation_flops(func, args, kwargs, out), moved), 1
        )
        return out

    def _look(self, storage: UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._given.append(storage.nbytes())
            self._known[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata, 0))

    def _is_born(self, storage: UntypedStorage) -> bool:
        if storage._cdata in self._known:
            return False
        size = storage.nbytes()
        self._known[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata, size))
        self._live += size
        self.alive.append(self._live)
        self.beside.append(self._live - self._gradients)
        return True

    def _forget(self, address: int, size: int, gone: object) -> None:
        self._live -= size
        self._known.pop(address, None)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if parameter not in self._handed:
            assert parameter.grad is not None
            self._handed[parameter] = parameter.grad.untyped_storage().nbytes()
            self._gradients += self._handed[parameter]


class Undropped(TorchFunctionMode):
    """Fused attention without dropout: on the CPU it would build the matrix for it, which no GPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Bytes that have to be touched; those of an expanded axis are there once."""
    return prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.element_size()


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What an operation writes into."""
    named = zip(func._schema.arguments, args, strict=False)
    values = [value for about, value in named if about.alias_info is not None and about.alias_info.is_write]
    values += [
        kwargs[about.name]
        for about in func._schema.arguments
        if about.name in kwargs and about.alias_info is not None and about.alias_info.is_write
    ]
    return _tensors(values)
