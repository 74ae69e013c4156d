"""The process group of a run, for a single process: rank, world size, device and collective operations.

`regard.train.distributed` has the groups of several processes (DDP, FSDP). They are in another module because
torch.distributed takes long to import.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """A group of processes that train one model together; this base class is a group of a single process."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that writes files and prints."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a shard of every parameter and of the optimizer state (FSDP)."""
        return False

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module to train: the model itself, moved to this group's device; with FSDP a sharded copy."""
        return model.to(self.device)

    def wrap(self, prepared: nn.Module) -> nn.Module:
        """Return the module that the training task calls: the prepared module, wrapped in DDP if the group uses DDP."""
        return prepared

    def unsharded(self, prepared: nn.Module) -> AbstractContextManager[None]:
        """Context manager: gather all sharded parameters, so that methods other than `forward` can be called."""
        return nullcontext()

    def copy_weights(self, prepared: nn.Module, model: nn.Module) -> None:
        """Copy the trained weights from `prepared` to the original model.

        Without FSDP both are the same module, and nothing is copied.
        """

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Context manager: skip gradient synchronization between processes, for gradient accumulation."""
        return nullcontext()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all processes."""
        return x

    def run_on_main(self, act: Callable[[], T]) -> T:
        """Call `act` in rank 0 only and return the result in every process; an error is raised in every process."""
        return act()

    def all_gather(self, act: Callable[[], T]) -> list[T]:
        """Call `act` in every process and return all results, by rank; the first error is raised in every process."""
        return [act()]

    def shard_like(self, value: Tensor, like: Tensor | None) -> Tensor:
        """Shard a full tensor in the same way as `like`; return the full tensor if `like` is not sharded."""
        return value

    def empty_like(self, shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Return an uninitialized tensor that is sharded in the same way as `like`.

        shape  shape of the full tensor
        """
        return torch.empty(shape, dtype=dtype)


SINGLE_PROCESS = ProcessGroup()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; the tensor itself if it is not sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def single_process(device: str | None = None) -> ProcessGroup:
    """Return a process group that contains only this process, on a device; None uses a GPU if there is one."""
    return ProcessGroup(device=parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


def parse_device(name: str) -> torch.device:
    """Return the torch.device with this name. Raises ConfigError if this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is not a device; use cpu, cuda or cuda:NUMBER") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not available: torch sees {torch.cuda.device_count()} GPUs")
    return device
