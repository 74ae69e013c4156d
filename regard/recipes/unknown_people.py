"""Make questions about unknown people, who appear in no text. A model cannot know the answers."""

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.recipes.name_likelihood import extract_name

CANDIDATES = 20  # names sampled for each unknown person: some belong to known people or are too long


def make_unknown_questions(
    questions: Sequence[BirthplaceQuestion], known: Iterable[str], count: int, seed: int, learned: Sequence[str] = ()
) -> list[str]:
    """Make up to `count` different questions about unknown people.

    An unknown person has the first names of one known person and the last name of another, which is harder to detect
    than a name with no known part. No question is longer than the longest of `questions`.

    questions  questions whose names are combined
    known      texts and questions; a name that occurs in a text or question is not used
    learned    questions that were taught by `regard ask --learn`; two thirds of the unknown people have a first or last
               name from these questions
    """
    longest = max((len(each.text) for each in questions), default=0)
    everything = "\n".join(known)
    rng = random.Random(seed)
    first, last = _split_names(each.text for each in questions)
    candidates = [_sample_names(first, last, CANDIDATES * count, rng)]
    if learned:
        learned_first, learned_last = _split_names(learned)
        candidates.append(_sample_names(learned_first, last, CANDIDATES * count, rng))
        candidates.append(_sample_names(first, learned_last, CANDIDATES * count, rng))
    found: dict[str, None] = {}
    for name in (name for names in zip_longest(*candidates) for name in names if name is not None):
        question = QUESTION.format(name=name)
        if len(found) < count and len(question) <= longest and name not in everything:
            found[question] = None
    return list(found)


def _split_names(questions: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return all first names and all last names of the people in the questions, sorted."""
    names = [name for each in questions if (name := extract_name(each))]
    first = sorted({name.rpartition(" ")[0] or name for name in names})
    return first, sorted({name.rpartition(" ")[2] for name in names})


def _sample_names(first: Sequence[str], last: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return a random sample of the combinations of first and last names, at most `count`."""
    pairs = range(len(first) * len(last))
    sampled = rng.sample(pairs, min(len(pairs), count))
    return [f"{first[pair // len(last)]} {last[pair % len(last)]}" for pair in sampled]
