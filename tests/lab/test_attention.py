"""The claims about attention itself: what holds, what the sheets get wrong, and the faults that turn each verdict."""

from math import exp, log, nan
from typing import Any

import pytest
from torch import Tensor

from regard.base.errors import ConfigError
from regard.lab.claim import claims
from regard.lab.verdict import REFUTED, SUPPORTED, UNCLEAR, Numbers
from tests import mutants
from tests.lab.quick import numbers
from tests.mutants import naive


def ignores_the_length_of_keys(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(q, k / k.norm(dim=-1, keepdim=True), v, **rest)


def asks_with_the_first_head_only(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(q[:, :1].expand_as(q), k, v, **rest)


def mistakes_keys_for_queries(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(k, q, v, **rest) if q.shape == k.shape else naive(q, k, v, **rest)


def leaks_the_mean_of_the_values(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(q, k, v, **rest) + 1e-3 * v.mean(2, keepdim=True)


def squares_beta(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(q, k, v, **rest, sharpness=lambda beta, c: 1 / c if beta is None else beta * beta)


def halves_beta(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(q, k, v, **rest, sharpness=lambda beta, c: (c**-0.5 if beta is None else beta) / 2)


def gives_nan_in_the_last_row(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    out = naive(q, k, v, **rest)
    out[..., -1, :] = nan
    return out


def negates_scores(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return naive(-q, k, v, **rest)


FAULTS = {
    "average-two": (mutants.scales_by_the_width_whatever_beta_says, mutants.normalises_queries, squares_beta),
    "beta": (
        mutants.takes_beta_for_a_temperature,
        mutants.scales_by_the_width_whatever_beta_says,
        mutants.prefers_the_first_keys,
        mutants.scales_twice,
        squares_beta,
        halves_beta,
    ),
    "copy-value": (
        squares_beta,
        mutants.scales_by_the_width_whatever_beta_says,
        mutants.takes_beta_for_a_temperature,
        mutants.exponentiates_without_the_maximum,
        mutants.prefers_the_first_keys,
    ),
    "dense-equivalent": (
        mutants.prefers_the_first_keys,
        mutants.takes_zero_for_no_beta,
        mutants.never_sees_itself,
    ),
    "diffuse": (
        mutants.takes_zero_for_no_beta,
        mutants.takes_beta_for_a_temperature,
        mutants.masks_after_the_softmax,
        mutants.clips_values,
    ),
    "dot-product": (
        mutants.runs_softmax_over_the_queries,
        mutants.drops_the_scale,
        mutants.scales_by_the_width_of_v,
        mutants.computes_in_bfloat16,
    ),
    "four-kinds": (
        mutants.scales_by_the_width_whatever_beta_says,
        mutants.keeps_the_three_largest_weights,
        leaks_the_mean_of_the_values,
        negates_scores,
    ),
    "key-nudge": (mutants.drops_the_scale, mutants.scales_twice, mutants.keeps_the_three_largest_weights),
    "key-stretch": (ignores_the_length_of_keys, mutants.runs_softmax_over_the_queries, leaks_the_mean_of_the_values),
    "keys-queries-values": (
        gives_nan_in_the_last_row,
        mistakes_keys_for_queries,
        mutants.never_sees_itself,
        leaks_the_mean_of_the_values,
    ),
    "noisy-keys-one-head": (
        ignores_the_length_of_keys,
        mutants.scales_by_the_width_whatever_beta_says,
        squares_beta,
    ),
    "noisy-keys-two-heads": (
        asks_with_the_first_head_only,
        ignores_the_length_of_keys,
        leaks_the_mean_of_the_values,
        squares_beta,
    ),
    "query-nudge": (
        mutants.centres_queries_over_the_rows,
        mutants.runs_softmax_over_the_queries,
        mutants.inverts_the_scale,
    ),
    "rows-are-distributions": (
        mutants.runs_softmax_over_the_queries,
        mistakes_keys_for_queries,
        mutants.centres_queries_over_the_rows,
    ),
    "scale-by-root": (mutants.drops_the_scale, mutants.scales_twice, mutants.inverts_the_scale, mutants.detaches_terms),
    "softmax-jacobian": (mutants.computes_in_bfloat16, mutants.scales_by_the_width_whatever_beta_says),
}
NAMES = sorted(FAULTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_is_the_same_for_other_seeds(name):
    claim = claims()[name]
    for seed in (1, 2):
        came = claim.run(claim.setup(seed=seed, smoke=True))
        assert came.verdict.word == SUPPORTED, came.verdict.sentence
        assert all(verdict.word == REFUTED for _, verdict in came.wrong_answers)


@pytest.mark.parametrize("name", NAMES)
def test_another_correct_attention_is_supported(name):
    """A correct implementation of its own supports every claim, so faults are refuted for their fault."""
    claim = claims()[name]
    came = claim.run(claim.setup(smoke=True), attention=naive)
    assert came.verdict.word == SUPPORTED, came.verdict.sentence


def adds_up(q: Tensor, k: Tensor, v: Tensor, *, beta: float | None = None, **rest: Any) -> Tensor:
    """Attention without a softmax: linear in keys, and additive."""
    return (q @ k.mT * (q.shape[-1] ** -0.5 if beta is None else beta)) @ v


def returns_the_values(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return v if q.shape[2] == v.shape[2] else naive(q, k, v, **rest)


def shares_among_positive_scores(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    chosen = (q @ k.mT > 0).to(v.dtype)
    return chosen / chosen.sum(-1, keepdim=True).clamp(min=1) @ v


@pytest.mark.parametrize(
    ("name", "at", "attention"),
    [
        ("beta", 0, mutants.takes_beta_for_a_temperature),
        ("copy-value", 0, shares_among_positive_scores),
        ("copy-value", 1, returns_the_values),
        ("diffuse", 0, mutants.takes_beta_for_a_temperature),
        ("key-nudge", 0, adds_up),
        ("key-nudge", 1, adds_up),
        ("scale-by-root", 1, mutants.exponentiates_without_the_maximum),
    ],
)
def test_an_attention_that_agrees_with_a_wrong_answer_supports_it(name, at, attention):
    claim = claims()[name]
    _, verdict = claim.run(claim.setup(smoke=True), attention=attention).wrong_answers[at]
    assert verdict.word == SUPPORTED, verdict.sentence


def test_the_numbers_of_beta():
    measured = numbers("beta")
    assert measured["weights"][0] == pytest.approx([0.246, 0.249, 0.251, 0.254], abs=5e-4)
    assert measured["weights"][-1] == pytest.approx([0, 0, 0, 1], abs=1e-12)
    assert measured["variance"] == pytest.approx(63.9, rel=0.02)
    assert measured["scaled variance"] == pytest.approx(1.0, abs=0.02)


def test_60_30_30_copies_up_to_two_e_to_the_minus_30():
    measured = numbers("copy-value")
    assert measured["weight of the other keys"] == pytest.approx(2 * exp(-30), rel=1e-9)
    assert f"{measured['weight of the other keys']:.0e}" == "2e-13"
    assert measured["bounds"][1][2] == log(9 / 1e-4)
    assert all(
        lost == pytest.approx(eps / (1 + eps))
        for row in measured["error at the bound"]
        for lost, eps in zip(row, measured["errors"], strict=True)
    )
    assert measured["weights of equal queries"] == [[1, 0, 0]] * 3


def test_no_beta_gives_the_mean():
    measured = numbers("diffuse")
    assert measured["betas"][-1] == 0
    assert measured["distance from 1/m"][-1] < 1e-16
    assert measured["entropy"][-1] == pytest.approx(log(7))


def test_sizes_are_m_by_n_and_t_by_n():
    claim = claims()["dot-product"]
    setup = claim.setup({"width": 2, "queries": 3, "keys": 11, "value_width": 5})
    measured = claim.run(setup).numbers
    assert (measured["size of A"], measured["size of H"]) == ([11, 3], [5, 3])


def test_hard_attention_uses_one_key_and_soft_attention_all():
    used = {kind: numbers("four-kinds")[kind]["most nonzero weights"] for kind in numbers("four-kinds")["kinds"]}
    assert used == {"self soft": 7, "self hard": 1, "cross soft": 5, "cross hard": 1}


@pytest.mark.parametrize("name", ["key-nudge", "query-nudge"])
def test_the_first_order_error_is_4e_5_at_small_eps_and_quadratic(name):
    measured = numbers(name)
    assert measured["sizes"][-1] == 1e-4
    assert f"{measured['relative error'][-1]:.0e}" == "4e-05"
    assert measured["order of the error"] == pytest.approx(2, abs=0.01)


def test_a_random_change_of_a_key_has_mean_0_and_the_mean_square_of_the_formula():
    measured = numbers("key-nudge")
    low, high = measured["mean squared change, measured by formula"]
    assert 0.97 < low <= high < 1.03  # 20,000 draws: a standard deviation of 0.01
    assert measured["mean change by root mean square"] < 0.03


def test_a_changed_query_changes_only_its_own_column():
    assert numbers("query-nudge")["change of other columns"] == 0
    assert numbers("query-nudge")["columns changed by a key"] == 5


def test_the_weight_of_a_key_a_thousand_times_longer_depends_on_the_sign():
    measured = numbers("key-stretch")
    assert measured["alphas"][-1] == 1000
    assert measured["weight, positive score"][-1] == pytest.approx(1, abs=1e-12)
    assert measured["weight, negative score"][-1] == pytest.approx(0, abs=1e-12)
    assert measured["weight, zero score"] == pytest.approx([measured["weight, zero score"][0]] * 6, abs=1e-15)


def test_two_of_10_keys_have_the_weight_0_49991_at_s_10():
    measured = numbers("average-two")
    at = measured["sizes"].index(10.0)
    assert measured["keys"] == 10
    assert f"{measured['weight of a'][at]:.5f}" == f"{measured['weight of b'][at]:.5f}" == "0.49991"


def test_one_head_is_near_each_value_in_37_percent_of_draws():
    measured = numbers("noisy-keys-one-head")
    assert measured["size"] == 20
    assert f"{measured['share near v_a']:.0%}" == f"{measured['share near v_b']:.0%}" == "37%"
    assert measured["share near v_a"] == pytest.approx(measured["expected share"], abs=1e-4)
    assert measured["share near v_a"] + measured["share near v_b"] + measured["share in between"] == pytest.approx(1)


def test_two_heads_are_near_the_mean_in_89_5_percent_of_draws():
    measured = numbers("noisy-keys-two-heads")
    assert f"{measured['share of c1 near v_a']:.1%}" == f"{measured['expected share']:.1%}" == "89.5%"
    assert measured["share of c near the mean"] > measured["share of c1 near v_a"]


def test_the_full_setup_gives_the_shares_to_four_digits():
    for name, at, share in (
        ("noisy-keys-one-head", "share near v_a", 0.3726),
        ("noisy-keys-one-head", "share near v_b", 0.3726),
        ("noisy-keys-two-heads", "share of c1 near v_a", 0.8952),
    ):
        claim = claims()[name]
        assert claim.run(claim.setup()).numbers[at] == pytest.approx(share, abs=0.0001)


def test_the_three_matrices_give_u_b_and_u_b_minus_u_c():
    first, second = numbers("keys-queries-values")["outputs along u"]
    assert first == pytest.approx([0, 1, -1, 0], abs=1e-12)
    assert second == pytest.approx([0, 1, 0, 0], abs=1e-12)
    # with u_d or u_c added, c2 is x2 itself, which has nothing of u_b: at a right angle, or farther
    assert min(numbers("keys-queries-values")["distance from u_b, u_d added"]) == pytest.approx(2**0.5)


def test_the_largest_of_25_derivatives_is_that_of_the_largest_output():
    measured = numbers("softmax-jacobian")
    assert [len(row) for row in measured["derivatives"]] == [5] * 5
    exact = sum(exp(z - 100) for z in (-3, 1, 5, -1))
    assert measured["largest derivative"] == measured["derivative of the largest"] == pytest.approx(exact, rel=1e-9)
    assert f"{measured['largest derivative']:.2e}" == "5.64e-42"
    assert measured["derivatives"][3][3] == pytest.approx(exp(-95), rel=1e-9)
    assert measured["y (1 - y) of the largest in float64"] == 0


def test_scores_have_the_variance_of_their_width():
    measured = numbers("scale-by-root")
    assert measured["variance, undivided"] == pytest.approx(measured["widths"], rel=0.15)
    assert measured["variance, divided"] == pytest.approx([1] * 5, rel=0.15)
    assert (
        measured["overflow: largest score"]
        > measured["overflow: largest exponent of float32"]
        == pytest.approx(88.7, abs=0.05)
    )


def test_rows_sum_to_one_and_columns_do_not():
    measured = numbers("rows-are-distributions")
    assert [sum(row) for row in measured["weights"]] == pytest.approx([1] * 7)
    assert max(measured["column sums of the weights"]) > 1.1


# what of a run one sentence of the claim is about, and what it would be if that sentence were wrong
UNTRUE: dict[str, tuple[Numbers, ...]] = {
    "beta": ({"variance": 32.0}, {"scaled variance": 2.0}),
    "copy-value": ({"distance from the identity, equal queries": 1e-9},),
    "noisy-keys-two-heads": ({"standard deviation of c, two equal heads": 0.1},),
    "scale-by-root": ({"overflow: share finite": 0.5}, {"overflow: error against float64": 0.5}),
}


@pytest.mark.parametrize("name", UNTRUE)
def test_every_sentence_of_the_claim_can_refute_it(name):
    for wrong in UNTRUE[name]:
        assert claims()[name].judge(numbers(name) | wrong).word == REFUTED, wrong


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pairs": 9}, "pairs is 9, but must be at least 10000"),
        ({"betas": ()}, r"betas must be finite and above 0, at least two: betas=\(\)"),
        ({"scores": (2.0,)}, "scores must be finite, at least two different ones"),
        ({"width": 0}, "width is 0, but must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        claims()["beta"].setup(settings)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("copy-value", {"errors": (0.5,)}, "errors between 0 and 0.1"),
        ("copy-value", {"opposed": (5.0, -5.0)}, "opposed must be a positive score and negative ones"),
        ("diffuse", {"betas": (10.0, 0.0)}, "betas must be above 0, since 0 is added"),
        ("softmax-jacobian", {"inputs": (0.0, 700.0)}, "must differ by at most 400"),
    ],
)
def test_settings_for_which_a_claim_says_something_else_are_refused(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        claims()[name].setup(settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("parameter-count", {"widths": (1,), "lengths": (1,)}), ("multi-head", {"length": 5})],
)
def test_an_erratum_is_left_out_where_the_right_number_is_that_of_the_sheet(name, settings):
    found = claims()[name].run(claims()[name].setup(settings, smoke=True))
    assert found.verdict.word == SUPPORTED
    assert {verdict.word for _, verdict in found.wrong_answers} <= {REFUTED}


def test_a_choice_of_keys_that_is_its_own_inverse_does_not_tell_rows_from_columns():
    rows = claims()["rows-are-distributions"]
    found = rows.run(rows.setup({"looks_at": (1, 0), "changed": 0}))
    assert found.verdict.word == UNCLEAR
    assert "looks_at must not be its own inverse" in found.verdict.sentence


@pytest.mark.parametrize("settings", [{"width": 8}, {"gains": (0.9,)}])
def test_narrow_stacks_and_gains_near_1_decide_nothing_about_norms(settings):
    found = claims()["layer-norm"].run(claims()["layer-norm"].setup(settings))
    assert found.verdict.word == UNCLEAR
    assert "the width must be at least 64" in found.verdict.sentence


def test_the_order_in_which_betas_are_given_does_not_matter():
    claim = claims()["beta"]
    one, other = (claim.run(claim.setup({"betas": betas}, smoke=True)) for betas in ((0.01, 100.0), (100.0, 0.01)))
    assert one.numbers == other.numbers
    assert other.verdict.word == SUPPORTED
