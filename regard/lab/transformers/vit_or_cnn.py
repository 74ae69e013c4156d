"""Vision Transformer or convolutional network: which learns better from few images?

Claim: The convolutional network, by far; with more images the Vision Transformer comes closer. The usual explanation,
    that a convolution has locality built in while a Transformer has to learn which pixels are neighbours, is not the
    reason here: on images of 8 x 8 pixels the network is just as far ahead after the pixels are shuffled.
Measures: A small network of each kind with about the same number of parameters, trained for the same number of steps on
    growing parts of scikit-learn's digits, over seeds: the accuracy on 400 other images; and for the fewest images the
    accuracy of the convolutional network if the pixels of all images are shuffled in the same way.
Budget: 60 seconds
Source: 002 1.5d
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.digits import CLASSES, SIDE, TRAIN_IMAGES, Digits, accuracy, load_digit_images, train_classifier
from regard.lab.drawing import COLOURS, MARKERS, Figure, make_figure
from regard.lab.seeds_interval import Estimate, interval_half_width
from regard.models.cnn import CNN, CNNConfig
from regard.models.vit import ViT, ViTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = r"\mathrm{right}_{\mathrm{cnn}}(n) - \mathrm{right}_{\mathrm{vit}}(n) \to 0 \mathrm{as} n \mathrm{grows}"

KINDS = {"vit": "Vision Transformer", "cnn": "convolutional network"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Numbers of training images, both networks, and the training steps and seeds."""

    sizes: tuple[int, ...] = (25, 100, 400, 1397)
    width: int = 32
    heads: int = 2
    depth: int = 2
    patch: int = 2
    widths: tuple[int, ...] = (16, 32, 40)
    batch: int = 32
    steps: int = 160
    rate: float = 0.01
    repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ConfigError(f"sizes must be two or more growing numbers of images: sizes={self.sizes}")
        if self.sizes[-1] > TRAIN_IMAGES:
            raise ConfigError(f"there are {TRAIN_IMAGES} training images, but sizes={self.sizes}")


SMOKE = Setup(sizes=(60, 1397), heads=4, depth=1, widths=(12, 24, 32), steps=60, rate=0.02, repeats=4)


def run(
    setup: Setup,
    vit: Callable[[ViTConfig], Any] = ViT,
    cnn: Callable[[CNNConfig], Any] = CNN,
) -> Numbers:
    """vit, cnn  build the models: vit(config), cnn(config)"""
    make = {"vit": lambda seed: _build_vit(setup, vit, seed), "cnn": lambda seed: _build_cnn(setup, cnn, seed)}
    right: dict[str, list[list[float]]] = {kind: [[] for _ in setup.sizes] for kind in KINDS}
    scattered: list[float] = []
    given, others = load_digit_images()
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        order = torch.randperm(len(given.labels), generator=make_generator(seed))
        for at, size in enumerate(setup.sizes):
            for kind in KINDS:
                right[kind][at].append(
                    _train_and_test(make[kind](seed), setup, given.subset(order[:size]), others, seed)
                )
        few = given.subset(order[: setup.sizes[0]])
        scattered.append(
            _train_and_test(make["cnn"](seed), setup, few.shuffle_pixels(seed), others.shuffle_pixels(seed), seed)
        )
    ahead = [
        [theirs - ours for theirs, ours in zip(*pair, strict=True)]
        for pair in zip(right["cnn"], right["vit"], strict=True)
    ]
    # paired differences per seed, which vary less
    compared = {
        "gained from more images": [many - few for few, many in zip(right["vit"][0], right["vit"][-1], strict=True)],
        "lead lost by more images": [few - many for few, many in zip(ahead[0], ahead[-1], strict=True)],
        "kept when pixels are scattered": [
            mixed - ours - lead / 2 for mixed, ours, lead in zip(scattered, right["vit"][0], ahead[0], strict=True)
        ],
    }
    return {
        "sizes": list(setup.sizes),
        "repeats": setup.repeats,
        "parameters": {kind: sum(each.numel() for each in make[kind](0).parameters()) for kind in KINDS},
        "right": {kind: [fmean(shares) for shares in right[kind]] for kind in KINDS},
        "interval": {kind: [interval_half_width(shares) for shares in right[kind]] for kind in KINDS},
        "ahead": [fmean(several) for several in ahead],
        "interval of ahead": [interval_half_width(several) for several in ahead],
        "right, pixels scattered": fmean(scattered),
        "interval, pixels scattered": interval_half_width(scattered),
        **{name: fmean(several) for name, several in compared.items()},
        "interval of differences": {name: interval_half_width(several) for name, several in compared.items()},
    }


def _train_and_test(model: Any, setup: Setup, given: Digits, others: Digits, seed: int) -> float:
    train_classifier(model, given, steps=setup.steps, batch=setup.batch, rate=setup.rate, seed=seed)
    return accuracy(model, others)


def _build_vit(setup: Setup, vit: Callable[[ViTConfig], Any], seed: int) -> Any:
    model = vit(
        ViTConfig(
            image=SIDE,
            patch=setup.patch,
            channels=1,
            classes=CLASSES,
            width=setup.width,
            depth=setup.depth,
            heads=setup.heads,
            ff_width=2 * setup.width,
            pool="mean",
        )
    )
    # a larger init than the published one, for short training
    table = {"positions.weight": normal(0.3), "*norm.weight": constant(1.0)}
    init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def _build_cnn(setup: Setup, cnn: Callable[[CNNConfig], Any], seed: int) -> Any:
    model = cnn(CNNConfig(channels=1, classes=CLASSES, widths=setup.widths))
    model.init_weights(seed)
    return model


def verdict(numbers: Numbers) -> Verdict:
    sizes, ahead, spread = numbers["sizes"], numbers["ahead"], numbers["interval of ahead"]
    few, many = ({kind: numbers["right"][kind][at] for kind in KINDS} for at in (0, -1))
    counts, scattered = numbers["parameters"], numbers["right, pixels scattered"]
    alike = max(counts.values()) < 1.25 * min(counts.values())
    learnt = Estimate(few["vit"], numbers["interval"]["vit"][0]) - 0.15
    more, lost, kept = (Estimate(numbers[name], half) for name, half in numbers["interval of differences"].items())
    return decide(
        alike,
        f"From {sizes[0]} images the convolutional network ({counts['cnn']:,} parameters) has an accuracy of "
        f"{few['cnn']:.1%} and the Vision Transformer ({counts['vit']:,}) {few['vit']:.1%}: {ahead[0]:.2f} ± "
        f"{spread[0]:.2f} ahead. From {sizes[-1]} images they have {many['cnn']:.1%} and {many['vit']:.1%}: "
        f"{ahead[-1]:.2f} ± {spread[-1]:.2f} ({numbers['repeats']} seeds). From {sizes[0]} images with shuffled "
        f"pixels the convolutional network has {scattered:.1%} ± {numbers['interval, pixels scattered']:.1%}.",
        [learnt, more - 0.1, Estimate(ahead[0], spread[0]) - 0.1, lost - 0.05, kept],
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for number, (kind, shown) in enumerate(KINDS.items()):
        left.errorbar(
            numbers["sizes"],
            numbers["right"][kind],
            numbers["interval"][kind],
            label=shown,
            color=COLOURS[number],
            marker=MARKERS[number],
            capsize=3,
        )
    left.errorbar(
        numbers["sizes"][:1],
        [numbers["right, pixels scattered"]],
        [numbers["interval, pixels scattered"]],
        label="the same, pixels scattered",
        color=COLOURS[2],
        marker=MARKERS[2],
        linestyle="",
        capsize=3,
    )
    left.legend(frameon=False, fontsize="small")
    left.set(xscale="log", ylim=(0, 1.02), xlabel="training images", ylabel="accuracy", title="Digits")
    right.errorbar(
        numbers["sizes"], numbers["ahead"], numbers["interval of ahead"], color=COLOURS[3], marker=MARKERS[3], capsize=3
    )
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="training images", ylabel="difference of accuracy", title="Lead of the CNN")
    return figure
