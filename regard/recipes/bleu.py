"""BLEU scores of translations, computed by sacrebleu (Papineni et al. 2002; Post 2018)."""

from collections.abc import Sequence
from typing import Any

from regard.base.errors import DataError
from regard.base.extras import import_optional


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the corpus BLEU-4 of tokenised text, from 0 to 100, without smoothing.

    The tokens are separated by blanks.

    >>> round(bleu(["the cat sat on the rug"], ["the cat sat on the mat"]), 1)
    76.0
    """
    return _corpus_bleu(translations, references, tokenize="none", smooth_method="none", force=True)


def plain_text_bleu(translations: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """Return the corpus BLEU of plain text, from 0 to 100, with sacrebleu's default tokenisation (13a).

    lowercase  ignore upper and lower case
    """
    return _corpus_bleu(translations, references, lowercase=lowercase)


def check_sacrebleu() -> None:
    """Raise an error that names the package to install if sacrebleu is not installed."""
    import_optional("sacrebleu", "translate", "BLEU")


def _corpus_bleu(translations: Sequence[str], references: Sequence[str], **options: Any) -> float:
    if len(translations) != len(references):
        raise DataError(f"{len(translations)} translations have {len(references)} references; each needs one")
    if not translations:
        raise DataError("BLEU needs at least one translation")
    sacrebleu = import_optional("sacrebleu", "translate", "BLEU")
    return float(sacrebleu.corpus_bleu(list(translations), [list(references)], **options).score)
