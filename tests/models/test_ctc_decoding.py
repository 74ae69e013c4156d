"""Greedy CTC decoding: repeats, blanks, streaming."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.base.errors import CacheError, ConfigError, ShapeError
from regard.models.ctc_decoding import CTCGreedyDecoder, ctc_greedy_decode


def rows(*sequences: list[int], vocab: int = 5) -> torch.Tensor:
    """Logits whose best tokens are these."""
    return torch.nn.functional.one_hot(torch.tensor(sequences), vocab).float()


def test_repeats_merge_and_a_blank_between_keeps_them_apart():
    assert ctc_greedy_decode(rows([0, 3, 3, 0, 3, 1, 1, 0], [2, 2, 2, 2, 2, 2, 2, 2])) == [[3, 3, 1], [2]]
    assert ctc_greedy_decode(rows([0, 0, 0])) == [[]]


def test_any_token_may_be_the_blank():
    assert ctc_greedy_decode(rows([4, 0, 0, 4, 0, 1]), blank=4) == [[0, 0, 1]]


def test_rows_beyond_the_length_are_not_read():
    logits = rows([1, 0, 2, 3], [1, 2, 3, 4])
    assert ctc_greedy_decode(logits, lengths=[2, 4]) == [[1], [1, 2, 3, 4]]
    assert ctc_greedy_decode(logits, lengths=torch.tensor([0, 1])) == [[], [1]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 6), max_size=30))
def test_chunks_decode_as_the_whole(tokens, sizes):
    logits = rows(tokens)
    reader, found, start = CTCGreedyDecoder(), [], 0
    for size in [*sizes, len(tokens)]:
        found += reader.push(logits[:, start : start + size])[0]
        start += size
    assert found == ctc_greedy_decode(logits)[0]


def test_an_empty_piece_changes_nothing():
    reader = CTCGreedyDecoder()
    assert reader.push(rows([1, 1])) == [[1]]
    assert reader.push(rows([1, 1])[:, :0]) == [[]]
    assert reader.push(rows([1, 2])) == [[2]]


def test_wrong_logits_are_refused():
    with pytest.raises(ShapeError, match=r"logits is \(3, 5\), but is read as \(b n w\)"):
        ctc_greedy_decode(torch.zeros(3, 5))
    with pytest.raises(ConfigError, match="blank=5 is a token, but logits has tokens 0 to 4"):
        ctc_greedy_decode(rows([1]), blank=5)
    with pytest.raises(ConfigError, match="blank is -1, but must be at least 0"):
        CTCGreedyDecoder(-1)
    with pytest.raises(ShapeError, match="lengths has 2 numbers, but logits has b=1 sequences"):
        ctc_greedy_decode(rows([1]), lengths=[1, 1])
    reader = CTCGreedyDecoder()
    reader.push(rows([1], [2]))
    with pytest.raises(CacheError, match="logits has b=1 sequences, but the stream has 2"):
        reader.push(rows([1]))
