"""Does the Vision Transformer of the exercise learn to classify handwritten digits?

Claim: Yes. The model of the exercise `vit` has patches of 2 x 2 pixels, a class token, learned positions and two blocks
    of width 32. Trained for 20 epochs on 1,437 digits, it classifies most of the other 360 correctly.
Measures: The accuracy on the last 360 digits after each epoch, and the training loss, over seeds: the package's Vision
    Transformer with the sizes, the initial weights (torch's defaults; class token and positions zero) and the training
    of the exercise's last cell.
Finding: Trained on {{ n["training images"]|comma }} digits, a Vision Transformer with {{ n.parameters|comma }}
    parameters (patches of {{ n.patch }} x {{ n.patch }} pixels, width {{ n.width }}, {{ n.depth }} blocks, {{ n.heads
    }} heads) classifies {{ accuracy[0] }} of the other {{ n["test images"] }} correctly after {{ n["steps at the
    tests"][0] }} steps and {{ accuracy[-1] }} after {{ n["steps at the tests"][-1] }} (chance {{ n.chance|percent }};
    {{ n.repeats }} seeds, in brackets the 95 % confidence interval). The training loss of the last steps is {{
    n["training loss"]|fixed(3) }}.
Budget: 90 seconds
Source: 000 2, 002 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.data.digits import digits
from regard.lab.digits import CLASSES, SIDE, Digits, accuracy
from regard.lab.drawing import Figure, make_figure, mark_level, plot_intervals
from regard.lab.measure import count_parameters
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.vit import ViT, ViTConfig

MATHS = r"y = W \mathrm{norm}(z_L^0) + b, \quad z_0 = [x_{\mathrm{class}}; E \mathrm{patch}] + p"
TRAIN_IMAGES = 1437  # the first of 1,797 images in the order of the file, as in the exercise
LAST = 10  # steps whose mean training loss is reported


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: sizes of the Vision Transformer and its training, those of the exercise `vit`.

    patch     side of a patch in pixels
    width     width of the model
    ff_width  width of the hidden layer of the feed-forward parts
    heads     number of heads
    depth     number of blocks
    batch     number of images per training step
    steps     number of training steps; an epoch has 23 steps of 64 images
    rate      learning rate of AdamW
    """

    patch: int = 2
    width: int = 32
    ff_width: int = 64
    heads: int = 4
    depth: int = 2
    batch: int = 64
    steps: int = 460
    rate: float = 0.003


SMOKE = Setup(patch=4, batch=32, steps=50, rate=0.01, repeats=3)


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit  builds the model: vit(config)
    """
    read = digits()
    both = Digits(read.pixels.float() / 255, read.labels)
    given, others = both.subset(torch.arange(TRAIN_IMAGES)), both.subset(torch.arange(TRAIN_IMAGES, len(both.labels)))
    epoch = -(-TRAIN_IMAGES // setup.batch)
    tests = [*range(epoch, setup.steps, epoch), setup.steps]
    right: list[list[float]] = [[] for _ in tests]
    losses: list[float] = []
    for seed in setup.seeds:
        model = build_model(setup, seed, vit)
        optimizer, draws = torch.optim.AdamW(model.parameters(), lr=setup.rate), make_generator(seed)
        lost: list[float] = []
        for step in range(setup.steps):
            if step % epoch == 0:
                batches = torch.randperm(TRAIN_IMAGES, generator=draws).split(setup.batch)
            images, labels = given.subset(batches[step % epoch])
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lost.append(loss.item())
            if step + 1 in tests:
                right[tests.index(step + 1)].append(accuracy(model, others))
        losses.append(fmean(lost[-LAST:]))
    return {
        "patch": setup.patch,
        "width": setup.width,
        "depth": setup.depth,
        "heads": setup.heads,
        "training images": TRAIN_IMAGES,
        "test images": len(others.labels),
        "parameters": count_parameters(model),
        "chance": 1 / CLASSES,
        "repeats": setup.repeats,
        "steps at the tests": tests,
        "training loss": fmean(losses),
        **mean_and_interval("accuracy", right),
    }


def build_model(setup: Setup, seed: int, vit: Callable[[ViTConfig], Any] = ViT) -> Any:
    """Build the Vision Transformer of the exercise `vit` with the exercise's initial weights.

    These are torch's defaults, and zeros for the class token and the positions.

    vit  builds the model: vit(config)
    """
    sizes = {"width": setup.width, "ff_width": setup.ff_width, "heads": setup.heads, "depth": setup.depth}
    model = vit(ViTConfig(image=SIDE, patch=setup.patch, channels=1, classes=CLASSES, eps=1e-5, **sizes))  # type: ignore[arg-type]  # the config checks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in model.modules():
            if isinstance(part, nn.Linear | nn.Conv2d):
                part.reset_parameters()
    with torch.no_grad():
        model.class_token.zero_()
        model.positions.weight.zero_()
    return model


def verdict(numbers: Numbers) -> Decision:
    shares = estimates(numbers, "accuracy")
    return decide(True, [shares[-1] - 0.5], accuracy=shares)


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    name, times = "Vision Transformer of the exercise", numbers["steps at the tests"]
    plot_intervals(axes, times, {name: numbers["accuracy"]}, {name: numbers["interval of accuracy"]})
    mark_level(axes, numbers["chance"], "chance")
    axes.legend(frameon=False, loc="center right")
    axes.set(ylim=(0, 1.05), xlabel="training steps", ylabel="accuracy", title="Other digits after each epoch")
    return figure
