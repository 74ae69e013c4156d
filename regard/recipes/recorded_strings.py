"""Digit strings as lists of recordings: a batch contains indices, and its samples are gathered on the device."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RecordedStrings:
    """A batch of strings of recordings with silence between them. Unused columns have size 0.

    begins   first sample of each recording in its string, increasing along a row
    offsets  first sample of each recording in the array of all recordings
    sizes    number of samples of each recording
    """

    begins: Int[Tensor, "b k"]
    offsets: Int[Tensor, "b k"]
    sizes: Int[Tensor, "b k"]

    def sounds(self, recordings: Float[Tensor, "samples"], width: int) -> Float[Tensor, "b n"]:
        """Return the samples of each string, with zeros up to `width`.

        recordings  all recordings, one after the other, on the device of this batch

        >>> strings = RecordedStrings(torch.tensor([[1, 3]]), torch.tensor([[2, 0]]), torch.tensor([[1, 2]]))
        >>> strings.sounds(torch.tensor([0.1, 0.2, 0.3]), 6)
        tensor([[0.0000, 0.3000, 0.0000, 0.1000, 0.2000, 0.0000]])
        """
        if recordings.device.type != "cpu":
            return self.gather(recordings, width)
        sounds = torch.zeros(len(self.begins), width)
        columns = zip(sounds, self.begins.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        for row, begins, offsets, sizes in columns:
            for begin, offset, size in zip(begins, offsets, sizes, strict=True):
                if size:
                    row[begin : begin + size] = recordings[offset : offset + size]
        return sounds

    def gather(self, recordings: Float[Tensor, "samples"], width: int) -> Float[Tensor, "b n"]:
        """Return what `sounds` returns, without copying values from the GPU to the CPU, which would be slow."""
        positions = torch.arange(width, device=recordings.device)
        begun = (positions >= self.begins[:, :, None]).sum(1) - 1  # the latest column that has begun, or -1
        column = begun.clamp(min=0)
        inside = positions - self.begins.gather(1, column)
        real = (begun >= 0) & (inside < self.sizes.gather(1, column))
        chosen = recordings[(self.offsets.gather(1, column) + inside).clamp(0, len(recordings) - 1)]
        return chosen.masked_fill(~real, 0)
