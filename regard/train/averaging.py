"""Means of weights over a run, which are often better than the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class ExponentialAverage:
    """The mean that forgets: each step weighs `decay` times as much as the one after it.

    After n steps the mean forgets at least as fast as n / (n + 9) would, so that it is one of the steps there are.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= check_number("Exponential(decay)", self.decay) < 1:
            raise ConfigError(f"Exponential(decay) is from 0 to below 1, not {self.decay}")


@dataclass(frozen=True, kw_only=True)
class LastKAverage:
    """The mean of the last `count` states, one taken every so many steps."""

    count: int = 10
    every: int = 100

    def __post_init__(self) -> None:
        check_integer("LastK(count)", self.count, 1, "states")
        check_integer("LastK(every)", self.every, 1, "steps")


Averagings = ExponentialAverage | LastKAverage


class Averager:
    """The weights of a model in the mean, kept beside it."""

    def __init__(self, plan: Averagings, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._kept: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def update(self, done: int) -> None:
        """After so many steps."""
        if isinstance(self._plan, LastKAverage):
            if done % self._plan.every == 0:
                self._kept = [*self._kept, self._now()][-self._plan.count :]
            return
        if not self._kept:
            self._kept = [self._now()]
            return
        mean, now = self._kept[0], dict(_weights(self._model))
        keep = min(self._plan.decay, done / (done + 9))
        torch._foreach_lerp_([mean[name] for name in now], list(now.values()), 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the mean weights; afterwards its own are back."""
        if not self._kept:
            yield
            return
        own = self._now()
        self._set(self._mean())
        try:
            yield
        finally:
            self._set(own)

    def settle(self) -> None:
        """Give the model the mean weights for good."""
        if self._kept:
            self._set(self._mean())

    def tensors(self) -> dict[str, Tensor]:
        return {f"{number}/{name}": t for number, kept in enumerate(self._kept) for name, t in kept.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        own = dict(_weights(self._model))
        kept: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split("/")
            kept.setdefault(int(number), {})[name] = value.to(own[name].device)
        self._kept = [kept[number] for number in sorted(kept)]

    def _mean(self) -> dict[str, Tensor]:
        return {name: torch.stack([each[name] for each in self._kept]).mean(0) for name in self._kept[0]}

    def _now(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in _weights(self._model)}

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, weight in _weights(self._model):
            weight.copy_(weights[name])


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and floating buffers, shared ones once."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point())
