"""Image augmentation of a batch: shift, flip, TrivialAugment, random erasing, mixup and cutmix.

It runs on the device of the batch. Pixels are from 0 to 1. Random numbers are passed as tensors, so the augmentation of
an image does not depend on how a batch is divided among processes.
"""

from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_range

OPERATIONS = (
    "identity", "rotate", "shear_x", "shear_y", "translate_x", "translate_y",
    "brightness", "color", "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
GEOMETRY, BLENDS = OPERATIONS[1:6], OPERATIONS[6:10]
# the operations at full magnitude; a negative magnitude is the opposite direction
ROTATION = pi / 6
SHEAR = 0.3
TRANSLATION = 0.3  # share of the side of the image
BLEND = 0.9
BITS = 4  # removed from the eight of a pixel
ERASED = (0.15, 0.55)  # minimum and maximum side of an erased square, as a share of the image
ERASED_VALUE = 0.5


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Settings of image augmentation in training: shift, flip, random operations, erasing, mixup and cutmix.

    shift       maximum number of pixels by which an image is shifted, vertically and horizontally
    flip        fraction of images that are flipped horizontally
    operations  number of random operations, such as rotation or contrast, for each image; the value 1 gives
                TrivialAugment (Müller and Hutter 2021, arXiv:2103.10158)
    magnitude   maximum magnitude of the operations, from 0 to 1; 1 allows rotations of up to 30 degrees, for example
    erase       fraction of images in which a random square becomes grey (random erasing; Zhong et al. 2017,
                arXiv:1708.04896)
    mixup       fraction of images that are blended with another image (Zhang et al. 2017, arXiv:1710.09412)
    cutmix      fraction of images with a pasted square of another image (Yun et al. 2019, arXiv:1905.04899)
    """

    shift: int = 4
    flip: float = 0.5
    operations: int = 1
    magnitude: float = 1.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_integer("Augmentation(shift)", self.shift, 0, "pixels")
        check_integer("Augmentation(operations)", self.operations, 0)
        for name in ("flip", "magnitude", "erase", "mixup", "cutmix"):
            check_range(f"Augmentation({name})", getattr(self, name), 0, 1)
        check_range("mixup + cutmix, which are shares of images,", self.mixing, 0, 1)

    @property
    def mixing(self) -> float:
        """The fraction of images with mixup or cutmix."""
        return self.mixup + self.cutmix

    @property
    def draws(self) -> int:
        """The number of random numbers that the augmentation of one image uses."""
        return 11 + 2 * self.operations

    def __call__(
        self, x: Float[Tensor, "b channels y x"], draws: Float[Tensor, "b draws"]
    ) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
        """Augment a batch of images. Returns the images, and the weight of each image's own label.

        Without mixup and cutmix, the weight is 1. With them, the label of the partner image, which was blended or
        pasted in, has 1 minus this weight.

        x      images with values from 0 to 1
        draws  uniform random numbers from 0 to 1; `self.draws` of them for each image
        """
        down, across, mirror, whether, row, column, length, how, share, top, left, *drawn = draws.unbind(1)
        if self.shift >= min(x.shape[2:]):
            raise ConfigError(
                f"Augmentation(shift={self.shift}) is too large for images of {x.shape[2]} x {x.shape[3]}"
            )
        if self.shift:
            x = shift_images(x, _random_pixels(down, self.shift), _random_pixels(across, self.shift))
        if self.flip:
            x = flip_images(x, mirror < self.flip)
        for which, magnitude in zip(drawn[::2], drawn[1::2], strict=True):
            x = apply_operation(x, (which * len(OPERATIONS)).long(), (2 * magnitude - 1) * self.magnitude)
        if self.erase:
            gone = square_mask(x, row, column, ERASED[0] + (ERASED[1] - ERASED[0]) * length)
            x = x.masked_fill(gone & _per_image(whether < self.erase), ERASED_VALUE)
        if not self.mixing:
            return x, torch.ones_like(share)
        # the area of the square is 1 - share, unless it reaches beyond the edge
        pasted = square_mask(x, top, left, (1 - share).sqrt()) & _per_image((how >= self.mixup) & (how < self.mixing))
        blended, own = mixup(x, partner_images(x), torch.where(how < self.mixup, share, 1.0))
        both, kept = cutmix(blended, partner_images(x), pasted)
        return both, own * kept


def shift_images(
    x: Float[Tensor, "b channels y x"], down: Int[Tensor, "b"], across: Int[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """Shift each image by whole pixels, with reflection padding.

    down, across  pixels to shift each image down and to the right; negative numbers shift up and to the left
    """
    rows = _reflect_index(torch.arange(x.shape[2], device=x.device) - down[:, None], x.shape[2])
    columns = _reflect_index(torch.arange(x.shape[3], device=x.device) - across[:, None], x.shape[3])
    each = torch.arange(len(x), device=x.device)[:, None, None]
    return x[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flip_images(x: Float[Tensor, "b channels y x"], which: Bool[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Flip images horizontally: those for which `which` is True."""
    return torch.where(_per_image(which), x.flip(-1), x)


def affine(x: Float[Tensor, "b channels y x"], matrix: Float[Tensor, "b 2 3"]) -> Float[Tensor, "b channels y x"]:
    """Apply an affine transformation to each image.

    The output pixel at (x, y) is sampled from the input at matrix @ (x, y, 1). Coordinates are from -1 to 1.
    Sampling is bilinear with reflection padding.
    """
    # affine_grid would multiply matrices, in half precision under autocast
    by_across, by_down, more = matrix[:, None, None].unbind(-1)
    across, down = _pixel_centers(x.shape[3], x)[:, None], _pixel_centers(x.shape[2], x)[:, None, None]
    sources = by_across * across + by_down * down + more
    taken: Tensor = functional.grid_sample(x, sources, padding_mode="reflection", align_corners=False)
    return taken


def affine_matrix(
    angle: Float[Tensor, "b"],
    shear_x: Float[Tensor, "b"],
    shear_y: Float[Tensor, "b"],
    translate_x: Float[Tensor, "b"],
    translate_y: Float[Tensor, "b"],
) -> Float[Tensor, "b 2 3"]:
    """Return matrices for `affine` that rotate, shear and translate square images.

    angle                     clockwise rotation in radians
    shear_x, shear_y          shear factors
    translate_x, translate_y  shifts as fractions of the side of the image
    """
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([cos, sin - shear_x, -2 * translate_x], -1)
    second = torch.stack([-sin - shear_y, cos, -2 * translate_y], -1)
    return torch.stack([first, second], 1)


def blend(
    x: Float[Tensor, "b channels y x"], base: Float[Tensor, "b #channels #y #x"], factor: Float[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """Interpolate between a base image and an image: factor 0 gives the base, 1 the image; above 1 extrapolates.

    The result is clamped to [0, 1].
    """
    return (base + _per_image(factor) * (x - base)).clamp(0, 1)


def grey(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b 1 y x"]:
    """Convert images to greyscale: the luminance of RGB images, otherwise the mean of the channels."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def smooth(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Smooth images: each pixel becomes the weighted mean of itself (weight 5) and its eight neighbours (1 each)."""
    around = functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    return (9 * around + 4 * x) / 13


def posterize(x: Float[Tensor, "b channels y x"], bits: Int[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Reduce each pixel from eight bits to its `bits` most significant ones."""
    step = _per_image(2 ** (8 - bits))
    return (x * 255).round().div(step).floor() * step / 255


def solarize(x: Float[Tensor, "b channels y x"], above: Float[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Invert the pixels (x becomes 1 - x) that exceed the threshold `above` of their image."""
    return torch.where(x > _per_image(above), 1 - x, x)


def autocontrast(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Stretch the contrast of each channel to the range 0 to 1; a constant channel is unchanged."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def equalize(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Equalise the histogram of each channel; a constant channel is unchanged."""
    values = (x * 255).round().flatten(2).contiguous()
    ordered = values.sort(-1).values
    upto = torch.searchsorted(ordered, values, right=True)  # number of pixels that are as dark or darker
    lowest = torch.searchsorted(ordered, ordered[..., :1].contiguous(), right=True)
    shares = (upto - lowest) / (values.shape[-1] - lowest).clamp_min(1)
    return torch.where(ordered[..., -1:] > ordered[..., :1], shares, x.flatten(2)).reshape(x.shape)


def apply_operation(
    x: Float[Tensor, "b channels y x"], which: Int[Tensor, "b"], magnitude: Float[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """Apply an operation such as a rotation to each image, with a magnitude from -1 to 1.

    `which` is the index of each image's operation in OPERATIONS. For an operation with a direction, such as a rotation,
    a negative magnitude is the opposite direction.

    All operations are computed for all images, and one result is selected for each image. So the CPU need not wait for
    the GPU to know which operations are needed.
    """
    chosen = {name: which == number for number, name in enumerate(OPERATIONS)}

    def only(name: str, full: float) -> Tensor:
        return magnitude * full * chosen[name]

    matrix = affine_matrix(
        only("rotate", ROTATION), only("shear_x", SHEAR), only("shear_y", SHEAR), only("translate_x", TRANSLATION),
        only("translate_y", TRANSLATION),
    )  # fmt: skip
    shade = grey(x)
    base = torch.where(_per_image(chosen["color"]), shade, 0.0)
    base = torch.where(_per_image(chosen["contrast"]), shade.mean((2, 3), keepdim=True), base)
    base = torch.where(_per_image(chosen["sharpness"]), smooth(x), base)
    results = {
        GEOMETRY: affine(x, matrix),
        BLENDS: blend(x, base, 1 + BLEND * magnitude),
        ("posterize",): posterize(x, 8 - (BITS * magnitude.abs()).round().long()),
        ("solarize",): solarize(x, 1 - magnitude.abs()),
        ("autocontrast",): autocontrast(x),
        ("equalize",): equalize(x),
    }
    for names, result in results.items():
        x = torch.where(_per_image(torch.stack([chosen[name] for name in names]).any(0)), result, x)
    return x


def square_mask(
    x: Float[Tensor, "b channels y x"], row: Float[Tensor, "b"], column: Float[Tensor, "b"], side: Float[Tensor, "b"]
) -> Bool[Tensor, "b 1 y x"]:
    """Return a Boolean mask that is True inside a square of each image. Its shape is (b, 1, y, x).

    row, column  center of the square, as fractions of the height and width of the image
    side         side of the square, as a fraction of the sides of the image
    """
    rows, columns = (_pixel_centers(size, x) / 2 + 0.5 for size in x.shape[2:])
    return ((rows[:, None] - _per_image(row)).abs() < _per_image(side) / 2) & (
        (columns - _per_image(column)).abs() < _per_image(side) / 2
    )


def partner_images(x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Return the partner of each image for mixup and cutmix: images 0 and 1, 2 and 3, ... are swapped.

    Partners are in the same micro-batch. Batches are in random order, so the partner is random too.
    """
    if len(x) % 2:
        raise ShapeError(f"mixup and cutmix need pairs of images, but there are {len(x)}; use an even number")
    return x.reshape(-1, 2, *x.shape[1:]).flip(1).reshape(x.shape)


def mixup(
    x: Float[Tensor, "b channels y x"], other: Float[Tensor, "b channels y x"], share: Float[Tensor, "b"]
) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
    """Blend each image with another image (mixup). Returns the images, and the weight of each image's own label.

    share  weight of each image; the other image has the weight 1 - share
    """
    return torch.lerp(other, x, _per_image(share)), share


def cutmix(
    x: Float[Tensor, "b channels y x"], other: Float[Tensor, "b channels y x"], inside: Bool[Tensor, "b 1 y x"]
) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
    """Paste pixels of another image into each image (cutmix). Returns the images, and the kept fraction of each.

    inside  True at the pixels that are pasted
    """
    return torch.where(inside, other, x), 1 - inside.to(x.dtype).mean((1, 2, 3))


def mix_labels(labels: Int[Tensor, "b"], share: Float[Tensor, "b"], classes: int) -> Float[Tensor, "b classes"]:
    """Return one-hot labels mixed with the labels of the partner images.

    share  weight of each image's own label; the weight of the partner's label is 1 - share
    """
    own = functional.one_hot(labels, classes).to(share.dtype)
    return torch.lerp(partner_images(own), own, share[:, None])


def _per_image(x: Tensor) -> Tensor:
    """Reshape a tensor with one number per image, so that it broadcasts over channels and pixels."""
    return x[:, None, None, None]


def _pixel_centers(size: int, like: Tensor) -> Float[Tensor, "size"]:
    """Return the coordinates of the `size` pixel centres of one side; the edges of the image are at -1 and 1."""
    return (2 * torch.arange(size, dtype=like.dtype, device=like.device) + 1) / size - 1


def _random_pixels(drawn: Float[Tensor, "b"], most: int) -> Int[Tensor, "b"]:
    """Convert uniform random numbers from 0 to 1 to integers between -most and most."""
    return (drawn * (2 * most + 1)).long() - most


def _reflect_index(index: Int[Tensor, "b n"], size: int) -> Int[Tensor, "b n"]:
    """Map indices outside 0 to size - 1 back inside by reflection; the pixel at the edge is not repeated."""
    return (size - 1) - ((size - 1) - index.abs()).abs()
