"""Count the parameters, multiply-adds and memory of a model, in a forward pass on fake tensors."""

import re
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.base.counting import count_flops, saved_tensor_bytes
from regard.base.validation import check_integer
from regard.core.kernels import observe_requests
from regard.models.model import Config
from regard.models.presets import model_class


@dataclass(frozen=True)
class Count:
    """The costs of a model for one batch.

    parameters         number of parameters by module name; modules with the same name in every block are summed, with
                       `*` in place of the block number
    multiply_adds      multiply-adds of one forward pass: half the FLOPs that torch's FlopCounterMode counts
    attention_entries  number of query-key pairs that the masks leave visible, over all layers, heads and sequences
    cache_bytes        size of the KV cache after the forward pass, in bytes
    activation_bytes   bytes of the tensors that autograd saves for the backward pass, without parameters and buffers
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
        """The number of parameters of the whole model."""
        return sum(self.parameters.values())


def count(config: Config, *, batch: int = 1, length: int | None = None) -> Count:
    """Count the parameters, multiply-adds and memory of a model, without allocating its memory.

    config  configuration of the model
    batch   number of sequences or images
    length  number of tokens of a text, number of frames of a recording, or side of an image in pixels; None is the
            size in the configuration
    """
    check_integer("batch", batch, 1, "sequences")
    if length is not None:
        check_integer("length", length, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):  # masks and positions are computed with real tensors
        model = model_class(config)(config)
        inputs = model.example_inputs(batch, length)
        entries: list[int] = []
        watched = observe_requests(lambda name, call, out: entries.append(call.visible_pairs))
        with torch.no_grad(), count_flops() as flops, watched:
            model.eval()(*inputs)
        model.train()
        with saved_tensor_bytes([*model.parameters(), *model.buffers()]) as saved:
            model(*inputs)
        with torch.no_grad():
            cached = model.eval().cache_bytes(batch, length)
        return Count(
            batch=batch,
            length=length,
            parameters=sum_by_module({name: tensor.numel() for name, tensor in model.named_parameters()}),
            multiply_adds=flops.get_total_flops() // 2,
            attention_entries=sum(entries),
            cache_bytes=cached,
            activation_bytes=sum(saved.values()),
        )


def sum_by_module(sizes: dict[str, int]) -> dict[str, int]:
    """Sum the numbers of parameters by module.

    Block numbers become `*`, and names are cut to three components: the parameter blocks.3.attention.out.weight is
    counted under blocks.*.attention.

    sizes  number of elements of each parameter, by name
    """
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        owner = re.sub(r"\.\d+(?=\.|$)", ".*", name).rpartition(".")[0] or name
        part = ".".join(owner.split(".")[:3])
        parts[part] = parts.get(part, 0) + size
    return parts
