"""Read the attention weights of a model's calls: with the identity as values, the output is the weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.core.kernels import observe_requests
from regard.core.kernels.request import Request


def weights_of(run: Callable[[], object]) -> list[Tensor]:
    """What every attention inside the run weighed, in order: (b h i j) each."""
    calls: list[Request] = []
    with torch.no_grad(), observe_requests(lambda _, call, out: calls.append(call)):
        run()
    return [_weights(call) for call in calls]


def _weights(call: Request) -> Tensor:
    b, g, j = call.k.shape[:3]
    identity = torch.eye(j, dtype=call.q.dtype).expand(b, g, j, j)
    with torch.no_grad():
        return attend(
            call.q, call.k, identity, mask=call.mask, scores=list(call.terms), beta=call.beta, positions=call.positions
        )
