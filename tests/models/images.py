"""Small models on images, and helpers of their tests."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.models.cnn import CNNConfig
from regard.models.davit import DaViTConfig
from regard.models.mlp import MLPConfig
from regard.models.model import Config
from regard.models.resnet import ResNetConfig
from regard.models.vit import ViTConfig

VIT = ViTConfig(image=12, patch=4, channels=2, classes=5, width=24, depth=2, heads=3, ff_width=40)
DAVIT = DaViTConfig(channels=2, classes=5, widths=(12, 18), depths=(1, 1), heads=(2, 3), window=2, ff_factor=3)
BASELINES: dict[str, Config] = {
    "mlp": MLPConfig(image=12, channels=2, classes=5, widths=(17, 13)),
    "cnn": CNNConfig(channels=2, classes=5, widths=(7, 11)),
    "resnet": ResNetConfig(channels=2, classes=5, width=6, depth=8),
}


def images(batch: int = 3, rows: int = 12, columns: int = 12, channels: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, channels, rows, columns, generator=torch.Generator().manual_seed(seed))


def enlarged(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with weights so large that no part of it hides."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.2)
    return model


def trained(
    model: nn.Module, batch: Callable[[torch.Generator], tuple[Tensor, Tensor]], steps: int, rate: float
) -> float:
    """The share of 256 new images that the model gets right after so many batches."""
    draws = torch.Generator().manual_seed(2)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    model.train()
    for _ in range(steps):
        image, label = batch(draws)
        optimiser.zero_grad()
        cross_entropy(model(image), label).backward()
        optimiser.step()
    model.eval()
    right = []
    with torch.no_grad():
        for _ in range(4):
            image, label = batch(draws)
            right.append(model(image).argmax(-1) == label)
    return torch.cat(right).float().mean().item()


def stripes(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """64 noisy images with lines across, down or slanting; where they begin differs, so no single pixel tells."""
    label = torch.randint(0, 3, (64,), generator=draws)
    down, across = torch.tensor([[1, 0], [0, 1], [1, 1]])[label].T[..., None, None]
    start = torch.randint(0, 4, (64, 1, 1), generator=draws)
    line = (down * torch.arange(8)[:, None] + across * torch.arange(8) + start) % 4 < 2
    return line[:, None].float() + 0.1 * torch.randn(64, 1, 8, 8, generator=draws), label
