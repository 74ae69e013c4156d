"""What a model costs, without running it: torch's own counters over a pass with tensors that hold no numbers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from regard.base.validation import check_integer
from regard.core.kernels import observe_requests
from regard.core.kernels.request import Request
from regard.models.model import Config
from regard.models.presets import model_class


@dataclass(frozen=True)
class Count:
    """The costs of one model for one batch.

    parameters         by part; blocks of one kind are summed under `*`
    multiply_adds      of one forward pass, as torch counts matrix products, convolutions and attention
    attention_entries  query-key pairs that masks let through, over all layers, heads and sequences
    cache_bytes        keys and values held after the pass
    activation_bytes   what a training step keeps of the forward pass for the backward pass, without parameters
    """

    batch: int
    length: int | None
    parameters: dict[str, int]
    multiply_adds: int
    attention_entries: int
    cache_bytes: int
    activation_bytes: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


def count(config: Config, *, batch: int = 1, length: int | None = None) -> Count:
    """The costs of the model of this configuration; no memory is taken for it."""
    check_integer("batch", batch, 1, "sequences")
    if length is not None:
        check_integer("length", length, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):  # masks and positions are worked out for real
        model = model_class(config)(config)
        inputs = model.example(batch, length)
        entries: list[int] = []
        watched = observe_requests(lambda name, call, out: entries.append(visible_pairs(call)))
        with torch.no_grad(), count_flops() as flops, watched:
            model.eval()(*inputs)
        model.train()
        with saving(but=[*model.parameters(), *model.buffers()]) as kept:
            model(*inputs)
        with torch.no_grad():
            cached = model.eval().cache_bytes(batch, length)
        return Count(
            batch=batch,
            length=length,
            parameters=by_part({name: tensor.numel() for name, tensor in model.named_parameters()}),
            multiply_adds=flops.get_total_flops() // 2,
            attention_entries=sum(entries),
            cache_bytes=cached,
            activation_bytes=sum(kept.values()),
        )


def by_part(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes summed by what stands before the last dot, with `*` for the numbers of blocks, at most three deep."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        owner = re.sub(r"\.\d+(?=\.|$)", ".*", name).rpartition(".")[0] or name
        part = ".".join(owner.split(".")[:3])
        parts[part] = parts.get(part, 0) + size
    return parts


def visible_pairs(call: Request) -> int:
    """Pairs that the mask of a call lets through, over all its sequences and heads."""
    b, h, _, i, j, _, _ = call.sizes
    alike = b * h // ((call.mask.batch() or 1) * (call.mask.heads() or 1))
    return call.mask.count(i, j, positions=call.positions) * alike


@contextmanager
def saving(but: list[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps inside, but for those of these tensors."""
    own = {tensor.untyped_storage()._cdata for tensor in but}
    kept: dict[int, int] = {}
    alive = []  # a freed storage would leave its address to the next

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def count_flops() -> FlopCounterMode:
    """torch's counter, which does not know by itself what the CPU's fused attention costs."""
    on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: _attention_flops})


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))
