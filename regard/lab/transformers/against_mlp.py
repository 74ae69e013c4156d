"""How does a Transformer differ from a multi-layer perceptron?

Claim: A perceptron over a whole input has weights for each of its n positions, so its number of parameters grows with n
    and it accepts no other n. A Transformer has the same parameters for any n and accepts any n: its feed-forward part
    is a perceptron applied to each token, and its attention weights are computed from the tokens, while the first layer
    of a perceptron has fixed weights per position.
Measures: Parameters of real models of both kinds for growing images; which of them accept images of another size; a
    feed-forward part on a sequence against each token alone; how much the attention weights, and the derivatives of a
    perceptron's first layer, differ between two inputs.
Budget: 1 second
Source: 004 1c-d
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_bars, plot_lines
from regard.models.mlp import MLP, MLPConfig
from regard.models.vit import ViT, ViTConfig

MATHS = r"n H + H \mathrm{against} 2 D H + H + D"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Both models, and the image sides they are built for, in patches."""

    width: int = 24
    heads: int = 3
    depth: int = 2
    patch: int = 4
    sides: tuple[int, ...] = (2, 3, 5, 8)
    hidden: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.sides)) < 2:
            raise ConfigError(f"sides must be at least two different ones: sides={self.sides}")


SMOKE = Setup()


def run(
    setup: Setup,
    attention: Attention = attend,
    vit: Callable[[ViTConfig], Any] = ViT,
    mlp: Callable[[MLPConfig], Any] = MLP,
) -> Numbers:
    """vit, mlp  build the models: vit(config), mlp(config)"""
    transformers, perceptrons = [], []
    for side in setup.sides:
        image = setup.patch * side
        looking = ViTConfig(
            image=image,
            patch=setup.patch,
            channels=1,
            classes=5,
            width=setup.width,
            depth=setup.depth,
            heads=setup.heads,
            pool="mean",
            positions="none",  # learned positions would be parameters for each position
        )
        transformers.append(vit(looking))
        perceptrons.append(mlp(MLPConfig(image=image, channels=1, classes=5, widths=(setup.hidden,))))
    for model in (*transformers, *perceptrons):
        model.init_weights(setup.seed)
        model.double().eval()
    draws = make_generator(setup.seed)
    images = [
        torch.randn(2, 1, setup.patch * side, setup.patch * side, generator=draws, dtype=torch.float64)
        for side in setup.sides
    ]
    tokens = transformers[-1].embed(images[-1]).detach()
    part = transformers[-1].blocks[0].feedforward
    with torch.no_grad():
        alone = torch.cat([part(token) for token in tokens.split(1, 1)], 1)
        shared = float((alone - part(tokens)).abs().max())
    q = tokens[:, None]
    places = torch.eye(q.shape[2], dtype=q.dtype).expand(2, 1, -1, -1)
    weights = attention(q, q, places)
    slopes = _first_layer_derivatives(perceptrons[-1].layers[0], images[-1].flatten(1))
    return {
        "tokens": [side**2 for side in setup.sides],
        "pixels": [(setup.patch * side) ** 2 for side in setup.sides],
        "hidden": setup.hidden,
        "parameters of transformer": [_count_parameters(model) for model in transformers],
        "parameters of perceptron": [_count_parameters(model) for model in perceptrons],
        "sizes taken by transformer": [sum(_accepts(model, image) for image in images) for model in transformers],
        "sizes taken by perceptron": [sum(_accepts(model, image) for image in images) for model in perceptrons],
        "difference of tokens alone": shared,
        "attention weights between inputs": float((weights[0] - weights[1]).abs().max()),
        "slopes of perceptron between inputs": float((slopes[0] - slopes[1]).abs().max()),
    }


def _count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _accepts(model: Any, image: Tensor) -> bool:
    try:
        model(image)
    except ShapeError:
        return False
    return True


def _first_layer_derivatives(layer: Any, inputs: Tensor) -> list[Tensor]:
    """Return the derivatives of the first layer's outputs by each position, for each input."""
    return [torch.autograd.functional.jacobian(layer, row) for row in inputs]


def verdict(numbers: Numbers) -> Verdict:
    ours, theirs = numbers["parameters of transformer"], numbers["parameters of perceptron"]
    pixels, sizes = numbers["pixels"], len(numbers["pixels"])
    same = len(set(ours)) == 1
    per_place = all(
        count - theirs[0] == (n - pixels[0]) * numbers["hidden"] for n, count in zip(pixels, theirs, strict=True)
    )
    taken = [numbers[f"sizes taken by {kind}"] for kind in ("transformer", "perceptron")]
    moved, fixed = numbers["attention weights between inputs"], numbers["slopes of perceptron between inputs"]
    return decide(
        same
        and per_place
        and taken == [[sizes] * sizes, [1] * sizes]
        and numbers["difference of tokens alone"] < 1e-12
        and moved > 1e-3
        and fixed == 0,
        f"From {pixels[0]} to {pixels[-1]} pixels the perceptron goes from {theirs[0]:,} to {theirs[-1]:,} "
        f"parameters and the Transformer from {ours[0]:,} to {ours[-1]:,}. Of {sizes} image sizes each perceptron "
        f"accepts {max(taken[1])} and each Transformer {min(taken[0])}. The feed-forward part gives the same outputs "
        f"for tokens alone and together, up to {numbers['difference of tokens alone']:.0g}. Between two inputs "
        f"attention weights differ by {moved:.2f}, and the derivatives of the perceptron's first layer by {fixed:g}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    kinds = {"perceptron": "perceptron", "Transformer": "transformer"}
    plot_lines(left, numbers["pixels"], {shown: numbers[f"parameters of {kind}"] for shown, kind in kinds.items()})
    left.set(xscale="log", yscale="log", xlabel="pixels", ylabel="parameters", title="Parameters by size of input")
    plot_bars(right, {shown: min(numbers[f"sizes taken by {kind}"]) for shown, kind in kinds.items()})
    right.set(ylabel=f"of {len(numbers['pixels'])} image sizes", title="Sizes that one model accepts")
    return figure
