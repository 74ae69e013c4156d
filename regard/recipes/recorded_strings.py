"""Digit strings that refer to recordings: a batch contains indices, and the samples are copied on its device."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RecordedStrings:
    """A batch of digit strings, each made of recordings with silence between them.

    Each row is a string, and each column one of its recordings. A string with fewer recordings has columns of size 0.

    begins   index of the first sample of each recording in its string, increasing along a row
    offsets  index of the first sample of each recording in the array of all recordings
    sizes    number of samples of each recording
    """

    begins: Int[Tensor, "b k"]
    offsets: Int[Tensor, "b k"]
    sizes: Int[Tensor, "b k"]

    def sounds(self, recordings: Float[Tensor, "samples"], width: int) -> Float[Tensor, "b n"]:
        """Return the samples of each string, with zeros up to `width`.

        recordings  samples of all recordings, one after the other, on the device of this batch
        width       number of samples in each row of the result

        Here one sample from offset 2 begins at sample 1 of the string, and two samples from offset 0 at sample 3:

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
