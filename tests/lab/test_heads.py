"""The claims about heads and self-attention: what they find, what the sheets said, and that a fault turns them over."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.core.attend import attend
from regard.core.channel import channel_attend
from regard.core.linear import LinearResult, linear_attend, relu
from regard.core.masks import full, window
from regard.lab.verdict import REFUTED
from regard.nn.attention import Attention, merge_heads, split_heads
from regard.nn.synthesizer import Synthesizer
from tests import mutants
from tests.lab.quick import Fault, claim, outcome

# faults that attention could have


def without_scale(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return attend(q, k, v, **({"beta": 1.0} | rest))


def over_the_wrong_axis(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Softmax over queries instead of keys."""
    weights: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-2)
    return weights @ v


def halves_beta(q: Tensor, k: Tensor, v: Tensor, *, beta: float | None = None, **rest: Any) -> Tensor:
    return attend(q, k, v, beta=(q.shape[-1] ** -0.5 if beta is None else beta) / 2, **rest)


def nan_in_the_last_row(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    out = attend(q, k, v, **rest)
    return torch.cat([out[..., :-1, :], out[..., -1:, :] * math.nan], -2)


def heads_mixed(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Heads mixed by a wrong order of axes."""
    out = attend(q, k, v, **rest)
    return out.transpose(1, 2).reshape(out.shape)


def soft_where_hard(q: Tensor, k: Tensor, v: Tensor, *, beta: float | None = None, **rest: Any) -> Tensor:
    """beta = 1 where beta is infinite."""
    return attend(q, k, v, beta=1.0 if beta == math.inf else beta, **rest)


def one_place_late(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention to values shifted by one position."""
    return attend(q, k, v.roll(1, 2), **rest)


def into_the_future(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **rest: Any) -> Tensor:
    """Attention that ignores its mask."""
    return attend(q, k, v, **rest)


def mask_one_wider(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, **rest: Any) -> Tensor:
    return attend(q, k, v, mask=full() if mask is None else mask | window(before=5), **rest)


def without_terms(q: Tensor, k: Tensor, v: Tensor, *, scores: Any = None, **rest: Any) -> Tensor:
    """Attention that ignores score terms."""
    return attend(q, k, v, **rest)


def places_counted(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention with a bias to the first positions."""
    fading = torch.arange(k.shape[2], dtype=q.dtype)[None].expand(q.shape[2], -1)
    return attend(q, k, v, scores=-fading, **rest)


def unnormalised(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> LinearResult:
    """Linear attention whose outputs are too large by the number of keys."""
    out, state = linear_attend(q, k, v, **rest)
    return LinearResult(out * k.shape[2], state)


def other_features(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> LinearResult:
    return linear_attend(q, k, v, **({"features": relu()} | rest))


def scaled_by_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Channel attention scaled by the number of positions instead of the width."""
    return channel_attend(q, k, v, beta=q.shape[2] ** -0.5)


def shared_keys(width: int, heads: int, **rest: Any) -> Attention:
    """All query heads use the first key head."""
    return Attention(width, heads, kv_heads=1, **rest)


def without_biases(width: int, heads: int) -> Attention:
    return Attention(width, heads, bias=False)


class Unprojected(Attention):
    """Multi-head attention without W_o."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, head_width=width // heads + 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = split_heads(self.query_key_value(x), 3 * self.heads).chunk(3, 1)
        return merge_heads(attend(q, k, v))


class Forgetful(Attention):
    """The full pass ignores the mask; the streamed pass uses it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Any, stream: Any) -> Tensor:
        return super().mix(q, k, v, None if stream is None else mask, cache, stream)


class WithoutCache(Attention):
    """A correct layer that recomputes all tokens at each step."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Any, stream: Any) -> Tensor:
        out = super().mix(q, k, v, mask, cache, stream)
        if cache is not None and q.shape[2] == 1:
            held, values = cache.tensors()
            attend(held, held, values)
        return out


def peeking(width: int, heads: int, context: int, *, parts: tuple[str, ...]) -> Synthesizer:
    """A dense synthesizer that compares tokens, as dot-product attention does."""
    return Synthesizer(width, heads, context, parts=("dot",) if parts == ("dense",) else parts)


def never_comparing(width: int, heads: int, context: int, *, parts: tuple[str, ...]) -> Synthesizer:
    return Synthesizer(width, heads, context, parts=("random",))


def one_head(width: int, heads: int, **rest: Any) -> Attention:
    """A layer with one head, whatever number is asked for."""
    return Attention(width, 1, **rest)


FAULTS: list[Fault] = [
    ("several-heads", {"layer": one_head}),
    ("multi-head", {"attention": without_scale}),
    ("multi-head", {"attention": heads_mixed}),
    ("grouped-convolution", {"attention": without_terms}),
    ("grouped-convolution", {"attention": one_place_late}),
    ("head-width", {"layer": shared_keys}),
    ("why-same-size", {"layer": Unprojected}),
    ("permutation", {"attention": places_counted}),
    ("permutation", {"attention": over_the_wrong_axis}),
    ("identity-layer", {"attention": soft_where_hard}),
    ("identity-layer", {"attention": one_place_late}),
    ("identity-layer", {"attention": halves_beta}),
    ("identity-layer", {"attention": mutants.runs_softmax_over_the_queries}),
    ("parameter-count", {"attention": nan_in_the_last_row}),
    ("linear-attention", {"attention": nan_in_the_last_row}),
    ("grouped-convolution", {"attention": nan_in_the_last_row}),
    ("running-linear", {"attention": soft_where_hard}),
    ("as-convolution", {"attention": without_terms}),
    ("as-convolution", {"attention": soft_where_hard}),
    ("parameter-count", {"layer": without_biases}),
    ("new-token", {"attention": into_the_future}),
    ("new-token", {"layer": WithoutCache}),
    ("linear-attention", {"linear": unnormalised}),
    ("linear-attention", {"linear": other_features}),
    ("sparse-patterns", {"attention": into_the_future}),
    ("sparse-patterns", {"attention": mask_one_wider}),
    ("channel-attention", {"attention": over_the_wrong_axis}),
    ("channel-attention", {"channels": scaled_by_positions}),
    ("streaming", {"layer": Forgetful}),
    ("positions", {"attention": without_terms}),
    ("synthesizer", {"mixer": peeking}),
    ("synthesizer", {"mixer": never_comparing}),
]


def test_heads_of_the_full_width_must_cost_more() -> None:
    numbers = outcome("head-width").numbers
    assert (
        claim("head-width").judge(numbers | {"multiply-adds at full width": numbers["multiply-adds"]}).word == REFUTED
    )


def test_a_projection_has_262144_weights_for_any_number_of_heads() -> None:
    numbers = outcome("head-width").numbers
    assert numbers["width"] == 512
    assert set(numbers["weights"]) == {262_144}
    assert "32,768" in claim("head-width").wrong_answers[0].verdict(numbers).sentence


def test_permuted_outputs_agree_to_rounding() -> None:
    assert 0 < outcome("permutation").numbers["error"] < 3e-15


def test_orthonormal_tokens_give_themselves_0_355_and_1_at_infinite_beta() -> None:
    numbers = outcome("identity-layer").numbers
    assert round(numbers["own weight of orthonormal tokens"], 3) == 0.355
    assert numbers["error of orthonormal tokens, beta = inf"] == 0


@pytest.mark.parametrize("task", ["two relations", "digits"])
def test_several_heads_are_compared_at_equal_numbers_of_parameters(task: str) -> None:
    several, numbers = claim("several-heads"), outcome("several-heads").numbers
    assert len(set(numbers["parameters"][task])) == 1
    unequal = numbers | {"parameters": numbers["parameters"] | {task: [1, 2]}}
    assert several.judge(unequal).word == "refuted"


def test_noise_in_the_digits_costs_accuracy_and_no_noise_costs_nothing() -> None:
    assert min(outcome("several-heads").numbers["lost by noise"].values()) > 0
    several = claim("several-heads")
    quiet = several.run(several.setup({"noise": 0.0, "steps": 1, "digit_steps": 1, "repeats": 2}, smoke=True))
    assert set(quiet.numbers["lost by noise"].values()) == {0.0}


def test_heads_are_convolutions_to_the_bit() -> None:
    assert outcome("running-linear").numbers["error"] == 0.0
    numbers = outcome("as-convolution").numbers
    assert (numbers["error of conv1d"], numbers["error of conv2d"]) == (0.0, 0.0)
    assert (numbers["heads on a line"], numbers["heads on a grid"]) == (3, 9)


def test_queries_keys_and_values_of_width_12_have_432_weights_and_36_biases() -> None:
    numbers = outcome("parameter-count").numbers
    at = numbers["widths"].index(12)
    assert (numbers["weights"][at], numbers["biases"][at], numbers["attention weights"][at]) == (432, 36, 25)
    assert (numbers["dense weights"][at], numbers["dense biases"][at]) == (3600, 60)


def test_earlier_rows_stay_the_same_to_the_bit() -> None:
    assert outcome("new-token").numbers["change of earlier rows"] == 0.0


def test_linear_attention_takes_1_08_million_where_softmax_takes_16_8() -> None:
    numbers = outcome("linear-attention").numbers
    assert (numbers["length"], numbers["width"]) == (512, 32)
    assert (numbers["multiply-adds of softmax"], numbers["multiply-adds of linear"]) == (16_777_216, 1_081_344)


def test_scores_between_channels_cost_twice_those_between_patches() -> None:
    numbers = outcome("channel-attention").numbers
    assert (numbers["scores between patches"], numbers["scores between channels"]) == (33_554_432, 67_108_864)
    # four projections, the scores and the weighted sums
    assert numbers["patches with projections"] == 4 * 256 * 512**2 + 2 * 256 * 256 * 512
    assert numbers["channels with projections"] / numbers["patches with projections"] == pytest.approx(1.2)
    assert numbers["windows with projections"] < numbers["patches with projections"]
    assert numbers["groups with projections"] < numbers["channels with projections"]


def test_blocks_and_then_strides_make_two_n_root_n_pairs() -> None:
    assert outcome("sparse-patterns").numbers["pairs"]["blocks, then strides"] == [2 * 256 * 16, 2 * 1024 * 32]


def test_only_a_sliding_look_ahead_grows_with_depth() -> None:
    waits = outcome("streaming").numbers["tokens waited for"]
    assert waits["chunks"] == [4, 4]
    assert waits["chunks with look-ahead"] == [8, 8]
    assert waits["sliding look-ahead"] == [1 + 4, 1 + 3 * 4]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("several-heads", {"length": 3}, "length is 3, but must be at least 4"),
        ("synthesizer", {"pairs": 1}, "pairs is 1, but must be at least 2"),
        ("several-heads", {"noise": -0.5}, "noise must be at least 0 and finite: noise=-0.5"),
        ("identity-layer", {"length": 2}, "length is 2, but must be at least 3"),
        ("identity-layer", {"betas": (1.0, 2.0)}, "betas must grow and end with inf"),
        (
            "grouped-convolution",
            {"kernel": 4},
            "kernel must be odd and at most a third of the length: kernel=4",
        ),
        ("grouped-convolution", {"heads": 4}, "width must be a multiple of heads: width=15, heads=4"),
        ("as-convolution", {"kernel": 4}, "kernel must be odd: kernel=4; try 5"),
        ("sparse-patterns", {"lengths": (256, 500)}, "must be squares, but 500 is not"),
        ("sparse-patterns", {"lengths": (256, 256)}, "lengths must grow: lengths=(256, 256)"),
        ("linear-attention", {"lengths": (128, 64)}, "lengths must grow: lengths=(128, 64)"),
        ("streaming", {"look_ahead": 7}, "look_ahead=7, chunk=4; try look_ahead=4"),
        (
            "positions",
            {"repeats": 1},
            "repeats is 1, but must be at least 2: it counts seeds; an interval needs two",
        ),
        ("positions", {"lengths": (32, 48)}, "lengths must begin with the training length 12"),
        ("synthesizer", {"repeats": 1}, "an interval needs two"),
        ("synthesizer", {"names": 3}, "4 pairs need one name each, but names=3; raise names"),
    ],
)
def test_invalid_settings_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        claim(name).setup(settings, smoke=True)
