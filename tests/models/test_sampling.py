"""Decoding strategies: which tokens they choose, how often, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.models.beam_search import BeamSearch
from regard.models.generation_types import make_strategy
from regard.models.hypothesis import Hypothesis
from regard.models.sampling import (
    Greedy,
    KthLargest,
    Sample,
    StepwiseStrategy,
    Strategy,
    rank_tokens,
    top_tokens,
    top_tokens_by_keys,
)

# probabilities 0.05, 0.4, 0.1, 0.3, 0.15
SHARES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], dtype=torch.float64)
LOGITS = SHARES.log()[None]


def chosen(strategy: object, logits: Tensor, chance: Tensor | None = None) -> list[int]:
    assert isinstance(strategy, StepwiseStrategy)
    return strategy.choose(logits, torch.zeros(len(logits)) if chance is None else chance).tolist()


def drawn_from(strategy: object, logits: Tensor) -> list[float]:
    assert isinstance(strategy, Sample)
    return strategy.probabilities(logits)[0].tolist()


def test_tokens_are_ranked_by_logit_and_equal_ones_by_id() -> None:
    assert rank_tokens(torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [1, 3, 5, 4, 0, 2]
    many = torch.zeros(1, 1009)
    many[0, 7::2] = 1.0
    assert rank_tokens(many)[0].tolist() == [*range(7, 1009, 2), *range(7), *range(8, 1009, 2)]


def test_greedy_takes_the_most_likely_token_and_the_lowest_of_equal_ones() -> None:
    assert chosen(Greedy(), torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0], [0.0, -1.0, 2.0]])) == [1, 0, 2]
    assert chosen(Greedy(), torch.cat([torch.full((1, 4001), 2.0), torch.full((1, 4001), -3.0)])) == [0, 0]


def test_the_kth_token_counts_from_one() -> None:
    assert [chosen(KthLargest(k), LOGITS)[0] for k in (1, 2, 3, 4, 5)] == [1, 3, 4, 2, 0]
    assert [chosen(KthLargest(k), torch.tensor([[2.0, 7.0, 7.0, 2.0]]))[0] for k in (1, 2, 3, 4)] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Sample(), [0.05, 0.4, 0.1, 0.3, 0.15]),
        (Sample(top_p=1.0), [0.05, 0.4, 0.1, 0.3, 0.15]),
        (Sample(top_k=5), [0.05, 0.4, 0.1, 0.3, 0.15]),
        (Sample(top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sample(top_k=1), [0, 1, 0, 0, 0]),
        (Sample(top_p=0.39), [0, 1, 0, 0, 0]),  # the first alone is more than that
        (Sample(top_p=0.41), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sample(top_p=0.69), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sample(top_p=0.71), [0, 40 / 85, 0, 30 / 85, 15 / 85]),
        # of the three that top_k leaves, 40/85 are less than 0.5, so the second is needed as well
        (Sample(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sample(top_k=3, top_p=0.47), [0, 1, 0, 0, 0]),
        (Sample(temperature=0.5), [x**2 / 0.285 for x in (0.05, 0.4, 0.1, 0.3, 0.15)]),
        # temperature comes first: 0.16 + 0.09 of 0.285 is 0.877
        (Sample(temperature=0.5, top_p=0.87), [0, 16 / 25, 0, 9 / 25, 0]),
        (Sample(temperature=1e-310), [0, 1, 0, 0, 0]),
        (Sample(temperature=1e300), [0.2] * 5),
    ],
)
def test_probabilities_after_temperature_top_k_and_top_p(strategy: object, expected: list[float]) -> None:
    assert drawn_from(strategy, LOGITS) == pytest.approx(expected, abs=1e-14)
    assert drawn_from(strategy, LOGITS + 1000) == pytest.approx(expected, abs=1e-12)


def many(kind: str, scale: float) -> Tensor:
    """Logits of 3 texts over 2003 tokens, most of them with twins unless they are distinct."""
    logits = scale * torch.randn(3, 2003, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    if kind == "ruled out":
        logits[:, ::3] = -math.inf
        logits[1, 5:] = -math.inf
    if kind == "one row of one value":
        logits[2] = 0.25
    made = {"twins": logits.round(), "half": logits.bfloat16(), "single": logits.float()}
    return made.get(kind, logits)


KINDS = ["distinct", "single", "half", "twins", "ruled out", "one row of one value"]


@pytest.mark.parametrize("kind", KINDS)
def test_top_tokens_are_the_first_of_the_ranking(kind: str) -> None:
    logits = many(kind, 3.0)
    for k in (1, 2, 7, 100, 499, 700, 2003):
        assert torch.equal(top_tokens(logits, k), rank_tokens(logits)[:, :k])
        assert torch.equal(top_tokens(logits[1], k), rank_tokens(logits[1])[:k])
        assert chosen(KthLargest(k), logits) == rank_tokens(logits)[:, k - 1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_top_tokens_by_keys_are_those_of_the_ranking(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 1009, generator=torch.Generator().manual_seed(1)) * 3).round().to(dtype)  # many are equal
    logits[0, 3], logits[2, 5] = -torch.inf, torch.inf
    logits[1, ::2] = -0.0  # equals 0.0
    for k in (1, 37, 1009):
        assert torch.equal(top_tokens_by_keys(logits, k), rank_tokens(logits)[:, :k])


def by_sorting(strategy: Sample, logits: Tensor) -> Tensor:
    """What is drawn from, by a sort of all tokens."""
    logits = logits.double()
    shares = ((logits - logits.amax(-1, keepdim=True)) / strategy.temperature).softmax(-1)
    order = rank_tokens(logits)
    shares = shares.gather(-1, order)
    if strategy.top_k is not None:
        shares[:, strategy.top_k :] = 0.0
        shares /= shares.sum(-1, keepdim=True)
    if strategy.top_p is not None:
        shares = shares * (shares.cumsum(-1) - shares < strategy.top_p)
    return torch.zeros_like(shares).scatter(-1, order, shares / shares.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.02, 1.0, 9.0])
def test_a_large_vocabulary_gives_the_probabilities_of_a_full_sort(kind: str, scale: float) -> None:
    logits = many(kind, scale)
    chance = torch.rand(3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for settings in (
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 1999},
        {"top_p": 1e-7},
        {"top_p": 0.37},
        {"top_p": 0.91},
        {"top_p": 0.9999999},
        {"top_p": 0.91, "temperature": 0.03},
        {"top_p": 0.91, "temperature": 40.0},
        {"top_p": 0.91, "temperature": 1e-310},
        {"top_p": 0.91, "temperature": 1e300},
        {"top_k": 40, "top_p": 0.37, "temperature": 1.7},
    ):
        strategy = Sample(**settings)
        truth, found = by_sorting(strategy, logits), strategy.probabilities(logits)
        assert torch.equal(found > 0, truth > 0), settings
        assert torch.allclose(found, truth, rtol=1e-11, atol=0.0), settings
        assert chosen(strategy, logits, chance) == (truth.cumsum(-1) <= chance[:, None]).sum(-1).tolist(), settings


def test_top_p_sums_in_the_order_of_the_ranking() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(2)).round()
    for tenths in range(1, 10):  # at this temperature all tokens are equally likely, and five of them are a tenth
        strategy = Sample(temperature=1e300, top_p=tenths / 10)
        assert torch.equal(strategy.probabilities(logits) > 0, by_sorting(strategy, logits) > 0)


def test_of_equal_tokens_the_lower_ones_are_kept() -> None:
    equal = torch.zeros(1, 6)
    assert drawn_from(Sample(top_k=2), equal) == [0.5, 0.5, 0, 0, 0, 0]
    assert drawn_from(Sample(top_p=0.4), equal) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0])


def test_a_token_with_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    ends = torch.tensor([0.0, 0.25, 0.5 - 1e-12, 0.5, 0.75, 1.0 - 2**-53], dtype=torch.float64)
    assert chosen(Sample(), logits.expand(6, 5), ends) == [1, 1, 1, 3, 3, 3]
    assert chosen(Sample(top_k=2), LOGITS.expand(6, 5), ends) == [1, 1, 1, 1, 3, 3]


def test_random_numbers_map_to_tokens_in_order() -> None:
    edges = SHARES.cumsum(0)
    for token in range(5):
        low = 0.0 if token == 0 else float(edges[token - 1]) + 1e-9
        for chance in (low, float(edges[token]) - 1e-9):
            assert chosen(Sample(), LOGITS, torch.tensor([chance], dtype=torch.float64)) == [token]


def chi_square(counts: Tensor, shares: Tensor) -> float:
    expected = shares * counts.sum()
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0, "a token was drawn that should not be possible"
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    "strategy", [Sample(), Sample(top_k=3), Sample(top_p=0.8), Sample(temperature=1.7, top_k=4, top_p=0.9)]
)
def test_frequencies_are_the_probabilities(strategy: StepwiseStrategy) -> None:
    assert isinstance(strategy, Sample)
    draws = 20000
    chance = torch.rand(draws, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    counts = torch.bincount(strategy.choose(LOGITS.expand(draws, 5), chance), minlength=5)
    shares = strategy.probabilities(LOGITS)[0]
    # four degrees of freedom or fewer: less than one run in a thousand exceeds 18.5
    assert chi_square(counts, shares) < 18.5


def test_frequencies_that_are_off_by_a_fiftieth_would_be_found() -> None:
    off = torch.tensor([0.0, 0.02, 0.0, -0.02, 0.0])
    assert chi_square(20000 * SHARES, SHARES) < 1e-9
    assert chi_square(20000 * (SHARES + off), SHARES) > 18.5


def test_half_precision_logits_are_drawn_from_in_double() -> None:
    logits = torch.randn(3, 11, dtype=torch.bfloat16)
    made = Sample(top_p=0.9)
    assert made.probabilities(logits).dtype == torch.float64
    assert torch.equal(made.probabilities(logits), made.probabilities(logits.double()))


def test_the_beam_score_has_a_length_penalty() -> None:
    text = Hypothesis(0, [5, 1, 2, 3, 4], [-1.5] * 4)
    assert BeamSearch(3).score(text) == -6.0
    assert BeamSearch(3, 1.0).score(text) == -1.5
    assert BeamSearch(3, 0.5).score(text) == -3.0


def test_strategies_are_values() -> None:
    assert Sample(top_p=0.5, seed=3) == Sample(1.0, None, 0.5, 3)
    assert len({Greedy(), Greedy(), KthLargest(2), KthLargest(2), BeamSearch(2), Sample()}) == 4
    assert repr(Sample(top_k=3)) == "Sample(temperature=1.0, top_k=3, top_p=None, seed=0, stream=0)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sample(temperature=0.0), r"above 0 and finite, not 0\.0; .* leave it out \(greedy decoding\)"),
        (lambda: Sample(temperature=-1.0), "above 0 and finite"),
        (lambda: Sample(temperature=math.inf), "above 0 and finite, not inf"),
        (lambda: Sample(temperature=math.nan), "temperature is nan"),
        (lambda: Sample(top_k=0), "top_k is 0, but must be at least 1: it counts tokens"),
        (lambda: Sample(top_k=2.5), r"top_k takes a whole number, not 2\.5"),
        (lambda: Sample(top_p=0.0), r"top_p is a probability, above 0 and at most 1, not 0\.0"),
        (lambda: Sample(top_p=1.01), r"above 0 and at most 1, not 1\.01"),
        (lambda: Sample(top_p=math.nan), "top_p is nan"),
        (lambda: Sample(seed=-1), "seed is -1, but must be at least 0"),
        (lambda: KthLargest(0), "k is 0, but must be at least 1"),
        (lambda: BeamSearch(0), "num_beams is 0, but must be at least 1: it counts hypotheses"),
        (lambda: BeamSearch(True), "num_beams takes a whole number, not True"),
        (lambda: BeamSearch(2, math.inf), r"length_penalty is a finite exponent such as 0\.6, not inf"),
        (lambda: KthLargest(12).check(11), "k is 12, but the vocabulary has only 11 tokens"),
        (lambda: Sample(top_k=12).check(11), "top_k is 12, but the vocabulary has only 11 tokens"),
    ],
)
def test_wrong_settings_of_a_strategy_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_settings_that_fit_the_vocabulary_are_accepted() -> None:
    for strategy in (Greedy(), KthLargest(11), Sample(top_k=11), Sample(), BeamSearch(99)):
        strategy.check(11)


@pytest.mark.parametrize(
    ("keywords", "strategy"),
    [
        ({}, Greedy()),
        ({"num_beams": 1}, Greedy()),
        ({"temperature": 0.8}, Sample(0.8)),
        ({"top_k": 3, "seed": 4, "num_beams": 1}, Sample(top_k=3, seed=4)),
        ({"top_p": 0.9}, Sample(top_p=0.9)),
        ({"num_beams": 3}, BeamSearch(3)),
        ({"num_beams": 3, "length_penalty": 0.6}, BeamSearch(3, 0.6)),
        ({"strategy": "sample", "seed": 4}, Sample(seed=4)),
        ({"strategy": "beam"}, BeamSearch(4)),
        ({"strategy": "greedy"}, Greedy()),
        ({"strategy": KthLargest(2)}, KthLargest(2)),
    ],
)
def test_keywords_make_a_strategy(keywords: dict[str, Any], strategy: Strategy) -> None:
    assert make_strategy(**keywords) == strategy


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        (
            {"num_beams": 4, "temperature": 0.5},
            "temperature=0.5 is for strategy='sample', but num_beams=4 was chosen; leave it out",
        ),
        ({"num_beams": 4, "seed": 1}, "seed=1 is for strategy='sample', but num_beams=4 was chosen"),
        ({"seed": 1}, "strategy='greedy' was chosen; leave it out or give temperature, top_k or top_p too"),
        ({"length_penalty": 0.6}, "length_penalty=0.6 is for strategy='beam', but strategy='greedy' was chosen"),
        ({"length_penalty": 0.6, "top_k": 3}, "length_penalty=0.6 is for strategy='beam', but top_k=3 was chosen"),
        ({"strategy": "greedy", "top_k": 3}, "top_k=3 is for strategy='sample', but strategy='greedy' was chosen"),
        ({"strategy": "sample", "num_beams": 3}, "num_beams=3 is for strategy='beam', but strategy='sample'"),
        ({"strategy": Greedy(), "top_k": 3}, r"strategy=Greedy\(\) has its own settings; leave out top_k"),
        ({"num_beams": 0}, "num_beams is 0, but must be at least 1"),
        ({"strategy": "kth"}, "strategy is 'greedy', 'sample', 'beam' or a value such as .* not 'kth'"),
        ({"strategy": Greedy}, "strategy is 'greedy', 'sample', 'beam' or a value such as"),
    ],
)
def test_keywords_that_contradict_each_other_are_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy(**keywords)
