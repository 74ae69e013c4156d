"""Texts with a gap: where the gap lies, what is learned, and that nothing of the text is lost."""

import re

import pytest
import torch

from regard.base.errors import ConfigError, RegardError
from regard.base.seeds import make_generator
from regard.data.span_corruption import (
    IGNORED,
    MASK,
    PAD,
    MaskedText,
    collate,
    collect_alphabet,
    corrupt_spans,
    encode_question,
    encode_text,
    mask_span,
    question_prompt,
)

TEXT = "Ada Lumen was born in Norwick, and her brother Paul in Elm."


def parts(made: MaskedText) -> tuple[str, str, str]:
    prefix, suffix, content = made.text.rstrip(PAD).split(MASK)
    return prefix, content, suffix


def test_the_masked_span_is_moved_to_the_end() -> None:
    made = mask_span("Ada was born in ", "Elm", ".", 29, whole_text=True)
    assert made.text == f"Ada was born in {MASK}.{MASK}Elm{PAD * 7}"


def test_the_whole_text_or_only_the_content_is_learned() -> None:
    everything = mask_span("Ada was born in ", "Elm", ".", 29, whole_text=True)
    content = mask_span("Ada was born in ", "Elm", ".", 29, whole_text=False)
    assert everything.text[everything.start : everything.end] == everything.text[1:].rstrip(PAD) + PAD
    assert content.text[content.start : content.end] == "Elm" + PAD


def test_a_text_that_fits_is_complete() -> None:
    draws = make_generator(3)
    for _ in range(300):
        prefix, content, suffix = parts(corrupt_spans(TEXT, 71, draws))
        assert prefix + content + suffix == TEXT
        assert content


def test_a_longer_text_is_cropped_at_random() -> None:
    draws = make_generator(3)
    found = ["".join(parts(corrupt_spans(TEXT, 23, draws))) for _ in range(300)]
    assert all(piece in TEXT and len(piece) == 20 for piece in found)
    starts = {TEXT.index(piece) for piece in found}
    assert (min(starts), max(starts)) == (0, len(TEXT) - 20)


def test_every_text_has_the_requested_length() -> None:
    draws = make_generator(3)
    assert {len(corrupt_spans(TEXT, length, draws).text) for length in (71, 62, 23) for _ in range(50)} == {71, 62, 23}
    assert len(corrupt_spans(TEXT, 62, draws).text.rstrip(PAD)) == 61


def test_half_of_the_spans_are_whole_phrases() -> None:
    draws = make_generator(3)
    phrases = {"Ada Lumen", "Norwick", "Paul", "Elm"}
    content = [parts(corrupt_spans(TEXT, 71, draws))[1] for _ in range(2000)]
    assert sum(each in phrases for each in content) / 2000 == pytest.approx(0.5, abs=0.05)
    always = [parts(corrupt_spans(TEXT, 71, draws, phrases=1.0))[1] for _ in range(400)]
    assert set(always) == phrases
    assert min(always.count(each) for each in phrases) > 60


def test_other_spans_take_their_share_of_the_text() -> None:
    draws = make_generator(3)
    sizes = [len(parts(corrupt_spans(TEXT, 71, draws, phrases=0.0, share=0.2))[1]) for _ in range(2000)]
    assert sum(sizes) / 2000 == pytest.approx(0.2 * len(TEXT), rel=0.05)
    assert min(sizes) == 1


def test_a_text_without_capitals_has_spans_anywhere() -> None:
    assert parts(corrupt_spans("all in small letters", 31, make_generator(0), phrases=1.0))[1]


def test_the_same_generator_gives_the_same_span() -> None:
    assert corrupt_spans(TEXT, 71, make_generator(7)) == corrupt_spans(TEXT, 71, make_generator(7))
    assert corrupt_spans(TEXT, 71, make_generator(7)) != corrupt_spans(TEXT, 71, make_generator(8))


def test_the_span_of_a_question_is_its_answer() -> None:
    made = encode_question("Where was Ada born?", "Elm", 29)
    assert made.text.startswith(question_prompt("Where was Ada born?") + "Elm" + PAD)
    assert made.text[made.start : made.end] == "Elm" + PAD


def test_a_batch_has_the_next_character_as_target_where_it_is_learned_and_nothing_elsewhere() -> None:
    made = [encode_question("Where?", "Elm", 17), mask_span("Ada of ", "Rav", "", 17, whole_text=True)]
    letters = collect_alphabet([each.text for each in made])
    tokens, targets = collate(made, letters)
    assert tokens.shape == targets.shape == (2, 16)
    for each, read, told in zip(made, tokens.tolist(), targets.tolist(), strict=True):
        assert "".join(letters[token] for token in read) == each.text[:-1]
        for at, token in enumerate(told):
            learned = each.start <= at + 1 < each.end
            assert token == (letters.index(each.text[at + 1]) if learned else IGNORED)
    assert (targets[0] != IGNORED).sum() == 4


def test_an_alphabet_begins_with_padding_and_mask() -> None:
    assert collect_alphabet(["ba", "cab" + MASK]) == PAD + MASK + "abc"
    assert encode_text(PAD + "cab", PAD + MASK + "abc") == [0, 4, 2, 3]


def test_padding_is_never_learned_beyond_the_first() -> None:
    draws = make_generator(3)
    made = [corrupt_spans(TEXT, 71, draws) for _ in range(50)]
    letters = collect_alphabet([TEXT])
    _, targets = collate(made, letters)
    assert torch.equal((targets == 0).sum(1), torch.ones(50, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: mask_span("ab", "cd", "e", 7, whole_text=True),
            "has 7 characters and an end, but length is 7",
        ),
        (
            lambda: corrupt_spans("abc", 20, make_generator(0)),
            "a text needs at least 4 characters, but this is 'abc'",
        ),
        (lambda: corrupt_spans(TEXT, 6, make_generator(0)), "length is 6, but must be at least 7"),
        (
            lambda: corrupt_spans(TEXT, 71, make_generator(0), phrases=2.0),
            "phrases must be at least 0 and at most 1, not 2",
        ),
        (
            lambda: corrupt_spans(TEXT, 71, make_generator(0), share=0.0),
            "share must be above 0 and at most 0.5",
        ),
        (lambda: corrupt_spans("a" + MASK + "bcd", 20, make_generator(0)), "a text may not contain"),
        (lambda: encode_text("xyz", "xy"), "the alphabet does not contain 'z' of 'xyz'"),
    ],
)
def test_invalid_arguments_are_refused(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(RegardError, match=re.escape(words)):
        call()


def test_errors_are_of_our_kind() -> None:
    with pytest.raises(ConfigError):
        encode_text("z", "a")
