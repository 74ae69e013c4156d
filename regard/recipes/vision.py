"""What does an image show? A Vision Transformer tells digits apart, or the hundred classes of CIFAR-100.

Expected: built-in 98 % of digits it has not seen; 80 % of 5,000 images of CIFAR-100 that were held out.
Time: built-in one minute of one core; CIFAR-100 17 minutes on one H200 that five other runs share.
Memory: built-in 1 GB; CIFAR-100 6.6 GiB of the GPU's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number as real_number
from regard.data.digits import digits
from regard.data.image_folder import resize_image
from regard.data.images import Images, read_images
from regard.data.sampler import ShuffledOrder, sampler_generator
from regard.data.splits import split
from regard.models.cnn import CNNConfig
from regard.models.davit import DaViTConfig
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.vit import ViTConfig
from regard.recipes.image_augment import Augmentation, mixed_labels
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, Start
from regard.train.averaging import ExponentialAverage
from regard.train.objectives import cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine
from regard.train.task import Loss

AT_ONCE = 1000  # images that are classified together
DEALT = 1  # how images are dealt out, the same for every seed: runs are compared by images that none of them has seen
Networks = ViTConfig | DaViTConfig | CNNConfig
NAMES: Mapping[type[Networks], str] = {ViTConfig: "vit", DaViTConfig: "davit", CNNConfig: "cnn"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    network       vit, davit or cnn: which of `model` and `others` is trained, and is `model` from then on
    model         the settings of the network; the size of images, channels and classes are those of the data
    others        ready settings of the other networks
    smoothing     how much of each label is given to all classes alike
    validation    images that show during training how good the model is; 0 learns from them too
    test          images that the model is judged by in the end, the same ones for every seed
    size          height and width to bring images to; None leaves them, which must have one size
    """

    network: str = "vit"
    model: Networks
    others: tuple[Networks, ...] = ()
    plan: TrainingPlan
    augmentation: Augmentation
    smoothing: float = 0.1
    validation: int
    test: int
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("validation", self.validation, 0, "images")
        check_integer("test", self.test, 1, "images")
        check_integer("seed", self.seed, 0)
        if self.size is not None:
            check_integer("size", self.size, 1, "pixels")
        if not self.validation and (self.plan.patience is not None or self.plan.load_best_at_end):
            raise ConfigError("patience and load_best_at_end go by images for validation, but validation=0 leaves none")
        if not 0 <= real_number("smoothing", self.smoothing) < 1:
            raise ConfigError(f"smoothing is a share of each label, from 0 to below 1, not {self.smoothing}")
        ready = {NAMES[type(each)]: each for each in (*self.others, self.model)}
        if self.network not in ready:
            raise ConfigError(f"network is one of {', '.join(sorted(ready))}, not {self.network!r}")
        object.__setattr__(self, "model", ready.pop(self.network))
        object.__setattr__(self, "others", tuple(ready[name] for name in sorted(ready)))


def built_in() -> Settings:
    """With Muon, because weights as small as a Vision Transformer begins with take Adam long to grow."""
    plan = TrainingPlan(
        steps=1000, batch_size=64, optimizer=Muon(lr=0.03, weight_decay=0.1, adamw=AdamW(lr=0.01, weight_decay=0.05)),
        schedule=Cosine(warmup=50), averaging=ExponentialAverage(decay=0.99), evaluate_every=200, save_every=200,
    )  # fmt: skip
    return Settings(
        model=ViTConfig(
            image=8, patch=2, channels=1, classes=10, width=64, depth=4, heads=4, ff_width=128, pool="mean"
        ),
        others=(
            DaViTConfig(channels=1, classes=10, widths=(48, 96), depths=(1, 1), heads=(3, 6), window=2),
            CNNConfig(widths=(16, 32, 64)),
        ),
        plan=plan,
        augmentation=Augmentation(shift=0, flip=0.0, operations=2, strength=0.5, cutmix=0.3),
        validation=150,
        test=360,
    )


def real() -> Settings:
    """Sizes by what plain Vision Transformers of 3 to 6 million parameters have done well with: many thin blocks."""
    plan = TrainingPlan(
        steps=20_000, batch_size=1024,
        optimizer=Muon(lr=0.01, weight_decay=0.2, adamw=AdamW(lr=2e-3, weight_decay=0.05)),
        schedule=Cosine(warmup=1000), averaging=ExponentialAverage(decay=0.999), precision="bfloat16", compile=True,
        evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    return Settings(
        model=ViTConfig(
            image=32, patch=4, classes=100, width=256, depth=9, heads=4, ff_width=768, pool="mean", drop_path=0.1
        ),
        others=(
            DaViTConfig(
                classes=100, widths=(96, 192, 384), depths=(1, 1, 1), heads=(3, 6, 12), window=4, drop_path=0.1
            ),
            CNNConfig(channels=3, classes=100, widths=(128, 256, 512, 768)),
        ),
        plan=plan,
        augmentation=Augmentation(shift=4, flip=0.5, operations=1, erase=0.1, mixup=0.3, cutmix=0.5),
        validation=1000,
        test=5000,
    )


class Parts(NamedTuple):
    """Images to learn from, to see by during training how that goes, and to be judged by."""

    train: Images
    validation: Images
    test: Images


def data(folder: Path | None, settings: Settings) -> Parts:
    """The images for training that lie in a folder, else the digits, dealt out."""
    size = None if settings.size is None else (settings.size, settings.size)
    found = digits() if folder is None else read_images(folder, size=size)
    found = found if size is None else resize_image(found, size)
    held = settings.test + settings.validation
    if held >= len(found):
        raise ConfigError(
            f"test={settings.test} and validation={settings.validation} leave none of {len(found)} images to learn from"
        )
    # first those to judge by, so that they are the same however many there are for validation
    rest, test = split(len(found), [settings.test], DEALT)
    train, validation = split(len(rest), [settings.validation], DEALT)
    return Parts(*(found.chosen(records) for records in (rest[train], rest[validation], test)))


class Batch(NamedTuple):
    """Which images a step sees, and what is drawn for each of them."""

    records: Int64[Tensor, "b"]
    draws: Float[Tensor, "b draws"]


@dataclass(frozen=True, eq=False)
class Classify:
    """Images to classes. All of them lie on the model's device, so that a batch is only their numbers."""

    train: Images
    validation: Images
    augmentation: Augmentation
    smoothing: float
    batch_size: int
    seed: int
    _there: dict[torch.device, Images] = field(default_factory=dict, init=False, repr=False)

    def batch(self, step: int, part: int, of: int) -> Batch:
        records = self._order.part(part, of).at(step)
        if self.augmentation.mixing and len(records) % 2:
            raise ConfigError(
                f"images are mixed in pairs, but a batch of {self.batch_size} in {of} shares has {len(records)} in "
                "each; use an even number, or mixup=0 and cutmix=0"
            )
        # drawn for the whole batch at once, so that its shares make it up however many there are
        drawn = torch.rand(
            self.batch_size, self.augmentation.draws, generator=sampler_generator(self.seed, step, "augmentation")
        )
        return Batch(records, drawn[part * len(records) : (part + 1) * len(records)])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        images = self._on(batch.records.device)
        labels = images.labels[batch.records]
        x, own = self.augmentation(images.pixels[batch.records] / 255, batch.draws)
        logits = model(centred(x)).float()
        if not self.augmentation.mixing:
            return cross_entropy(logits, labels, smoothing=self.smoothing)
        targets = mixed_labels(labels, own, len(images.classes))
        total = functional.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
        return Loss(total, len(labels))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"accuracy": accuracy(model, self.validation)} if len(self.validation) else {}

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self.train), self.batch_size, self.seed)

    def _on(self, device: torch.device) -> Images:
        if device not in self._there:
            self._there[device] = Images(self.train.pixels.to(device), self.train.labels.to(device), self.train.classes)
        return self._there[device]


def centred(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Images from 0 to 1 as a model takes them: from -2 to 2, so that they vary by about 1."""
    return 4 * x - 2


def classified(model: nn.Module, pixels: UInt8[Tensor, "n channels y x"]) -> Int[Tensor, "n"]:
    """The likeliest class of each image."""
    device = next(model.parameters()).device
    return torch.cat([model(centred(some.to(device) / 255)).argmax(-1).cpu() for some in pixels.split(AT_ONCE)])


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of images whose class is told right."""
    return float((classified(model, images.pixels) == images.labels).double().mean())


def fitting(config: Networks, images: Images) -> Networks:
    """The settings of a network for images of this size, these channels and classes."""
    channels, height, width = images.pixels.shape[1:]
    if not isinstance(config, ViTConfig):
        return replace(config, channels=channels, classes=len(images.classes))
    if height != width:
        raise ConfigError(f"a vit learns positions for square images, not for {height} x {width}; try network=davit")
    return replace(config, channels=channels, classes=len(images.classes), image=height)


def start(settings: Settings, place: RunLocation) -> Start:
    found = data(place.data, settings)
    model = build_from_config(fitting(settings.model, found.train), seed=settings.seed)
    task = Classify(
        found.train,
        found.validation,
        settings.augmentation,
        settings.smoothing,
        settings.plan.batch_size,
        settings.seed,
    )
    return Start(model, (Phase("training", task, settings.plan),))


def run(settings: Settings, place: RunLocation) -> RecipeResult:
    begun = start(settings, place)
    seconds = begun.trained(place)
    return RecipeResult({**judged(settings, begun.model, None, place), "seconds": seconds}, begun.model)


def judged(settings: Settings, model: Model, tokenizer: None, place: RunLocation) -> dict[str, float]:
    """The shares of images whose class is told right: of those never used, and of those for validation."""
    found = data(place.data, settings)
    figures = {"test accuracy": accuracy(model, found.test)}
    if len(found.validation):
        figures["validation accuracy"] = accuracy(model, found.validation)
    return figures
