"""BLEU by sacrebleu: hand-computed scores, and a fixed set with the score of an independent implementation."""

import math
import sys

import pytest

from regard.base.errors import ConfigError, DataError
from regard.recipes.bleu import bleu, plain_text_bleu

# the expected score of this set comes from an implementation that does not use sacrebleu
PAIRS = {
    "a man in a blue shirt is standing on a ladder cleaning a window .": (
        "a man in a blue shirt stands on a ladder cleaning a window ."
    ),
    "two dogs play in the snow .": "two dogs are playing in the snow .",
    "the woman &apos;s red hat is on the table": "the woman &apos;s red hat lies on the table .",
    "a group of people sit outside": "a group of people sits outside in the sun .",
    "ein hund läuft über die grüne wiese .": "ein brauner hund läuft über eine grüne wiese .",
    "three kids are jumping": "three kids are jumping .",
}


def test_a_fixed_set_has_the_known_score() -> None:
    assert bleu([*PAIRS], [*PAIRS.values()]) == pytest.approx(52.930819174847784, abs=1e-9)


def test_equal_text_scores_100_and_text_without_a_common_4_gram_0() -> None:
    assert bleu(["a red cat sits"], ["a red cat sits"]) == pytest.approx(100)
    assert bleu(["a red cat sits here"], ["a red dog sits here"]) == 0.0


def test_the_score_is_the_geometric_mean_of_clipped_n_gram_precisions() -> None:
    # of 6, 5, 4 and 3 n-grams 5, 4, 3 and 2 are in the reference
    assert bleu(["the cat sat on the rug"], ["the cat sat on the mat"]) == pytest.approx(
        100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    )
    translations, references = ["the the the the cat sat on it", "a b c d"], ["the cat sat on it", "a b c d"]
    ones, twos, threes, fours = (5 + 4) / 12, (4 + 3) / 10, (3 + 2) / 8, (2 + 1) / 6
    assert bleu(translations, references) == pytest.approx(100 * (ones * twos * threes * fours) ** 0.25)


def test_the_brevity_penalty_applies_to_the_whole_corpus() -> None:
    assert bleu(["a b c d"], ["a b c d e f g"]) == pytest.approx(100 * math.exp(1 - 7 / 4))
    # one translation is too short and one too long
    assert bleu(["a b c d", "e f g h x"], ["a b c d y", "e f g h"]) == pytest.approx(
        100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25
    )


def test_n_grams_do_not_cross_sentences() -> None:
    assert bleu(["a b c", "d e f"], ["a b c", "d e f"]) == 0.0


def test_plain_text_is_tokenised_by_sacrebleu_and_case_can_be_ignored() -> None:
    package = pytest.importorskip("sacrebleu")
    translations = ["a man, who runs fast.", "the end!"]
    references = ["A man, who runs slowly.", "The end!"]
    score = package.corpus_bleu(translations, [references]).score
    lower = package.corpus_bleu(translations, [references], lowercase=True).score
    assert plain_text_bleu(translations, references) == pytest.approx(score)
    assert plain_text_bleu(translations, references, lowercase=True) == pytest.approx(lower) != score


def test_an_error_names_the_extra_if_sacrebleu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    for score in (bleu, plain_text_bleu):
        with pytest.raises(ConfigError, match=r"sacrebleu, which is not installed: pip install 'regard\[translate\]'"):
            score(["a"], ["a"])


def test_each_translation_needs_a_reference() -> None:
    for score in (bleu, plain_text_bleu):
        with pytest.raises(DataError, match="2 translations have 1 references; each needs one"):
            score(["a", "b"], ["a"])
        with pytest.raises(DataError, match="at least one translation"):
            score([], [])
