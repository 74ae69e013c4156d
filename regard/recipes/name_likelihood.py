"""Name likelihood: the log-probability of the name in a question, which distinguishes known from unknown people.

A name that occurred in training has a high probability under the model. An unknown name has a low probability, even if
it combines the names of two known people. The probability of the answer alone is not enough, because a model can give
a probable answer about any person.
"""

import math
from collections.abc import Sequence

import torch

from regard.data.birthplaces_dataset import QUESTION
from regard.data.characters import CharacterTokenizer
from regard.data.span_corruption import PAD
from regard.models.generation import eval_mode
from regard.models.gpt import GPT

BEFORE, AFTER = QUESTION.split("{name}")


def extract_name(question: str) -> str:
    """Return the name in a question such as "Where was Ada Lovelace born?"; "" if the question has other words.

    Case is ignored.
    """
    first, last = len(BEFORE), len(question) - len(AFTER)
    matches = (question[:first] + question[max(first, last) :]).lower() == (BEFORE + AFTER).lower()
    return question[first:last] if matches else ""


def name_log_likelihood(
    model: GPT, tokenizer: CharacterTokenizer, questions: Sequence[str], batch_size: int = 256
) -> list[float]:
    """Return, for each question, the log-probability of the person's name and of the space that follows it.

    The result is minus infinity for a question without a name.
    """
    found: list[float] = []
    device = next(model.parameters()).device
    for start in range(0, len(questions), batch_size):
        some = questions[start : start + batch_size]
        size = max(map(len, some))
        tokens = torch.tensor([tokenizer.encode(each.ljust(size, PAD)) for each in some], device=device)
        with torch.no_grad(), eval_mode(*model.modules()):
            log_probabilities = model(tokens).log_softmax(-1, dtype=torch.float64)
        values = log_probabilities[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0].tolist()
        for each, row in zip(some, values, strict=True):
            name = extract_name(each)
            first = len(BEFORE) - 1  # the logits at a position predict the next character
            # includes the blank after the name, so that the beginning of a longer known name is unlikely
            found.append(sum(row[first : first + len(name) + 1]) if name else -math.inf)
    return found
