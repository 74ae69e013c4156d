"""Muon for many matrices at once: those of one shape are turned together, where torch turns one after the other."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, to rounding. A small model has many small matrices, and starting their products one by one takes a
    GPU's host longer than the rest of a step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)  # type: ignore[no-untyped-call]  # pieces of matrices are gathered there
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, parameters in shapes.items():
                self._turn(parameters, shape, group)
        return loss

    def _turn(self, parameters: list[Tensor], shape: torch.Size, group: dict[str, Any]) -> None:
        """Update the parameters of one shape."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        remembered = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(remembered, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, remembered, group["momentum"]) if group["nesterov"] else remembered
        turned = orthogonal(torch.stack(list(ahead)), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(turned.to(parameters[0].dtype).unbind()), alpha=-rate)


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Each matrix with its singular values brought near 1, by Newton and Schulz's iteration in bfloat16."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, change, x, beta=a)
    return x.mT if tall else x
