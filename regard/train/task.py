"""The interface of a training task: batches, loss and validation metrics."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The sum of losses and the number of targets. Sums make the mean over micro-batches and processes exact."""

    total: Tensor
    count: Tensor | int


@runtime_checkable
class Task(Protocol):
    """What `fit` needs to train a model."""

    def batch(self, step: int, part: int, of: int) -> Any:
        """Return micro-batch `part` of `of` of the batch of a step, with tensors on the CPU.

        The result depends on the arguments only, so that a resumed run sees the same batches.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of a batch, which is on the model's device.

        Call the model itself, not one of its methods: DDP and FSDP synchronize in `forward`.
        """
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the validation metrics; the first is the score, larger is better. {} means no validation.

        Every process evaluates all data, and the metrics of rank 0 are used.
        """
        ...
