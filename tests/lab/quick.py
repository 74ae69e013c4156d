"""Quick runs of claims, each made once for all tests that look at it."""

from functools import cache

from regard.lab.claim import Numbers, Outcome, claims

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
