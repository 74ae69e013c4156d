"""Find the keyword that takes a mask: its name, its axes, and whether True keeps or hides a key."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

ADDITIVE_NAMES = ("attn_bias", "attention_bias", "bias")  # arguments whose name suggests an additive mask
MASK_NAMES = ("attn_mask", "attention_mask", "mask", "visible", "src_mask", "bias_mask", *ADDITIVE_NAMES)
AXES = ("b h i j", "b 1 i j", "(b h) i j", "b i j", "i j", "b 1 1 j", "b j", "i j b")
# in this order, because an argument that is added to the scores also accepts the other values, but then hides no key
VALUES = ("boolean", "ones", "additive")

ReadWeights = Callable[..., Tensor]  # the weights of a call with these keywords


@dataclass(frozen=True)
class MaskArgument:
    """How an attention function takes its mask: the keyword, the axes and the meaning of the values.

    name           the keyword
    axes           axes of the mask, such as "b 1 i j"
    values         "boolean"; "ones" (the numbers 1 and 0); or "additive" (0 and -inf)
    polarity       what True or 1 means: "keep" (visible) or "drop" (hidden). "transposed" if a mask that hides a key
                   hides the query of the same index instead; None if the mask hides nothing
    boolean_added  whether the function also accepts a boolean mask, but wrongly adds it to the scores as 0 and 1
    """

    name: str
    axes: str
    values: str
    polarity: str | None
    boolean_added: bool = False

    @property
    def works(self) -> bool:
        """Whether the mask hides the right keys."""
        return self.polarity in ("keep", "drop")

    @property
    def per_row(self) -> bool:
        """Whether the mask has an axis of queries, so that queries can have different masks."""
        return "i" in self.axes

    def reshape(self, x: Shaped[Tensor, "b h i j"]) -> Tensor:
        """Convert a (b, h, i, j) tensor to the axes of this argument; of an axis that it lacks, index 0 is kept."""
        return {
            "b h i j": lambda: x,
            "b 1 i j": lambda: x[:, :1],
            "(b h) i j": lambda: x.flatten(0, 1),
            "b i j": lambda: x[:, 0],
            "i j": lambda: x[0, 0],
            "b 1 1 j": lambda: x[:, :1, :1],
            "b j": lambda: x[:, 0, 0],
            "i j b": lambda: x[:, 0].permute(1, 2, 0),
        }[self.axes]()

    def convert(self, visible: Bool[Tensor, "b h i j"], dtype: torch.dtype) -> Tensor:
        """Convert a boolean mask (True is visible) to a new tensor with this argument's axes, values and polarity."""
        mask = self.reshape(visible).clone()
        if self.values == "additive":
            return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        mask = ~mask if self.polarity == "drop" else mask
        return mask if self.values == "boolean" else mask.to(dtype)


def find_mask_argument(
    read: ReadWeights,
    names: Iterable[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    axes_tried: tuple[str, ...] = AXES,
) -> MaskArgument | None:
    """Find how an attention function takes a mask, by trial calls with each keyword, type of values and axes.

    Returns the first format that hides the right keys, or that hides the queries of the same indices instead. If there
    is none, returns the first format that raises no error, else None.

    read        function that calls the attention at q = 0 with the keywords that it gets, and returns the weights
    names       keywords to try
    shape       sizes b, h, i and j
    axes_tried  axes of masks to try, such as "b 1 i j"
    """
    visible = torch.ones(shape, dtype=torch.bool)
    visible[..., 1] = False
    accepted: MaskArgument | None = None
    for name in names:
        for values, axes in product(reversed(VALUES) if name in ADDITIVE_NAMES else VALUES, axes_tried):
            argument = MaskArgument(name, axes, values, None)
            found = mask_polarity(read, argument, visible, dtype)
            if found == "refused":
                continue
            if found is not None:
                same_name = accepted is not None and accepted.name == name and accepted.values == "boolean"
                return replace(argument, polarity=found, boolean_added=same_name and values == "additive")
            accepted = accepted or argument
    return accepted


def mask_polarity(
    read: ReadWeights, argument: MaskArgument, visible: Bool[Tensor, "b h i j"], dtype: torch.dtype
) -> str | None:
    """Measure whether True in a mask means "keep" or "drop"; "transposed" or None if the mask hides no key.

    The results mean the same as in `MaskArgument.polarity`. Returns "refused" if the call raises an error. A mask hides
    keys only if visible keys keep a positive weight, so a mask that makes all weights NaN hides nothing.

    read      function that calls the attention at q = 0 with the keywords that it gets, and returns the weights
    argument  the keyword, axes and values with which the mask is passed
    visible   the mask to pass
    """
    try:
        before, after = read(), read(**{argument.name: argument.convert(visible, dtype)})
    except Exception:  # the function of the user may raise any exception
        return "refused"
    if after.shape != before.shape:
        return "refused"  # the mask was broadcast over other axes than those of the scores
    seen = before > 0
    for name, left in (("keep", seen & visible), ("drop", seen & ~visible)):
        gone = seen & ~left & left.any(-1, keepdim=True)
        if bool(gone.any()) and bool((after[left] > 0).all()) and bool((after[gone] == 0).all()):
            return name
    empty_rows = seen.any(-1) & ~(after > 0).any(-1)
    return "transposed" if bool(empty_rows[..., 1].all()) and not bool(empty_rows[..., 2:].any()) else None


def fully_masked_row(read: ReadWeights, argument: MaskArgument, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Measure the weights of a query whose keys are all hidden: "zeros", "nan", "mean", "unmasked" or "other".

    "mean" means that all weights are equal, "unmasked" that the weights are the same as without a mask.

    read      function that calls the attention with random q and k and the keywords that it gets, and returns the
              weights
    argument  how the attention takes its mask
    shape     sizes b, h, i and j
    dtype     dtype of an additive mask
    """
    masked = read(**{argument.name: argument.convert(hide_one_row(argument, shape), dtype)})
    row = masked[:, :, 2]
    if bool(row.isnan().all()):
        return "nan"
    if bool((row == 0).all()):
        return "zeros"
    if bool((row - row.mean(-1, keepdim=True)).abs().max() < 1e-4):
        return "mean"
    everything = argument.convert(torch.ones(shape, dtype=torch.bool), dtype)
    unmasked = read(**{argument.name: everything})[:, :, 2]
    # a large number that is added to all scores rounds them
    return "unmasked" if torch.allclose(row, unmasked, rtol=0, atol=2e-2) else "other"


def hide_one_row(argument: MaskArgument, shape: tuple[int, ...]) -> Bool[Tensor, "b h i j"]:
    """Return a Boolean mask that hides all keys from query 2, and key 1 from all queries.

    If the mask argument has no axis of queries, one row cannot be hidden alone, and the mask hides all keys from all
    queries.
    """
    visible = torch.full(shape, argument.per_row)
    visible[:, :, 2] = False
    visible[..., 1] = False
    return visible
