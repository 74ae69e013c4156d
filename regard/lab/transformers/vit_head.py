"""How does the Vision Transformer predict a class?

Claim: It reads one learned token, which is the same for every image and collects information from all patches in
    attention. Its output of the last block is normalised and passed to a head: a hidden layer with tanh for
    pre-training, a linear layer for fine-tuning, where only the head is replaced. Mean pooling has no such token and
    reads all patches equally.
Measures: Logits of small real models in float64 against the same computed from the output of the blocks. Gradients of
    the logits at each normalised token. How much the class token's input and output differ between images, and change
    if one patch changes. Parameters of the heads and of the rest.
Budget: 1 second
Source: 000 1.5d, 002 1.5c
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.models.vit import ViT, ViTConfig
from regard.nn.blocks import run_blocks
from regard.nn.init import constant, init_parameters, normal

MATHS = (
    r"y = W \mathrm{norm}(x_0) + b \mathrm{or} W \tanh(V \mathrm{norm}(x_0) + c) + b, \quad "
    r"\mathrm{against} W \frac{1}{n} \sum_i \mathrm{norm}(x_i) + b"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, and the numbers of classes for pre-training and fine-tuning."""

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
    """vit  builds the model: vit(config)"""
    side = setup.patch * setup.side
    images = torch.randn(2, 3, side, side, generator=make_generator(setup.seed), dtype=torch.float64)
    pretrained = _build_model(setup, vit, head="mlp-tanh", classes=setup.classes)
    tuned = _build_model(setup, vit, head="linear", classes=setup.fewer)
    pooled = _build_model(setup, vit, head="linear", classes=setup.fewer, pool="mean")
    with torch.no_grad():
        inputs = tuned.embed(images)[:, 0]
        first = tuned.hidden(images)[:, 0]
        moved = [float((tuned.hidden(other)[:, 0] - first).abs().max()) for other in _negate_patches(images, setup)]
        x = {name: run_blocks(model.blocks, model.embed(images)) for name, model in _by_name(pretrained, tuned, pooled)}
        tokens = {name: model.norm(x[name]) for name, model in _by_name(pretrained, tuned, pooled)}
        expected = {
            "tanh": pretrained.head(torch.tanh(pretrained.head_hidden(tokens["tanh"][:, 0]))),
            "linear": tuned.head(tokens["linear"][:, 0]),
            "mean": pooled.head(tokens["mean"].mean(1)),
        }
        errors = {
            name: float((model(images) - expected[name]).abs().max())
            for name, model in _by_name(pretrained, tuned, pooled)
        }
        unnormalised = float((tuned(images) - tuned.head(x["linear"][:, 0])).abs().max())
    trunk, other = _trunk_sizes(pretrained), _trunk_sizes(tuned)
    return {
        "width": setup.width,
        "classes": [setup.classes, setup.fewer],
        "errors": errors,
        "difference without the norm": unnormalised,
        "gradients": {name: _gradient_norms(model, images) for name, model in _by_name(pretrained, tuned, pooled)},
        "class token between images, going in": float((inputs[0] - inputs[1]).abs().max()),
        "class token between images, coming out": float((first[0] - first[1]).abs().max()),
        "class token moved by each patch": moved,
        "head parameters": [
            _count_parameters(model) - sum(_trunk_sizes(model).values()) for model in (pretrained, tuned)
        ],
        "parts that differ before the head": sum(trunk.get(name) != other.get(name) for name in {*trunk, *other}),
        "tokens": [tokens[name].shape[1] for name in ("linear", "mean")],
    }


def _by_name(pretrained: Any, tuned: Any, pooled: Any) -> tuple[tuple[str, Any], ...]:
    return ("tanh", pretrained), ("linear", tuned), ("mean", pooled)


def _build_model(setup: Setup, vit: Callable[[ViTConfig], Any], *, head: str, classes: int, pool: str = "class") -> Any:
    config = ViTConfig(
        image=setup.patch * setup.side,
        patch=setup.patch,
        classes=classes,
        width=setup.width,
        depth=setup.depth,
        heads=setup.heads,
        head=head,
        pool=pool,
    )
    model = vit(config).double().eval()
    # larger than the usual init, so that tokens affect each other as after training
    table = {"*norm.weight": constant(1.0), "*.weight": normal(0.3), "*.bias": normal(0.3), "class_token": normal(1.0)}
    init_parameters(model, table, setup.seed)
    return model


def _negate_patches(images: Tensor, setup: Setup) -> list[Tensor]:
    """Return the images with each patch in turn negated."""
    changed = []
    for at in range(setup.side**2):
        row, column = (setup.patch * place for place in divmod(at, setup.side))
        other = images.clone()
        other[:, :, row : row + setup.patch, column : column + setup.patch] *= -1
        changed.append(other)
    return changed


def _gradient_norms(model: Any, images: Tensor) -> list[float]:
    """Return the norm of the gradient of the logits at each normalised token."""
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


def _count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _trunk_sizes(model: Any) -> dict[str, int]:
    """Return the sizes of the parameters before the head, by name."""
    return {name: each.numel() for name, each in model.named_parameters() if not name.startswith("head")}


def verdict(numbers: Numbers) -> Verdict:
    d, (many, few) = numbers["width"], numbers["classes"]
    error, gradients = max(numbers["errors"].values()), numbers["gradients"]
    one = all(row[0] > 1e-6 and max(row[1:]) == 0 for row in (gradients["tanh"], gradients["linear"]))
    every = min(gradients["mean"]) > 1e-6 and max(gradients["mean"]) - min(gradients["mean"]) < 1e-12
    inside = numbers["class token between images, going in"]
    outside, moved = numbers["class token between images, coming out"], min(numbers["class token moved by each patch"])
    heads = numbers["head parameters"] == [d * d + d + d * many + many, d * few + few]
    trunk, tokens = numbers["parts that differ before the head"], numbers["tokens"]
    return decide(
        error < 1e-12
        and numbers["difference without the norm"] > 1e-3
        and one
        and every
        and inside == 0
        and min(outside, moved) > 1e-6
        and heads
        and trunk == 0
        and tokens[0] == tokens[1] + 1,
        f"Logits equal those of the normalised class token, or of the mean, up to {error:.0g}; without the norm they "
        f"differ by {numbers['difference without the norm']:.2f}. The gradient at the patches is "
        f"{max(gradients['linear'][1:]):g} with the class token and at least {min(gradients['mean']):.2f} with mean "
        f"pooling. Between two images the class token differs by {inside:g} at the input and {outside:.2f} at the "
        f"output, and every patch changes it by at least {moved:.2f}. The head has {numbers['head parameters'][0]} "
        f"parameters for {many} classes for pre-training and {numbers['head parameters'][1]} for {few} for "
        f"fine-tuning; {trunk} parts before it differ in size.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    gradients = numbers["gradients"]
    curves = {"class token": gradients["linear"], "mean pooling": [float("nan"), *gradients["mean"]]}
    plot_lines(left, list(range(len(gradients["linear"]))), curves)
    left.set(xlabel="token; 0 is the class token", ylabel="gradient of the logits", title="Gradient at each token")
    moved = numbers["class token moved by each patch"]
    plot_lines(right, list(range(1, len(moved) + 1)), {"class token": moved})
    right.set(xlabel="changed patch", ylabel="change of the class token", title="Effect of each patch")
    return figure
