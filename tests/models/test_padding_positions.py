"""Positions of tokens in padded batches: counted from the first real token."""

import torch

from regard.core.masks import causal, padding
from regard.models.padding_positions import first_tokens, token_positions

CPU = torch.device("cpu")


def test_columns_are_positions_unless_a_batch_is_left_padded() -> None:
    for real in (None, padding([3, 1]), causal()):
        assert token_positions(real, 2, 3, CPU).tolist() == [2, 3, 4]


def test_left_padding_does_not_count() -> None:
    left = padding([5, 2, 0], side="left", width=5)
    assert token_positions(left, 0, 5, CPU).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert token_positions(left, 5, 2, CPU).tolist() == [[5, 6], [2, 3], [0, 1]]  # tokens that are added later are real


def test_the_first_token_is_the_first_real_one() -> None:
    x = torch.arange(24.0).reshape(3, 4, 2)
    assert torch.equal(first_tokens(x, padding([4, 2, 1])), x[:, 0])
    assert torch.equal(first_tokens(x, None), x[:, 0])
    left = padding([4, 1, 0], side="left", width=4)
    assert torch.equal(first_tokens(x, left), x[[0, 1, 2], [0, 3, 3]])
