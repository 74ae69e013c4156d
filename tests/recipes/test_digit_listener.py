"""Hearing: streamed in any pieces it is one pass over the whole, no later than stated, and errors are counted right."""

from dataclasses import replace

import pytest
import torch

from regard.base.errors import ShapeError, TrainingError
from regard.data.digit_strings import DigitStrings
from regard.data.log_mel import LogMel, log_mel
from regard.data.tones import tones
from regard.recipes.digit_listener import (
    DigitListener,
    RecognizedWord,
    at_once,
    edits,
    heard,
    latency,
    streamed,
    token_error,
)
from tests.recipes.listeners import MODEL, RATE, SOUND, listening


@pytest.mark.parametrize(("chunk", "look_ahead"), [(1, 0), (3, 0), (2, 1), (1, 3)])
def test_no_row_waits_longer_than_the_latency_and_one_waits_as_long(chunk: int, look_ahead: int):
    sound = LogMel(rate=800, bands=3)
    config = replace(MODEL, mels=3, chunk=chunk, look_ahead=look_ahead)
    listener = DigitListener(listening(config), sound)
    waited = []
    for received, sample in enumerate(torch.rand(390, generator=torch.Generator().manual_seed(1)).split(1), 1):
        for _ in range(listener.rows(sample).shape[1]):
            begun = len(waited) * 4 * sound.hop  # the first sample of this row
            waited.append((received - begun) / sound.rate)
    assert len(waited) >= 2 * chunk
    assert max(waited) == pytest.approx(latency(config, sound))


@pytest.mark.parametrize("piece", [1, 67, 797, 5000])
def test_a_stream_in_pieces_of_any_size_gives_the_rows_of_one_pass(piece: int):
    model, sounds = listening(), tones(1, (2, 3), rate=RATE).sounds[0][: 1300 if piece == 1 else None]
    listener = DigitListener(model, SOUND)
    rows = torch.cat([*(listener.rows(part) for part in sounds.split(piece)), listener.last_rows()], 1)
    with torch.no_grad():
        torch.testing.assert_close(rows, model(heard(sounds, SOUND)[None]), rtol=0, atol=1e-5)


def test_words_come_with_where_they_were_heard_and_when_they_were_known():
    model, sounds = listening(), tones(3, (2, 4), rate=RATE)
    whole = at_once(model, sounds, SOUND, together=2)
    assert min(map(len, whole)) > 2
    late = latency(MODEL, SOUND)
    for sound, digits in zip(sounds.sounds, whole, strict=True):
        listener = DigitListener(model, SOUND)
        words: list[RecognizedWord] = []
        for piece in sound.split(SOUND.hop):
            new = listener.push(piece)
            assert all(word.shown == pytest.approx(listener.received / RATE) for word in new)
            words += new
        assert all(0 < word.shown - word.at < late + SOUND.hop / RATE for word in words)
        words += listener.finish()
        assert [int(word.text) for word in words] == digits
        assert [word.at for word in words] == sorted(word.at for word in words)


def test_a_sound_without_a_row_says_nothing():
    model = listening()
    assert DigitListener(model, SOUND).finish() == []
    listener = DigitListener(model, SOUND)
    assert listener.push(torch.zeros(37)) == listener.finish() == []
    short = DigitStrings((torch.zeros(37),), (torch.tensor([3]),), RATE)
    assert at_once(model, short, SOUND) == [[]]
    assert streamed(model, short, SOUND) == ([[]], 0.0)


def test_a_stream_that_is_not_one_pass_is_told(monkeypatch: pytest.MonkeyPatch):
    rows = DigitListener.rows
    monkeypatch.setattr(DigitListener, "rows", lambda self, samples: rows(self, samples) + 0.01)
    with pytest.raises(
        TrainingError, match=r"sound 0, streamed, has logits that are 0\.01 away from those of one pass"
    ):
        streamed(listening(), tones(1, rate=RATE), SOUND)


def test_the_distance_between_strings_counts_edits():
    assert edits([], []) == 0
    assert edits([1, 2, 3], []) == edits([], [1, 2, 3]) == 3
    assert edits([1, 2, 3, 4], [1, 3, 4]) == 1
    assert edits([1, 2, 3], [3, 1, 2]) == 2
    assert edits([1, 1, 2], [1, 2, 2]) == 1
    sounds = DigitStrings((torch.zeros(1),) * 2, (torch.tensor([1, 2, 3]), torch.tensor([4, 5])), RATE)
    assert token_error([[1, 3], [4, 5, 5]], sounds) == 2 / 5


def test_the_model_sees_frames_less_their_mean_in_speech_over_its_spread():
    sound = tones(1, rate=RATE).sounds[0]
    torch.testing.assert_close(4 * heard(sound, SOUND) - 7, log_mel(sound, SOUND), rtol=0, atol=1e-5)


def test_frames_of_another_size_are_refused_by_the_listener():
    with pytest.raises(ShapeError, match="with 5 mels"):
        DigitListener(listening(), replace(SOUND, bands=6)).push(torch.zeros(400))
