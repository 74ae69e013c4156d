"""Where tokens stand in sequences that were filled up to a common length: what was filled in has no place."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask


def counted(padding: Mask | None, start: int, n: int, device: torch.device) -> Int[Tensor, "*b n"]:
    """Positions of the columns from `start` on: (n), or (b n) where sequences are filled at their front.

    Counting starts at a sequence's first real token, so that filling at either side changes nothing.
    """
    columns = torch.arange(start, start + n, device=device)
    front = _front(padding, device)
    return columns if front is None else (columns - front[:, None]).clamp(min=0)


def first_tokens(x: Float[Tensor, "b n d"], padding: Mask | None) -> Float[Tensor, "b d"]:
    """The row of each sequence's first real token."""
    front = _front(padding, x.device)
    if front is None:
        return x[:, 0]
    # an empty sequence has none; its last row stands in
    return x[torch.arange(x.shape[0], device=x.device), front.clamp(max=x.shape[1] - 1)]


def is_filled_in_front(padding: Mask | None) -> bool:
    return isinstance(padding, PaddingMask) and padding.width is not None


def _front(padding: Mask | None, device: torch.device) -> Int[Tensor, "b"] | None:
    """How many columns were filled in before each sequence, or None where none were."""
    if not isinstance(padding, PaddingMask) or padding.width is None:
        return None
    return padding.width - padding.data.to(device)
