"""Moses tokenisation, and detokenisation to the same text."""

import pytest

from regard.recipes.moses_tokenizer import moses_detokenize, moses_tokenize


@pytest.mark.parametrize(
    ("language", "text", "tokens"),
    [
        ("en", "a man, who runs fast.", "a man , who runs fast ."),
        ("en", "the woman's hat isn't red!", "the woman &apos;s hat isn &apos;t red !"),
        ("en", "the ladies' room", "the ladies &apos; room"),
        ("de", "joe's laden", "joe &apos; s laden"),
        ("en", "10,000 dogs, 3 cats (or 4): 5.5 each", "10,000 dogs , 3 cats ( or 4 ) : 5.5 each"),
        ("en", 'a sign says "stop & go".', "a sign says &quot; stop &amp; go &quot; ."),
        ("de", "„halt“ \u2013 ruft er…", "&quot; halt &quot; - ruft er ..."),
        ("en", "wait ... and see...", "wait ... and see ..."),
        ("en", "a u.s. army truck in the u.s.", "a u.s. army truck in the u.s."),
        ("en", "st. peter's is an upside-down house.", "st. peter &apos;s is an upside-down house ."),
        ("en", "[a|b] <c> d_e", "&#91; a &#124; b &#93; &lt; c &gt; d _ e"),
        ("en", ".", "."),
        ("en", "  ", ""),
    ],
)
def test_text_is_tokenised_as_by_moses(language: str, text: str, tokens: str) -> None:
    assert moses_tokenize(text, language) == tokens


def test_tokenised_text_is_unchanged() -> None:
    text = "the woman &apos;s sign says &quot; a &amp; b &quot; , twice ."
    assert moses_tokenize(text) == text


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "a man, who runs (fast): 10,000 steps; 50%!"),
        ("en", "the woman's hat isn't red."),
        ("en", "the ladies' room is open."),
        ("de", "vor joe's laden steht ein u-bahn-schild."),
        ("en", 'a "red" sign says "stop", twice.'),
        ("en", '"stop & go" [now]?'),
    ],
)
def test_detokenisation_restores_the_text(language: str, text: str) -> None:
    assert moses_detokenize(moses_tokenize(text, language)) == text
