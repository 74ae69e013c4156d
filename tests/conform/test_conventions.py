"""Conventions are found out and named, and a declared one that is not kept is a fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError, UnknownNameError
from regard.conform import check
from regard.core.attend import attend
from regard.core.masks import as_mask, causal, window
from regard.core.positions import Rotary
from regard.core.scores import alibi, sink, softcap
from tests.conform import mutants


def conventions(fn: object, **declared: object) -> dict[str, str]:
    """The conventions; they are measured whichever facts are tested."""
    return {each.name: each.value for each in check(fn, only=["runs"], **declared).conventions}


def test_torch_is_read_by_its_conventions() -> None:
    found = conventions(nn.functional.scaled_dot_product_attention)
    assert found == {
        "visible keys": "causal",
        "causal argument": "is_causal=True",
        "alignment": "top-left",
        "scale": "1/sqrt(c)",
        "grouped heads": "repeat",
        "mask": "attn_mask (b h i j), True keeps",
        "fully masked row": "zeros",
    }


def test_the_layer_of_torch_drops_where_its_function_keeps() -> None:
    found = conventions(nn.MultiheadAttention(12, 3, batch_first=True))
    assert found["mask"] == "attn_mask ((b h) i j), True drops"
    assert found["fully masked row"] == "nan"
    assert found["causal argument"] == "is_causal=True, raises without a mask"
    assert found["padding"] == "key_padding_mask (b j), True drops"


@pytest.mark.parametrize(
    ("fn", "name", "value"),
    [
        (mutants.right_window, "visible keys", "causal, 4 earlier keys and itself"),
        (mutants.sees_one_ahead, "visible keys", "all earlier keys, itself and 1 later one"),
        (lambda q, k, v: attend(q, k, v, mask=window(2, 3)), "visible keys", "2 earlier keys, itself and 3 later ones"),
        (mutants.right_rotary, "rotary pairing", "half, base 10000"),
        (mutants.pairs_neighbours, "rotary pairing", "interleaved, base 10000"),
        (mutants.tiles_grouped_heads, "grouped heads", "tile"),
        (mutants.aligns_causal_top_left, "alignment", "top-left"),
        (mutants.drops_the_scale, "scale", "1 (none)"),
        (mutants.reads_true_as_hidden, "mask", "mask (b h i j), True drops"),
        (mutants.fills_with_the_smallest_number, "fully masked row", "mean"),
        (lambda q, k, v: attend(q, k, v, scores=alibi(heads=q.shape[1])), "bias", "ALiBi, -m |i - j|"),
        (lambda q, k, v: attend(q, k, v, beta=0.7), "scale", "0.7"),
    ],
)  # fmt: skip
def test_a_convention_is_found_and_named(fn: object, name: str, value: str) -> None:
    assert conventions(fn)[name] == value


def test_both_forms_of_alibi_are_distinguished() -> None:
    def by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = torch.tensor([2 ** (-8 * (h + 1) / q.shape[1]) for h in range(q.shape[1])])
        return attend(q, k, v, scores=(slopes[:, None, None] * torch.arange(k.shape[2])).expand(-1, q.shape[2], -1))

    def four(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] != 4:
            raise ValueError("made for 4 heads")
        return by_key(q, k, v)

    report = check(four, heads=4, quick=True)
    assert {each.name: each.value for each in report.conventions}["bias"] == "ALiBi, +m j"
    assert report.ok, report


def test_a_declared_convention_is_no_fault() -> None:
    for fn, declared in (
        (mutants.tiles_grouped_heads, {"grouping": "tile"}),
        (mutants.drops_the_scale, {"scale": 1.0}),
        (mutants.trusts_zero_times_nan, {"masked_nan": "propagates"}),
        (mutants.fills_with_the_smallest_number, {"fully_masked_rows": "mean"}),
    ):
        report = check(fn, quick=True, **declared)
        assert report.ok, report


def test_a_failure_says_what_to_declare_if_it_is_meant() -> None:
    failed = check(mutants.tiles_grouped_heads, only="grouping").findings[0]
    assert failed.failure is not None
    assert failed.failure.declare == "grouping='tile'"


@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_soft_caps_are_declared(cap: float) -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, scores=softcap(cap))

    report = check(capped, only=["scores", "scale", "outputs", "extreme-scores"], softcap=cap)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["soft-cap"] == f"{cap:g}"
    failed = check(capped, only="scores").failures
    assert failed[0].failure is not None
    assert failed[0].failure.declare == f"softcap={cap:g}"
    assert not check(capped, only="scores", softcap=1.5 * cap).ok


@pytest.mark.parametrize(
    ("base", "pairing", "share", "width", "words"),
    [
        (1e3, "half", 1.0, None, "half, base 1000"),
        (1e6, "interleaved", 1.0, None, "interleaved, base 1e+06"),
        (1e6, "half", 1.0, 64, "half, base 1e+06"),
        (1e4, "half", 0.5, None, "half, base 10000, 50% of the coordinates"),
        (1e4, "half", 0.25, 16, "half, base 10000, 25% of the coordinates"),
    ],
)
def test_rotary_of_any_base_and_share_is_found(
    base: float, pairing: str, share: float, width: int | None, words: str
) -> None:
    def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turn = Rotary(base=base, pairing=pairing, width=None if share == 1 else int(share * q.shape[-1]))
        return attend(turn(q, k.shape[2] - q.shape[2]), turn(k, 0), v, mask=causal())

    facts = ["scores", "scale", "rotary-pairing", "last-queries-alone", "outputs", "gradients"]
    report = check(turned, only=facts, causal=True, rotary=pairing, width=width)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["rotary pairing"] == words


def test_alibi_of_other_slopes_is_declared() -> None:
    def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=causal(), scores=alibi(slopes=torch.linspace(0.1, 0.9, q.shape[1])))

    assert check(sloped, only=["key-order", "outputs"], causal=True, bias="alibi").ok
    failed = check(sloped, only="key-order", causal=True).failures
    assert [result.name for result in failed] == ["key-order"]
    assert failed[0].failure is not None
    assert failed[0].failure.declare == "bias='alibi'"


@pytest.mark.parametrize(
    ("norm", "declared"),
    [
        (lambda x: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6), {"qk_norm": "rms"}),
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), {"qk_norm": "layer"}),
        (lambda x: nn.functional.normalize(x, dim=-1), {"qk_norm": "l2", "scale": 10.0}),
    ],
    ids=["rms", "layer", "l2"],
)
def test_a_norm_of_q_and_k_is_declared(norm: Callable[[Tensor], Tensor], declared: dict[str, Any]) -> None:
    def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(norm(q), norm(k), v, beta=declared.get("scale"))

    report = check(normed, quick=True, **declared)
    assert report.ok, report
    failed = check(normed, only="scores").failures
    assert [result.name for result in failed] == ["scores"]
    assert failed[0].failure is not None
    assert failed[0].failure.declare == f"qk_norm={declared['qk_norm']!r}"


def test_a_sink_is_declared() -> None:
    def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=causal(), scores=sink(torch.linspace(-1, 1, q.shape[1])))

    report = check(sunk, quick=True, causal=True, sink=True)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["sink"] == "logits -1, -0.6, -0.2, 0.2, 0.6, 1"
    failed = check(sunk, only="weights-sum-to-one", causal=True).failures
    assert [result.name for result in failed] == ["weights-sum-to-one"]
    assert failed[0].failure is not None
    assert failed[0].failure.declare == "sink=True"
    assert [result.name for result in check(attend, only="weights-sum-to-one", sink=True).failures] == [
        "weights-sum-to-one"
    ]


def test_a_causal_argument_that_is_on_by_default_is_switched_off_where_declared() -> None:
    def by_default(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        return attend(q, k, v, mask=causal() if is_causal else None)

    assert conventions(by_default)["visible keys"] == "causal"
    report = check(by_default, quick=True, causal=False)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["visible keys"] == "every key"


def test_a_view_that_is_no_band_is_declared() -> None:
    fn = mutants.hides_the_first_key_from_odd_rows
    assert not check(fn, only="mask-pattern").ok
    assert check(fn, quick=True, mask_pattern="any").ok


def test_a_window_wider_than_a_few_keys_is_found() -> None:
    assert conventions(mutants.forgets_what_is_40_keys_away)["visible keys"] == "causal, 40 earlier keys and itself"
    failed = check(mutants.forgets_what_is_40_keys_away, only="window", causal=True).failures[0]
    assert failed.failure is not None
    assert failed.failure.declare == "causal=True, window_before=40"


def test_another_layout_is_found_out() -> None:
    def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), mask=causal()).transpose(1, 2)

    report = check(flat, causal=True, quick=True)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["layout"] == "b n h c"


def test_a_mask_by_another_name_is_declared() -> None:
    def named(q: Tensor, k: Tensor, v: Tensor, who: Tensor | None = None) -> Tensor:
        return attend(q, k, v, mask=as_mask(who))

    assert check(named, quick=True)["mask-ignored"].status == "not applicable"
    report = check(named, quick=True, mask_argument="who", mask_polarity="keep")
    assert report.ok, report
    assert report["fully-masked-row"].status == "passed"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"casual": True}, "check has no option 'casual'; did you mean 'causal'?"),
        ({"grouping": "tiles"}, "grouping is one of 'repeat', 'tile', not 'tiles'; did you mean 'tile'?"),
        ({"causal": 1}, "causal is True, False or None to measure it, not 1"),
        ({"window_before": -1}, "window_before"),
        ({"scale": 0.0}, "scale is a positive number, not 0.0"),
        ({"causal": True, "window_after": 2}, "causal=True shows no later key, but window_after=2 shows some"),
        ({"kind": "encoder"}, "kind is one of 'attention', 'decoder', not 'encoder'"),
        ({"mask_argument": "who"}, "mask_argument='who' was declared, but right accepts no mask of that name; it has"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_named(declared: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(mutants.right, **declared)  # type: ignore[arg-type]
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"heads": 0}, "heads is 0, but must be at least 1"),
        ({"vocab": -3}, "vocab is -3, but must be at least 1"),
        (
            {"layout": "n h"},
            "layout is one of 'b h n c', 'b n h c', 'n b h c', 'b n c', 'n b c', 'n c', not",
        ),
        ({"heads": 2, "kv_heads": 3}, "heads must be a multiple of kv_heads: heads=2, kv_heads=3"),
        ({"seed": "x"}, "seed takes a whole number, not 'x'"),
        ({"extra": 3}, "extra is a dict of arguments by name, not 3"),
        ({"only": 3}, "only takes names of facts, as only=['scale'], not 3"),
        ({"only": ["scale"], "without": ["scale"]}, "no fact is left to test: `without` excludes scale"),
    ],
)
def test_wrong_options_raise(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(mutants.right, **given)
    assert words in str(error.value)


def test_what_a_decoder_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="extra has no_such, but TinyDecoder takes tokens, attention_mask"):
        check(mutants.TinyDecoder(), extra={"no_such": 1})


def test_an_output_without_gradients_is_reported() -> None:
    def unlearned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    assert conventions(unlearned)["gradients"] == "none"
    assert "gradients" not in conventions(mutants.right)


def test_a_required_argument_that_was_not_passed_is_reported() -> None:
    def needs(q: Tensor, k: Tensor, v: Tensor, dropout_rate: float | None) -> Tensor:
        return attend(q, k, v)

    assert conventions(needs)["filled in"] == "dropout_rate = None"

    def fails(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        return attend(q, k, v)[..., :1]

    with pytest.raises(ConfigError, match=r"None was passed for width, which has no default: pass width=\.\.\."):
        check(fails, quick=True)


def test_no_declaration_is_suggested_that_would_not_help() -> None:
    def adds_to_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / (weights.sum(-1, keepdim=True) + 1e-3) @ v

    failed = check(adds_to_the_sum, quick=True).failures
    assert [result.name for result in failed] == ["weights-sum-to-one"]
    turned = check(mutants.forgets_to_turn, quick=True, causal=True, rotary="half").failures
    for failure in (failed[0].failure, turned[0].failure):
        assert failure is not None
        assert failure.declare == ""


def test_a_fact_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown fact 'scales'; did you mean 'scale'"):
        check(mutants.right, only=["scales"])


def test_a_decoder_without_a_known_vocabulary_raises() -> None:
    with pytest.raises(ConfigError, match="the vocabulary size of the decoder is unknown; pass vocab="):
        check(lambda tokens: tokens, kind="decoder")


def test_facts_can_be_chosen_and_left_out() -> None:
    assert [result.name for result in check(mutants.scales_twice, only=["scale", "runs"]).facts] == ["runs", "scale"]
    assert check(mutants.scales_twice, without=["scale"], quick=True).ok
    assert [result.name for result in check(mutants.right, only="scale").facts] == ["scale"]  # one needs no list


def test_no_scale_is_read_where_rows_do_not_sum_to_one() -> None:
    result = check(mutants.forgets_to_rescale_between_tiles, only="scale").facts[0]
    assert result.status == "not applicable"
    assert "weights of a row do not sum to one" in result.reason


def test_polarity_of_padding_is_named_and_declared() -> None:
    assert conventions(mutants.pads_where_true_keeps)["padding"] == "key_padding_mask (b j), True keeps"
    report = check(mutants.pads_where_true_keeps, quick=True, mask_polarity="keep")
    assert report["mask-polarity"].status == "passed"
    assert (
        "declare mask_argument='key_padding_mask' to test all facts of masks with it"
        in report["fully-masked-row"].reason
    )
    padded = check(mutants.pads_where_true_keeps, only="fully-masked-row", mask_argument="key_padding_mask")
    assert padded["fully-masked-row"].status == "passed"


def test_an_error_names_the_options_of_check() -> None:
    with pytest.raises(ConfigError) as error:
        check(torch.softmax)
    assert "Pass heads=, kv_heads= or width= if it needs certain sizes" in str(error.value)
    assert "(n b h c)" in str(error.value)


def test_sys_exit_in_the_checked_code_is_an_error() -> None:
    def leaves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise SystemExit(0)

    with pytest.raises(ConfigError, match=r"leaves could not be checked: it raised SystemExit\(0\), which ends"):
        check(leaves)


def test_the_mode_of_a_module_and_the_random_state_are_left_as_they_were() -> None:
    module = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True).train()
    module.out_proj.eval()
    state = torch.random.get_rng_state()
    report = check(module, quick=True, fully_masked_rows="nan", masked_nan="propagates")
    assert report.ok, report
    assert module.training
    assert not module.out_proj.training
    assert torch.equal(torch.random.get_rng_state(), state)
    decoder = mutants.TinyDecoder().train()
    part = next(iter(decoder.children())).eval()
    check(decoder, only=["runs"])
    assert decoder.training
    assert not part.training


def test_queries_that_rotary_turns_from_zero_are_declared() -> None:
    fn = mutants.turns_every_step_from_zero_and_hides_nothing
    report = check(fn, only=["scores", "last-queries-alone", "outputs"], alignment="top-left")
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["alignment"] == "top-left, by rotary positions"
    failed = check(fn, only="last-queries-alone", alignment="bottom-right").failures
    assert [result.name for result in failed] == ["last-queries-alone"]
    assert failed[0].failure is not None
    assert failed[0].failure.declare == "alignment='top-left'"


def test_one_later_key_is_meant_where_it_is_declared() -> None:
    for declared in ({"window_after": 1}, {"causal": False, "window_after": 1}):
        facts = ["causal-off-by-one", "causality", "window", "outputs"]
        report = check(mutants.sees_one_ahead, only=facts, **declared)
        assert report.ok, report
    failed = check(mutants.sees_one_ahead, only="causal-off-by-one").failures[0]
    assert failed.failure is not None
    assert failed.failure.declare == "window_after=1"
    assert "diagonal" in failed.fact.cause


def test_alibi_has_the_slopes_of_the_paper_or_of_its_code() -> None:
    def of_the_paper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 2.0 ** (-8.0 * torch.arange(1, q.shape[1] + 1) / q.shape[1])
        return attend(q, k, v, scores=alibi(slopes=slopes))

    report = check(of_the_paper, quick=True)  # six heads are used, which is no power of two
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["bias"] == "ALiBi, -m |i - j|"


def test_arguments_that_nothing_was_tried_with_are_named() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor, lengths: object = None, softcap: object = None) -> Tensor:
        return attend(q, k, v)

    found = conventions(capped)["untested arguments"]
    assert found == "lengths, softcap; declare mask_argument=... if one is a mask"
    assert "untested arguments" not in conventions(nn.functional.scaled_dot_product_attention)
    values = conventions(nn.MultiheadAttention(12, 3, batch_first=True), extra={"need_weights": False})
    assert values["untested arguments"] == "average_attn_weights"


def test_a_bias_argument_is_an_additive_mask_and_a_switch_is_no_scale() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: bool = True) -> Tensor:
        scores = q * (q.shape[-1] ** -0.5 if scale else 1.0) @ k.mT
        return (scores if bias is None else scores + bias).softmax(-1) @ v

    report = check(biased, quick=True, fully_masked_rows="nan", masked_nan="propagates")
    assert report.ok, report
    values = {each.name: each.value for each in report.conventions}
    assert values["mask"] == "bias (b h i j), added to scores"
    assert "untested arguments" not in values


def test_a_layer_that_takes_a_memory_is_not_said_to_take_one_length_only() -> None:
    values = conventions(mutants.RightCross())["lengths"]
    assert values == "as many queries as keys, unless context is passed"


def test_a_class_raises() -> None:
    with pytest.raises(ConfigError, match=r"^RightCross is a class; pass an instance, as RightCross\(\.\.\.\)$"):
        check(mutants.RightCross)
