"""Weight averaging: the exponential moving average (EMA) of the weights, or the mean of the last k snapshots."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.validation import check_integer, check_range


@dataclass(frozen=True, kw_only=True)
class ExponentialAverage:
    """Exponential moving average (EMA) of the weights.

    decay  factor of the old average at each step; the current weights have the factor 1 - decay. At step n the decay is
           at most n / (n + 9), so that the initial weights soon have little influence
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        check_range("ExponentialAverage(decay)", self.decay, 0, 1, below=True)


@dataclass(frozen=True, kw_only=True)
class LastKAverage:
    """Weight averaging: the mean of the last snapshots of the weights.

    count  number of latest snapshots that are averaged
    every  steps between snapshots
    """

    count: int = 10
    every: int = 100

    def __post_init__(self) -> None:
        check_integer("LastKAverage(count)", self.count, 1, "snapshots")
        check_integer("LastKAverage(every)", self.every, 1, "steps")

    def snapshots(self, steps: int) -> int:
        """Return the number of snapshots that are averaged at the end of a run of `steps` steps."""
        return min(self.count, steps // self.every)


AveragingConfig = ExponentialAverage | LastKAverage


class Averager:
    """Keeps averaged weights of a model during training: an exponential moving average or the last snapshots."""

    def __init__(self, config: AveragingConfig, model: nn.Module) -> None:
        self._config, self._model = config, model
        self._snapshots: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the current weights. Call this after every optimizer step.

        With `LastKAverage`, a snapshot is taken only if `step` is a multiple of `every`.

        step  number of optimizer steps done
        """
        if isinstance(self._config, LastKAverage):
            if step % self._config.every == 0:
                self._snapshots = [*self._snapshots, self._copy()][-self._config.count :]
            return
        if not self._snapshots:
            self._snapshots = [self._copy()]
            return
        mean, now = self._snapshots[0], dict(_weights(self._model))
        decay = min(self._config.decay, step / (step + 9))
        torch._foreach_lerp_([mean[name] for name in now], list(now.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: the model has the averaged weights inside the block, and its own weights again on exit."""
        own = self._copy()
        self.apply()
        try:
            yield
        finally:
            self._load(own)

    def apply(self) -> None:
        """Copy the averaged weights into the model; does nothing if no weights were averaged yet."""
        if self._snapshots:
            names = self._snapshots[0]
            self._load({name: torch.stack([each[name] for each in self._snapshots]).mean(0) for name in names})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average or the snapshots as a flat state dict; keys are `snapshot number/parameter name`.

        An exponential moving average has the snapshot number 0.
        """
        return {f"{number}/{name}": t for number, each in enumerate(self._snapshots) for name, t in each.items()}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load averaged weights from a state dict that `state_dict` returned."""
        own = dict(_weights(self._model))
        snapshots: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split("/")
            snapshots.setdefault(int(number), {})[name] = value.to(own[name].device)
        self._snapshots = [snapshots[number] for number in sorted(snapshots)]

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in _weights(self._model)}

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in _weights(self._model):
            weight.copy_(weights[name])


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all parameters and floating-point buffers; a shared tensor is yielded once."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point())
