"""The processes that train together: how many, which one this is, and what passes between them."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class World:
    """One process of several that train one model, or the only one."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training."""
        return model

    def unsynchronised(self, model: nn.Module) -> AbstractContextManager[None]:
        """While gradients are only added up, nothing is sent."""
        return nullcontext()

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return x

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> None:
        """Shorten the gradient to a norm."""
        nn.utils.clip_grad_norm_(parameters, most)


ALONE = World()


@contextmanager
def alone(device: str | None = None) -> Iterator[World]:
    """One process, on the device asked for, or a GPU where there is one."""
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    yield World(device=torch.device(found))
