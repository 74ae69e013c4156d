"""The processes that train together: how many, which one this is, and what passes between them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """One process of several that train one model, or the only one; here the only one."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether each process holds a piece of every weight and of what the optimizer remembers."""
        return False

    def trained(self, model: nn.Module) -> nn.Module:
        """The model that learns: this one on the device, or a copy of it in pieces."""
        return model.to(self.device)

    def called(self, trained: nn.Module) -> nn.Module:
        """The model that learns, as a task calls it."""
        return trained

    def opened(self, trained: nn.Module) -> AbstractContextManager[None]:
        """While a task uses methods of the model besides calling it, as generation does."""
        return nullcontext()

    def hand_back(self, trained: nn.Module, model: nn.Module) -> None:
        """Give the model that was handed in what was learned, where a copy of it was trained."""

    def unsynchronised(self, called: nn.Module) -> AbstractContextManager[None]:
        """While gradients are only added up, nothing is sent."""
        return nullcontext()

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return x

    def shared(self, act: Callable[[], T]) -> T:
        """What the leader's act gives, in every process; where it fails, it fails in all."""
        return act()

    def gathered(self, act: Callable[[], T]) -> list[T]:
        """What the act gives in each process, in every process; where it fails in one, it fails in all."""
        return [act()]

    def laid(self, value: Tensor, like: Tensor | None) -> Tensor:
        """A whole tensor as another one lies: the piece of it that is this process's, where that one is in pieces."""
        return value

    def hollow(self, shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Room for a tensor that will lie as another one does."""
        return torch.empty(shape, dtype=dtype)


SINGLE_PROCESS = Processes()


def local_shard(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def single_process(device: str | None = None) -> Iterator[Processes]:
    """One process, on the device asked for, or a GPU where there is one."""
    yield Processes(device=known_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


def known_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {name!r}; there are cpu, cuda and cuda:NUMBER") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not here: torch sees {torch.cuda.device_count()} GPUs")
    return device
