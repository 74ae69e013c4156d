"""Optimisers as values: which parameters get which rate and decay is said by rules on their names."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.validation import check_number
from regard.train.muon import BatchedMuon as BatchedMuon


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Parameters whose names a regular expression finds get these shares of the rate and of the decay."""

    names: str
    rate: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        _expression("Rule(names)", self.names)
        for name in ("rate", "decay"):
            if check_number(f"Rule({name})", getattr(self, name)) < 0:
                raise ConfigError(f"Rule({name}) is a share from 0 upwards, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decay apart from the gradient (Loshchilov and Hutter 2017, arXiv:1711.05101).

    rules  the first that fits a parameter's name counts. Vectors (biases, gains of norms) never decay.
    """

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rate", "eps"):
            if not check_number(f"AdamW({name})", getattr(self, name)) > 0:
                raise ConfigError(f"AdamW({name}) must be above 0, not {getattr(self, name)}")
        if check_number("AdamW(decay)", self.decay) < 0:
            raise ConfigError(f"AdamW(decay) must be 0 or above, not {self.decay}")
        if not all(0 <= check_number("AdamW(betas)", beta) < 1 for beta in self.betas):
            raise ConfigError(f"AdamW(betas) are from 0 to below 1, not {self.betas}")

    def made(self, named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        for rule in self.rules:
            if not any(re.search(rule.names, name) for name, _ in named):
                some = ", ".join(name for name, _ in named[:5])
                raise ConfigError(f"Rule(names={rule.names!r}) finds no parameter; there are {some or 'none'}, ...")
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named:
            rule = next((rule for rule in self.rules if re.search(rule.names, name)), Rule(names=""))
            decay = self.decay * rule.decay if parameter.ndim > 1 else 0.0
            groups.setdefault((self.rate * rule.rate, decay), []).append(parameter)
        listed = [{"params": each, "lr": rate, "weight_decay": decay} for (rate, decay), each in groups.items()]
        return [torch.optim.AdamW(listed, betas=self.betas, eps=self.eps, fused=True)] if listed else []


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Orthogonalised momentum for matrices (Jordan et al. 2024), AdamW for the rest.

    besides  names of matrices that are left to AdamW: embeddings and the last layer
    """

    rate: float = 0.02
    momentum: float = 0.95
    decay: float = 0.0
    besides: str = r"token|position|segment|embed|head|pair"
    rest: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        _expression("Muon(besides)", self.besides)
        if not check_number("Muon(rate)", self.rate) > 0:
            raise ConfigError(f"Muon(rate) must be above 0, not {self.rate}")
        if not 0 <= check_number("Muon(momentum)", self.momentum) < 1:
            raise ConfigError(f"Muon(momentum) is from 0 to below 1, not {self.momentum}")
        if check_number("Muon(decay)", self.decay) < 0:
            raise ConfigError(f"Muon(decay) must be 0 or above, not {self.decay}")

    def made(self, named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in named if p.ndim == 2 and not re.search(self.besides, name)]
        chosen = {id(each) for each in matrices}
        rest = self.rest.made([(name, p) for name, p in named if id(p) not in chosen])
        if not matrices:
            return rest
        first = BatchedMuon(matrices, lr=self.rate, momentum=self.momentum, weight_decay=self.decay)
        return [first, *rest]


Optimisers = AdamW | Muon


class Stepper:
    """The optimisers of one run as one: rates set by a schedule, and a state that can be written down."""

    def __init__(self, plan: Optimisers, model: nn.Module) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self._named:
            raise ConfigError("the model has no parameter that learns: requires_grad is False for all of them")
        self._all = plan.made(self._named)
        self._full = [[group["lr"] for group in each.param_groups] for each in self._all]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self._all for group in each.param_groups]

    def gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self._named if p.grad is not None]

    def clip(self, most: float) -> None:
        """Shorten the gradient of all parameters together to a norm, over all processes that hold pieces of it."""
        nn.utils.clip_grad_norm_([p for _, p in self._named], most)

    def at(self, share: float) -> None:
        """Take that share of the full rates from now on."""
        for each, rates in zip(self._all, self._full, strict=True):
            for group, rate in zip(each.param_groups, rates, strict=True):
                group["lr"] = rate * share

    def step(self) -> None:
        """One update. A scaler of gradients sees this and `param_groups`, so that all optimisers step or none."""
        for each in self._all:
            each.step()

    def forget_gradients(self) -> None:
        for each in self._all:
            each.zero_grad(set_to_none=True)

    def rate(self, share: float) -> float:
        """The rate of the first parameters, for the log."""
        return float(self._full[0][0]) * share

    def tensors(self) -> dict[str, Tensor]:
        """All that the optimisers remember, by the names of parameters."""
        names = self._names()
        return {
            f"{names[id(parameter)]}/{what}": value
            for each in self._all
            for parameter, kept in each.state.items()
            for what, value in kept.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Remember what was written down."""
        kept: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, what = key.split("/")
            kept.setdefault(name, {})[what] = value
        names = self._names()
        for each in self._all:
            own = [names[id(parameter)] for group in each.param_groups for parameter in group["params"]]
            state = {index: kept[name] for index, name in enumerate(own) if name in kept}
            each.load_state_dict({"state": state, "param_groups": each.state_dict()["param_groups"]})

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._named}


def _expression(what: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"{what} is {text!r}, which is not a regular expression: {error}") from None
