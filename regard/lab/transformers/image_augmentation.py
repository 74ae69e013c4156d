"""Does augmentation of the training images help a Vision Transformer more than a convolutional network?

Claim: Yes, on digits while there are few of them. Small random rotations, shears and shifts show the network further
    images of each class. They help a Vision Transformer more, whose design assumes less about images. It comes closer
    to the convolutional network, which stays ahead. With many digits augmentation changes little.
Measures: A small network of each kind with about the same number of parameters, trained for the same number of steps on
    growing numbers of images, without and with augmentation, over seeds, and tested on other images. Digits are turned,
    sheared and shifted by less than a pixel. With `--set data=PATH`, larger networks on CIFAR-100 or other images, with
    random crops and flips. If there are several learning rates, the accuracy of the first seed on validation images
    chooses one for each network, each number of images, and without and with augmentation.
Finding: {{ n.images }}, convolutional network ({{ n.parameters["cnn"]|comma }} parameters) and Vision Transformer ({{
    n.parameters["vit"]|comma }}), accuracy on {{ n["test images"]|comma }} other images ({{ n.repeats }} seeds, in
    brackets the 95 % confidence interval): {% for size in n.sizes %}from {{ size|comma }} images {{
    accuracy["cnn"]["plain"][loop.index0] }} and {{ accuracy["vit"]["plain"][loop.index0] }}, with augmentation {{
    accuracy["cnn"]["augmented"][loop.index0] }} and {{ accuracy["vit"]["augmented"][loop.index0] }}{{ "; " if not
    loop.last else ". " }}{% endfor %}Augmentation changes the accuracy of the convolutional network by {% for each in
    gain["cnn"] %}{{ (100 * each.mean)|fixed(1) }} ± {{ (100 * each.half)|fixed(1) }}{{ ", " if not loop.last }}{%
    endfor %} percentage points, that of the Vision Transformer by {% for each in gain["vit"] %}{{ (100 *
    each.mean)|fixed(1) }} ± {{ (100 * each.half)|fixed(1) }}{{ ", " if not loop.last }}{% endfor %}.
Budget: 120 seconds
Source: 002 1.5d
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_range
from regard.lab.digits import build_digit_vit
from regard.lab.drawing import Figure, make_figure, mark_level, plot_intervals
from regard.lab.measure import count_parameters
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import check_at_least, check_growing
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.cnn import CNN, CNNConfig
from regard.models.vit import ViT, ViTConfig
from regard.recipes.image_augment import ImageAugmentation, affine, affine_matrix
from regard.recipes.vision import ImageClassificationTask, VisionSettings, accuracy, adapt_config, load_data
from regard.train.loop import fit
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.process_group import ProcessGroup
from regard.train.schedule import Cosine

MATHS = r"L = \frac{1}{n} \sum_{i=1}^n \mathrm{loss}(f(t_i(x_i)), y_i)"
KINDS = {"vit": "Vision Transformer", "cnn": "convolutional network"}
FORMS = ("plain", "augmented")


@dataclass(frozen=True, kw_only=True)
class SmallChanges(ImageAugmentation):
    """Augmentation that shifts and flips images, and then rotates, shears and shifts them by fractions of a pixel.

    turn   maximum angle of the rotation in degrees
    shear  maximum shear factor along each axis: the shift of a row or column relative to its neighbour, in pixels
    move   maximum shift along each axis in pixels, which need not be whole
    """

    turn: float
    shear: float
    move: float

    @property
    def draws(self) -> int:
        return super().draws + 5

    def __call__(
        self, x: Float[Tensor, "b channels y x"], draws: Float[Tensor, "b draws"]
    ) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
        x, own = super().__call__(x, draws[:, 5:])
        if self.turn or self.shear or self.move:
            angle, shear_x, shear_y, across, down = (2 * draws[:, :5] - 1).unbind(1)
            move = self.move / x.shape[3]
            sheared, moved = (self.shear * shear_x, self.shear * shear_y), (move * across, move * down)
            x = affine(x, affine_matrix(math.radians(self.turn) * angle, *sheared, *moved))
        return x, own


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the two networks are trained on one data set.

    sizes       numbers of training images to compare
    patch       side of the Vision Transformer's patches in pixels
    width       width of the Vision Transformer
    heads       number of heads of the Vision Transformer
    depth       number of blocks of the Vision Transformer
    widths      numbers of channels of the convolutional network's layers
    batch       number of images per training step
    steps       number of training steps
    rates       learning rates to choose from, by the accuracy on the validation images
    shift       augmentation: maximum shift in whole pixels, as a random crop after padding
    flip        augmentation: fraction of images that are flipped horizontally
    turn        augmentation: maximum angle of a rotation in degrees
    shear       augmentation: maximum shear factor along each axis
    move        augmentation: maximum additional shift along each axis in pixels, which need not be whole
    validation  number of validation images
    test        number of test images
    """

    sizes: tuple[int, ...]
    patch: int
    width: int
    heads: int
    depth: int
    widths: tuple[int, ...]
    batch: int
    steps: int
    rates: tuple[float, ...]
    shift: int = 0
    flip: float = 0.0
    turn: float = 0.0
    shear: float = 0.0
    move: float = 0.0
    validation: int
    test: int

    def __post_init__(self) -> None:
        check_at_least(self, sizes=2)
        check_growing(self, "sizes")
        for rate in self.rates:
            check_range("rates", rate, 0, above=True)

    def augmentation(self, form: str) -> ImageAugmentation:
        """Return the augmentation of the training images: none if `form` is "plain", all if it is "augmented"."""
        names = ("shift", "flip", "turn", "shear", "move")
        chosen = {name: getattr(self, name) if form == "augmented" else 0 for name in names}
        return SmallChanges(operations=0, **chosen)


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the images, and a Vision Transformer, a CNN and their training.

    data    path of CIFAR-100 or another image data set, in a form that the recipe `vision` reads; without it, the
            built-in digits are used
    digits  networks and training on the built-in digits
    photos  networks and training on the images of `data`
    """

    data: str = ""
    digits: Training = Training(
        sizes=(25, 200, 1200), patch=2, width=32, heads=2, depth=2, widths=(16, 32, 40), batch=32, steps=480,
        rates=(0.01,), turn=15.0, shear=0.1, move=0.5, validation=197, test=400,
    )  # fmt: skip
    photos: Training = Training(
        sizes=(1000, 4000, 16000), patch=4, width=192, heads=3, depth=6, widths=(64, 160, 304, 448), batch=256,
        steps=1200, rates=(0.001, 0.003), shift=4, flip=0.5, validation=1000, test=3000,
    )  # fmt: skip

    @property
    def training(self) -> Training:
        """The settings of the training on the chosen images."""
        return self.photos if self.data else self.digits


SMOKE = Setup(
    repeats=2, digits=replace(Setup().digits, sizes=(25, 200), depth=1, widths=(12, 24, 32), batch=16, steps=50)
)


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT, cnn: Callable[[CNNConfig], Any] = CNN) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit, cnn  build the models: vit(config), cnn(config)
    """
    training, device = setup.training, choose_device(setup)
    splits = load_data(Path(setup.data) if setup.data else None, make_settings(setup, "vit", "plain"))
    if training.sizes[-1] > len(splits.train):
        raise ConfigError(f"there are {len(splits.train)} training images, but sizes={training.sizes}")

    def build(kind: str, seed: int) -> Any:
        config = adapt_config(make_settings(setup, kind, "plain").model, splits.train)
        if kind == "vit" and not setup.data:
            return build_digit_vit(vit, seed, positions_std=0.3, **asdict(config))
        model = vit(config) if isinstance(config, ViTConfig) else cnn(config)  # type: ignore[arg-type]  # never a DaViT
        model.init_weights(seed)
        return model

    def train_and_test(kind: str, form: str, size: int, seed: int, rate: float) -> tuple[float, float]:
        """Return the accuracy on the validation images and on the test images."""
        settings = make_settings(setup, kind, form, rate, seed)
        few = splits.train.select(torch.randperm(len(splits.train), generator=make_generator(seed))[:size])
        model, task = build(kind, seed), ImageClassificationTask(few, splits.validation, settings)
        trained = fit(model, task, settings.plan, group=ProcessGroup(device=device))
        return trained.metrics[-1][1]["accuracy"], accuracy(model, splits.test)

    right: dict[str, dict[str, list[list[float]]]] = {kind: {form: [] for form in FORMS} for kind in KINDS}
    validated: dict[str, dict[str, list[float]]] = {kind: {form: [] for form in FORMS} for kind in KINDS}
    rates: dict[str, dict[str, list[float]]] = {kind: {form: [] for form in FORMS} for kind in KINDS}
    for kind, form, size in product(KINDS, FORMS, training.sizes):
        test = partial(train_and_test, kind, form, size)
        tried = [(rate, test(setup.seeds[0], rate)) for rate in training.rates]
        best, first = max(tried, key=lambda each: each[1][0])  # on validation images, never on test images
        results = [first, *(test(seed, best) for seed in setup.seeds[1:])]
        rates[kind][form].append(best)
        validated[kind][form].append(fmean(valid for valid, _ in results))
        right[kind][form].append([tested for _, tested in results])
    # paired differences per seed, which vary less
    gains = {kind: subtract(right[kind]["augmented"], right[kind]["plain"]) for kind in KINDS}
    more = subtract(gains["vit"], gains["cnn"])
    return {
        "images": "Photographs" if setup.data else "Digits",
        "classes": len(splits.test.classes),
        "test images": len(splits.test),
        "sizes": list(training.sizes),
        "steps": training.steps,
        "repeats": setup.repeats,
        "parameters": {kind: count_parameters(build(kind, 0)) for kind in KINDS},
        "learning rates": rates,
        "validation accuracy": validated,
        **mean_and_interval("accuracy", right),
        **mean_and_interval("gain", gains),
        **mean_and_interval("lead of the cnn", {f: subtract(right["cnn"][f], right["vit"][f]) for f in FORMS}),
        # the mean over all sizes but the largest
        **mean_and_interval("larger gain of the vit", [fmean(each) for each in zip(*more[:-1], strict=True)]),
        **mean_and_interval("gain lost with more images", subtract(gains["vit"][:1], gains["vit"][-1:])[0]),
    }


def choose_device(setup: Setup) -> torch.device:
    """Return the device to train on: a GPU for photographs if there is one, else the CPU."""
    return torch.device("cuda" if setup.data and torch.cuda.is_available() else "cpu")


def subtract(more: list[list[float]], less: list[list[float]]) -> list[list[float]]:
    """Return `more` minus `less` for each number of images (outer lists) and each seed (inner lists)."""
    return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(more, less, strict=True)]


def make_settings(setup: Setup, kind: str, form: str, rate: float = 0.001, seed: int = 0) -> VisionSettings:
    """Return the settings of one training for the recipe `vision`.

    kind  "vit" or "cnn"
    form  "plain" or "augmented"
    rate  learning rate of AdamW. On photographs Muon trains the matrices of the Vision Transformer with five times this
          rate, the ratio in the recipe
    """
    training = setup.training
    optimizer: AdamW | Muon = AdamW(lr=rate, weight_decay=0.0)
    if setup.data:
        optimizer = Muon(lr=5 * rate, weight_decay=0.2, adamw=AdamW(lr=rate, weight_decay=0.05))
    plan = TrainingPlan(
        steps=training.steps,
        batch_size=training.batch,
        optimizer=optimizer,
        schedule=Cosine(warmup=min(training.steps // 10, 100)),
        precision="bfloat16" if choose_device(setup).type == "cuda" else "float32",
        seed=seed,
    )
    transformer = ViTConfig(
        image=training.patch,  # replaced by the size of the images
        patch=training.patch,
        width=training.width,
        heads=training.heads,
        depth=training.depth,
        ff_width=2 * training.width,
        pool="mean",
    )
    return VisionSettings(
        architecture=kind,
        model=transformer,
        alternatives=(CNNConfig(widths=training.widths),),
        plan=plan,
        augmentation=training.augmentation(form),
        validation=training.validation,
        test=training.test,
        seed=seed,
    )


def verdict(numbers: Numbers) -> Decision:
    shares, gains, counts = estimates(numbers, "accuracy"), estimates(numbers, "gain"), numbers["parameters"]
    leads = estimates(numbers, "lead of the cnn")["augmented"]
    margins = [gains["vit"][0] - 0.1, estimates(numbers, "larger gain of the vit"), leads[0]]
    margins += [estimates(numbers, "gain lost with more images") - 0.05]
    return decide(max(counts.values()) < 1.25 * min(counts.values()), margins, accuracy=shares, gain=gains)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(len(KINDS))
    for axes, (kind, shown) in zip(panels, KINDS.items(), strict=True):
        plot_intervals(axes, numbers["sizes"], numbers["accuracy"][kind], numbers["interval of accuracy"][kind])
        mark_level(axes, 1 / numbers["classes"], "chance")
        axes.set(xscale="log", ylim=(0, 1.05), xlabel="training images", ylabel="accuracy", title=shown.capitalize())
    return figure
