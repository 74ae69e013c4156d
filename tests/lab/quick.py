"""Quick runs of claims, shared by all tests of a process, and faults that must refute claims."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from regard.lab.claim import Claim, Numbers, Outcome, claims

Fault = tuple[str, dict[str, Callable[..., Any]]]  # a claim, and its broken part

# claims that train for seconds: one quick run is enough
TRAINING = {
    "positions",
    "several-heads",
    "feed-forward-purpose",
    "against-rnn",
    "stability",
    "encoder-decoder",
    "vit-positions",
    "vit-on-digits",
    "vit-or-cnn",
    "image-augmentation",
    "bert-tasks",
    "pretraining-knowledge",
    "made-up-answers",
    "decoding",
}


# claims whose quick run has too few seeds or steps to decide: it must not say the opposite of the full run
NEEDS_FULL_RUN = {"feed-forward-purpose", "vit-or-cnn", "image-augmentation", "bert-tasks"}


def claim(name: str) -> Claim:
    return claims()[name]


@cache
def outcome(name: str) -> Outcome:
    return claim(name).run(claim(name).setup(smoke=True))


def numbers(name: str) -> Numbers:
    return outcome(name).numbers


def fault_cases(faults: Sequence[Fault]) -> list[Any]:
    """Return the pytest cases of faults: claim, fault, settings.

    For a claim that trains, only the first fault is quick. The first fault of a claim over seeds runs with two seeds.
    """
    cases = []
    for at, (name, fault) in enumerate(faults):
        again = name in [other for other, _ in faults[:at]]
        settings = {} if again or not hasattr(claim(name).module.SMOKE, "repeats") else {"repeats": 2}
        marks = [pytest.mark.slow] * (again and name in TRAINING)
        cases.append(
            pytest.param(name, fault, settings, id=f"{name}-{next(iter(fault.values())).__name__}", marks=marks)
        )
    return cases
