"""Image classification: a Vision Transformer on handwritten digits or on CIFAR-100.

Expected: built-in 98 % of test digits; 80 % of 5,000 held-out images of CIFAR-100.
Time: built-in one minute of one core; CIFAR-100 17 minutes on one H200 shared with five other runs.
Memory: built-in 1 GB; CIFAR-100 6.6 GiB of GPU memory.
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
from regard.base.validation import check_integer, check_range
from regard.data.digits import digits
from regard.data.image_folder import resize_images
from regard.data.image_formats import read_images
from regard.data.images import Images
from regard.data.sampler import ShuffledOrder, sampler_generator
from regard.data.splits import random_split
from regard.models.cnn import CNNConfig
from regard.models.davit import DaViTConfig
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.vit import ViTConfig
from regard.recipes.image_augment import ImageAugmentation, mix_labels
from regard.recipes.recipe import Phase, RunLocation, Splits, TrainingSetup
from regard.train.averaging import ExponentialAverage
from regard.train.objectives import cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine
from regard.train.task import Loss

EVAL_BATCH = 1000  # images
SPLIT_SEED = 1  # the same split for every seed, so that runs with different seeds are comparable
CPU_SETTINGS = {
    "plan.compile": False, "plan.precision": "float32", "plan.batch_size": 128, "plan.steps": 3000,
    "plan.schedule.warmup": 150, "plan.evaluate_every": 500, "plan.save_every": 500, "model.width": 96,
    "model.depth": 4, "model.ff_width": 192,
}  # fmt: skip
FROM_DATA = ("image", "channels", "classes")
NEXT_COMMAND = "regard look {folder}/model IMAGE.png"
# the scaling of `normalize_pixels`
PIXEL_SCALING = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
NetworkConfig = ViTConfig | DaViTConfig | CNNConfig
ARCHITECTURE_NAMES: Mapping[type[NetworkConfig], str] = {ViTConfig: "vit", DaViTConfig: "davit", CNNConfig: "cnn"}


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """Settings of the vision recipe.

    architecture     the network to train: vit, davit or cnn. If `model` is of another kind, its configuration in
                     `alternatives` replaces `model`
    model            configuration of the network; image size, channels and classes are set by the data
    alternatives     configurations of the other architectures
    label_smoothing  fraction of each label that is spread over all classes
    validation       number of training images held out for validation; 0 trains on all of them
    test             number of images for test, the same images for every seed
    size             height and width to resize images to; None keeps the size of the images, which must be the same
                     for all images
    """

    architecture: str = "vit"
    model: NetworkConfig
    alternatives: tuple[NetworkConfig, ...] = ()
    plan: TrainingPlan
    augmentation: ImageAugmentation
    label_smoothing: float = 0.1
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
            raise ConfigError("patience and load_best_at_end need validation images, but validation=0")
        check_range("label_smoothing", self.label_smoothing, 0, 1, below=True)
        ready = {ARCHITECTURE_NAMES[type(each)]: each for each in (*self.alternatives, self.model)}
        if self.architecture not in ready:
            raise ConfigError(f"architecture is one of {', '.join(sorted(ready))}, not {self.architecture!r}")
        object.__setattr__(self, "model", ready.pop(self.architecture))
        object.__setattr__(self, "alternatives", tuple(ready[name] for name in sorted(ready)))


def built_in() -> VisionSettings:
    """Return the settings for the built-in handwritten digits.

    The optimizer is Muon, because Adam is slow to grow the small initial weights of a ViT.
    """
    plan = TrainingPlan(
        steps=1000, batch_size=64, optimizer=Muon(lr=0.03, weight_decay=0.1, adamw=AdamW(lr=0.01, weight_decay=0.05)),
        schedule=Cosine(warmup=50), averaging=ExponentialAverage(decay=0.99), evaluate_every=200, save_every=200,
    )  # fmt: skip
    return VisionSettings(
        model=ViTConfig(
            image=8, patch=2, channels=1, classes=10, width=64, depth=4, heads=4, ff_width=128, pool="mean"
        ),
        alternatives=(
            DaViTConfig(channels=1, classes=10, widths=(48, 96), depths=(1, 1), heads=(3, 6), window=2),
            CNNConfig(widths=(16, 32, 64)),
        ),
        plan=plan,
        augmentation=ImageAugmentation(shift=0, flip=0.0, operations=2, magnitude=0.5, cutmix=0.3),
        validation=150,
        test=360,
    )


def real() -> VisionSettings:
    """Return the settings for CIFAR-100: a plain ViT with many narrow blocks.

    This shape suits models of 3 to 6 million parameters.
    """
    plan = TrainingPlan(
        steps=20_000, batch_size=1024,
        optimizer=Muon(lr=0.01, weight_decay=0.2, adamw=AdamW(lr=2e-3, weight_decay=0.05)),
        schedule=Cosine(warmup=1000), averaging=ExponentialAverage(decay=0.999), precision="bfloat16", compile=True,
        evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    return VisionSettings(
        model=ViTConfig(
            image=32, patch=4, classes=100, width=256, depth=9, heads=4, ff_width=768, pool="mean", drop_path=0.1
        ),
        alternatives=(
            DaViTConfig(
                classes=100, widths=(96, 192, 384), depths=(1, 1, 1), heads=(3, 6, 12), window=4, drop_path=0.1
            ),
            CNNConfig(channels=3, classes=100, widths=(128, 256, 512, 768)),
        ),
        plan=plan,
        augmentation=ImageAugmentation(shift=4, flip=0.5, operations=1, erase=0.1, mixup=0.3, cutmix=0.5),
        validation=1000,
        test=5000,
    )


def load_data(folder: Path | None, settings: VisionSettings) -> Splits[Images]:
    """Read the images of a folder, or the built-in digits if the folder is None, and split them."""
    size = None if settings.size is None else (settings.size, settings.size)
    found = digits() if folder is None else read_images(folder, size=size)
    found = found if size is None else resize_images(found, size)
    held = settings.test + settings.validation
    if held >= len(found):
        raise ConfigError(
            f"test={settings.test} and validation={settings.validation} leave none of {len(found)} images for training"
        )
    # the test images first, so that they do not depend on the size of the validation set
    rest, test = random_split(len(found), [settings.test], SPLIT_SEED)
    train, validation = random_split(len(rest), [settings.validation], SPLIT_SEED)
    return Splits(*(found.select(records) for records in (rest[train], rest[validation], test)))


class ImageBatch(NamedTuple):
    """A micro-batch: the indices of its training images (`records`), and random numbers for their augmentation."""

    records: Int64[Tensor, "b"]
    draws: Float[Tensor, "b draws"]


@dataclass(frozen=True, eq=False)
class ImageClassificationTask:
    """Training task: classify images. All images are on the model's device, so that a batch contains only indices."""

    train: Images
    validation: Images
    settings: VisionSettings
    _on_device: dict[torch.device, Images] = field(default_factory=dict, init=False, repr=False)

    def batch(self, step: int, part: int, of: int) -> ImageBatch:
        """Return micro-batch `part`, counted from 0, of a training step that is split into `of` micro-batches."""
        records, settings = self._order.at(step, part, of), self.settings
        if settings.augmentation.mixing and len(records) % 2:
            raise ConfigError(
                f"mixup and cutmix need pairs of images, but a batch of {settings.plan.batch_size} in {of} shares has "
                f"{len(records)} in each; use an even number, or mixup=0 and cutmix=0"
            )
        # drawn for the whole batch, so that the examples do not depend on the number of processes
        generator = sampler_generator(settings.seed, step, "augmentation")
        drawn = torch.rand(settings.plan.batch_size, settings.augmentation.draws, generator=generator)
        return ImageBatch(records, drawn[part * len(records) : (part + 1) * len(records)])

    def loss(self, model: nn.Module, batch: ImageBatch) -> Loss:
        """Augment the images and return the cross-entropy of their classes."""
        images, smoothing = self._images_on(batch.records.device), self.settings.label_smoothing
        labels = images.labels[batch.records]
        x, own = self.settings.augmentation(images.pixels[batch.records] / 255, batch.draws)
        logits = model(normalize_pixels(x)).float()
        if not self.settings.augmentation.mixing:
            return cross_entropy(logits, labels, smoothing=smoothing)
        targets = mix_labels(labels, own, len(images.classes))
        total = functional.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
        return Loss(total, len(labels))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the accuracy on the validation images; {} if there are none."""
        return {"accuracy": accuracy(model, self.validation)} if len(self.validation) else {}

    @cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self.train), self.settings.plan.batch_size, self.settings.seed)

    def _images_on(self, device: torch.device) -> Images:
        if device not in self._on_device:
            pixels, labels = self.train.pixels.to(device), self.train.labels.to(device)
            self._on_device[device] = Images(pixels, labels, self.train.classes)
        return self._on_device[device]


def normalize_pixels(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Normalise pixels from [0, 1] to [-2, 2], so that their standard deviation is about 1."""
    return 4 * x - 2


def predict_classes(model: nn.Module, pixels: UInt8[Tensor, "n channels y x"]) -> Int[Tensor, "n"]:
    """Return the most likely class of each image."""
    device = next(model.parameters()).device
    batches = (normalize_pixels(some.to(device) / 255) for some in pixels.split(EVAL_BATCH))
    return torch.cat([model(some).argmax(-1).cpu() for some in batches])


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Return the accuracy: the fraction of images that are classified correctly."""
    return float((predict_classes(model, images.pixels) == images.labels).double().mean())


def adapt_config(config: NetworkConfig, images: Images) -> NetworkConfig:
    """Return the configuration with the image size, channels and number of classes of these images."""
    channels, height, width = images.pixels.shape[1:]
    if not isinstance(config, ViTConfig):
        return replace(config, channels=channels, classes=len(images.classes))
    if height != width:
        raise ConfigError(f"vit needs square images, not {height} x {width}; try architecture=davit")
    return replace(config, channels=channels, classes=len(images.classes), image=height)


def prepare(settings: VisionSettings, location: RunLocation) -> TrainingSetup:
    """Build the untrained model and its training task."""
    splits = load_data(location.data, settings)
    model = build_from_config(adapt_config(settings.model, splits.train), seed=settings.seed)
    task = ImageClassificationTask(splits.train, splits.validation, settings)
    return TrainingSetup(model, (Phase("training", task, settings.plan),))


def evaluate(settings: VisionSettings, model: Model, tokenizer: None, location: RunLocation) -> dict[str, float]:
    """Return the accuracy on the test images and, if there are any, on the validation images."""
    splits = load_data(location.data, settings)
    metrics = {"test accuracy": accuracy(model, splits.test)}
    if len(splits.validation):
        metrics["validation accuracy"] = accuracy(model, splits.validation)
    return metrics
