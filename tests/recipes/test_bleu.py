"""BLEU against a count by hand and against sacrebleu, and text cut into tokens and put together again."""

import math
import random

import pytest

from regard.base.errors import ConfigError, DataError
from regard.recipes import bleu as module
from regard.recipes.bleu import bleu, detokenised, has_sacrebleu, sacrebleu, tokenised

WORDS = ["a", "the", "dog", "cat", "sits", "on", "mat", "red", "big", "and", "runs", "."]


def made_up(seed: int, size: int = 37) -> tuple[list[str], list[str]]:
    """References, and translations that are them with some words lost, swapped or new."""
    draw = random.Random(seed)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(5, 13))) for _ in range(size)]
    translations = []
    for reference in references:
        words = [draw.choice(WORDS) if draw.random() < 0.2 else word for word in reference.split()]
        translations.append(" ".join(word for word in words if draw.random() > 0.1))
    return translations, references


def test_what_is_said_alike_is_worth_100_and_what_shares_no_four_words_nothing() -> None:
    assert bleu(["a red cat sits"], ["a red cat sits"]) == pytest.approx(100)
    assert bleu(["a red cat sits here"], ["a red dog sits here"]) == 0.0


def test_a_count_by_hand() -> None:
    # of 6, 5, 4 and 3 sequences 5, 4, 3 and 2 are in the reference
    said, wanted = ["the cat sat on the rug"], ["the cat sat on the mat"]
    assert bleu(said, wanted) == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_a_word_counts_as_often_as_the_reference_has_it() -> None:
    said, wanted = ["the the the the cat sat on it", "a b c d"], ["the cat sat on it", "a b c d"]
    ones, twos, threes, fours = (5 + 4) / 12, (4 + 3) / 10, (3 + 2) / 8, (2 + 1) / 6
    assert bleu(said, wanted) == pytest.approx(100 * (ones * twos * threes * fours) ** 0.25)


def test_what_is_too_short_as_a_whole_loses_and_what_is_too_long_does_not_twice() -> None:
    assert bleu(["a b c d"], ["a b c d e f g"]) == pytest.approx(100 * math.exp(1 - 7 / 4))
    # one too short and one too long make up for each other
    assert bleu(["a b c d", "e f g h x"], ["a b c d y", "e f g h"]) == pytest.approx(
        100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25
    )


def test_sequences_do_not_reach_over_sentences() -> None:
    assert bleu(["a b c", "d e f"], ["a b c", "d e f"]) == 0.0


@pytest.mark.parametrize("seed", range(7))
def test_it_is_what_sacrebleu_counts_on_tokens(seed: int) -> None:
    package = pytest.importorskip("sacrebleu")
    said, wanted = made_up(seed)
    truth = package.corpus_bleu(said, [wanted], tokenize="none", smooth_method="none", force=True).score
    assert bleu(said, wanted) == pytest.approx(truth, abs=1e-9)
    assert 20 < truth < 80


def test_the_figure_for_plain_text_is_that_of_the_package() -> None:
    package = pytest.importorskip("sacrebleu")
    said, wanted = ["a man, who runs fast.", "the end!"], ["A man, who runs slowly.", "The end!"]
    assert sacrebleu(said, wanted) == pytest.approx(package.corpus_bleu(said, [wanted]).score)
    lower = package.corpus_bleu(said, [wanted], lowercase=True).score
    assert sacrebleu(said, wanted, lowercase=True) == pytest.approx(lower) != sacrebleu(said, wanted)


def test_where_the_package_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_sacrebleu", lambda: False)
    with pytest.raises(ConfigError, match=r"the package sacrebleu, which is missing: pip install sacrebleu"):
        sacrebleu(["a"], ["a"])


def test_whether_it_is_there_is_asked_without_loading_it() -> None:
    import importlib.util

    assert has_sacrebleu() == (importlib.util.find_spec("sacrebleu") is not None)


def test_pairs_that_do_not_match_are_told() -> None:
    for counted in (bleu, sacrebleu):
        with pytest.raises(DataError, match="2 translations have 1 references; each needs one"):
            counted(["a", "b"], ["a"])
        with pytest.raises(DataError, match="there are no translations"):
            counted([], [])


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
def test_text_is_cut_as_the_moses_tools_cut_it(language: str, text: str, tokens: str) -> None:
    assert tokenised(text, language) == tokens


def test_tokens_are_left_as_they_are() -> None:
    text = "the woman &apos;s sign says &quot; a &amp; b &quot; , twice ."
    assert tokenised(text) == text


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
def test_cut_and_put_together_it_is_the_text_again(language: str, text: str) -> None:
    assert detokenised(tokenised(text, language)) == text
