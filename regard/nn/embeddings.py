"""Token, patch and position embeddings."""

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.tracing import is_meta_or_fake
from regard.base.validation import check_integer
from regard.core.positions import sinusoidal
from regard.nn.projection import linear


class TokenEmbedding(nn.Module):
    """Token embedding: one learned vector for each of `vocab` tokens, multiplied by `scale`.

    width  width of a vector

    >>> regard.nn.TokenEmbedding(vocab=97, width=24)(torch.tensor([[5, 8]])).shape
    torch.Size([1, 2, 24])
    """

    def __init__(self, vocab: int, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.vocab, self.scale = check_integer("vocab", vocab, 1), scale
        self.weight = nn.Parameter(torch.zeros(vocab, width))

    def forward(self, tokens: Integer[Tensor, "b n"], name: str = "tokens") -> Float[Tensor, "b n d"]:
        """Return the embeddings of tokens. `name` is the name of the argument in error messages."""
        check_tokens(tokens, self.vocab, name)
        embedded = functional.embedding(tokens.long(), self.weight)  # torch takes int64 and int32 only
        return embedded if self.scale == 1.0 else embedded * self.scale

    def unembed(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n w"]:
        """Compute logits with the embedding weights (tied embeddings). Press and Wolf 2017, arXiv:1608.05859."""
        return linear(x, self.weight)


class LearnedPositions(nn.Module):
    """Learned position embedding for the first `context` positions.

    >>> regard.nn.LearnedPositions(context=64, width=24)(torch.arange(7)).shape
    torch.Size([7, 24])
    """

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.context = check_integer("context", context, 1)
        self.weight = nn.Parameter(torch.zeros(context, width))

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        known = f"the context has positions 0 to {self.context - 1}"
        check_integers("positions", positions, "*b n", self.context, known)
        return functional.embedding(positions, self.weight)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embedding of Vaswani et al. 2017. It has no parameters and no maximum length.

    pairing  order of the entries: "interleaved" puts sin and cos of each frequency side by side, "half" puts all sines
             before all cosines

    >>> regard.nn.SinusoidalPositions(24)(torch.arange(7)).shape
    torch.Size([7, 24])
    """

    def __init__(self, width: int, *, pairing: str = "interleaved") -> None:
        super().__init__()
        if width % 2:
            raise ConfigError(f"sinusoidal positions need an even width, a sin and a cos for each frequency: {width}")
        if pairing not in ("interleaved", "half"):
            raise ConfigError(f"pairing is 'interleaved' or 'half', not {pairing!r}")
        self.width, self.pairing = width, pairing

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        table = sinusoidal(positions.flatten(), self.width)
        if self.pairing == "half":
            table = table.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return table.unflatten(0, positions.shape)


class PatchEmbedding(nn.Module):
    """Patch embedding of images: a convolution whose kernel and stride have the size of one patch.

    The result is (b rows columns width), with one vector for each patch.

    width     number of output channels, the size of a vector
    patch     side of a patch in pixels
    channels  number of channels of the image

    >>> regard.nn.PatchEmbedding(24, patch=4)(torch.randn(2, 3, 8, 12)).shape
    torch.Size([2, 2, 3, 24])
    """

    def __init__(self, width: int, patch: int, channels: int = 3) -> None:
        super().__init__()
        self.patch, self.channels = check_integer("patch", patch, 1), check_integer("channels", channels, 1)
        self.projection = PatchConvolution(channels, width, patch, stride=patch)

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b rows columns d"]:
        check_image(image, self.channels)
        if image.shape[2] % self.patch or image.shape[3] % self.patch:
            raise ShapeError(
                f"image is {image.shape[2]} x {image.shape[3]}, which is not a multiple of the patch, {self.patch}; "
                "resize or pad it"
            )
        return self.projection(image).permute(0, 2, 3, 1)


class PatchConvolution(nn.Conv2d):
    """A convolution whose kernel and stride have the size of one patch.

    On a GPU it is computed as a linear layer that is applied to the pixels of each patch, because cuDNN's convolutions
    of three channels are slow: they took 3.3 of the 72 ms of a training step of ViT-B/16 on an H200 (docs/log.md).
    """

    def forward(self, image: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b d rows columns"]:
        return convolve_patches(image, self.weight, self.bias) if image.is_cuda else super().forward(image)


def convolve_patches(
    image: Float[Tensor, "b channels y x"], weight: Float[Tensor, "d channels height width"], bias: Tensor | None
) -> Float[Tensor, "b d rows columns"]:
    """Compute a convolution whose stride is the size of its kernel, as a linear layer of each patch's pixels."""
    (b, channels, y, x), (height, width) = image.shape, weight.shape[2:]
    patches = image.reshape(b, channels, y // height, height, x // width, width).permute(0, 2, 4, 1, 3, 5)
    return functional.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


def interpolate_positions(
    table: Float[Tensor, "n d"], old: tuple[int, int], new: tuple[int, int]
) -> Float[Tensor, "m d"]:
    """Resize learned position embeddings of patches to another grid, by bicubic antialiased interpolation.

    old, new  numbers of rows and columns of the old and the new grid of patches
    """
    if old == new:
        return table
    grid = table.unflatten(0, old).permute(2, 0, 1)[None].float()
    resized = functional.interpolate(grid, new, mode="bicubic", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


def check_integers(name: str, x: object, read_as: str, end: int, known: str) -> Tensor:
    """Check that x is an integer tensor with values from 0 to end - 1, and return it. Else raise an error.

    Values on a GPU are not checked here, because reading them would wait for the GPU; torch checks their range.

    name     name of x in error messages
    read_as  the axes that x must have, such as "b n"
    end      one more than the largest valid value
    known    what the valid values are, for error messages
    """
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(f"{name} must be a tensor of whole numbers read as ({read_as}), not {came}")
    if x.ndim != len(read_as.split()) and "*" not in read_as:
        raise ShapeError(f"{name} is {tuple(x.shape)}, but is read as ({read_as})")
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_meta_or_fake(x) or not x.numel():
        return x  # reading values would synchronise with the device, or there are none
    values = x
    while torch._C._functorch.is_functorch_wrapped_tensor(values):  # inside torch.func.vmap or grad
        values = torch._C._functorch.get_unwrapped(values)
    low, high = (int(each) for each in values.aminmax())
    if low < 0 or high >= end:
        raise ShapeError(f"{name} holds {low if low < 0 else high}, but {known}")
    return x


def check_tokens(tokens: Tensor, vocab: int, name: str = "tokens") -> None:
    """Check that tokens is a non-empty integer tensor (b n) with values from 0 to vocab - 1, else raise an error."""
    if isinstance(tokens, Tensor) and tokens.ndim == 1:
        raise ShapeError(f"{name} is {tuple(tokens.shape)}, but is read as (b n); for one text write {name}[None]")
    check_integers(name, tokens, "b n", vocab, f"the vocabulary has tokens 0 to {vocab - 1}")
    if tokens.numel() == 0:
        raise ShapeError(f"{name} is {tuple(tokens.shape)} read as (b n), but there must be at least one token")


def check_floats(name: str, x: Tensor, read_as: str, axis: int, size: int) -> None:
    """Check that x is a non-empty floating-point tensor of the right shape, else raise an error.

    name     name of x in error messages
    read_as  the axes that x must have, such as "b channels y x"
    axis     index of the axis that must have size `size`
    """
    axes = read_as.split()
    if not isinstance(x, Tensor) or not x.is_floating_point():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(f"{name} must be a floating-point tensor read as ({read_as}), not {came}")
    if x.ndim != len(axes) or x.shape[axis] != size or x.shape[0] == 0:
        raise ShapeError(
            f"{name} is {tuple(x.shape)}, but is read as ({read_as}) with {size} {axes[axis]} and b of at least one"
        )


def check_image(image: Tensor, channels: int) -> None:
    """Check that image is a floating-point tensor (b channels y x) with `channels` channels, else raise an error."""
    check_floats("image", image, "b channels y x", 1, channels)


def check_context(length: int, context: int) -> None:
    """Check that an input of `length` positions fits the context, else raise ShapeError."""
    if length > context:
        raise ShapeError(
            f"the input has {length} positions, but the context has {context}; shorten it or build with "
            f"context={length}"
        )
