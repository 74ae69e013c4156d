"""Optimizer settings (AdamW, Muon) with parameter groups chosen by name, and the optimizer that a run steps."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.base.errors import ConfigError
from regard.base.validation import check_range
from regard.train.muon import BatchedMuon

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Factors of the learning rate and the weight decay, for the parameters whose names match a pattern.

    pattern             a regular expression, searched for in the parameter's name
    lr_scale            factor by which the optimizer's learning rate is multiplied
    weight_decay_scale  factor by which the optimizer's weight decay is multiplied
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_pattern("ParamGroup(pattern)", self.pattern)
        check_range("ParamGroup(lr_scale)", self.lr_scale, 0)
        check_range("ParamGroup(weight_decay_scale)", self.weight_decay_scale, 0)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Settings of AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101).

    One-dimensional parameters (biases, gains of norms) have no weight decay.

    lr            learning rate
    betas         decay rates of the running means of the gradient and of its square
    eps           number that is added to the denominator
    weight_decay  every step multiplies the weights by 1 - lr * weight_decay
    param_groups  factors of learning rate and weight decay by parameter name; the first group that matches is used
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    param_groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        check_range("AdamW(lr)", self.lr, 0, above=True)
        check_range("AdamW(eps)", self.eps, 0, above=True)
        check_range("AdamW(weight_decay)", self.weight_decay, 0)
        for beta in self.betas:
            check_range("AdamW(betas)", beta, 0, 1, below=True)

    def build(self, named: NamedParameters) -> list[torch.optim.Optimizer]:
        """Return a list with torch.optim.AdamW for these parameters; an empty list if there are no parameters.

        named  names and parameters
        """
        for group in self.param_groups:
            if not any(re.search(group.pattern, name) for name, _ in named):
                some = ", ".join(name for name, _ in named[:5])
                raise ConfigError(
                    f"ParamGroup(pattern={group.pattern!r}) matches no parameter; there are {some or 'none'}, ..."
                )
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named:
            group = next((each for each in self.param_groups if re.search(each.pattern, name)), ParamGroup(pattern=""))
            decay = self.weight_decay * group.weight_decay_scale if parameter.ndim > 1 else 0.0
            groups.setdefault((self.lr * group.lr_scale, decay), []).append(parameter)
        listed = [{"params": each, "lr": lr, "weight_decay": decay} for (lr, decay), each in groups.items()]
        return [torch.optim.AdamW(listed, betas=self.betas, eps=self.eps, fused=True)] if listed else []


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Settings of Muon for matrices, with AdamW for all other parameters.

    Muon is momentum with orthogonalized updates (Jordan et al. 2024).

    lr            learning rate of the matrices
    momentum      decay rate of the momentum buffer
    weight_decay  every step multiplies the matrices by 1 - lr * weight_decay
    exclude       a regular expression; matrices whose names match, such as embeddings and the output layer, use
                  AdamW
    adamw         the optimizer of all other parameters
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    exclude: str = r"token|position|segment|embed|head|pair"
    adamw: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        _check_pattern("Muon(exclude)", self.exclude)
        check_range("Muon(lr)", self.lr, 0, above=True)
        check_range("Muon(weight_decay)", self.weight_decay, 0)
        check_range("Muon(momentum)", self.momentum, 0, 1, below=True)

    def build(self, named: NamedParameters) -> list[torch.optim.Optimizer]:
        """Return a list of optimizers: Muon for the matrices, AdamW for the rest.

        An optimizer that would have no parameters is left out.
        """
        matrices = {name: p for name, p in named if p.ndim == 2 and not re.search(self.exclude, name)}
        rest = self.adamw.build([(name, p) for name, p in named if name not in matrices])
        if not matrices:
            return rest
        muon = BatchedMuon(matrices.values(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return [muon, *rest]


OptimizerConfig = AdamW | Muon


class CombinedOptimizer:
    """All optimizers of a training run as one optimizer with `step`, `zero_grad` and a flat state dict."""

    def __init__(self, config: OptimizerConfig, model: nn.Module) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self._named:
            raise ConfigError("the model has no parameter to train: requires_grad is False for all of them")
        self._optimizers = config.build(self._named)
        self._names = {id(parameter): name for name, parameter in self._named}
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]
            devices = {p.device for p in group["params"] if not isinstance(p, DTensor)}
            if len(devices) == 1 and next(iter(devices)).type == "cuda":
                # read on the GPU, so that a step captured as a CUDA graph follows the schedule
                group["lr"] = torch.tensor(group["lr"], device=next(iter(devices)))
                group["capturable"] = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers together.

        GradScaler reads them, so that after an overflow either all optimizers skip the step or none does.
        """
        return [group for each in self._optimizers for group in each.param_groups]

    @property
    def lr(self) -> float:
        """The current learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters that have a gradient."""
        return [p.grad for _, p in self._named if p.grad is not None]

    def scale_gradients(self, factor: Tensor, max_norm: float | None) -> None:
        """Multiply the gradients by a factor, then clip them so that their total norm is at most `max_norm`.

        With FSDP, the total norm is over the shards of all processes. If `max_norm` is None, gradients are not clipped.
        """
        gradients = self.gradients()
        if max_norm is not None and not any(isinstance(each, DTensor) for each in gradients):
            # one multiplication for both, because each reads and writes all gradients
            norm = nn.utils.get_total_norm(gradients) * factor
            factor, max_norm = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0), None
        torch._foreach_mul_(gradients, factor)
        if max_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self._named], max_norm)

    def scale_lr(self, factor: float) -> None:
        """Set every learning rate to this factor times its initial value."""
        for group in self.param_groups:
            lr = group["initial_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all optimizers as a flat state dict.

        The key of a tensor is `parameter name/state name`.
        """
        return {
            f"{self._names[id(parameter)]}/{key}": value
            for each in self._optimizers
            for parameter, state in each.state.items()
            for key, value in state.items()
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load the state of all optimizers from a state dict that `state_dict` returned."""
        states: dict[str, dict[str, Tensor]] = {}
        for path, value in tensors.items():
            name, key = path.split("/")
            states.setdefault(name, {})[key] = value
        for each in self._optimizers:
            own = [self._names[id(parameter)] for group in each.param_groups for parameter in group["params"]]
            state = {index: states[name] for index, name in enumerate(own) if name in states}
            each.load_state_dict({"state": state, "param_groups": each.state_dict()["param_groups"]})


def _check_pattern(what: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"{what} is {text!r}, which is not a regular expression: {error}") from None
