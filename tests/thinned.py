"""Tests of many like cases: a few of them are quick, and `make slow` runs the others."""

import zlib

# one case in so many is quick
THINNED = {
    "tests/core/test_truth.py": 12,
    "tests/core/test_transforms.py": 5,
    "tests/core/test_flex.py::test_no_length_but_the_second": 6,
    "tests/core/test_flex.py": 2,
    "tests/core/test_cache.py": 2,
    "tests/core/test_linear.py": 2,
    "tests/models/": 8,
    "tests/see/": 6,
    "tests/conform/test_mutants.py": 16,
    "tests/conform/test_silence.py": 3,
    "tests/conform/test_conventions.py": 2,
    "tests/conform/test_examples.py": 2,
    "tests/recipes/": 2,
    "tests/work/": 4,
    "tests/train/test_loop.py": 4,
    "tests/train/test_checkpoint.py": 3,
    "tests/train/test_distributed.py": 12,
    "tests/train/test_counts.py": 2,
    "tests/lab/test_every_claim.py::test_the_same_seed": 5,
    "tests/lab/test_every_claim.py::test_a_short_run": 5,
    "tests/lab/test_every_claim.py::test_sentences_have": 5,
    "tests/lab/test_every_claim.py::test_numbers_are": 3,
    "tests/lab/test_every_claim.py::test_every_wrong_answer": 5,
    "tests/lab/test_every_claim.py::test_what_seeds_do_not_agree_on": 5,
    "tests/lab/test_every_claim.py::test_these_claims_repeat": 5,
    "tests/lab/test_transformers.py": 4,
    "tests/lab/test_language_claims.py": 4,
    "tests/lab/test_heads.py": 2,
}


def is_quick(name: str) -> bool:
    """Whether a case of a thinned test is one of the few: by its name alone, so that it is always the same ones."""
    share = next((share for start, share in THINNED.items() if name.startswith(start)), 1)
    return zlib.crc32(name.encode()) % share == 0
