"""How does the Vision Transformer predict a class?

Claim: The prediction depends on one learned token, the class token. It is the same for every image and collects
    information from all patches by attention. Its output of the last block is normalised and passed to a head: a hidden
    layer with tanh for pre-training, a linear layer for fine-tuning, where only the head is replaced. Mean pooling has
    no such token and reads all patches equally.
Measures: Logits of small real models in float64 against the same computed from the output of the blocks. Gradients of
    the logits at each normalised token. How much the class token's input and output differ between images, and change
    if one patch changes. Parameters of the heads and of the rest.
Finding: Computed from the normalised class token alone, the logits agree up to {{ n.errors.values()|max|at_most }}.
    With mean pooling this holds for the mean of the patch tokens. If the norm is left out, the logits change by {{
    n["difference without the norm"]|fixed }}. The gradient of the logits at the patch tokens after the last block is {{
    n.gradients["linear"][1:]|max|short }} with the class token and at least {{ n.gradients["mean"]|min|fixed }} with
    mean pooling. At the input the class token differs between two images by {{ n["difference of class tokens between
    images, input"]|short }}, after the last block by {{ n["difference of class tokens between images, output"]|fixed
    }}, and a change of any one patch changes its output by at least {{ n["change of the class token by each
    patch"]|min|at_least(2) }}. At width {{ n.width }} the head has {{ n["head parameters"][0] }} parameters for {{
    n.classes[0] }} classes for pre-training and {{ n["head parameters"][1] }} for {{ n.classes[1] }} classes for
    fine-tuning; {% if n["parts that differ before the head"] == 0 %}all parts before the head have the same sizes in
    both{% else %}{{ n["parts that differ before the head"] }} parts before the head have other sizes{% endif %}.
Budget: 1 second
Source: 000 1.5d, 000 2, 002 1.5c, 002 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import count_parameters, largest_difference, normal_tensors
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.vit import ViT, ViTConfig
from regard.nn.blocks import run_blocks
from regard.nn.init import constant, init_parameters, normal

MATHS = (
    r"y = W \mathrm{norm}(x_0) + b \mathrm{or} W \tanh(V \mathrm{norm}(x_0) + c) + b, \quad "
    r"\mathrm{against} W \frac{1}{n} \sum_i \mathrm{norm}(x_i) + b"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the Vision Transformer.

    width    width of the model
    heads    number of heads
    depth    number of blocks
    patch    side of a patch in pixels
    side     side of the image in patches
    classes  number of classes in pre-training
    fewer    number of classes in fine-tuning
    """

    width: int = 24
    heads: int = 3
    depth: int = 2
    patch: int = 4
    side: int = 3
    classes: int = 17
    fewer: int = 5
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit  builds the model: vit(config)
    """
    side = setup.patch * setup.side
    (images,) = normal_tensors(make_generator(setup.seed), (2, 3, side, side))
    models = {
        "tanh": _build_model(setup, vit, head="mlp-tanh", classes=setup.classes),
        "linear": _build_model(setup, vit, head="linear", classes=setup.fewer),
        "mean": _build_model(setup, vit, head="linear", classes=setup.fewer, pool="mean"),
    }
    tanh, linear, mean = models.values()
    with torch.no_grad():
        inputs, first = linear.embed(images)[:, 0], linear.hidden(images)[:, 0]
        moved = [largest_difference(linear.hidden(other)[:, 0], first) for other in _negate_patches(images, setup)]
        x = {name: run_blocks(model.blocks, model.embed(images)) for name, model in models.items()}
        tokens = {name: model.norm(x[name]) for name, model in models.items()}
        expected = {
            "tanh": tanh.head(torch.tanh(tanh.head_hidden(tokens["tanh"][:, 0]))),
            "linear": linear.head(tokens["linear"][:, 0]),
            "mean": mean.head(tokens["mean"].mean(1)),
        }
        errors = {name: largest_difference(model(images), expected[name]) for name, model in models.items()}
        unnormalised = largest_difference(linear(images), linear.head(x["linear"][:, 0]))
    trunk, other = _trunk_sizes(tanh), _trunk_sizes(linear)
    return {
        "width": setup.width,
        "classes": [setup.classes, setup.fewer],
        "errors": errors,
        "difference without the norm": unnormalised,
        "gradients": {name: _gradient_norms(model, images) for name, model in models.items()},
        "difference of class tokens between images, input": largest_difference(*inputs),
        "difference of class tokens between images, output": largest_difference(*first),
        "change of the class token by each patch": moved,
        "head parameters": [count_parameters(model) - sum(_trunk_sizes(model).values()) for model in (tanh, linear)],
        "parts that differ before the head": sum(trunk.get(name) != other.get(name) for name in {*trunk, *other}),
        "tokens": [tokens[name].shape[1] for name in ("linear", "mean")],
    }


def _build_model(setup: Setup, vit: Callable[[ViTConfig], Any], **form: Any) -> Any:
    sizes: dict[str, Any] = {"patch": setup.patch, "width": setup.width, "depth": setup.depth, "heads": setup.heads}
    model = vit(ViTConfig(image=setup.patch * setup.side, **sizes, **form)).double().eval()
    # larger than the usual init, so that tokens affect each other as after training
    table = {"*norm.weight": constant(1.0), "*.weight": normal(0.3), "*.bias": normal(0.3), "class_token": normal(1.0)}
    init_parameters(model, table, setup.seed)
    return model


def _negate_patches(images: Tensor, setup: Setup) -> list[Tensor]:
    """Return one batch of images per patch, with the pixels of that patch multiplied by -1."""
    changed = []
    for at in range(setup.side**2):
        row, column = (setup.patch * place for place in divmod(at, setup.side))
        other = images.clone()
        other[:, :, row : row + setup.patch, column : column + setup.patch] *= -1
        changed.append(other)
    return changed


def _gradient_norms(model: Any, images: Tensor) -> list[float]:
    """Return, for each token of the first image, the norm of the gradient of the summed logits.

    The gradient is taken at the output of the final norm.
    """
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    hook = model.norm.register_forward_hook(keep)
    model(images).sum().backward()
    hook.remove()
    gradient = seen[0].grad
    sizes: list[float] = [] if gradient is None else gradient.norm(dim=-1)[0].tolist()
    return sizes


def _trunk_sizes(model: Any) -> dict[str, int]:
    """Return the number of elements of each parameter outside the classification head, by parameter name."""
    return {name: each.numel() for name, each in model.named_parameters() if not name.startswith("head")}


def verdict(numbers: Numbers) -> Decision:
    d, (many, few), gradients = numbers["width"], numbers["classes"], numbers["gradients"]
    one = all(row[0] > 1e-6 and max(row[1:]) == 0 for row in (gradients["tanh"], gradients["linear"]))
    every = min(gradients["mean"]) > 1e-6 and max(gradients["mean"]) - min(gradients["mean"]) < 1e-12
    exact = max(numbers["errors"].values()) < 1e-12 and numbers["difference without the norm"] > 1e-3
    same = numbers["difference of class tokens between images, input"] == 0
    changes = numbers["change of the class token by each patch"]
    reads = min(numbers["difference of class tokens between images, output"], *changes) > 1e-6
    heads = numbers["head parameters"] == [d * d + d + d * many + many, d * few + few]
    heads &= numbers["parts that differ before the head"] == 0
    heads &= numbers["tokens"][0] == numbers["tokens"][1] + 1
    return decide(exact and one and every and same and reads and heads)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    gradients = numbers["gradients"]
    curves = {"class token": gradients["linear"], "mean pooling": [float("nan"), *gradients["mean"]]}
    plot_lines(left, list(range(len(gradients["linear"]))), curves)
    left.set(xlabel="token; 0 is the class token", ylabel="gradient of the logits", title="Gradient at each token")
    moved = numbers["change of the class token by each patch"]
    plot_lines(right, list(range(1, len(moved) + 1)), {"class token": moved})
    right.set(xlabel="changed patch", ylabel="change of the class token", title="Effect of each patch")
    return figure
