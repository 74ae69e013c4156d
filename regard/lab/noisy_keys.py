"""Random keys around orthogonal means, one of them with a random length."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.drawing import COLOURS, Figure, make_figure


@dataclass(frozen=True, kw_only=True)
class NoisyKeysSetup:
    """Number of keys, scale s of the queries, variances of the noise and of the length, and number of draws."""

    keys: int = 10
    width: int = 11
    size: float = 20.0
    noise: float = 1e-12
    variance: float = 0.5
    draws: int = 100_000
    bins: int = 21
    seed: int = 0

    @property
    def means(self) -> Float[Tensor, "j c"]:
        return torch.eye(self.width, dtype=torch.float64)[: self.keys]

    @property
    def one_hot(self) -> Float[Tensor, "b 1 j j"]:
        """One-hot values, for which the outputs are the weights."""
        return torch.eye(self.keys, dtype=torch.float64).expand(self.draws, 1, -1, -1)

    def sample_keys(self, draws: torch.Generator) -> Float[Tensor, "b 1 j c"]:
        """Sample keys with isotropic noise."""
        noise = torch.randn(self.draws, 1, self.keys, self.width, generator=draws, dtype=torch.float64)
        return noise.mul_(self.noise**0.5).add_(self.means)

    def sample_lengths(self, draws: torch.Generator) -> Float[Tensor, "b"]:
        """Sample gamma ~ N(1, variance), stratified.

        There is one draw from each of `draws` equally likely intervals, so shares have a small error.
        """
        even = torch.arange(self.draws) + torch.rand(self.draws, generator=draws, dtype=torch.float64)
        gamma: Tensor = 1 + self.variance**0.5 * torch.special.ndtri(even / self.draws)
        return gamma

    def scale_first_key(self, gamma: Float[Tensor, "b"], draws: torch.Generator) -> Float[Tensor, "b 1 j c"]:
        """Sample keys whose first mean is multiplied by gamma."""
        keys = self.sample_keys(draws)
        keys[:, 0, 0] += (gamma - 1)[:, None] * self.means[0]
        return keys

    def histogram(self, weights: Float[Tensor, "m"]) -> list[float]:
        """Return the share of weights in each of `bins` intervals from 0 to 1."""
        shares: list[float] = torch.histc(weights, self.bins, 0, 1).div(len(weights)).tolist()
        return shares


def plot_histograms(histograms: dict[str, list[float]], xlabel: str, title: str) -> Figure:
    """Draw histograms of weights: the first filled, the others outlined on top."""
    figure, (axes,) = make_figure()
    for number, (name, shares) in enumerate(histograms.items()):
        edges = [at / len(shares) for at in range(len(shares) + 1)]
        axes.stairs(shares, edges, fill=number == 0, color=COLOURS[number], linewidth=2, label=name)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    axes.set(xlabel=xlabel, ylabel="share of draws", title=title)
    return figure
