"""Several processes that train one model: copies of it that share their gradients, or one model in pieces.

Whoever starts them with torchrun says how many there are. Every process reads its share of each batch and the sums of
losses and counts are exact, so several processes learn what one would have learned from the whole batch.
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
from regard.train.process_group import Processes, known_device, single_process

T = TypeVar("T")
WAYS = ("data", "sharded")
_JOINED = itertools.count()  # how often this process has joined others


@contextmanager
def join_process_group(parallel: str = "data", device: str | None = None) -> Iterator[Processes]:
    """The processes that torchrun has started, or this one alone where it has not.

    parallel  "data": every process holds the model and gradients are shared. "sharded": every process holds a piece
              of each weight, and states are written by all into a folder that all must reach
    device    "cpu" or "cuda"; None takes GPUs where there are any, one for each process of a machine
    """
    if parallel not in WAYS:
        raise ConfigError(f"joined(parallel) is one of {', '.join(WAYS)}, not {parallel!r}")
    if "RANK" not in os.environ:
        with single_process(device) as world:
            yield world
        return
    where = _own(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives its workers: those it starts again must not find the addresses of the dead
    named = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_JOINED)}", store)
    # what is no tensor of a GPU travels between the CPUs
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=named, rank=rank, world_size=size)
    try:
        if parallel == "data":
            yield DataParallel(rank, size, where)
        else:
            yield FullyShardedParallel(rank, size, where, mesh=init_device_mesh(where.type, (size,)))
    finally:
        dist.destroy_process_group()
        # a wrapped model is in a cycle and holds the group, whose threads abort the process if they outlive Python
        gc.collect()


def _own(device: str | None) -> torch.device:
    """The device of this process."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return known_device(kind)
    mine, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if mine >= there:
        raise ConfigError(
            f"this machine has {there} GPUs and torchrun started more processes on it; "
            f"use --nproc-per-node {there}, or device='cpu'"
        )
    return torch.device("cuda", mine)


@dataclass(frozen=True)
class ProcessGroup(Processes):
    """One process of several."""

    def summed(self, x: Tensor) -> Tensor:
        sums = x.clone()
        dist.all_reduce(sums)
        return sums

    def shared(self, act: Callable[[], T]) -> T:
        sent: list[Any] = [_tried(act) if self.leads else None]
        dist.broadcast_object_list(sent, src=0)
        value: T = _given([sent[0]])[0]
        return value

    def gathered(self, act: Callable[[], T]) -> list[T]:
        received: list[Any] = [None] * self.size
        dist.all_gather_object(received, _tried(act))
        return _given(received)


@dataclass(frozen=True)
class DataParallel(ProcessGroup):
    """Every process holds the whole model."""

    def called(self, trained: nn.Module) -> nn.Module:
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(trained, device_ids=ids)

    def unsynchronised(self, called: nn.Module) -> AbstractContextManager[None]:
        wrapped = _uncompiled(called)
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()


@dataclass(frozen=True)
class FullyShardedParallel(ProcessGroup):
    """Every process holds a piece of each weight; the rest of a block is fetched while it computes (FSDP2)."""

    mesh: DeviceMesh = field(kw_only=True)

    @property
    def sharded(self) -> bool:
        return True

    def trained(self, model: nn.Module) -> nn.Module:
        cut = copy.deepcopy(model).to(self.device)
        for tensor in [*cut.parameters(), *cut.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # all begin with the leader's weights
        for blocks in [each for each in cut.modules() if isinstance(each, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=self.mesh)
        # in pieces again after each pass, since an evaluation has no backward pass that would do it
        fully_shard(cut, mesh=self.mesh, reshard_after_forward=True)
        return cut

    @contextmanager
    def opened(self, trained: nn.Module) -> Iterator[None]:
        # methods do not fetch weights as calls do, so all are whole for the while
        parts = [each for each in trained.modules() if isinstance(each, FSDPModule)]
        for each in parts:
            each.unshard()
            each.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for each in parts:
                each.set_reshard_after_forward(True, recurse=False)
                each.reshard()

    def hand_back(self, trained: nn.Module, model: nn.Module) -> None:
        model.load_state_dict({name: _whole(tensor) for name, tensor in trained.state_dict().items()})

    @contextmanager
    def unsynchronised(self, called: nn.Module) -> Iterator[None]:
        cut = _uncompiled(called)
        assert isinstance(cut, FSDPModule)
        cut.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            cut.set_requires_gradient_sync(True)

    def laid(self, value: Tensor, like: Tensor | None) -> Tensor:
        if not (isinstance(like, DTensor) and like.shape == value.shape):
            return value
        return distribute_tensor(value.to(self.device), self.mesh, like.placements, src_data_rank=None)

    def hollow(self, shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        if not (isinstance(like, DTensor) and like.shape == shape):
            return torch.empty(shape, dtype=dtype)
        return torch.empty_like(like.detach(), dtype=dtype)


def _uncompiled(called: nn.Module) -> nn.Module:
    """What torch.compile went around, where it did."""
    inside: nn.Module = getattr(called, "_orig_mod", called)
    return inside


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tried(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _given(answers: list[tuple[T, Exception | None]]) -> list[T]:
    """What was answered, unless one of them is an error."""
    failed = [error for _, error in answers if error is not None]
    if failed:
        raise failed[0]
    return [value for value, _ in answers]
