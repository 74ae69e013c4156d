"""Quick runs of claims, each made once for all tests that look at it."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from regard.lab.claim import Numbers, Outcome, claims

Fault = tuple[str, dict[str, Callable[..., Any]]]  # a claim, and the part that is broken

# claims that train for seconds: once in the quick tests is enough
TRAINING = {
    "positions",
    "against-rnn",
    "stability",
    "encoder-decoder",
    "vit-positions",
    "vit-or-cnn",
    "bert-tasks",
    "pretraining-knowledge",
    "made-up-answers",
    "decoding",
}


@cache
def outcome(name: str) -> Outcome:
    claim = claims()[name]
    return claim.run(claim.setup(smoke=True))


def numbers(name: str) -> Numbers:
    return outcome(name).numbers


def cases(faults: Sequence[Fault]) -> list[Any]:
    """Claims, faults and settings to run them with; of those of a claim that trains, all but the first are slow.

    The first fault of a claim that repeats over seeds shows with two of them.
    """
    made = []
    for at, (name, fault) in enumerate(faults):
        again = name in [other for other, _ in faults[:at]]
        settings = {} if again or not hasattr(claims()[name].module.SMOKE, "repeats") else {"repeats": 2}
        label = f"{name}-{next(iter(fault.values())).__name__}"
        marks = [pytest.mark.slow] * (again and name in TRAINING)
        made.append(pytest.param(name, fault, settings, id=label, marks=marks))
    return made
