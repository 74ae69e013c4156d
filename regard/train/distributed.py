"""Distributed training with torchrun: process groups for DDP and FSDP.

Each process computes the gradients of a part of every batch. The losses and the numbers of targets are summed over all
processes, so the loss is the mean over the whole batch, as in training with one process.
"""

import copy
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from regard.base.errors import ConfigError
from regard.train.process_group import ProcessGroup, parse_device, single_process

T = TypeVar("T")
PARALLEL = ("ddp", "fsdp")
_GROUP_NUMBER = itertools.count()  # process groups that this process has joined


@contextmanager
def join_process_group(parallel: str = "ddp", device: str | None = None) -> Iterator[ProcessGroup]:
    """Context manager: join the process group that torchrun started.

    Without torchrun, the group contains only this process.

    parallel  "ddp": every process has the whole model. "fsdp": every process has a shard of each parameter, and
              all processes write checkpoints to a folder that all of them can reach
    device    "cpu" or "cuda"; None uses GPUs if there are any, one per process
    """
    if parallel not in PARALLEL:
        raise ConfigError(f"parallel must be one of {', '.join(PARALLEL)}, not {parallel!r}")
    if "RANK" not in os.environ:
        yield single_process(device)
        return
    own = _local_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps its store across restarts: a restarted worker must not find the addresses of dead ones
    prefix = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_GROUP_NUMBER)}"
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "cpu:gloo"  # Python objects go through gloo
    dist.init_process_group(backend, store=PrefixStore(prefix, store), rank=rank, world_size=world_size)
    try:
        if parallel == "ddp":
            yield DDPGroup(rank, world_size, own)
        else:
            yield FSDPGroup(rank, world_size, own, mesh=init_device_mesh(own.type, (world_size,)))
    finally:
        dist.destroy_process_group()
        # a DDP module is in a reference cycle and holds the group, whose threads abort the process at exit
        gc.collect()


def _local_device(device: str | None) -> torch.device:
    """Return the device of this process. If there are several GPUs, it is the GPU whose index is the local rank.

    device  "cuda", another device name, or None for a GPU if there is one
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return parse_device(kind)
    local_rank, available = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= available:
        raise ConfigError(
            f"this machine has {available} GPUs and torchrun started more processes on it; "
            f"use --nproc-per-node {available}, or device='cpu'"
        )
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class DistributedGroup(ProcessGroup):
    """A process group with the collective operations of torch.distributed."""

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    def run_on_main(self, act: Callable[[], T]) -> T:
        sent: list[Any] = [_try(act) if self.is_main else None]
        dist.broadcast_object_list(sent, src=0)
        value: T = _raise_first_error([sent[0]])[0]
        return value

    def all_gather(self, act: Callable[[], T]) -> list[T]:
        received: list[Any] = [None] * self.world_size
        dist.all_gather_object(received, _try(act))
        return _raise_first_error(received)


@dataclass(frozen=True)
class DDPGroup(DistributedGroup):
    """Data parallel training (DDP): every process has the whole model."""

    def wrap(self, prepared: nn.Module) -> nn.Module:
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(prepared, device_ids=ids)

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        ddp = _unwrap_compiled(wrapped)
        assert isinstance(ddp, DistributedDataParallel)
        return ddp.no_sync()


@dataclass(frozen=True)
class FSDPGroup(DistributedGroup):
    """Fully sharded training (FSDP2): every process has a shard of each parameter and gathers one block at a time."""

    mesh: DeviceMesh = field(kw_only=True)

    @property
    def is_sharded(self) -> bool:
        return True

    def prepare(self, model: nn.Module) -> nn.Module:
        sharded = copy.deepcopy(model).to(self.device)
        for tensor in [*sharded.parameters(), *sharded.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # all start with the weights of rank 0
        for blocks in [each for each in sharded.modules() if isinstance(each, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=self.mesh)
        # reshard after forward, because validation has no backward pass that would do it
        fully_shard(sharded, mesh=self.mesh, reshard_after_forward=True)
        return sharded

    @contextmanager
    def unsharded(self, prepared: nn.Module) -> Iterator[None]:
        # only `forward` gathers parameters by itself
        modules = [each for each in prepared.modules() if isinstance(each, FSDPModule)]
        for each in modules:
            each.unshard()
            each.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for each in modules:
                each.set_reshard_after_forward(True, recurse=False)
                each.reshard()

    def copy_weights(self, prepared: nn.Module, model: nn.Module) -> None:
        state = prepared.state_dict()
        model.load_state_dict({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()})

    @contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        sharded = _unwrap_compiled(wrapped)
        assert isinstance(sharded, FSDPModule)
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def shard_like(self, value: Tensor, like: Tensor | None) -> Tensor:
        if not (isinstance(like, DTensor) and like.shape == value.shape):
            return value
        return distribute_tensor(value.to(self.device), self.mesh, like.placements, src_data_rank=None)

    def empty_like(self, shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        if not (isinstance(like, DTensor) and like.shape == shape):
            return torch.empty(shape, dtype=dtype)
        return torch.empty_like(like.detach(), dtype=dtype)


def _unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the original module of a module that torch.compile returned; any other module is returned unchanged."""
    inside: nn.Module = getattr(module, "_orig_mod", module)
    return inside


def _try(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _raise_first_error(results: list[tuple[T, Exception | None]]) -> list[T]:
    """Return the values of all processes, or raise the first error.

    results  pairs (value, error), one for each process; the error is None if there was none
    """
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]
