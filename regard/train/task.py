"""The interface of a training task: batches, loss and validation metrics."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The sum of the losses of a batch, and the number of targets.

    With sums and counts, the mean over micro-batches and processes is exact.
    """

    total: Tensor
    count: Tensor | int


@runtime_checkable
class Task(Protocol):
    """Protocol of a training task: the batches, the loss and the validation that `fit` needs to train a model."""

    def batch(self, step: int, part: int, of: int) -> Any:
        """Return one micro-batch of a training step, with tensors on the CPU.

        The result depends on the arguments only, so that a resumed run sees the same batches.

        step  index of the training step, from 0
        part  index of the micro-batch, from 0
        of    number of micro-batches of the step, over all processes
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of a batch. The tensors of the batch are on the model's device.

        Call the model itself, not one of its methods: DDP and FSDP synchronize in `forward`.
        """
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the validation metrics by name; {} means no validation.

        The first metric is the score that selects the best weights: larger is better. Every process evaluates all
        validation data, and the metrics of rank 0 are used.
        """
        ...
