"""Greedy decoding for connectionist temporal classification (CTC). Graves et al. 2006.

The most likely token of each time step is chosen. Then repeated tokens are merged and blanks are removed.
"""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import CacheError, ConfigError, ShapeError
from regard.base.validation import check_integer


class CTCGreedyDecoder:
    """Greedy CTC decoder for streams: the logits are passed in chunks of time steps, which may have any length.

    The tokens do not depend on how the logits are divided into chunks.

    blank  the blank token
    """

    def __init__(self, blank: int = 0) -> None:
        self.blank = check_integer("blank", blank, 0)
        self._last: list[int] = []  # the token of the last row of each sequence, to merge a repeat

    def push(self, logits: Float[Tensor, "b n w"]) -> list[list[int]]:
        """Decode the logits of the next n time steps. Returns, for each sequence, the tokens that these steps add."""
        if logits.ndim != 3 or not logits.shape[2]:
            raise ShapeError(f"logits is {tuple(logits.shape)}, but is read as (b n w), a row of scores for each step")
        if self.blank >= logits.shape[2]:
            raise ConfigError(f"blank={self.blank} is a token, but logits has tokens 0 to {logits.shape[2] - 1}")
        best: list[list[int]] = logits.argmax(-1).tolist()
        last = self._last or [self.blank] * len(best)
        if len(last) != len(best):
            raise CacheError(f"logits has b={len(best)} sequences, but the stream has {len(last)}")
        found = [_collapse(rows, before, self.blank) for rows, before in zip(best, last, strict=True)]
        self._last = [rows[-1] if rows else before for rows, before in zip(best, last, strict=True)]
        return found


def ctc_greedy_decode(
    logits: Float[Tensor, "b n w"], *, blank: int = 0, lengths: Sequence[int] | Int[Tensor, "b"] | None = None
) -> list[list[int]]:
    """Greedy CTC decoding: return the tokens of each sequence.

    lengths  number of time steps of each sequence, without padding; None uses all n
    """
    if lengths is None:
        return CTCGreedyDecoder(blank).push(logits)
    if len(lengths) != len(logits):
        raise ShapeError(
            f"lengths has {len(lengths)} numbers, but logits has b={len(logits)} sequences; give one for each"
        )
    each = zip(logits, [int(length) for length in lengths], strict=True)
    return [CTCGreedyDecoder(blank).push(rows[None, :length])[0] for rows, length in each]


def _collapse(rows: list[int], before: int, blank: int) -> list[int]:
    pairs = zip([before, *rows], rows, strict=False)
    return [token for previous, token in pairs if token not in (previous, blank)]
