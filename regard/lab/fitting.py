"""How the lab trains its small models: Adam, a short warm-up, then evenly down to nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.validation import check_integer


def fit(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    loss: Callable[[], Tensor],
    *,
    steps: int,
    rate: float,
    warm_up: int = 20,
) -> list[float]:
    """Train parameters in place; the loss at each step comes back.

    parameters  those of a model, or groups of them with rates of their own: {"params": [...], "lr": 0.3}
    loss        draws a batch and gives the loss on it
    rate        the largest learning rate, reached within `warm_up` steps; with none it is there from the first
    """
    check_integer("steps", steps, 1)
    check_integer("warm_up", warm_up, 0)
    optimiser = torch.optim.Adam(parameters, lr=rate, fused=True)
    fading = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / max(warm_up, 1)) * (1 - step / steps)
    )
    losses = []
    for _ in range(steps):
        now = loss()
        optimiser.zero_grad()
        now.backward()
        optimiser.step()
        fading.step()
        losses.append(now.item())
    return losses
