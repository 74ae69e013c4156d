"""What a model is trained to do: which batch a step sees, the loss on it, and how good the model has become."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """A sum and what it is the sum over: means of several shares of a batch can then be put together exactly."""

    total: Tensor
    count: Tensor | int


@runtime_checkable
class Task(Protocol):
    """A task, as the loop sees it."""

    def batch(self, step: int, part: int, of: int) -> Any:
        """Share `part` of `of` of the batch of a step: a function of these and of nothing else. Tensors on the CPU."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss on a batch, which lies on the model's device.

        The model is called, not one of its methods: a call is what gradients of several processes meet in.
        """
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on what is held out, the first of which is the score; larger is better. None at all is {}.

        Every process evaluates all of it, and the leader's figures count.
        """
        ...
