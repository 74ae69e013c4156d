"""Count floating-point operations (FLOPs) and the bytes that autograd saves, with torch's own hooks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_ATEN: Any = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


# FLOPs from the shapes of the arguments. torch's own table has the attention kernels of the GPU only.
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_flops() -> FlopCounterMode:
    """Return torch's `FlopCounterMode`, extended to count the fused attention operators of the CPU.

    >>> with count_flops() as flops: model(tokens)
    >>> flops.get_total_flops()
    """
    return FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)


@contextmanager
def saved_tensor_bytes(exclude: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Context manager: record the bytes of each storage that autograd saves for the backward pass.

    `with saved_tensor_bytes(...) as saved` makes `saved` a dictionary from the address of a storage to its bytes. An
    entry is added when autograd saves a tensor inside the block. Scalars without a grad_fn are not counted, because
    they are constants that many calls share.

    exclude  tensors whose storages are not counted, such as parameters
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
    saved: dict[int, int] = {}
    alive = []  # keeps each storage: a freed one would leave its address to the next

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded and not (tensor.ndim == 0 and tensor.grad_fn is None):
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
