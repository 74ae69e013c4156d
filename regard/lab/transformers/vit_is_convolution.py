"""Is there a convolution in the Vision Transformer?

Claim: Yes, in the patch embedding: cutting an image into P x P patches, flattening each and projecting all with one
    matrix is a convolution whose kernel size and stride are P, with the same weights.
Measures: A real patch embedding against patches that are cut out, flattened and multiplied, and against torch's
    convolution, on whole numbers, where sums are exact, and on random numbers. The change of the output if the image is
    shifted by one patch or by one pixel. The parameters of both.
Finding: On whole numbers the patch embedding differs from a matrix on flattened patches by {{ n["error of the matrix on
    whole numbers"]|short }} and from a convolution of kernel and stride {{ n.patch }} by {{ n["error of the convolution
    on whole numbers"]|short }}, on random numbers by at most {{ rounding|at_most }}; each has {{ n.parameters|comma }}
    parameters. Shifting the image by a patch shifts the outputs, up to {{ n["change if shifted by a patch"]|at_most }};
    shifting it by a pixel changes them by {{ n["change if shifted by a pixel"]|fixed(1) }}.
Budget: 1 second
Source: 000 1.5a, 002 1.5a
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.drawing import Figure, make_figure, plot_bars, plot_lines
from regard.lab.measure import count_parameters, largest_difference
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.embeddings import PatchEmbedding

MATHS = r"y_{rc} = b + \sum_{k u v} W_{k u v} x_{k, P r + u, P c + v}"

FEATURES = 12  # number of output features of one patch to draw


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the patch embedding and of the image.

    width     width of the embedding
    patch     side of a patch in pixels; at least 2, so that an image can shift by less than a patch
    channels  number of channels of the image
    rows      number of rows of patches
    columns   number of columns of patches; at least 2, so that an image can shift by one patch
    """

    width: int = 48
    patch: int = 16
    channels: int = 3
    rows: int = 3
    columns: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("patch", self.patch, 2, "pixels, so that an image can shift by less than a patch")
        check_integer("columns", self.columns, 2, "patches in a row, so that an image can shift by one")


SMOKE = Setup(width=19, patch=7)


def run(setup: Setup, patches: Callable[[int, int, int], Any] = PatchEmbedding) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    patches  builds the patch embedding: patches(width, patch, channels), with its weights in `projection`
    """
    draws = make_generator(setup.seed)
    made = patches(setup.width, setup.patch, setup.channels).double()
    shape = (2, setup.channels, setup.patch * setup.rows, setup.patch * setup.columns)
    numbers: Numbers = {"patch": setup.patch, "parameters": count_parameters(made)}
    with torch.no_grad():
        for name in ("whole numbers", "random numbers"):
            image = torch.randn(shape, generator=draws, dtype=torch.float64)
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64))
            if name == "whole numbers":
                image = (8 * image).round()
                for parameter in made.parameters():
                    parameter.copy_((8 * parameter).round())
            weight, bias = made.projection.weight, made.projection.bias
            matrix = weight.flatten(1)
            out = made(image)
            cut = functional.linear(_cut_patches(image, setup.patch), matrix, bias)
            convolved = functional.conv2d(image, weight, bias, stride=setup.patch).permute(0, 2, 3, 1)
            ways = {"patch embedding": out, "matrix on flattened patches": cut, "convolution": convolved}
            numbers["features of a patch"] = {way: each[0, 0, 0, :FEATURES].tolist() for way, each in ways.items()}
            numbers[f"error of the matrix on {name}"] = largest_difference(out, cut)
            numbers[f"error of the convolution on {name}"] = largest_difference(out, convolved)
            numbers[f"convolution against matrix on {name}"] = largest_difference(cut, convolved)
        numbers["parameters of the matrix"] = matrix.numel() + bias.numel()
        for name, pixels in (("a patch", setup.patch), ("a pixel", 1)):
            moved = made(image.roll(pixels, 3))
            numbers[f"change if shifted by {name}"] = float((moved - out.roll(1, 2)).abs().max())
    return numbers


def _cut_patches(image: Tensor, patch: int) -> Tensor:
    """Cut images into patches of side `patch`.

    The result is (b, rows, columns, channels * patch * patch).
    """
    b, channels, height, width = image.shape
    squares = image.reshape(b, channels, height // patch, patch, width // patch, patch)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3)


def verdict(numbers: Numbers) -> Decision:
    exact = all(numbers[f"error of the {how} on whole numbers"] == 0 for how in ("matrix", "convolution"))
    rounding = max(numbers[f"error of the {how} on random numbers"] for how in ("matrix", "convolution"))
    same = numbers["parameters"] == numbers["parameters of the matrix"]
    shifts = numbers["change if shifted by a patch"] < 1e-10 and numbers["change if shifted by a pixel"] > 1e-3
    return decide(exact and rounding < 1e-10 and same and shifts, rounding=rounding)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    ways = numbers["features of a patch"]
    plot_lines(left, range(len(ways["convolution"])), ways, overlapping=True, legend=False)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower left", ncols=3)
    left.set(xlabel="feature of a patch", ylabel="value", title="Three forms of one operation")
    plot_bars(right, {name: numbers[f"change if shifted by {name}"] for name in ("a patch", "a pixel")})
    right.set(ylabel="difference from shifted patches", title="Image shifted by")
    return figure
