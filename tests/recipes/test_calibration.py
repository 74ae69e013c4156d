"""Confidence is a share of right answers, and a threshold keeps the precision that was asked for."""

import math
import random

import pytest
import torch

from regard.base.errors import ConfigError
from regard.recipes.calibration import AnswerLikelihood, calibrate, exceeds_precision, logistic_regression


def drawn(count: int, seed: int = 0) -> tuple[list[AnswerLikelihood], list[bool]]:
    """Answers that are right as often as 1 / (1 + exp(-(2 odds + 0.5 name + 8))) says."""
    source = random.Random(seed)
    said = [AnswerLikelihood(source.uniform(-5, 0), source.uniform(-20, 0)) for _ in range(count)]
    return said, [source.random() < 1 / (1 + math.exp(-(2 * x.odds + 0.5 * x.name + 8))) for x in said]


def alike(*answers: float) -> list[AnswerLikelihood]:
    """Answers about people who are equally familiar."""
    return [AnswerLikelihood(each, -7.0) for each in answers]


def test_the_curve_is_that_of_the_answers() -> None:
    found = calibrate(*drawn(20_000), precision=0.9)
    assert found.odds == pytest.approx(2, abs=0.1)
    assert found.name == pytest.approx(0.5, abs=0.03)
    assert found.offset == pytest.approx(8, abs=0.4)
    assert found.score(AnswerLikelihood(math.log(0.25), -16 + 4 * math.log(3))) == pytest.approx(0.5, abs=0.02)
    assert 0 < found.score(AnswerLikelihood(-1e9, -1e9)) < found.score(AnswerLikelihood(1e9, 1e9)) < 1


@pytest.mark.parametrize("precision", [0.6, 0.8, 0.9])
def test_answers_above_the_threshold_are_right_as_often_as_was_asked(precision: float) -> None:
    found = calibrate(*drawn(4000), precision=precision)
    said, right = drawn(20_000, seed=1)
    given = [hit for x, hit in zip(said, right, strict=True) if found.accepts(x)]
    assert precision <= sum(given) / len(given)
    assert len(given) / len(said) == pytest.approx(found.coverage, abs=0.03)


@pytest.mark.parametrize("precision", [0.6, 0.8, 0.9])
def test_no_answer_is_given_of_which_the_model_is_less_sure_than_was_asked(precision: float) -> None:
    said, right = drawn(4000)
    found = calibrate(said, right, precision=precision)
    assert precision <= found.threshold < precision + 0.01
    assert any(found.score(x) < precision for x in said)
    surely = calibrate(alike(*[-0.1] * 60, -2.0, -2.1), [True] * 60 + [False, True], 0.9)
    assert not surely.accepts(alike(-2.0)[0]), "sixty sure answers are no excuse for one that is not"
    assert surely.coverage == pytest.approx(60 / 62)


@pytest.mark.parametrize("seed", range(6))
def test_a_model_that_is_nearly_certain_of_everything_answers_much_of_what_it_knows(seed: int) -> None:
    """As real ones are: 99.5 % sure where they are right, 94 where they are wrong, and half of what is made up."""
    source = random.Random(seed)

    def people(count: int, unsure: float, least: float, most: float) -> list[AnswerLikelihood]:
        return [AnswerLikelihood(-(10 ** source.gauss(unsure, 0.6)), source.uniform(least, most)) for _ in range(count)]

    right, wrong, made_up = people(176, -2.3, -30, -8), people(24, -1.2, -30, -8), people(200, -0.2, -60, -27)
    found = calibrate([*right, *wrong, *made_up], [True] * 176 + [False] * 224, 0.9)
    assert sum(map(found.accepts, right)) > 120
    assert sum(map(found.accepts, wrong)) <= 6
    assert not any(map(found.accepts, made_up))


def test_probabilities_that_float32_rounds_to_one_are_equally_likely() -> None:
    assert (
        AnswerLikelihood(0.0, 0.0).odds == AnswerLikelihood(-1e-9, 0.0).odds == pytest.approx(math.log(1e7), rel=1e-3)
    )
    assert AnswerLikelihood(math.log(0.5), 0.0).odds == pytest.approx(0)
    assert AnswerLikelihood(-800.0, 0.0).odds == -800


def test_nothing_is_surer_than_so_few_right_answers_can_show() -> None:
    few = calibrate(alike(*[-1e-4] * 30, -9.0), [True] * 30 + [False], 0.9)
    assert few.score(AnswerLikelihood(0.0, -7.0)) == 31 / 32
    assert few.accepts(AnswerLikelihood(0.0, -7.0))


def test_strangers_are_told_by_their_names_where_answers_do_not_tell() -> None:
    source = random.Random(3)
    known = [AnswerLikelihood(source.uniform(-0.3, 0), source.uniform(-17, -11)) for _ in range(31)]
    strangers = [AnswerLikelihood(source.uniform(-0.3, 0), source.uniform(-50, -25)) for _ in range(29)]
    verdicts = [True] * 31 + [False] * 29
    found = calibrate([*known, *strangers], verdicts, 0.9)
    assert all(map(found.accepts, known))
    assert not any(map(found.accepts, strangers))
    assert found.threshold == 0.9, "nobody lies between, so that less familiar ones have as much room as can be"
    nameless = calibrate([AnswerLikelihood(x.answer, -7.0) for x in (*known, *strangers)], verdicts, 0.9)
    assert nameless.coverage == 0


def test_nobody_asked_about_by_name_is_answered() -> None:
    found = calibrate([*alike(*[-0.1] * 40), AnswerLikelihood(-0.1, -math.inf)], [True] * 41, 0.9)
    assert found.accepts(alike(-0.1)[0])
    assert found.score(AnswerLikelihood(0.0, -math.inf)) == 0
    assert calibrate([AnswerLikelihood(-0.1, -math.inf)] * 40, [True] * 40, 0.9).coverage == 0


def test_what_is_likelier_but_not_better_counts_for_nothing() -> None:
    said = [AnswerLikelihood(-0.1 * number, -40.0 + number) for number in range(40)]
    found = calibrate(said, [number < 20 for number in range(40)], 0.9)
    assert found.name == 0
    assert found.odds > 0


def test_a_stricter_precision_answers_less() -> None:
    coverage = [calibrate(*drawn(4000), precision=p).coverage for p in (0.5, 0.7, 0.9, 0.99)]
    assert coverage == sorted(coverage, reverse=True)
    assert coverage[0] > coverage[-1]


def test_luck_with_a_few_is_no_promise() -> None:
    sure, wrong = alike(*(-0.01 * number for number in range(25))), alike(*[-30.0] * 9)
    some = calibrate([*sure[:20], *wrong], [True] * 20 + [False] * 9, 0.9)
    assert some.coverage == 0  # nine in ten right would do that one time in eight
    assert calibrate([*sure, *wrong], [True] * 25 + [False] * 9, 0.9).coverage == 25 / 34
    kept = []
    for seed in range(60):
        found = calibrate(*drawn(200, seed), precision=0.85)
        others, right = drawn(4000, seed + 1000)
        given = [hit for x, hit in zip(others, right, strict=True) if found.accepts(x)]
        kept.append(sum(given) >= 0.85 * len(given))
    assert sum(kept) >= 48


def test_where_nothing_is_right_nothing_is_said() -> None:
    found = calibrate(alike(-1.0, -2.0, -3.0, -0.5, -0.1, -0.2), [False] * 6, precision=0.9)
    assert found.coverage == 0
    assert not found.accepts(AnswerLikelihood(0.0, 0.0))


def test_answers_that_are_equally_sure_are_given_together() -> None:
    found = calibrate(alike(*[-1.0] * 10), [True] * 6 + [False] * 4, precision=0.9)
    assert found.coverage == 0


@pytest.mark.parametrize("precision", [0.0, 1.5])
def test_a_precision_is_a_share(precision: float) -> None:
    with pytest.raises(ConfigError, match="precision must be above 0 and at most 1"):
        calibrate(alike(-1.0), [True], precision)


def test_answers_without_verdicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 2 answers, but 1 labels"):
        calibrate(alike(-1.0, -2.0), [True], 0.9)


def test_where_likelier_answers_are_not_better_all_are_as_sure_as_the_share_that_is_right() -> None:
    sure = alike(*(-0.01 * number for number in range(100)))
    found = calibrate(sure, [number >= 36 for number in range(100)], 0.9)
    assert found.score(sure[0]) == found.score(sure[-1]) == pytest.approx(0.64, abs=0.01)


@pytest.mark.parametrize("separable", [True, False])
def test_logistic_regression_gives_the_weights_of_scikit_learn(separable: bool) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(97, 2, generator=generator, dtype=torch.float64) * torch.tensor([5.0, 40.0])
    noise = 0.0 if separable else torch.randn(97, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([0.8, -0.05], dtype=torch.float64) + 0.5 + noise > 0
    model = linear.LogisticRegression(C=1e3, max_iter=10_000, tol=1e-12).fit(x.numpy(), y.numpy())
    expected = [*model.coef_[0], model.intercept_[0]]
    assert logistic_regression(x, y.double()).tolist() == pytest.approx(expected, rel=1e-4)


def test_the_binomial_bound_is_that_of_clopper_and_pearson() -> None:
    special = pytest.importorskip("scipy.special")
    for count in (1, 7, 30, 97):
        for hits in range(count + 1):
            bound = special.betaincinv(hits, count - hits + 1, 0.1) if hits else 0.0
            for precision in (0.6, 0.9, 1.0):
                assert exceeds_precision(hits, count, precision) == (bound >= precision)
