"""Streaming recognition equals one pass over the whole sound within the stated latency; error rates."""

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
    algorithmic_latency,
    normalized_log_mel,
    recognize,
    recognize_streaming,
)
from tests.recipes.listeners import LOG_MEL, MODEL, RATE, random_listener


@pytest.mark.parametrize(("chunk", "look_ahead"), [(1, 0), (3, 0), (2, 1), (1, 3)])
def test_the_longest_wait_for_a_row_is_the_latency(chunk: int, look_ahead: int):
    sound = LogMel(sample_rate=800, mels=3)
    config = replace(MODEL, mels=3, chunk=chunk, look_ahead=look_ahead)
    listener = DigitListener(random_listener(config), sound)
    waited = []
    for received, sample in enumerate(torch.rand(390, generator=torch.Generator().manual_seed(1)).split(1), 1):
        for _ in range(listener.rows(sample).shape[1]):
            begun = len(waited) * 4 * sound.hop_length  # the first sample of this row
            waited.append((received - begun) / sound.sample_rate)
    assert len(waited) >= 2 * chunk
    assert max(waited) == pytest.approx(algorithmic_latency(config, sound))


@pytest.mark.parametrize("piece", [1, 67, 797, 5000])
def test_a_stream_in_pieces_of_any_size_gives_the_rows_of_one_pass(piece: int):
    model, sounds = random_listener(), tones(1, (2, 3), sample_rate=RATE).sounds[0][: 1300 if piece == 1 else None]
    listener = DigitListener(model, LOG_MEL)
    rows = torch.cat([*(listener.rows(part) for part in sounds.split(piece)), listener.last_rows()], 1)
    with torch.no_grad():
        torch.testing.assert_close(rows, model(normalized_log_mel(sounds, LOG_MEL)[None]), rtol=0, atol=1e-5)


def test_words_have_their_position_and_the_time_of_recognition():
    model, sounds = random_listener(), tones(3, (2, 4), sample_rate=RATE)
    whole = recognize(model, sounds, LOG_MEL, batch_size=2)
    assert min(map(len, whole)) > 2
    late = algorithmic_latency(MODEL, LOG_MEL)
    for sound, digits in zip(sounds.sounds, whole, strict=True):
        listener = DigitListener(model, LOG_MEL)
        words: list[RecognizedWord] = []
        for piece in sound.split(LOG_MEL.hop_length):
            new = listener.push(piece)
            assert all(word.shown == pytest.approx(listener.received / RATE) for word in new)
            words += new
        assert all(0 < word.shown - word.at < late + LOG_MEL.hop_length / RATE for word in words)
        words += listener.finish()
        assert [int(word.text) for word in words] == digits
        assert [word.at for word in words] == sorted(word.at for word in words)


def test_a_sound_shorter_than_a_row_has_no_words():
    model = random_listener()
    assert DigitListener(model, LOG_MEL).finish() == []
    listener = DigitListener(model, LOG_MEL)
    assert listener.push(torch.zeros(37)) == listener.finish() == []
    short = DigitStrings((torch.zeros(37),), (torch.tensor([3]),), RATE)
    assert recognize(model, short, LOG_MEL) == [[]]
    assert recognize_streaming(model, short, LOG_MEL) == ([[]], 0.0)


def test_a_stream_that_differs_from_one_pass_is_an_error(monkeypatch: pytest.MonkeyPatch):
    rows = DigitListener.rows
    monkeypatch.setattr(DigitListener, "rows", lambda self, samples: rows(self, samples) + 0.01)
    with pytest.raises(TrainingError, match=r"the streamed logits of sound 0 differ by 0\.01 from those of one pass"):
        recognize_streaming(random_listener(), tones(1, sample_rate=RATE), LOG_MEL)


def test_the_input_is_the_normalized_log_mel_spectrogram():
    sound = tones(1, sample_rate=RATE).sounds[0]
    torch.testing.assert_close(4 * normalized_log_mel(sound, LOG_MEL) - 7, log_mel(sound, LOG_MEL), rtol=0, atol=1e-5)


def test_a_spectrogram_with_another_number_of_mels_is_refused():
    with pytest.raises(ShapeError, match="with 5 mels"):
        DigitListener(random_listener(), replace(LOG_MEL, mels=6)).push(torch.zeros(400))
