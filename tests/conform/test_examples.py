"""Printed examples run, give what their comments say, and expect what the rule demands."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.conform import check
from tests.conform.mutants import MUTANTS, right
from tests.conform.run_example import assert_example_holds, close_values, result_comment, run_example
from tests.conform.test_mutants import check_mutant


def cosine(q, k, v):
    return (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT * 3).softmax(-1) @ v


def flips_values(q, k, v):
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v.flip(2)


def rows_first(q, k, v):
    return torch.einsum("bhij,bjhc->bihc", torch.einsum("bihc,bjhc->bhij", q, k).softmax(-1), v)


def answers_with_weights(q, k, v):
    return (q @ k.mT).softmax(-1) @ v, None


def multihead(width: int, heads: int) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(width, heads, batch_first=True)


class Loud(nn.Module):
    """An attention at a real width whose fault lies in numbers that are too many to be written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = 12
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(768, 768) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (12, 64)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.out_proj(((q @ k.mT / 64).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("fn", "declared"),
    [
        (functional.scaled_dot_product_attention, {}),
        (lambda q, k, v: torch.sigmoid(q * q.shape[-1] ** -0.5 @ k.mT) @ v, {}),
        (rows_first, {"layout": "b n h c"}),
        (answers_with_weights, {}),
        (multihead(24, 4), {}),
        (Loud(), {}),
    ],
    ids=["sdpa", "lambda", "layout", "tuple", "module", "projections"],
)
def test_examples_run_for_functions_layouts_tuples_and_modules(fn: object, declared: dict[str, Any]) -> None:
    failed = check(fn, quick=True, **declared).findings
    assert failed
    for result in failed:
        assert result.failure is not None
        assert_example_holds(result.failure.example, fn)


def test_numbers_that_are_too_many_come_from_a_seed() -> None:
    failure = check(Loud(), only=["scale"]).failures[0].failure
    assert failure is not None
    assert "attend = as_probe(module.eval()).call" in failure.example
    assert "torch.manual_seed(" in failure.example
    assert len(failure.example) < 1000


@pytest.mark.parametrize("fn", [cosine, flips_values])
def test_what_should_be_is_attention_without_positions_that_nobody_declared(fn: object) -> None:
    failure = check(fn, only=["scores"]).failures[0].failure
    assert failure is not None
    space, _ = run_example(failure.example, fn)
    right = functional.scaled_dot_product_attention(space["q"], space["k"], space["v"])
    assert close_values(right, eval(str(result_comment(failure.example, "should be")), {"torch": torch}))


def test_a_call_that_raises_in_the_middle_of_a_fact_is_the_example() -> None:
    def refuses_37_keys(q, k, v):
        if k.shape[2] == 37:
            raise ValueError(f"length {k.shape[2]}")
        return functional.scaled_dot_product_attention(q, k, v)

    failed = check(refuses_37_keys, quick=True).failures
    assert failed
    for result in failed:
        assert result.failure is not None
        assert "ValueError: length" in result.reason
        assert_example_holds(result.failure.example, refuses_37_keys)


@pytest.mark.parametrize("name", ["turns_every_step_from_zero", "forgets_to_rescale_between_blocks"])
def test_an_example_does_not_end_in_a_row_that_sees_nothing(name: str) -> None:
    failure = check_mutant(name).failures[0].failure
    assert failure is not None
    space, last = run_example(failure.example, MUTANTS[name].fn)
    assert space["q"].shape[2] <= space["k"].shape[2]
    assert "nan" not in failure.found + failure.example
    assert math.isfinite(float(torch.as_tensor(space[last]).sum()))


def test_the_example_of_a_module_around_an_attention_is_true() -> None:
    module = MUTANTS["ForgetsBatchFirst"].fn()
    failed = check(module, quick=True).failures[0]
    assert failed.failure is not None
    assert "attend = as_probe(module.eval()).call" in failed.failure.example
    assert failed.failure.declare == "layout='n b c'"
    assert_example_holds(failed.failure.example, module)
    assert check(module, quick=True, layout="n b c", fully_masked_rows="nan", masked_nan="propagates").ok


def test_a_leak_is_shown_with_as_many_queries_as_keys() -> None:
    failure = check_mutant("forgets_the_mask").failures[0].failure
    assert failure is not None
    space, name = run_example(failure.example, MUTANTS["forgets_the_mask"].fn)
    assert space["q"].shape[2] == space["k"].shape[2] == 2
    assert bool(space[name].isfinite().all())


class Gapped(nn.Module):
    """A decoder with a cache that is returned, which loses a little of each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)

    def forward(self, input_ids: Tensor, past_key_values: Tensor | None = None, use_cache: bool = False) -> Any:
        before = 0 if past_key_values is None else past_key_values[:, -1:] * 0.9
        sums = self.embed(input_ids).cumsum(1) + before
        return SimpleNamespace(logits=sums @ self.embed.weight.T, past_key_values=sums)


def test_the_example_of_a_missing_bias_has_the_bias_that_was_declared() -> None:
    failure = check(right, bias="alibi", only=["key-order"]).failures[0].failure
    assert failure is not None
    assert_example_holds(failure.example, right)
    assert "scores have no bias, but alibi was declared" in failure.found


def test_a_context_shorter_than_nine_tokens_is_reported() -> None:
    class Short(Gapped):
        def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
            if input_ids.shape[1] > 8:
                raise IndexError("position 8 of 8")
            return super().forward(input_ids)

    model = Short()
    failed = check(model, quick=True).failures
    assert [result.name for result in failed] == ["runs"]
    assert failed[0].failure is not None
    assert "raises IndexError: position 8 of 8; 3 tokens do not raise" in failed[0].reason
    assert "check one with a longer context" in failed[0].reason
    assert_example_holds(failed[0].failure.example, model)


def test_an_example_of_a_decoder_goes_through_its_cache() -> None:
    model = Gapped()
    failed = check(model, quick=True).failures
    assert [result.name for result in failed] == ["cache"]
    assert failed[0].failure is not None
    assert "past_key_values=past, use_cache=True" in failed[0].failure.example
    assert_example_holds(failed[0].failure.example, model)


@pytest.mark.parametrize("name", ["IgnoresPositionIds", "DropsThePaddingMask", "SeesEmptySlotsInside"])
def test_the_example_of_a_decoder_has_one_sequence_of_few_tokens(name: str) -> None:
    failure = check_mutant(name).failures[0].failure
    assert failure is not None
    space, _ = run_example(failure.example, MUTANTS[name].fn())
    assert space["tokens"].shape[0] == 1
    assert space["tokens"].shape[1] <= (7 if "Slots" in name else 2)


def test_a_fault_of_rounding_that_no_few_numbers_show_comes_from_seeds() -> None:
    def climbs(q, k, v):
        slopes = (2.0 ** (-8 * torch.arange(1, q.shape[1] + 1) / q.shape[1])).to(q.dtype)
        apart = (torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])).abs()
        return (q * q.shape[-1] ** -0.5 @ k.mT + slopes[:, None, None] * apart).softmax(-1) @ v

    failure = check(climbs, only=["half-precision"]).failures[0].failure
    assert failure is not None
    assert len(failure.example) < 1000
    assert_example_holds(failure.example, climbs)
