"""Vision Transformer or convolutional network: which learns better from how many images?

Claim: The one whose built-in assumptions fit the task, while there are few images; more images make up for missing
    assumptions. A convolution assumes that neighbouring pixels belong together and that a pattern means the same
    everywhere. On digits the convolutional network is far ahead from few images, and the Vision Transformer comes
    closer with more. If the class depends on two distant parts of the image, those assumptions do not help: the
    convolutional network stays at chance, and the Vision Transformer, whose attention is global, needs only enough
    images. If a local pattern predicts the class in most images and two distant parts in all, the convolutional network
    is ahead from few images and the Vision Transformer from many: a crossover on one data set.
Measures: A small network of each kind with about the same number of parameters, trained for the same number of steps on
    growing numbers of images, over seeds, and tested on 400 others. Three data sets: scikit-learn's digits; noise with
    a bright or dark patch at each side, whose class is whether the two are alike; and the same images with a small
    patch of stripes somewhere between the two, whose direction agrees with the class in most images. For the fewest
    digits also the convolutional network with the pixels of all images shuffled in the same way: at 8 x 8 pixels it
    keeps its lead, so that locality is not the whole explanation there.
Finding: Digits, from {{ n.sizes[0] }} images: convolutional network ({{ n.parameters["cnn"]|comma }} parameters) {{
    accuracy["digits"]["cnn"][0] }}, Vision Transformer ({{ n.parameters["vit"]|comma }}) {{
    accuracy["digits"]["vit"][0] }} of other images classified correctly ({{ n.repeats }} seeds, in brackets the 95 %
    confidence interval); from {{ n.sizes[-1]|comma }} images {{ accuracy["digits"]["cnn"][-1] }} and {{
    accuracy["digits"]["vit"][-1] }}. Noise with two distant patches, whose class is whether the two are alike (chance
    50 %): from {{ n.sizes[0] }} images {{ accuracy["distant patches"]["cnn"][0] }} and {{ accuracy["distant
    patches"]["vit"][0] }}, from {{ n.sizes[-1]|comma }} images {{ accuracy["distant patches"]["cnn"][-1] }} and {{
    accuracy["distant patches"]["vit"][-1] }}. The same images with stripes, whose direction alone predicts the class of
    {{ n.agree|percent }} of them: {% for size in n.sizes %}from {{ size|comma }} images {{ accuracy["patches and
    stripes"]["cnn"][loop.index0] }} and {{ accuracy["patches and stripes"]["vit"][loop.index0] }}{{ ", " if not
    loop.last else ". " }}{% endfor %}With the pixels of all digits shuffled in the same way, which destroys
    neighbourhoods, the convolutional network has {{ shuffled }} from {{ n.sizes[0] }} digits.
Budget: 120 seconds
Source: 002 1.5d
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.lab.digits import (
    CLASSES,
    TRAIN_IMAGES,
    Digits,
    accuracy,
    build_digit_vit,
    load_digit_images,
    train_classifier,
)
from regard.lab.drawing import Figure, make_figure, mark_level, plot_intervals
from regard.lab.measure import count_parameters
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.cnn import CNN, CNNConfig
from regard.models.vit import ViT, ViTConfig

MATHS = (
    r"\mathrm{convolution}: y_r = \sum_{\| u \| \le 1} W_u x_{r+u}, \quad "
    r"\mathrm{attention}: y_r = \sum_s a_{rs} W x_s"
)
KINDS = {"vit": "Vision Transformer", "cnn": "convolutional network"}
TASKS = {"digits": CLASSES, "distant patches": 2, "patches and stripes": 2}
SIDE, PATCH = 16, 4  # of the images with two distant patches: 8 pixels between them, more than three convolutions see


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: a Vision Transformer, a CNN, and their training on three tasks.

    The first task is to classify digits. The second is to compare two distant patches of an image. The third adds a
    patch of stripes between the two, whose direction agrees with the class in most images.

    sizes   numbers of training images to compare
    width   width of the Vision Transformer
    heads   number of heads of the Vision Transformer
    depth   number of blocks of the Vision Transformer
    widths  numbers of channels of the convolutional network's layers
    batch   number of images per training step
    steps   number of training steps
    rates   learning rates for the digits, and for the other two tasks
    agree   third task: probability that the direction of the stripes agrees with the class; between 0.6 and 0.95,
            so that the stripes help but are not enough
    """

    sizes: tuple[int, ...] = (25, 200, 1397)
    width: int = 32
    heads: int = 2
    depth: int = 2
    widths: tuple[int, ...] = (16, 32, 40)
    batch: int = 32
    steps: int = 240
    rates: tuple[float, float] = (0.01, 0.003)
    agree: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ConfigError(f"sizes must be two or more growing numbers of images: sizes={self.sizes}")
        if self.sizes[-1] > TRAIN_IMAGES:
            raise ConfigError(f"there are {TRAIN_IMAGES} training images, but sizes={self.sizes}")
        if not 0.6 <= self.agree <= 0.95:
            raise ConfigError(
                f"agree must be between 0.6 and 0.95, so that stripes help but are not enough: agree={self.agree}"
            )


SMOKE = Setup(sizes=(60, 1397), heads=4, depth=1, widths=(12, 24, 32), steps=60, rates=(0.02, 0.01))


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT, cnn: Callable[[CNNConfig], Any] = CNN) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit, cnn  build the models: vit(config), cnn(config)
    """

    def build(kind: str, task: str, seed: int) -> Any:
        if kind == "cnn":
            model = cnn(CNNConfig(channels=1, classes=TASKS[task], widths=setup.widths))
            model.init_weights(seed)
            return model
        sizes = {"width": setup.width, "depth": setup.depth, "heads": setup.heads, "classes": TASKS[task]}
        image = {"patch": 2} if task == "digits" else {"image": SIDE, "patch": PATCH}
        return build_digit_vit(vit, seed, positions_std=0.3, **sizes, **image)

    def train_and_test(kind: str, task: str, given: Digits, others: Digits, seed: int) -> float:
        model, rate = build(kind, task, seed), setup.rates[task != "digits"]
        train_classifier(model, given, steps=setup.steps, batch=setup.batch, rate=rate, seed=seed)
        return accuracy(model, others)

    right: dict[str, dict[str, list[list[float]]]] = {
        task: {kind: [[] for _ in setup.sizes] for kind in KINDS} for task in TASKS
    }
    shuffled: list[float] = []
    for seed in setup.seeds:
        images, others = load_digit_images()
        given = {"digits": images.subset(torch.randperm(len(images.labels), generator=make_generator(seed)))}
        given["distant patches"] = sample_distant_patches(TRAIN_IMAGES, make_generator(seed))
        given["patches and stripes"] = sample_stripes(TRAIN_IMAGES, make_generator(seed), setup.agree)
        tests = {"digits": others, "distant patches": sample_distant_patches(400, make_generator(seed + 500))}
        tests["patches and stripes"] = sample_stripes(400, make_generator(seed + 500), setup.agree)
        for task in TASKS:
            for at, size in enumerate(setup.sizes):
                part = given[task].subset(torch.arange(size))
                for kind in KINDS:
                    right[task][kind][at].append(train_and_test(kind, task, part, tests[task], seed))
        few = given["digits"].subset(torch.arange(setup.sizes[0])).shuffle_pixels(seed)
        shuffled.append(train_and_test("cnn", "digits", few, others.shuffle_pixels(seed), seed))
    leads = {
        task: [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(kinds["cnn"], kinds["vit"], strict=True)]
        for task, kinds in right.items()
    }
    return {
        "sizes": list(setup.sizes),
        "repeats": setup.repeats,
        "agree": setup.agree,
        "parameters": {kind: count_parameters(build(kind, "digits", 0)) for kind in KINDS},
        **mean_and_interval("accuracy", right),
        # paired differences per seed, which vary less
        **mean_and_interval("lead of the cnn", leads),
        **mean_and_interval(
            "lead lost with more digits",
            [few - many for few, many in zip(*leads["digits"][:: len(setup.sizes) - 1], strict=True)],
        ),
        **mean_and_interval("accuracy, pixels shuffled", shuffled),
    }


def sample_distant_patches(count: int, draws: torch.Generator) -> Digits:
    """Sample `count` images of noise with one bright or dark patch at the left edge and one at the right edge.

    The label is 1 if both patches are bright or both are dark, and 0 otherwise.
    """
    images = 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=draws)
    signs = torch.randint(2, (count, 2), generator=draws)
    rows = PATCH * torch.randint(SIDE // PATCH, (count, 2), generator=draws)
    for side, columns in enumerate((slice(0, PATCH), slice(SIDE - PATCH, SIDE))):
        inside = (torch.arange(SIDE) >= rows[:, side, None]) & (torch.arange(SIDE) < rows[:, side, None] + PATCH)
        images[:, 0, :, columns] += (2 * signs[:, side] - 1)[:, None, None] * inside[:, :, None]
    return Digits(images, (signs[:, 0] == signs[:, 1]).long())


def sample_stripes(count: int, draws: torch.Generator, agree: float) -> Digits:
    """Sample images as `sample_distant_patches` does, each with a patch of stripes somewhere between the two patches.

    agree  probability that the direction of the stripes agrees with the class: vertical for 1, horizontal for 0
    """
    images, labels = sample_distant_patches(count, draws)
    vertical = torch.where(torch.rand(count, generator=draws) < agree, labels, 1 - labels)
    stripes = (2.0 - 4.0 * (torch.arange(PATCH) % 2)).expand(PATCH, PATCH)
    rows = torch.randint(SIDE - PATCH + 1, (count,), generator=draws).tolist()
    columns = (PATCH + torch.randint(SIDE - 3 * PATCH + 1, (count,), generator=draws)).tolist()
    for image, upright, row, column in zip(images[:, 0], vertical, rows, columns, strict=True):
        image[row : row + PATCH, column : column + PATCH] += stripes if upright else stripes.mT
    return Digits(images, labels)


def verdict(numbers: Numbers) -> Decision:
    shares, leads, counts = estimates(numbers, "accuracy"), estimates(numbers, "lead of the cnn"), numbers["parameters"]
    far, shuffled = shares["distant patches"], estimates(numbers, "accuracy, pixels shuffled")
    margins = [shares["digits"]["vit"][0] - 0.15, leads["digits"][0] - 0.1]
    margins += [estimates(numbers, "lead lost with more digits") - 0.05, -leads["distant patches"][-1] - 0.2]
    margins += [far["vit"][-1] - 0.9, 0.65 - far["cnn"][-1], leads["distant patches"][0] + 0.2]
    margins += [leads["patches and stripes"][0], -leads["patches and stripes"][-1]]
    return decide(max(counts.values()) < 1.25 * min(counts.values()), margins, accuracy=shares, shuffled=shuffled)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(len(TASKS))
    for axes, (task, classes) in zip(panels, TASKS.items(), strict=True):
        means, halves = (
            {shown: numbers[name][task][kind] for kind, shown in KINDS.items()}
            for name in ("accuracy", "interval of accuracy")
        )
        plot_intervals(axes, numbers["sizes"], means, halves)
        mark_level(axes, 1 / classes, "chance")
        axes.set(xscale="log", ylim=(0, 1.05), xlabel="training images", ylabel="accuracy", title=task.capitalize())
    return figure
