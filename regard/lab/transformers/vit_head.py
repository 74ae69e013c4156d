"""How does the Vision Transformer come to a class?

Claim: It reads one token, which is learned, is the same for every image and gathers from all patches in attention; the
    last block's output of it is normalised and goes to a layer of its own: with one hidden layer and tanh while
    pre-training, linear when fine-tuning, where only that layer is replaced. Mean pooling has no such token and reads
    all patches alike.
Measures: Logits of small real models in float64 against the same taken by hand from the blocks' output; gradients of
    the logits at each normalised token; how far the class token's input and output differ between images, and move
    when one patch changes; parameters of the heads, and of what stands before them.
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
    """The model, and the classes it is pre-trained on and fine-tuned to."""

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
    """vit  makes the model: vit(config)"""
    side = setup.patch * setup.side
    images = torch.randn(2, 3, side, side, generator=make_generator(setup.seed), dtype=torch.float64)
    pretrained = _made(setup, vit, head="mlp-tanh", classes=setup.classes)
    tuned = _made(setup, vit, head="linear", classes=setup.fewer)
    pooled = _made(setup, vit, head="linear", classes=setup.fewer, pool="mean")
    with torch.no_grad():
        inputs = tuned.embed(images)[:, 0]
        first = tuned.hidden(images)[:, 0]
        moved = [float((tuned.hidden(other)[:, 0] - first).abs().max()) for other in _changed(images, setup)]
        x = {name: run_blocks(model.blocks, model.embed(images)) for name, model in _named(pretrained, tuned, pooled)}
        tokens = {name: model.norm(x[name]) for name, model in _named(pretrained, tuned, pooled)}
        expected = {
            "tanh": pretrained.head(torch.tanh(pretrained.head_hidden(tokens["tanh"][:, 0]))),
            "linear": tuned.head(tokens["linear"][:, 0]),
            "mean": pooled.head(tokens["mean"].mean(1)),
        }
        errors = {
            name: float((model(images) - expected[name]).abs().max())
            for name, model in _named(pretrained, tuned, pooled)
        }
        unnormalised = float((tuned(images) - tuned.head(x["linear"][:, 0])).abs().max())
    trunk, other = _trunk(pretrained), _trunk(tuned)
    return {
        "width": setup.width,
        "classes": [setup.classes, setup.fewer],
        "errors": errors,
        "difference without the norm": unnormalised,
        "gradients": {name: _read(model, images) for name, model in _named(pretrained, tuned, pooled)},
        "class token between images, going in": float((inputs[0] - inputs[1]).abs().max()),
        "class token between images, coming out": float((first[0] - first[1]).abs().max()),
        "class token moved by each patch": moved,
        "head parameters": [_count(model) - sum(_trunk(model).values()) for model in (pretrained, tuned)],
        "parts that differ before the head": sum(trunk.get(name) != other.get(name) for name in {*trunk, *other}),
        "tokens": [tokens[name].shape[1] for name in ("linear", "mean")],
    }


def _named(pretrained: Any, tuned: Any, pooled: Any) -> tuple[tuple[str, Any], ...]:
    return ("tanh", pretrained), ("linear", tuned), ("mean", pooled)


def _made(setup: Setup, vit: Callable[[ViTConfig], Any], *, head: str, classes: int, pool: str = "class") -> Any:
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
    # larger than at the start of training, where hardly anything moves anything: as if it had been trained
    table = {"*norm.weight": constant(1.0), "*.weight": normal(0.3), "*.bias": normal(0.3), "class_token": normal(1.0)}
    init_parameters(model, table, setup.seed)
    return model


def _changed(images: Tensor, setup: Setup) -> list[Tensor]:
    """The images with each patch in turn replaced by its opposite."""
    changed = []
    for at in range(setup.side**2):
        row, column = (setup.patch * place for place in divmod(at, setup.side))
        other = images.clone()
        other[:, :, row : row + setup.patch, column : column + setup.patch] *= -1
        changed.append(other)
    return changed


def _read(model: Any, images: Tensor) -> list[float]:
    """How much each normalised token counts for the logits: the size of the gradient there."""
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


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _trunk(model: Any) -> dict[str, int]:
    """Sizes of the parameters before the head, by name."""
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
        f"Logits are those of the normalised class token, or of the mean, to {error:.0g}; without the norm they are "
        f"{numbers['difference without the norm']:.2f} off. Patches count {max(gradients['linear'][1:]):g} beside the "
        f"class token and {min(gradients['mean']):.2f} each when averaged. Between two images that token differs by "
        f"{inside:g} going in and {outside:.2f} coming out, and every patch moves it by {moved:.2f} at least. The head "
        f"has {numbers['head parameters'][0]} parameters for {many} classes in pre-training and "
        f"{numbers['head parameters'][1]} for {few} afterwards; {trunk} parts before it differ in size.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    gradients = numbers["gradients"]
    curves = {"class token": gradients["linear"], "mean pooling": [float("nan"), *gradients["mean"]]}
    plot_lines(left, list(range(len(gradients["linear"]))), curves)
    left.set(xlabel="token; 0 is the class token", ylabel="gradient of the logits", title="What the head reads")
    moved = numbers["class token moved by each patch"]
    plot_lines(right, list(range(1, len(moved) + 1)), {"class token": moved})
    right.set(xlabel="patch that is changed", ylabel="change of the class token", title="What the class token gathers")
    return figure
