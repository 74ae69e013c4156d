"""Changes of images that leave what they show: functions on a whole batch, on the device it lies on.

Images go from 0 to 1. What is drawn at random comes in as tensors, a number for each image, so that a change is a
function of what it is given, and an image is changed alike in the whole batch and in a share of it.
"""

from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_number

OPERATIONS = (
    "nothing", "turn", "shear across", "shear down", "move across", "move down",
    "brightness", "colour", "contrast", "sharpness", "posterise", "solarise", "stretch", "equalise",
)  # fmt: skip
GEOMETRY, BLENDS = OPERATIONS[1:6], OPERATIONS[6:10]
# what full strength is; with strength -1 it is as much the other way, where there is one
TURN = pi / 6
SHEAR = 0.3
MOVE = 0.3  # of the side
BLEND = 0.9
BITS = 4  # taken from the eight of a pixel
ERASED = (0.15, 0.55)  # the shortest and the longest side of a square that is erased, as a share of the image's
MIDDLE = 0.5  # what is put in its place


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How images are changed in training.

    shift       pixels by which an image is moved at most, up or down and to the sides
    flip        share of images that are mirrored, left to right
    operations  how many of `OPERATIONS` are done to each image, drawn one after the other. One is that of Müller and
                Hutter 2021, arXiv:2103.10158
    strength    share of their full strength that operations have at most
    erase       share of images of which a square is erased (Zhong et al. 2017, arXiv:1708.04896)
    mixup       share of images that are blended with another one (Zhang et al. 2017, arXiv:1710.09412)
    cutmix      share of images into which a part of another one is pasted (Yun et al. 2019, arXiv:1905.04899)
    """

    shift: int = 4
    flip: float = 0.5
    operations: int = 1
    strength: float = 1.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_integer("Augmentation(shift)", self.shift, 0, "pixels")
        check_integer("Augmentation(operations)", self.operations, 0)
        for name in ("flip", "strength", "erase", "mixup", "cutmix"):
            if not 0 <= check_number(f"Augmentation({name})", getattr(self, name)) <= 1:
                raise ConfigError(f"Augmentation({name}) is a share, from 0 to 1, not {getattr(self, name)}")
        if self.mixing > 1:
            raise ConfigError(
                "an image is blended, pasted into or left alone, so mixup + cutmix is at most 1, not "
                f"{self.mixup} + {self.cutmix}"
            )

    @property
    def mixing(self) -> float:
        """The share of images that show something of another one."""
        return self.mixup + self.cutmix

    @property
    def draws(self) -> int:
        """How many numbers between 0 and 1 the changes of one image take."""
        return 11 + 2 * self.operations

    def __call__(
        self, x: Float[Tensor, "b channels y x"], draws: Float[Tensor, "b draws"]
    ) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
        """Images changed, and how much of each is its own; the rest is of the one `beside` it."""
        down, across, mirror, whether, row, column, length, how, share, top, left, *drawn = draws.unbind(1)
        if self.shift >= min(x.shape[2:]):
            raise ConfigError(
                f"Augmentation(shift={self.shift}) moves images of {x.shape[2]} x {x.shape[3]} out of sight"
            )
        if self.shift:
            x = shifted(x, _pixels(down, self.shift), _pixels(across, self.shift))
        if self.flip:
            x = flipped(x, mirror < self.flip)
        for which, strength in zip(drawn[::2], drawn[1::2], strict=True):
            x = operated(x, (which * len(OPERATIONS)).long(), (2 * strength - 1) * self.strength)
        if self.erase:
            gone = square(x, row, column, ERASED[0] + (ERASED[1] - ERASED[0]) * length)
            x = x.masked_fill(gone & _wide(whether < self.erase), MIDDLE)
        if not self.mixing:
            return x, torch.ones_like(share)
        # the square has the area that the share leaves, where it does not reach beyond the edge
        pasted = square(x, top, left, (1 - share).sqrt()) & _wide((how >= self.mixup) & (how < self.mixing))
        blended, own = mixup(x, beside(x), torch.where(how < self.mixup, share, 1.0))
        both, kept = cutmix(blended, beside(x), pasted)
        return both, own * kept


def shifted(
    x: Float[Tensor, "b channels y x"], down: Int[Tensor, "b"], across: Int[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """Images moved by whole pixels: crops of what they are with their mirror images around them."""
    rows = _mirrored(torch.arange(x.shape[2], device=x.device) - down[:, None], x.shape[2])
    columns = _mirrored(torch.arange(x.shape[3], device=x.device) - across[:, None], x.shape[3])
    each = torch.arange(len(x), device=x.device)[:, None, None]
    return x[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flipped(x: Float[Tensor, "b channels y x"], which: Bool[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Images of which some are mirrored, left to right."""
    return torch.where(_wide(which), x.flip(-1), x)


def affine(x: Float[Tensor, "b channels y x"], matrix: Float[Tensor, "b 2 3"]) -> Float[Tensor, "b channels y x"]:
    """Images whose pixels are taken from where a matrix sends their places, (across, down, 1).

    Positions go from -1 at one edge to 1 at the other. Between pixels it interpolates, beyond the edge it mirrors.
    """
    # written out: affine_grid multiplies matrices, which autocast would do in half precision
    by_across, by_down, more = matrix[:, None, None].unbind(-1)
    across, down = _places(x.shape[3], x)[:, None], _places(x.shape[2], x)[:, None, None]
    sources = by_across * across + by_down * down + more
    taken: Tensor = functional.grid_sample(x, sources, padding_mode="reflection", align_corners=False)
    return taken


def placing(
    turn: Float[Tensor, "b"],
    shear_across: Float[Tensor, "b"],
    shear_down: Float[Tensor, "b"],
    across: Float[Tensor, "b"],
    down: Float[Tensor, "b"],
) -> Float[Tensor, "b 2 3"]:
    """The matrices for `affine` that turn square images clockwise, by radians, shear and move them, by shares of 1."""
    cos, sin = turn.cos(), turn.sin()
    first = torch.stack([cos, sin - shear_across, -2 * across], -1)
    second = torch.stack([-sin - shear_down, cos, -2 * down], -1)
    return torch.stack([first, second], 1)


def blend(
    x: Float[Tensor, "b channels y x"], base: Float[Tensor, "b #channels #y #x"], factor: Float[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """What differs from a base, times a factor: 0 leaves the base, 1 the image, and 2 exaggerates."""
    return (base + _wide(factor) * (x - base)).clamp(0, 1)


def grey(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b 1 y x"]:
    """How bright each pixel is to the eye: of red, green and blue, else of channels alike."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def smooth(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Each pixel with its eight neighbours, itself five times; at the edge, with those there are."""
    around = functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    return (9 * around + 4 * x) / 13


def posterise(x: Float[Tensor, "b channels y x"], bits: Int[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Images of which so many of the eight bits of a pixel are left."""
    step = _wide(2 ** (8 - bits))
    return (x * 255).round().div(step).floor() * step / 255


def solarise(x: Float[Tensor, "b channels y x"], above: Float[Tensor, "b"]) -> Float[Tensor, "b channels y x"]:
    """Images in which what is brighter than a threshold is inverted."""
    return torch.where(x > _wide(above), 1 - x, x)


def stretch(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Images in which each channel goes from 0 to 1; a channel of one value stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def equalise(x: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b channels y x"]:
    """Images in which each channel has all values from 0 to 1 about as often; a channel of one value stays."""
    values = (x * 255).round().flatten(2).contiguous()
    ordered = values.sort(-1).values
    upto = torch.searchsorted(ordered, values, right=True)  # pixels that are as dark or darker
    lowest = torch.searchsorted(ordered, ordered[..., :1].contiguous(), right=True)
    shares = (upto - lowest) / (values.shape[-1] - lowest).clamp_min(1)
    return torch.where(ordered[..., -1:] > ordered[..., :1], shares, x.flatten(2)).reshape(x.shape)


def operated(
    x: Float[Tensor, "b channels y x"], which: Int[Tensor, "b"], strength: Float[Tensor, "b"]
) -> Float[Tensor, "b channels y x"]:
    """Images with one of `OPERATIONS` done to each, by its number, with a strength from -1 to 1.

    All are done to all images and one is taken: that needs no look at the numbers, for which a GPU would be waited.
    """
    chosen = {name: which == number for number, name in enumerate(OPERATIONS)}

    def only(name: str, full: float) -> Tensor:
        return strength * full * chosen[name]

    matrix = placing(
        only("turn", TURN), only("shear across", SHEAR), only("shear down", SHEAR), only("move across", MOVE),
        only("move down", MOVE),
    )  # fmt: skip
    shade = grey(x)
    base = torch.where(_wide(chosen["colour"]), shade, 0.0)
    base = torch.where(_wide(chosen["contrast"]), shade.mean((2, 3), keepdim=True), base)
    base = torch.where(_wide(chosen["sharpness"]), smooth(x), base)
    results = {
        GEOMETRY: affine(x, matrix),
        BLENDS: blend(x, base, 1 + BLEND * strength),
        ("posterise",): posterise(x, 8 - (BITS * strength.abs()).round().long()),
        ("solarise",): solarise(x, 1 - strength.abs()),
        ("stretch",): stretch(x),
        ("equalise",): equalise(x),
    }
    for names, result in results.items():
        x = torch.where(_wide(torch.stack([chosen[name] for name in names]).any(0)), result, x)
    return x


def square(
    x: Float[Tensor, "b channels y x"], row: Float[Tensor, "b"], column: Float[Tensor, "b"], side: Float[Tensor, "b"]
) -> Bool[Tensor, "b 1 y x"]:
    """Where each image has a square: its middle and its side as shares of the image's sides."""
    rows, columns = (_places(size, x) / 2 + 0.5 for size in x.shape[2:])
    return ((rows[:, None] - _wide(row)).abs() < _wide(side) / 2) & ((columns - _wide(column)).abs() < _wide(side) / 2)


def beside(x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """For each image of a batch another one: the first and the second change places, the third and the fourth, ...

    Both are in one share of a batch, which is in random order anyway.
    """
    if len(x) % 2:
        raise ShapeError(f"images are mixed in pairs, but there are {len(x)} of them; use an even number")
    return x.reshape(-1, 2, *x.shape[1:]).flip(1).reshape(x.shape)


def mixup(
    x: Float[Tensor, "b channels y x"], other: Float[Tensor, "b channels y x"], share: Float[Tensor, "b"]
) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
    """Images blended with others, and the shares that are their own, which were given."""
    return torch.lerp(other, x, _wide(share)), share


def cutmix(
    x: Float[Tensor, "b channels y x"], other: Float[Tensor, "b channels y x"], inside: Bool[Tensor, "b 1 y x"]
) -> tuple[Float[Tensor, "b channels y x"], Float[Tensor, "b"]]:
    """Images with others pasted inside, and the shares of the area that are their own."""
    return torch.where(inside, other, x), 1 - inside.to(x.dtype).mean((1, 2, 3))


def mixed_labels(labels: Int[Tensor, "b"], share: Float[Tensor, "b"], classes: int) -> Float[Tensor, "b classes"]:
    """The labels of images of which a share is their own and the rest is of the one beside."""
    own = functional.one_hot(labels, classes).to(share.dtype)
    return torch.lerp(beside(own), own, share[:, None])


def _wide(x: Tensor) -> Tensor:
    """A number for each image, as it goes with images."""
    return x[:, None, None, None]


def _places(size: int, like: Tensor) -> Float[Tensor, "size"]:
    """The middles of pixels, where the edges are -1 and 1."""
    return (2 * torch.arange(size, dtype=like.dtype, device=like.device) + 1) / size - 1


def _pixels(drawn: Float[Tensor, "b"], most: int) -> Int[Tensor, "b"]:
    """Numbers from 0 to 1 as whole ones from -most to most."""
    return (drawn * (2 * most + 1)).long() - most


def _mirrored(index: Int[Tensor, "b n"], size: int) -> Int[Tensor, "b n"]:
    """Indices beyond the edge by less than the size, led back inside; the pixel at the edge is not repeated."""
    return (size - 1) - ((size - 1) - index.abs()).abs()
