"""Random strings written twice: what can be copied, and what cannot."""

import pytest
import torch

from regard.base.errors import ConfigError
from regard.data.repeated_text import ALPHABET, LENGTH, repeated_permutations, repeated_text


def test_every_string_is_written_twice_and_has_no_character_twice() -> None:
    text = repeated_text(5000, seed=3)
    assert len(text) == 5000
    assert set(text) <= set(ALPHABET)
    lengths, at = set(), 0
    while at + 2 * LENGTH[1] < len(text):
        (length,) = (n for n in range(LENGTH[0], LENGTH[1] + 1) if text[at : at + n] == text[at + n : at + 2 * n])
        assert len(set(text[at : at + length])) == length
        lengths.add(length)
        at += 2 * length
    assert len(lengths) > 20, "a copy cannot be found by its distance"


def test_the_text_depends_on_the_seed_only() -> None:
    assert repeated_text(300, seed=3) == repeated_text(700, seed=3)[:300] != repeated_text(300, seed=4)


def test_sequences_of_different_tokens_are_written_twice() -> None:
    tokens = repeated_permutations(7, 11, vocab=13, seed=2)
    assert tokens.shape == (7, 22)
    assert torch.equal(tokens[:, :11], tokens[:, 11:])
    assert all(len(set(row)) == 11 for row in tokens.tolist())
    assert not torch.equal(tokens, repeated_permutations(7, 11, vocab=13, seed=3))
    with pytest.raises(ConfigError, match="length=14 different tokens need a vocabulary of at least 14, not 13"):
        repeated_permutations(1, 14, vocab=13)
