"""Training of the lab's small models: Adam with a short warm-up and a linear decay."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.validation import check_integer


def fit(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    loss: Callable[[], Tensor],
    *,
    steps: int,
    rate: float,
    warm_up: int = 20,
) -> list[float]:
    """Train parameters in place with Adam and return the loss of each step.

    The learning rate rises linearly during the warm-up; over all steps it is also multiplied by a linear decay to 0.

    parameters  parameters of a model, or parameter groups: {"params": [...], "lr": 0.3}
    loss        function that samples a batch and returns its loss
    rate        the learning rate before warm-up and decay are applied, for parameters without an "lr" of their own
    warm_up     number of steps of the warm-up
    """
    check_integer("steps", steps, 1)
    check_integer("warm_up", warm_up, 0)
    optimiser = torch.optim.Adam(parameters, lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / max(warm_up, 1)) * (1 - step / steps)
    )
    losses = []
    for _ in range(steps):
        current = loss()
        optimiser.zero_grad()
        current.backward()
        optimiser.step()
        scheduler.step()
        losses.append(current.item())
    return losses


def fit_cross_entropy(
    model: Any,
    sample: Callable[[], tuple[Sequence[Tensor], Tensor]],
    *,
    steps: int,
    rate: float,
    warm_up: int = 20,
    parameters: Iterable[dict[str, Any]] | None = None,
) -> list[float]:
    """Train a model with cross-entropy on its logits and return the loss of each step.

    The model is in eval mode afterwards.

    sample      function that returns the positional arguments of the model and the targets of a batch; a target of
                -100 is ignored
    rate        the learning rate, as in `fit`
    parameters  parameter groups; None is all parameters of the model
    """

    def loss() -> Tensor:
        inputs, targets = sample()
        return functional.cross_entropy(model(*inputs).flatten(0, -2), targets.flatten())

    losses = fit(parameters or model.train().parameters(), loss, steps=steps, rate=rate, warm_up=warm_up)
    model.eval()
    return losses
