"""Track the memory of tensors while code runs, operation by operation."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Context manager that records how many bytes of tensors are alive.

    model    model whose parameters and buffers are not counted
    exclude  further tensors that are not counted, such as the optimizer state

    The records are attributes:

    alive              bytes of the tensors created inside the block that are still alive: a list with one entry after
                       each allocation
    alive_activations  the same list, without the accumulated gradients (`.grad`) of parameters
    input_bytes        bytes of the tensors that were used but not created inside the block, such as the batch; tensors
                       without axes are not counted
    """

    def __init__(self, model: nn.Module, exclude: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: list[int] = []
        self.alive_activations: list[int] = []
        self.input_bytes = 0
        self._now = self._gradients = 0
        # keys are addresses; values keep a storage alive or notice its end, so that no other storage has its address
        self._known: dict[int, Any] = {}
        self._model = model
        for tensor in [*model.parameters(), *model.buffers(), *exclude]:
            self._known[tensor.untyped_storage()._cdata] = tensor

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at once."""
        return max(self.alive, default=0)

    def __enter__(self) -> "MemoryTracker":
        hook = self._count_gradient
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._model.parameters() if p.requires_grad]
        self._counted: set[nn.Parameter] = set()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self.input_bytes += storage.nbytes() if tensor.ndim else 0
                self._remember(storage, 0)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._remember(storage, storage.nbytes())
                self.alive.append(self._now)
                self.alive_activations.append(self._now - self._gradients)
        return out

    def _remember(self, storage: UntypedStorage, size: int) -> None:
        self._now += size
        self._known[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata, size))

    def _forget(self, address: int, size: int, reference: object) -> None:
        self._now -= size
        self._known.pop(address, None)

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        if parameter not in self._counted:
            assert parameter.grad is not None
            self._counted.add(parameter)
            self._gradients += parameter.grad.untyped_storage().nbytes()


class IgnoreAttentionDropout(TorchFunctionMode):
    """Context manager: scaled_dot_product_attention runs without dropout.

    With dropout, the CPU allocates a matrix of attention weights, and a GPU does not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
