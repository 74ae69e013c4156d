"""What do a Transformer and a multi-layer perceptron have in common, and how do they differ?

Claim: Both alternate linear maps and fixed non-linear functions in layers whose widths are free to choose, and both
    compute their hidden states from other hidden states: the feed-forward part of a Transformer is a perceptron applied
    to each token. But a perceptron over a whole input has weights for each of its n positions, so its number of
    parameters grows with n and it accepts no other n. A Transformer has the same parameters for any n and accepts any
    n, and its attention weights are computed from the tokens, while the first layer of a perceptron has fixed weights
    per position.
Measures: Parameters of real models of both kinds for growing images; which of them accept images of another size; a
    feed-forward part on a sequence against each token alone, and against a perceptron with the same weights; the
    gradient from the hidden states of one layer to those of the layer before, in both; how much the attention weights,
    and the derivatives of a perceptron's first layer, differ between two inputs.
Finding: For images of {{ n.pixels[0] }} to {{ n.pixels[-1]|comma }} pixels the perceptron has {{ n["parameters of
    perceptron"][0]|comma }} to {{ n["parameters of perceptron"][-1]|comma }} parameters and the Transformer (patches as
    tokens, no position table) {{ n["parameters of transformer"][0]|comma }} to {{ n["parameters of
    transformer"][-1]|comma }}. Of {{ n.pixels|length }} image sizes each perceptron accepts {{ n["sizes accepted by
    perceptron"]|max }} and each Transformer {{ n["sizes accepted by transformer"]|min }}. The feed-forward part gives
    the same outputs for tokens alone and together, up to {{ n["difference of tokens processed alone"]|at_most }}, and a
    perceptron with its weights gives them up to {{ n["difference to a perceptron of one token"]|at_most }}. Every
    hidden state after the second block depends on {{ n["hidden states read"] }} of {{ n.tokens[-1] }} hidden states
    after the first. For two different inputs the attention weights differ by up to {{ n["change of attention weights
    between inputs"]|fixed }}. The weights of the perceptron's first layer (its derivatives) {% if n["change of
    first-layer derivatives between inputs"] == 0 %}stay the same{% else %}differ by up to {{ n["change of first-layer
    derivatives between inputs"]|short }}{% endif %}.
Budget: 1 second
Source: 004 1c, 004 1d
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import ShapeError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_bars, plot_lines
from regard.lab.measure import attention_weights, count_parameters, largest_difference, normal_tensors
from regard.lab.settings import setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.models.mlp import MLP, MLPConfig
from regard.models.vit import ViT, ViTConfig

MATHS = r"\mathrm{perceptron, first layer}: n H + H, \quad \mathrm{feed-forward part, any} n: 2 D H + H + D"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of this lab claim's experiment: sizes of a Vision Transformer and of a multi-layer perceptron.

    width   width of the Transformer
    heads   number of heads of the Transformer
    depth   number of blocks of the Transformer; at least 2, because the experiment counts how many outputs of the
            first block each output of the second block depends on
    patch   side of a patch in pixels
    sides   sides of the images in patches, at least two different ones; both models are built for each of them
    hidden  width of the hidden layer of the multi-layer perceptron
    """

    width: int = 24
    heads: int = 3
    depth: int = 2
    patch: int = 4
    sides: tuple[int, ...] = (2, 3, 5, 8)
    hidden: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 2, "blocks, of which one reads the other")
        if not 2 <= len(set(self.sides)) == len(self.sides):
            raise setting_error(self, "sides must be at least two, all different", "sides")


SMOKE = Setup()


def run(
    setup: Setup,
    attention: Attention = attend,
    vit: Callable[[ViTConfig], Any] = ViT,
    mlp: Callable[[MLPConfig], Any] = MLP,
) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    attention  the attention function to test
    vit, mlp   build the models: vit(config), mlp(config)
    """
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
    images = normal_tensors(draws, *((2, 1, setup.patch * side, setup.patch * side) for side in setup.sides))
    tokens = transformers[-1].embed(images[-1]).detach()
    part = transformers[-1].blocks[0].feedforward
    with torch.no_grad():
        alone = torch.cat([part(token) for token in tokens.split(1, 1)], 1)
        shared = largest_difference(alone, part(tokens))
        same = largest_difference(_as_perceptron(part, mlp)(tokens[0, :, :, None, None]), part(tokens)[0])
    weights = attention_weights(attention, tokens[:, None], tokens[:, None])
    slopes = _first_layer_derivatives(perceptrons[-1].layers[0], images[-1].flatten(1))
    return {
        "tokens": [side**2 for side in setup.sides],
        "pixels": [(setup.patch * side) ** 2 for side in setup.sides],
        "hidden": setup.hidden,
        "parameters of transformer": [count_parameters(model) for model in transformers],
        "parameters of perceptron": [count_parameters(model) for model in perceptrons],
        "sizes accepted by transformer": [sum(_accepts(model, image) for image in images) for model in transformers],
        "sizes accepted by perceptron": [sum(_accepts(model, image) for image in images) for model in perceptrons],
        "difference of tokens processed alone": shared,
        "difference to a perceptron of one token": same,
        "hidden states read": _hidden_states_read(transformers[-1], tokens[:1]),
        "change of attention weights between inputs": largest_difference(weights[0], weights[1]),
        "change of first-layer derivatives between inputs": largest_difference(*slopes),
    }


def _as_perceptron(part: Any, mlp: Callable[[MLPConfig], Any]) -> Any:
    """Return a multi-layer perceptron with one hidden layer that has the weights of a feed-forward part.

    Its input is one token as an image of one pixel, whose channels are the entries of the token.
    """
    hidden, width = part.up.weight.shape
    made = mlp(MLPConfig(image=1, channels=width, classes=width, widths=(hidden,), activation="gelu")).double().eval()
    made.layers[0].load_state_dict(part.up.state_dict())
    made.head.load_state_dict(part.down.state_dict())
    return made


def _accepts(model: Any, image: Tensor) -> bool:
    try:
        model(image)
    except ShapeError:
        return False
    return True


def _first_layer_derivatives(layer: Any, inputs: Tensor) -> list[Tensor]:
    """Return the Jacobian of a model's first layer at each input."""
    return [torch.autograd.functional.jacobian(layer, row) for row in inputs]


def _hidden_states_read(model: Any, tokens: Tensor) -> int:
    """Return how many output tokens of the first block each output token of the second block depends on.

    An output token depends on another token if the gradient of its squared norm with respect to that token is nonzero.
    The result is the minimum over all output tokens of the second block.
    """
    middle = model.blocks[0](tokens).detach().requires_grad_()
    out = model.blocks[1](middle)
    counts = []
    for row in range(out.shape[1]):
        (gradient,) = torch.autograd.grad(out[0, row].square().sum(), middle, retain_graph=True)
        counts.append(int((gradient[0].abs().amax(-1) > 0).sum()))
    return min(counts)


def verdict(numbers: Numbers) -> Decision:
    ours, perceptron = numbers["parameters of transformer"], numbers["parameters of perceptron"]
    pixels, sizes = numbers["pixels"], len(numbers["pixels"])
    counted = [perceptron[0] + (n - pixels[0]) * numbers["hidden"] for n in pixels] == perceptron
    accepted = numbers["sizes accepted by transformer"] == [sizes] * sizes
    accepted &= numbers["sizes accepted by perceptron"] == [1] * sizes
    fixed = numbers["change of first-layer derivatives between inputs"] == 0
    return decide(
        len(set(ours)) == 1
        and counted
        and accepted
        and fixed
        and numbers["hidden states read"] == numbers["tokens"][-1]
        and numbers["difference of tokens processed alone"] < 1e-12
        and numbers["difference to a perceptron of one token"] < 1e-12
        and numbers["change of attention weights between inputs"] > 1e-3
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    kinds = {"perceptron": "perceptron", "Transformer": "transformer"}
    plot_lines(left, numbers["pixels"], {shown: numbers[f"parameters of {kind}"] for shown, kind in kinds.items()})
    left.set(xscale="log", yscale="log", xlabel="pixels", ylabel="parameters", title="Parameters by size of input")
    plot_bars(right, {shown: min(numbers[f"sizes accepted by {kind}"]) for shown, kind in kinds.items()})
    right.set(ylabel=f"of {len(numbers['pixels'])} image sizes", title="Sizes that one model accepts")
    return figure
