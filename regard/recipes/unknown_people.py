"""Questions about people whom nobody has heard of: what a model says of them is made up, however sure it is."""

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.recipes.name_likelihood import name_in

MANY = 20  # pairs of names that are looked at for each stranger


def strangers(
    questions: Sequence[BirthplaceQuestion], heard: Iterable[str], count: int, seed: int, told: Sequence[str] = ()
) -> list[str]:
    """Questions about so many different strangers, or about as many as there can be.

    A stranger has the first names of somebody who is asked about, and the last name of another. That is harder to tell
    than a name of which no part is known. No question is longer than those that were given, so that all can be read.

    questions  whose people lend their names
    heard      texts and questions, in none of which a stranger stands
    told       questions that were learned by themselves: two strangers in three have a part of such a name, which is
               learned so well that the part alone may do
    """
    longest = max((len(each.text) for each in questions), default=0)
    everything = "\n".join(heard)
    draw = random.Random(seed)
    first, last = _parts(each.text for each in questions)
    kinds = [_joined(first, last, MANY * count, draw)]
    if told:
        told_first, told_last = _parts(told)
        kinds += [_joined(told_first, last, MANY * count, draw), _joined(first, told_last, MANY * count, draw)]
    found: dict[str, None] = {}
    for name in (name for names in zip_longest(*kinds) for name in names if name is not None):
        question = QUESTION.format(name=name)
        # few of so many names are somebody's, or too long
        if len(found) < count and len(question) <= longest and name not in everything:
            found[question] = None
    return list(found)


def _parts(questions: Iterable[str]) -> tuple[list[str], list[str]]:
    """First names and last names of those whom questions are about."""
    names = [name for each in questions if (name := name_in(each))]
    first = sorted({name.rpartition(" ")[0] or name for name in names})
    return first, sorted({name.rpartition(" ")[2] for name in names})


def _joined(first: Sequence[str], last: Sequence[str], count: int, draw: random.Random) -> list[str]:
    """Some of all names that first names and last names make."""
    pairs = range(len(first) * len(last))
    drawn = draw.sample(pairs, min(len(pairs), count))
    return [f"{first[pair // len(last)]} {last[pair % len(last)]}" for pair in drawn]
