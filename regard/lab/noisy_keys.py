"""Keys for the claims about noisy keys: orthonormal means plus normal noise, and a first key of random length."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.drawing import COLOURS, Figure, make_figure
from regard.lab.settings import check_at_least, setting_error


@dataclass(frozen=True, kw_only=True)
class NoisyKeysSetup:
    """Settings of claims about attention to noisy keys: orthonormal means plus normal noise.

    keys      number of keys
    width     width of the keys, at least the number of keys, because the means are orthogonal
    size      scale s of the queries
    noise     variance of the noise in each channel of a key; size * noise ** 0.5, the standard deviation of the
              noise of a score, must be at most 1e-4, because the claims are about tiny noise
    variance  variance of gamma, the random length of the first key, whose mean is 1
    draws     number of random sets of keys
    bins      number of bins of the histograms of weights
    """

    keys: int = 10
    width: int = 11
    size: float = 20.0
    noise: float = 1e-12
    variance: float = 0.5
    draws: int = 100_000
    bins: int = 21
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, keys=3, draws=1000)
        if self.noise >= 0 and self.size * self.noise**0.5 > 1e-4:
            raise setting_error(self, "size * noise ** 0.5 must be at most 1e-4", "size", "noise")
        if self.keys > self.width or min(self.size, self.variance) <= 0 or self.noise < 0:
            text = "orthogonal means need as many channels as keys, and size and variance must be above 0"
            raise setting_error(self, text, "keys", "width", "size", "variance", "noise")

    @property
    def means(self) -> Float[Tensor, "j c"]:
        """The orthonormal means of the keys."""
        return torch.eye(self.width, dtype=torch.float64)[: self.keys]

    @property
    def one_hot(self) -> Float[Tensor, "b 1 j j"]:
        """One-hot values, for which the outputs of attention are the attention weights."""
        return torch.eye(self.keys, dtype=torch.float64).expand(self.draws, 1, -1, -1)

    def sample_keys(self, draws: torch.Generator) -> Float[Tensor, "b 1 j c"]:
        """Sample `self.draws` sets of keys: the means plus isotropic normal noise."""
        noise = torch.randn(self.draws, 1, self.keys, self.width, generator=draws, dtype=torch.float64)
        return noise.mul_(self.noise**0.5).add_(self.means)

    def sample_lengths(self, draws: torch.Generator) -> Float[Tensor, "b"]:
        """Sample `self.draws` lengths gamma ~ N(1, variance) by stratified sampling.

        One length is sampled from each of `self.draws` equally likely intervals, which lowers the sampling error.
        """
        even = torch.arange(self.draws) + torch.rand(self.draws, generator=draws, dtype=torch.float64)
        gamma: Tensor = 1 + self.variance**0.5 * torch.special.ndtri(even / self.draws)
        return gamma

    def scale_first_key(self, gamma: Float[Tensor, "b"], draws: torch.Generator) -> Float[Tensor, "b 1 j c"]:
        """Sample `self.draws` sets of keys, with the mean of the first key of set b multiplied by gamma[b]."""
        keys = self.sample_keys(draws)
        keys[:, 0, 0] += (gamma - 1)[:, None] * self.means[0]
        return keys

    def histogram(self, weights: Float[Tensor, "m"]) -> list[float]:
        """Return the fraction of the weights in each of `self.bins` equal intervals from 0 to 1."""
        shares: list[float] = torch.histc(weights, self.bins, 0, 1).div(len(weights)).tolist()
        return shares


def plot_histograms(histograms: dict[str, list[float]], xlabel: str, title: str) -> Figure:
    """Draw named histograms of weights in one panel: the first filled, the others as outlines on top."""
    figure, (axes,) = make_figure()
    for number, (name, shares) in enumerate(histograms.items()):
        edges = [at / len(shares) for at in range(len(shares) + 1)]
        axes.stairs(shares, edges, fill=number == 0, color=COLOURS[number], linewidth=2, label=name)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    axes.set(xlabel=xlabel, ylabel="share of draws", title=title)
    return figure
