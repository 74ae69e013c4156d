"""Optimisers as values: which parameters get which rate and decay is said by rules on their names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.numbers import real


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Parameters whose names a regular expression finds get these shares of the rate and of the decay."""

    names: str
    rate: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.names)
        except re.error as error:
            raise ConfigError(f"Rule(names={self.names!r}) is not a regular expression: {error}") from None


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
            if not real(f"AdamW({name})", getattr(self, name)) > 0:
                raise ConfigError(f"AdamW({name}) must be above 0, not {getattr(self, name)}")

    def made(self, named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
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
    besides: str = r"embed|positions|head|class_token"
    rest: AdamW = field(default_factory=AdamW)

    def made(self, named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in named if p.ndim == 2 and not re.search(self.besides, name)]
        chosen = {id(each) for each in matrices}
        rest = self.rest.made([(name, p) for name, p in named if id(p) not in chosen])
        if not matrices:
            return rest
        first = torch.optim.Muon(matrices, lr=self.rate, momentum=self.momentum, weight_decay=self.decay)
        return [first, *rest]


Optimisers = AdamW | Muon


class Stepper:
    """The optimisers of one run as one: rates set by a schedule, and a state that can be written down."""

    def __init__(self, plan: Optimisers, model: nn.Module) -> None:
        self._all = plan.made([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        self._full = [[group["lr"] for group in each.param_groups] for each in self._all]

    def parameters(self) -> Iterator[nn.Parameter]:
        for each in self._all:
            for group in each.param_groups:
                yield from group["params"]

    def step(self, share: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """One update with that share of the full rate."""
        for each, rates in zip(self._all, self._full, strict=True):
            for group, rate in zip(each.param_groups, rates, strict=True):
                group["lr"] = rate * share
            if scaler is None:
                each.step()
            else:
                scaler.step(each)
            each.zero_grad(set_to_none=True)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        for each in self._all:
            scaler.unscale_(each)

    def rate(self, share: float) -> float:
        """The rate of the first parameters, for the log."""
        return self._full[0][0] * share if self._full else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """All that the optimisers remember, by name."""
        return {
            f"{number}.{index}.{name}": value
            for number, each in enumerate(self._all)
            for index, kept in each.state_dict()["state"].items()
            for name, value in kept.items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Remember what was written down."""
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self._all]
        for key, value in tensors.items():
            number, index, name = key.split(".", 2)
            states[int(number)].setdefault(int(index), {})[name] = value
        for each, state in zip(self._all, states, strict=True):
            each.load_state_dict({"state": state, "param_groups": each.state_dict()["param_groups"]})
