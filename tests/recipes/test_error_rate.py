"""Error rates of speech recognition: hand-computed distances and rates."""

import torch

from regard.data.digit_strings import DigitStrings
from regard.recipes.error_rate import edit_distance, sequence_accuracy, token_error_rate


def test_edit_distance_token_error_rate_and_sequence_accuracy():
    assert edit_distance([], []) == 0
    assert edit_distance([1, 2, 3], []) == edit_distance([], [1, 2, 3]) == 3
    assert edit_distance([1, 2, 3, 4], [1, 3, 4]) == 1
    assert edit_distance([1, 2, 3], [3, 1, 2]) == 2
    assert edit_distance([1, 1, 2], [1, 2, 2]) == 1
    sounds = DigitStrings((torch.zeros(1),) * 2, (torch.tensor([1, 2, 3]), torch.tensor([4, 5])), 8000)
    assert token_error_rate([[1, 3], [4, 5, 5]], sounds) == 2 / 5
    assert sequence_accuracy([[1, 3], [4, 5]], sounds) == 1 / 2
