"""Strings of recordings: slices and the gather that a GPU uses give the same samples."""

import torch

from regard.recipes.recorded_strings import RecordedStrings


def test_each_recording_is_copied_to_its_place() -> None:
    strings = RecordedStrings(
        torch.tensor([[2, 6, 13], [0, 4, 9]]),
        torch.tensor([[3, 0, 0], [5, 1, 7]]),
        torch.tensor([[3, 2, 0], [4, 1, 3]]),
    )
    samples = torch.arange(1, 11) / 8
    expected = torch.tensor([[0, 0, 4, 5, 6, 0, 1, 2, 0, 0, 0, 0, 0, 0], [6, 7, 8, 9, 2, 0, 0, 0, 0, 8, 9, 10, 0, 0]])
    for sounds in (strings.sounds(samples, 14), strings.gather(samples, 14)):
        assert torch.equal(sounds, expected / 8)
