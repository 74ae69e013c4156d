"""Questions about people whom nobody has heard of: what a model says of them is made up, however sure it is."""

import random
from collections.abc import Iterable, Sequence

from regard.data.birthplaces import QUESTION, Question
from regard.recipes.familiar import name_in

MANY = 20  # pairs of names that are looked at for each stranger


def strangers(questions: Sequence[Question], heard: Iterable[str], count: int, seed: int) -> list[str]:
    """Questions about so many different strangers, or about as many as there can be.

    A stranger has the first names of somebody who is asked about, and the last name of another. That is harder to tell
    than a name of which no part is known. No question is longer than those that were given, so that all can be read.

    questions  whose people lend their names
    heard      texts and questions, in none of which a stranger stands
    """
    names = [name for each in questions if (name := name_in(each.text))]
    first = sorted({name.rpartition(" ")[0] or name for name in names})
    last = sorted({name.rpartition(" ")[2] for name in names})
    everything = "\n".join(heard)
    longest = max((len(each.text) for each in questions), default=0)
    pairs = range(len(first) * len(last))
    found: list[str] = []
    # few of so many pairs are somebody, or too long
    for pair in random.Random(seed).sample(pairs, min(len(pairs), MANY * count)):
        name = f"{first[pair // len(last)]} {last[pair % len(last)]}"
        question = QUESTION.format(name=name)
        if len(found) < count and len(question) <= longest and name not in everything:
            found.append(question)
    return found
