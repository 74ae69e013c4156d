"""The Muon optimizer with batched matrix products: all matrices of one shape are orthogonalized together.

torch.optim.Muon orthogonalizes one matrix after the other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon with batched matrix products; the results are equal up to rounding.

    A small model has many small matrices. Launching one matrix product for each takes longer than the rest of a step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one optimizer step."""
        sharded = any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])
        other_scale = any(group["adjust_lr_fn"] not in (None, "original") for group in self.param_groups)
        if sharded or other_scale or closure is not None:
            return super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, parameters in shapes.items():
                self._update(parameters, shape, group)
        return None

    def _update(self, parameters: list[Tensor], shape: torch.Size, group: dict[str, Any]) -> None:
        """Do the Muon update of parameters that all have this shape, with batched matrix products.

        group  the parameter group with the hyperparameters
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momentum, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momentum, group["momentum"]) if group["nesterov"] else momentum
        matrices = orthogonalize(torch.stack(list(updates)), group["ns_coefficients"], group["ns_steps"], group["eps"])
        lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        # multiplied, not passed as `alpha`, because on a GPU the learning rate is a tensor
        torch._foreach_sub_(parameters, list((matrices.to(parameters[0].dtype) * lr).unbind()))


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Move the singular values of each matrix close to 1, by the Newton-Schulz iteration in bfloat16.

    coefficients  coefficients of the polynomial that each iteration applies to the singular values
    steps         number of iterations
    eps           smallest norm by which a matrix is divided before the first iteration
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
