"""How familiar somebody is to a model: how likely it finds the letters of the name that a question says.

Who was read of has a name that the model could have gone on with by itself. A stranger's surprises it, and so does one
that joins two known ones; the answer alone often does not tell, since something likely can be said of anybody.
"""

import math
from collections.abc import Sequence

import torch

from regard.data.birthplaces_dataset import QUESTION
from regard.data.characters import Characters
from regard.data.span_corruption import PAD
from regard.models.generation import eval_mode
from regard.models.gpt import GPT

BEFORE, AFTER = QUESTION.split("{name}")


def name_in(question: str) -> str:
    """Whom a question asks about; empty where it is of another form. Capitals do not matter."""
    first, last = len(BEFORE), len(question) - len(AFTER)
    asks = (question[:first] + question[max(first, last) :]).lower() == (BEFORE + AFTER).lower()
    return question[first:last] if asks else ""


def familiarity(model: GPT, letters: Characters, questions: Sequence[str], at_once: int = 256) -> list[float]:
    """The log-probability of each question's name and of its end; minus infinity where a question has none."""
    found: list[float] = []
    device = next(model.parameters()).device
    for start in range(0, len(questions), at_once):
        some = questions[start : start + at_once]
        size = max(map(len, some))
        tokens = torch.tensor([letters.encode(each.ljust(size, PAD)) for each in some], device=device)
        with torch.no_grad(), eval_mode(model):
            chances = model(tokens).log_softmax(-1, dtype=torch.float64)
        values = chances[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0].tolist()
        for each, row in zip(some, values, strict=True):
            name = name_in(each)
            first = len(BEFORE) - 1  # a letter is told by the one before it
            # with the blank after it: the beginning of a known name is another name
            found.append(sum(row[first : first + len(name) + 1]) if name else -math.inf)
    return found
