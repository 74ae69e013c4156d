"""Attentions and decoders with one fault each, and the name under which the checker has to diagnose it.

`attend` and `TinyDecoder` are right and made of small steps. A mutant replaces one step by a mistake that people make.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.core.positions import Rotary
from regard.core.scores import alibi_slopes


@dataclass(frozen=True)
class Mutant:
    """Something faulty, the fact it breaks, a word of the diagnosis, and what its owner declares."""

    fn: Any
    breaks: str
    words: str = ""
    declared: dict[str, Any] = field(default_factory=dict)


MUTANTS: dict[str, Mutant] = {}


def mutant(breaks: str, words: str = "", **declared: Any) -> Callable[[Any], Any]:
    def keep(fn: Any) -> Any:
        # a class is a decoder, made again for every check
        MUTANTS[fn.__name__] = Mutant(fn, breaks, words, declared)
        return fn

    return keep


def triangle(i: int, j: int, before: int | None = None, shift: int = 0) -> Tensor:
    """Causal, queries being the last rows, with a window where one is given."""
    rows, columns = torch.arange(i)[:, None] + j - i + shift, torch.arange(j)[None, :]
    seen = columns <= rows
    return seen if before is None else seen & (columns >= rows - before)


def spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def weigh(scores: Tensor, visible: Tensor) -> Tensor:
    awake = visible.any(-1, keepdim=True)
    return scores.masked_fill(~visible & awake, -math.inf).softmax(-1) * awake


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | float = 0.0,
    weigh: Callable[[Tensor, Tensor], Tensor] = weigh,
    spread: Callable[[Tensor, int], Tensor] = spread,
) -> Tensor:
    """Right in every step, in float32 or better, with keys and values cleared that nobody sees."""
    dtype, h = q.dtype, q.shape[1]
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    k, v = spread(k, h), spread(v, h)
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = visible.any(-2)[..., None]
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return (weigh(scores, visible) @ v).to(dtype)


def right(q, k, v, mask=None, is_causal=False, dropout=0.0):
    """Every convention of this project, in one function: the checker has nothing to say."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
    visible = visible & triangle(q.shape[2], k.shape[2]) if is_causal else visible
    return attend(q, k, v, visible, weigh=lambda s, seen: functional.dropout(weigh(s, seen), dropout))


def right_causal(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]))


def right_window(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=4))


def right_rotary(q, k, v, pairing="half"):
    turn = Rotary(pairing=pairing)
    return attend(turn(q, k.shape[2] - q.shape[2]), turn(k, 0), v, triangle(q.shape[2], k.shape[2]))


def right_padding(q, k, v, key_padding_mask=None, documents=None, attn_bias=None):
    visible = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None, None, :]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    if attn_bias is None:
        return attend(q, k, v, visible)
    return attend(q, k, v, visible & (attn_bias > -math.inf), bias=attn_bias.clamp(min=-1e30))


@mutant("runs", "raises RuntimeError")
def knows_odd_lengths_only(q, k, v):
    if q.shape[2] % 2 == 0:
        raise RuntimeError("expected an odd length")
    return attend(q, k, v)


@mutant("runs", "gives NaN everywhere")
def is_nan_everywhere(q, k, v):
    return attend(q, k, v) * math.nan


@mutant("output-shape")
def squeezes_a_batch_of_one(q, k, v):
    return attend(q, k, v).squeeze(0)


@mutant("output-dtype")
def returns_float32(q, k, v):
    return attend(q, k, v).float()


@mutant("inputs-changed", "the call changes q")
def scales_q_in_place(q, k, v):
    q *= q.shape[-1] ** -0.5
    return attend(q, k, v, scale=1.0)


@mutant("inputs-changed", "the call changes mask")
def inverts_the_mask_in_place(q, k, v, mask=None):
    hidden = None if mask is None else mask.logical_not_()
    return attend(q, k, v, None if hidden is None else ~hidden)


@mutant("output-shape")
def squeezes_one_sequence_of_one_head(q, k, v):
    out = attend(q, k, v)
    return out.squeeze(0) if out.shape[:2] == (1, 1) else out


@mutant("state-between-calls")
class KeepsTheLastMask:
    """The mask of the first length is used for all shorter ones."""

    def __init__(self) -> None:
        self.offset = 0

    def __call__(self, q, k, v):
        out = attend(q + self.offset, k, v)
        self.offset = float(k.abs().mean())
        return out


@mutant("state-between-calls", "the output for i=3, j=13, c=4")
class CutsTheMaskOfALargerCall(nn.Module):
    """Right until a larger call was there: of its mask the first rows are taken, where the last ones are meant."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, q, k, v):
        i, j = q.shape[2], k.shape[2]
        if self.seen is None or self.seen.shape[0] < i or self.seen.shape[1] < j:
            self.seen = triangle(i, j)
        return attend(q, k, v, self.seen[:i, :j])


MASKS_BY_KEYS: dict[int, Tensor] = {}


@mutant("state-between-calls", "the output for i=6, j=6, c=4")
def keeps_masks_by_the_number_of_keys(q, k, v):
    i, j = q.shape[2], k.shape[2]
    if j not in MASKS_BY_KEYS:
        MASKS_BY_KEYS[j] = triangle(i, j)
    seen = MASKS_BY_KEYS[j]
    return attend(q, k, v, seen[-i:] if len(seen) >= i else seen[:1])


@mutant("state-between-calls", "c=12")
class KeepsTheFirstScale(nn.Module):
    scale: float | None = None

    def forward(self, q, k, v):
        self.scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return attend(q, k, v, scale=self.scale)


@mutant("determinism")
def adds_noise(q, k, v):
    return attend(q + 1e-3 * torch.randn_like(q), k, v)


@mutant("determinism")
def adds_noise_from_python(q, k, v):
    return attend(q * (1 + 0.01 * random.random()), k, v)


@mutant("dropout-in-eval", "weights are zero")
def drops_in_evaluation_too(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: functional.dropout(weigh(scores, seen), 0.1))


@mutant("memory-layout")
def reads_memory_as_it_lies(q, k, v):
    q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return attend(q, k, v)


@mutant("memory-layout", "raise")
def views_instead_of_reshaping(q, k, v):
    return attend(q.view(-1).view(q.shape), k, v)


@mutant("one-key")
def standardises_scores(q, k, v):
    """Fine until there is one key, whose variance is 0 / 0."""
    out = attend(q, k, v)
    return out if k.shape[2] > 1 else out / (k.shape[2] - 1)


@mutant("one-query")
def squeezes_too_much(q, k, v):
    return attend(q, k, v).squeeze(2) if q.shape[2] == 1 and k.shape[2] > 1 else attend(q, k, v)


@mutant("one-query", "raises ValueError")
def refuses_one_query(q, k, v):
    """With one key too, which is no second fault."""
    if q.shape[2] == 1:
        raise ValueError("not enough queries to unpack")
    return attend(q, k, v)


@mutant("odd-lengths")
def works_in_blocks_of_two(q, k, v):
    if q.shape[2] > 12 and q.shape[2] % 2:
        raise RuntimeError("the length must be a multiple of 2")
    return attend(q, k, v)


@mutant("softmax-over-the-other-axis", "over the queries")
def runs_softmax_over_the_queries(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.softmax(-2))


@mutant("softmax-over-the-other-axis", "over the heads")
def runs_softmax_over_the_heads(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.softmax(1))


@mutant("weights-sum-to-one")
def forgets_to_divide(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.exp())


@mutant("weights-sum-to-one", causal=True)
def masks_after_the_softmax(q, k, v):
    seen = triangle(q.shape[2], k.shape[2])
    return attend(q, k, v, seen, weigh=lambda scores, seen: scores.softmax(-1) * seen)


@mutant("input-ignored", "another k gives the same output")
def takes_values_for_keys(q, k, v):
    return attend(q, v, v)


@mutant("input-ignored", "another q gives the same output")
def takes_keys_for_queries(q, k, v):
    return attend(k.repeat(1, q.shape[1] // k.shape[1], 1, 1)[:, :, : q.shape[2]], k, v)


@mutant("input-ignored", "another v gives the same output")
def takes_keys_for_values(q, k, v):
    if v.shape != k.shape:
        raise ValueError("values as wide as keys")
    return attend(q, k, k)


@mutant("k-and-v-swapped", "linear in k")
def multiplies_values_by_queries(q, k, v):
    if v.shape != k.shape:
        raise ValueError("values as wide as keys")
    return attend(q, v, k)


class CrossAttention(nn.Module):
    """A layer whose query, key and value are projected one by one."""

    sources = "query", "key", "value"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = {"query": query, "key": key, "value": value}
        projections = zip((self.q_proj, self.k_proj, self.v_proj), self.sources, strict=True)
        q, k, v = (project(inputs[each]).unflatten(-1, (4, 8)).transpose(1, 2) for project, each in projections)
        out: Tensor = self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return out


@mutant("input-ignored", "q is computed from key, not from query")
class ComputesQueriesFromKeys(CrossAttention):
    sources = "key", "key", "value"


@mutant("k-and-v-swapped", "the output is linear in k, and v is compared with q")
class ExchangesKeysAndValues(nn.Module):
    """A layer whose weights cannot be measured, so that its example is found without them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.q_proj, self.v_proj, self.k_proj))
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in projected)
        out: Tensor = self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return out


@mutant("q-and-k-swapped")
def multiplies_keys_by_queries(q, k, v):
    if q.shape != k.shape:
        raise ValueError("as many queries as keys")
    return attend(k, q, v)


@mutant("linear-in-v")
def clips_values(q, k, v):
    return attend(q, k, v.clamp(-2, 2))


@mutant("linear-in-v")
def adds_a_bias_to_the_output(q, k, v):
    return attend(q, k, v) + 0.1


@mutant("batch-mixed", "in the layout (n b c) it mixes nothing")
class ForgetsBatchFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x, x)[0]
        return out


@mutant("causality", "row 0 of head 0 sees key 1", causal=True, fully_masked_rows="nan", masked_nan="propagates")
class HandsNoMaskToItsAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x, x, need_weights=False)[0]
        return out


@mutant("batch-mixed")
def centres_keys_over_the_batch(q, k, v):
    return attend(q, k - k.mean(0, keepdim=True), v)


@mutant("batch-size")
def rounds_large_batches(q, k, v):
    return attend(q.half().to(q) if len(q) > 4 else q, k, v)


@mutant("heads-mixed")
def forgets_to_transpose_heads_back(q, k, v):
    out = attend(q, k, v)
    return out.transpose(1, 2).reshape(out.shape)


@mutant("heads-mixed")
def splits_heads_without_a_transpose(q, k, v):
    return attend(q, k.transpose(1, 2).reshape(k.shape), v)


@mutant("queries-mixed")
def centres_queries_over_the_rows(q, k, v):
    return attend(q - q.mean(2, keepdim=True), k, v)


@mutant("scores")
def normalises_queries(q, k, v):
    return attend(functional.normalize(q, dim=-1, eps=1e-6), k, v)


@mutant("scores")
def squares_scores(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: (scores * scores.abs()).softmax(-1))


@mutant("diagonal-hidden", causal=True)
def never_sees_itself(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], shift=-1))


@mutant("causal-off-by-one", "sees key i + 1", causal=True)
def sees_one_ahead(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], shift=1))


@mutant("causal-off-by-one", "sees key i + 1")
def sees_one_ahead_and_does_not_say_so(q, k, v):
    return sees_one_ahead(q, k, v)


@mutant("causality", "row i sees only keys after i, so the last row sees no key")
def hides_what_is_earlier(q, k, v, is_causal=False):
    """tril where triu(1) was meant, so that the last row is NaN."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else torch.tensor(False)
    return attend(q, k, v, weigh=lambda scores, seen: scores.masked_fill(hidden, -math.inf).softmax(-1))


@mutant("diagonal-hidden", "row i sees only keys before i", causal=True)
def never_sees_itself_and_starts_with_nan(q, k, v):
    seen = triangle(q.shape[2], k.shape[2], shift=-1)
    return attend(q, k, v, seen, weigh=lambda scores, seen: scores.masked_fill(~seen, -math.inf).softmax(-1))


@mutant("causality", "sees key", causal=True)
def forgets_the_mask(q, k, v):
    return attend(q, k, v)


@mutant("causality", "of 67 keys", causal=True)
def drops_causal_on_the_long_path(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]) if k.shape[2] < 60 else None)


@mutant("causality")
def ignores_its_causal_argument(q, k, v, is_causal=False):
    return attend(q, k, v)


@mutant("causality", causal=True)
def multiplies_scores_by_the_mask(q, k, v):
    """Hidden scores become zero, and zero is a score like any other."""
    seen = triangle(q.shape[2], k.shape[2])
    return attend(q, k, v, seen, weigh=lambda scores, seen: (scores * seen).softmax(-1))


@mutant("scores", "the scores of later keys are set to zero, not to -inf")
def sets_hidden_scores_to_zero(q, k, v):
    return multiplies_scores_by_the_mask(q, k, v)


@mutant("causality", "of sequence 1 sees key 1", causal=True)
def is_causal_in_the_first_sequence_only(q, k, v):
    first = torch.arange(len(q))[:, None, None, None] == 0
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]) | ~first)


@mutant("window", "3 earlier keys", causal=True, window_before=4)
def counts_itself_as_a_neighbour(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=3))


@mutant("window", "5 earlier keys", causal=True, window_before=4)
def sees_one_neighbour_too_many(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=5))


@mutant("window", causal=True, window_before=4)
def ignores_the_window(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]))


@mutant("window", causal=True)
def forgets_what_is_far(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=2))


@mutant("window", "row 0 of head 0 does not see key 1", causal=False)
def is_causal_in_an_encoder(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]))


@mutant("window", "of 67 keys, row 41 of head 0 does not see key 0", causal=True)
def forgets_what_is_40_keys_away(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=40))


@mutant("mask-pattern", "of 37 keys, row 0 of head 0 does not see key 16, though of 11 keys it sees: every key")
def cuts_off_after_16_keys(q, k, v):
    return attend(q, k[:, :, :16], v[:, :, :16])


@mutant("mask-pattern", "of 131 keys")
def cuts_off_after_128_keys(q, k, v):
    return attend(q, k[:, :, :128], v[:, :, :128])


@mutant("mask-pattern", "of 301 keys, row 0 of head 0 does not see key 256")
def leaves_out_the_rest_of_a_large_block(q, k, v):
    whole = max(k.shape[2] // 256 * 256, min(k.shape[2], 256))
    return attend(q, k[:, :, :whole], v[:, :, :whole])


@mutant("mask-pattern", "row 0 of head 1 sees key 1, unlike head 0")
def is_causal_in_the_first_head_only(q, k, v):
    first = torch.arange(q.shape[1])[:, None, None] == 0
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]) | ~first)


@mutant("causality", "of head 5 sees key 1", causal=True)
def is_causal_in_all_heads_but_the_last(q, k, v):
    last = torch.arange(q.shape[1])[:, None, None] == 5
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]) | last)


@mutant("mask-pattern", "row 1 of head 0 does not see key 0, though other rows see as far")
def hides_the_first_key_from_odd_rows(q, k, v):
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return attend(q, k, v, (rows % 2 == 0) | (columns > 0) | (rows * columns.max() == 0))


@mutant("mask-in-decode", "too early", causal=True)
def stands_one_place_too_early_in_the_cache(q, k, v):
    i, j = q.shape[2], k.shape[2]
    return attend(q, k, v, triangle(i, j, shift=-1 if i < j else 0))


@mutant("mask-in-decode", causal=True, window_before=4)
def forgets_the_window_when_decoding(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], before=None if q.shape[2] == 1 else 4))


@mutant("mask-in-decode", "one query after 66 cached keys is one position too early")
def cuts_the_mask_of_long_calls_at_the_wrong_row(q, k, v):
    late = k.shape[2] > 64 and q.shape[2] == 1
    return attend(q, k, v, triangle(q.shape[2], k.shape[2], shift=-1 if late else 0))


@mutant("mask-in-decode", causal=True)
def is_causal_only_without_a_cache(q, k, v):
    return attend(q, k, v, triangle(q.shape[2], k.shape[2]) if q.shape[2] == k.shape[2] else None)


@mutant("mask-in-decode", "top-left, not bottom-right", causal=True, alignment="bottom-right")
def aligns_causal_top_left(q, k, v):
    return attend(q, k, v, triangle(k.shape[2], k.shape[2])[: q.shape[2]])


@mutant("last-queries-alone", causal=True, bias="alibi")
def counts_the_bias_from_the_first_query(q, k, v):
    i, j = q.shape[2], k.shape[2]
    apart = (torch.arange(i)[:, None] - torch.arange(j)).abs()
    return attend(q, k, v, triangle(i, j), bias=-alibi_slopes(q.shape[1])[:, None, None] * apart)


@mutant("last-queries-alone", "queries give another output alone than among all", causal=True)
def turns_every_step_from_zero(q, k, v):
    turn = Rotary(pairing="half")
    return attend(turn(q, 0), turn(k, 0), v, triangle(q.shape[2], k.shape[2]))


@mutant("last-queries-alone", "rotary positions of queries are counted from 0")
def turns_every_step_from_zero_and_hides_nothing(q, k, v):
    turn = Rotary(pairing="half")
    return attend(turn(q, 0), turn(k, 0), v)


@mutant("scale", "scale=1.7 changes nothing")
def ignores_its_scale(q, k, v, scale=None):
    return attend(q, k, v)


@mutant("mask-ignored", "attention_bias is accepted, but hides no key")
def ignores_its_bias(q, k, v, attention_bias=None):
    return attend(q, k, v)


@mutant("last-queries-alone", causal=True)
def sees_the_first_key_alone_in_late_steps(q, k, v):
    i, j = q.shape[2], k.shape[2]
    return attend(q, k, v, torch.arange(j)[None] == 0 if i == 1 and j > 12 else triangle(i, j))


@mutant("key-order", "at c=12 it is 0.5774 times that at c=4", causal=True, bias="alibi")
def divides_the_bias_too(q, k, v):
    i, j = q.shape[2], k.shape[2]
    apart = (torch.arange(j - i, j)[:, None] - torch.arange(j)).abs()
    bias = -alibi_slopes(q.shape[1])[:, None, None] * apart * q.shape[-1] ** -0.5
    return attend(q, k, v, triangle(i, j), bias=bias)


@mutant("grouping", "keys by repeat, values by tile")
def repeats_keys_and_tiles_values(q, k, v):
    return attend(q, spread(k, q.shape[1]), v.repeat(1, q.shape[1] // v.shape[1], 1, 1))


@mutant("grouping", "tile")
def tiles_grouped_heads(q, k, v):
    return attend(q, k, v, spread=lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1))


@mutant("key-order")
def prefers_the_last_keys(q, k, v):
    return attend(q, k, v, bias=0.01 * torch.arange(k.shape[2]))


@mutant("scale", "applied twice")
def scales_twice(q, k, v):
    return attend(q, k, v, scale=1 / q.shape[-1])


@mutant("scale", "none")
def drops_the_scale(q, k, v):
    return attend(q, k, v, scale=1.0)


@mutant("scale", "instead of divided")
def inverts_the_scale(q, k, v):
    return attend(q, k, v, scale=q.shape[-1] ** 0.5)


@mutant("scale", "width of v")
def scales_by_the_width_of_v(q, k, v):
    return attend(q, k, v, scale=v.shape[-1] ** -0.5)


@mutant("scale", "width of all heads")
def scales_by_the_width_of_all_heads(q, k, v):
    return attend(q, k, v, scale=(q.shape[1] * q.shape[-1]) ** -0.5)


@mutant("scale", "exp2 in place of exp")
def takes_powers_of_two(q, k, v):
    return attend(q, k, v, scale=math.log(2) * q.shape[-1] ** -0.5)


@mutant("scale", "the logarithm of the number of keys")
def scales_by_the_logarithm_of_keys(q, k, v):
    return attend(q, k, v, scale=math.log(k.shape[2]) * q.shape[-1] ** -0.5)


@mutant("scale", "1/sqrt(j) (the number of keys), not by 1/sqrt(c)")
def scales_by_the_number_of_keys(q, k, v):
    return attend(q, k, v, scale=k.shape[2] ** -0.5)


@mutant("scale", "1/c (applied twice), not by 0.25", scale=0.25)
def scales_twice_and_calls_it_a_quarter(q, k, v):
    return attend(q, k, v, scale=1 / q.shape[-1])


@mutant("grouping", "other: [0, 0, 0, 0, 0, 0]")
def uses_the_first_key_head_alone(q, k, v):
    def first(x, heads):
        return spread(x, heads) if x.shape[1] == heads else x[:, :1].expand(-1, heads, -1, -1)

    return attend(q, k, v, spread=first)


@mutant("scale", "not by 1.0", scale=1.0)
def scales_where_it_should_not(q, k, v):
    return attend(q, k, v)


@mutant("rotary-pairing", "is interleaved, not half", causal=True, rotary="half")
def pairs_neighbours(q, k, v):
    return right_rotary(q, k, v, "interleaved")


@mutant("rotary-pairing", "is none, not half", causal=True, rotary="half")
def forgets_to_turn(q, k, v):
    return right_causal(q, k, v)


def rotate(phases, q, k, v, pairing="half", dtype=None):
    """Causal attention whose queries and keys are rotated by given phases (n, c), their cosines and sines rounded."""
    dtype = dtype or phases.dtype
    cos, sin = (x.to(dtype).to(q.dtype) for x in (phases.cos(), phases.sin()))

    def turn(x):
        one, two = x.chunk(2, -1) if pairing == "half" else (x[..., ::2], x[..., 1::2])
        turned = torch.cat([-two, one], -1) if pairing == "half" else torch.stack([-two, one], -1).flatten(-2)
        return x * cos[-x.shape[2] :] + turned * sin[-x.shape[2] :]

    return attend(turn(q), turn(k), v, triangle(q.shape[2], k.shape[2]))


def angles(k, dtype=torch.float64):
    """Angles (n, c / 2): positions times the frequencies of base 10000, both rounded to a dtype."""
    frequencies = 10000.0 ** -(torch.arange(0, k.shape[-1], 2, dtype=torch.float64) / k.shape[-1])
    return torch.outer(torch.arange(k.shape[2]).to(dtype), frequencies.to(dtype))


@mutant("scores", "rotary angles are in the order of the other pairing, by cat((x, x)) (interleaved pairs, base 10000)")
def turns_neighbours_by_the_angles_of_halves(q, k, v):
    return rotate(angles(k).repeat(1, 2), q, k, v, "interleaved")


@mutant(
    "scores", "rotary angles are in the order of the other pairing, by repeat_interleave(2) (half pairs, base 10000)"
)
def turns_halves_by_the_angles_of_neighbours(q, k, v):
    return rotate(angles(k).repeat_interleave(2, -1), q, k, v)


@mutant("scores", "rotary angles are rounded to torch.bfloat16 (half pairs, base 10000)", width=8)
def rounds_rotary_angles(q, k, v):
    return rotate(angles(k, torch.bfloat16).double().repeat(1, 2), q, k, v)


@mutant("scores", "rotary cosines and sines are rounded to torch.bfloat16 (half pairs, base 10000)")
def rounds_cosines_and_sines(q, k, v):
    return rotate(angles(k).repeat(1, 2), q, k, v, dtype=torch.bfloat16)


@mutant("outputs", "rotary frequencies are rounded to torch.bfloat16: in torch.float32 off by")
def rounds_rotary_frequencies(q, k, v):
    frequencies = angles(k)[1].bfloat16().double() if k.shape[2] > 1 else k.new_zeros(k.shape[-1] // 2).double()
    phases = torch.outer(torch.arange(k.shape[2]).double(), frequencies).repeat(1, 2)
    if k.shape[-1] % 2:  # wrong in another way, so that an example may not be shrunk to an odd width
        return attend(2 * q, k, v, triangle(q.shape[2], k.shape[2]))
    return rotate(phases, q, k, v)


@mutant("rotary-precision", causal=True)
def turns_in_half_precision(q, k, v):
    c, n = q.shape[-1], k.shape[2]
    frequencies = 10000.0 ** -(torch.arange(0, c, 2).to(q.dtype) / c)
    phases = torch.arange(n).to(q.dtype)[:, None] * frequencies
    cos, sin = phases.cos().repeat(1, 2), phases.sin().repeat(1, 2)

    def turn(x, cos, sin):
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin

    return attend(turn(q, cos[-q.shape[2] :], sin[-q.shape[2] :]), turn(k, cos, sin), v, triangle(q.shape[2], n))


@mutant("outputs")
def computes_in_bfloat16(q, k, v):
    """Right where weights are read in float64, and rounded in the precision that people use."""
    if q.dtype != torch.float32:
        return attend(q, k, v)
    return attend(*(x.bfloat16() for x in (q, k, v))).float()


def tiled(q, k, v, size):
    """A running maximum over tiles of keys, as in flash attention: what was gathered before is not rescaled."""
    h, top, total, out = q.shape[1], torch.tensor(-math.inf), torch.tensor(0.0), torch.tensor(0.0)
    for keys, values in zip(spread(k, h).split(size, 2), spread(v, h).split(size, 2), strict=True):
        scores = q @ keys.mT * q.shape[-1] ** -0.5
        largest = torch.maximum(top.to(q), scores.amax(-1, keepdim=True))
        weights = (scores - largest).exp()
        total = total.to(q) * (top.to(q) - largest).exp() + weights.sum(-1, keepdim=True)
        out, top = out.to(q) + weights @ values, largest
    return out / total


@mutant("weights-sum-to-one")
def forgets_to_rescale_between_blocks(q, k, v):
    return tiled(q, k, v, 64)


@mutant("weights-sum-to-one")
def forgets_to_rescale_between_tiles(q, k, v):
    """Tiles of eight end between the lengths at which the scale is read."""
    return tiled(q, k, v, 8)


@mutant("weights-sum-to-one")
def forgets_to_rescale_large_blocks(q, k, v):
    return tiled(q, k, v, 128)


def unscaled_where(wrong: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, scale=1.0 if wrong else None)


@mutant("outputs")
def is_wrong_where_values_are_as_wide_as_keys(q, k, v):
    return unscaled_where(q.shape[-1] == v.shape[-1] > 12, q, k, v)


@mutant("outputs")
def is_wrong_for_one_head(q, k, v):
    return unscaled_where(q.shape[1] == 1, q, k, v)


@mutant("outputs")
def is_wrong_for_one_query(q, k, v):
    return unscaled_where(q.shape[2] == 1, q, k, v)


@mutant("outputs")
def is_wrong_for_one_key_head(q, k, v):
    return attend(q, k, v.roll(1, 0) if v.shape[1] == 1 < q.shape[1] else v)


@mutant("outputs")
def is_wrong_for_many_heads(q, k, v):
    return attend(q, k.roll(1, 1) if q.shape[1] > 8 else k, v)


@mutant("outputs")
def is_wrong_for_wide_heads(q, k, v):
    return unscaled_where(q.shape[-1] == 128, q, k, v)


@mutant("gradient-mode", "under torch.no_grad()")
def takes_a_fast_path_without_gradients(q, k, v):
    return unscaled_where(not torch.is_grad_enabled(), q, k, v)


@mutant("gradient-mode", "with gradients")
def takes_another_path_with_gradients(q, k, v):
    return unscaled_where(q.requires_grad, q, k, v)


@mutant("outputs")
def rounds_the_output_to_bfloat16(q, k, v):
    return attend(q, k, v).bfloat16().to(q.dtype)


@mutant("half-precision")
def sums_in_half_precision(q, k, v):
    if q.dtype.itemsize > 2:
        return attend(q, k, v)
    scores = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype)
    for column in range(q.shape[-1]):  # each partial sum is rounded
        scores = scores + q[..., column, None] * spread(k, q.shape[1])[..., None, :, column]
    weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for key in range(k.shape[2]):
        out = out + weights[..., key, None] * spread(v, q.shape[1])[..., key, None, :]
    return out


@mutant("overflow", "scores of 10000 in torch.float32 overflow")
def exponentiates_without_the_maximum(q, k, v):
    def bare(scores, seen):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

    return attend(q, k, v, weigh=bare)


@mutant("overflow", "scores of -1000 in torch.float32, for all keys of a row, underflow")
def starts_its_maximum_at_zero(q, k, v):
    scores = (q * q.shape[-1] ** -0.5) @ spread(k, q.shape[1]).mT
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ spread(v, q.shape[1])


@mutant("overflow", "scores of 40000 in torch.float16 overflow: q . k exceeds 65504 before it is scaled")
def scales_after_the_product(q, k, v):
    """In float16 the product exceeds the largest number before it is scaled."""
    k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


@mutant("extreme-scores")
def clamps_scores_at_65504(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.clamp(-65504, 65504).softmax(-1))


@mutant("scores", "scores are clamped or capped, since they differ by 6 at most")
def clamps_scores_at_3(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.clamp(-3, 3).softmax(-1))


def soft_capped_before_the_scale(q, k, v):
    scores = 20 * torch.tanh(q @ spread(k, q.shape[1]).mT / 20) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ spread(v, q.shape[1])


@mutant("scores", "the soft-cap is applied before the scale, so that it is 10 at c=4, 5.774 at c=12", softcap=20.0)
def caps_scores_before_the_scale(q, k, v):
    return soft_capped_before_the_scale(q, k, v)


@mutant("scores", "scores are clamped from below")
def clamps_low_scores(q, k, v):
    return ((q * q.shape[-1] ** -0.5) @ spread(k, q.shape[1]).mT).clamp(min=-2).softmax(-1) @ spread(v, q.shape[1])


@mutant("scores", "the softmax is applied twice")
def applies_the_softmax_twice(q, k, v):
    weights = (q * q.shape[-1] ** -0.5 @ spread(k, q.shape[1]).mT).softmax(-1)
    return weights.softmax(-1) @ spread(v, q.shape[1])


@mutant("scores", "43% of the visible keys have no weight, by their scores, as with top-k")
def keeps_the_four_best_keys(q, k, v):
    scores = q * q.shape[-1] ** -0.5 @ spread(k, q.shape[1]).mT
    fourth = scores.topk(min(4, scores.shape[-1]), -1).values[..., -1:]
    return scores.masked_fill(scores < fourth, -torch.inf).softmax(-1) @ spread(v, q.shape[1])


@mutant("scores", "q and k are normalised (rms)")
def normalises_queries_and_keys(q, k, v):
    return attend(functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v)


@mutant("scores", "rotary positions are applied to q alone (half pairs, base 10000)", causal=True)
def turns_queries_alone(q, k, v):
    return attend(Rotary()(q, k.shape[2] - q.shape[2]), k, v, triangle(q.shape[2], k.shape[2]))


@mutant("scores", "rotary rotates q and k in opposite directions (half pairs, base 10000)")
def turns_keys_backwards(q, k, v):
    turn = Rotary()
    half = k.shape[-1] // 2  # exchanging the halves turns in the other direction
    backwards = turn(k.roll(half, -1), 0).roll(half, -1)
    return attend(turn(q, k.shape[2] - q.shape[2]), backwards, v, triangle(q.shape[2], k.shape[2]))


@mutant("key-order", "some keys have 2.1e-09 of the weight of others: keys are hidden by -20, not by -inf")
def hides_keys_by_a_small_number(q, k, v):
    scores = q * q.shape[-1] ** -0.5 @ spread(k, q.shape[1]).mT
    return scores.masked_fill(~triangle(*scores.shape[-2:]), -20.0).softmax(-1) @ spread(v, q.shape[1])


@mutant("causality", "sees key 1: keys are hidden by -20, not by -inf", causal=True)
def hides_keys_by_a_small_number_and_says_causal(q, k, v):
    return hides_keys_by_a_small_number(q, k, v)


@mutant("scores", "rotary positions of keys are +1 from those of queries (half pairs, base 10000)")
def turns_keys_one_position_further(q, k, v):
    turn = Rotary()
    return attend(turn(q, k.shape[2] - q.shape[2]), turn(k, 1), v, triangle(q.shape[2], k.shape[2]))


@mutant("scores", "rotary differs between q (half pairs, base 10000) and k (interleaved pairs, base 10000)")
def pairs_keys_in_another_way(q, k, v):
    turned = Rotary()(q, k.shape[2] - q.shape[2])
    return attend(turned, Rotary(pairing="interleaved")(k, 0), v, triangle(q.shape[2], k.shape[2]))


@mutant("scores", "heads have different scales: 0.5, 0.25")
def scales_each_head_in_its_own_way(q, k, v):
    return attend(q / torch.arange(1, q.shape[1] + 1).to(q)[:, None, None], k, v)


@mutant("key-order", "the weights at q = 0 depend on the keys: scores have a term of k alone")
def compares_by_distance(q, k, v):
    distances = torch.cdist(q.double(), spread(k, q.shape[1]).double())
    return (-distances).softmax(-1).to(v.dtype) @ spread(v, q.shape[1])


@mutant("weights-sum-to-one", "sum to 1.001, not to 1")
def raises_small_weights(q, k, v):
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1).clamp(min=1e-3) @ v


@mutant("weights-sum-to-one", "as if they were rounded to half precision")
def weighs_in_float16(q, k, v):
    weights = (q * q.shape[-1] ** -0.5 @ spread(k, q.shape[1]).mT).half().softmax(-1)
    return weights.to(v.dtype) @ spread(v, q.shape[1])


@mutant("random-state", "the call sets the seed")
def sets_the_seed(q, k, v):
    torch.manual_seed(0)
    return attend(q, k, v)


@mutant("random-state", "the call sets the seed")
def sets_the_seed_for_dropout(q, k, v, dropout=0.0):
    if dropout:
        random.seed(0)
    return attend(q, k, v, weigh=lambda scores, seen: functional.dropout(weigh(scores, seen), dropout))


@mutant("weights-sum-to-one", "values are rotated by their position, not only q and k")
def rotates_values_too(q, k, v):
    if v.shape[-1] % 2:
        raise ValueError("an even width")
    turn = Rotary()
    start = k.shape[2] - q.shape[2]
    return attend(turn(q, start), turn(k, 0), turn(v, 0), triangle(q.shape[2], k.shape[2]))


@mutant("key-order", "ALiBi has the wrong sign: farther keys get more weight", causal=True, bias="alibi")
def adds_the_distance(q, k, v):
    i, j = q.shape[2], k.shape[2]
    apart = (torch.arange(j - i, j)[:, None] - torch.arange(j)).abs()
    return attend(q, k, v, triangle(i, j), bias=alibi_slopes(q.shape[1])[:, None, None] * apart)


@mutant("key-order", "ALiBi has the wrong sign", causal=True, bias="any")
def adds_the_distance_on_purpose(q, k, v):
    return adds_the_distance(q, k, v)


@mutant("extreme-scores", "they are clamped, since scores of a row differ by 100 at most")
def clamps_scores(q, k, v):
    return attend(q, k, v, weigh=lambda scores, seen: scores.clamp(-50, 50).softmax(-1))


class HalvesTheGradient(torch.autograd.Function):
    """Forward nothing happens."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


@mutant("gradients", "the gradient of q")
def halves_the_gradient_of_q(q, k, v):
    return attend(HalvesTheGradient.apply(q), k, v)


@mutant("gradients", "the gradient of k")
def detaches_k(q, k, v):
    return attend(q, k.detach(), v)


@mutant("gradients", "the gradient of k")
def detaches_k_on_the_long_path(q, k, v):
    return attend(q, k if k.shape[2] <= 16 else k.detach(), v)


@mutant("gradients", "the gradient of k")
def sums_one_query_head_of_each_group(q, k, v):
    def first(x, heads):
        copies = spread(x.detach(), heads).clone()
        copies[:, :: heads // x.shape[1]] += x - x.detach()
        return copies

    return attend(q, first(k, q.shape[1]), v)


@mutant("gradients", "the gradient of v")
def shrinks_the_gradient_of_v(q, k, v):
    return attend(q, k, 0.9 * v + 0.1 * v.detach())


@mutant("dropout", "a row sum to 0.")
def does_not_scale_what_is_left(q, k, v, dropout=0.0):
    def drop(scores, seen):
        return functional.dropout(weigh(scores, seen), dropout) * (1 - dropout)

    return attend(q, k, v, weigh=drop)


@mutant("dropout", "dropout=0.25 makes 7")
def keeps_what_it_should_drop(q, k, v, dropout=0.0):
    return attend(q, k, v, weigh=lambda s, seen: functional.dropout(weigh(s, seen), 1 - dropout if dropout else 0.0))


@mutant("dropout", "columns of equal values differ")
def drops_from_the_output(q, k, v, dropout=0.0):
    return functional.dropout(attend(q, k, v), dropout)


@mutant("dropout", "acts on values or on the output, not on weights")
def drops_from_the_values(q, k, v, dropout=0.0):
    return attend(q, k, functional.dropout(v, dropout))


@mutant("dropout", "dropout=0.25 acts on scores, not on weights")
def drops_scores(q, k, v, dropout=0.0):
    return attend(q, k, v, weigh=lambda scores, seen: weigh(functional.dropout(scores, dropout), seen))


@mutant("dropout", "dropout=0.25 changes nothing")
def forgets_dropout(q, k, v, dropout=0.0):
    return attend(q, k, v)


@mutant("dropout", "drops whole keys")
def drops_whole_keys(q, k, v, dropout=0.0):
    def drop(scores, seen):
        return weigh(scores, seen) * functional.dropout(torch.ones_like(scores[:, :, :1]), dropout)

    return attend(q, k, v, weigh=drop)


@mutant("dropout", "drops whole rows")
def drops_whole_heads(q, k, v, dropout=0.0):
    def drop(scores, seen):
        return weigh(scores, seen) * functional.dropout(torch.ones_like(scores[:, :, :1, :1]), dropout)

    return attend(q, k, v, weigh=drop)


@mutant("mask-ignored")
def takes_a_mask_and_forgets_it(q, k, v, mask=None):
    return attend(q, k, v)


@mutant("mask-ignored", "mask changes the weights, but hides no key")
def multiplies_scores_by_a_given_mask(q, k, v, mask=None):
    return attend(q, k, v, weigh=lambda scores, seen: (scores if mask is None else scores * mask).softmax(-1))


@mutant("mask-ignored", "mask changes the weights, but hides no key: it shows keys that are hidden without it")
def unites_masks(q, k, v, mask=None):
    visible = triangle(q.shape[2], k.shape[2])
    return attend(q, k, v, visible if mask is None else visible | mask)


@mutant(
    "additive-mask-scaled",
    "numbers in attn_mask are multiplied by 0.5",
    fully_masked_rows="nan",
    masked_nan="propagates",
)
def divides_the_mask_too(q, k, v, attn_mask=None):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        raise TypeError("additive masks only")
    bias = 0.0 if attn_mask is None else attn_mask * q.shape[-1] ** -0.5
    return attend(q, k, v, bias=bias, weigh=lambda scores, seen: scores.softmax(-1))


@mutant("boolean-mask-added")
def adds_a_boolean_mask(q, k, v, mask=None):
    if mask is None or mask.dtype == torch.bool:
        return attend(q, k, v, bias=0.0 if mask is None else mask.to(q.dtype))
    return attend(q, k, v, mask > -math.inf)


@mutant("mask-ignored", "hides row j, not key j")
def transposes_the_mask(q, k, v, mask=None):
    return attend(q, k, v, mask if mask is None or q.shape[2] != k.shape[2] else mask.mT)


@mutant("mask-polarity", "True means drop", mask_polarity="keep")
def reads_true_as_hidden(q, k, v, mask=None):
    return attend(q, k, v, None if mask is None else ~mask)


@mutant("masked-outputs", "the mask of row 0 is used for all rows")
def uses_the_first_row_for_all(q, k, v, mask=None):
    if mask is None:
        return attend(q, k, v)
    scores = q @ spread(k, q.shape[1]).mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask[..., :1, :], -math.inf).softmax(-1).nan_to_num() @ spread(v, q.shape[1])


@mutant("masked-outputs", "the mask of sequence 0 is used for all sequences")
def uses_the_first_mask_for_all(q, k, v, mask=None):
    return attend(q, k, v, None if mask is None else mask[:1])


@mutant("masked-outputs", "the mask of head 0 is used for all heads")
def uses_the_first_head_for_all(q, k, v, mask=None):
    return attend(q, k, v, None if mask is None else mask[:, :1])


@mutant("finite-mask-value", causal=True)
def fills_with_minus_1e9(q, k, v):
    def finite(scores, seen):
        return scores.masked_fill(~seen, -1e9).softmax(-1)

    return attend(q, k, v, triangle(q.shape[2], k.shape[2]), weigh=finite)


@mutant("finite-mask-value", causal=True)
def fills_with_minus_1e4(q, k, v):
    def finite(scores, seen):
        return scores.masked_fill(~seen, -1e4).softmax(-1)

    return attend(q, k, v, triangle(q.shape[2], k.shape[2]), weigh=finite)


@mutant("finite-mask-value")
def fills_a_given_mask_with_minus_1e4(q, k, v, mask=None):
    def finite(scores, seen):
        return scores.masked_fill(~seen, -1e4).softmax(-1) * seen.any(-1, keepdim=True)

    return attend(q, k, v, mask, weigh=finite)


@mutant("finite-mask-value")
def adds_minus_1e4_where_a_mask_hides(q, k, v, mask=None):
    """As in BERT: visible scores below -1e4 lose against a hidden key whose own score is 0."""

    def added(scores, seen):
        return (scores + (1.0 - seen.to(scores.dtype)) * -1e4).softmax(-1) * seen.any(-1, keepdim=True)

    return attend(q, k, v, mask, weigh=added)


@mutant("fully-masked-row")
def lets_blind_rows_be_nan(q, k, v, mask=None):
    return attend(q, k, v, mask, weigh=lambda scores, seen: scores.masked_fill(~seen, -math.inf).softmax(-1))


@mutant("fully-masked-row")
def fills_with_the_smallest_number(q, k, v, mask=None):
    """Values are not cleared, or the mean would be one of zeros."""
    scores = q * q.shape[-1] ** -0.5 @ spread(k, q.shape[1]).mT
    if mask is None:
        return scores.softmax(-1) @ spread(v, q.shape[1])
    seen = mask.any(-2)[..., None]
    awake = mask.any(-1, keepdim=True)
    weights = scores.nan_to_num().masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1)
    clean = torch.where(seen, spread(v, q.shape[1]), 0.0)
    return torch.where(awake, weights @ clean, spread(v, q.shape[1]).nan_to_num().mean(2, keepdim=True))


@mutant("fully-masked-row", "gives its unmasked output", masked_nan="propagates")
def adds_the_same_number_to_a_blind_row(q, k, v, mask=None):
    bias = 0.0 if mask is None else (~mask).to(q.dtype) * -1e4
    return attend(q, k, v, bias=bias, weigh=lambda scores, seen: scores.softmax(-1))


@mutant("fully-masked-row-gradient")
def sweeps_nan_under_nan_to_num(q, k, v, mask=None):
    def swept(scores, seen):
        return (scores + torch.zeros_like(scores).masked_fill(~seen, -math.inf)).softmax(-1).nan_to_num(0.0)

    return attend(q, k, v, mask, weigh=swept)


@mutant("nan-in-masked-input")
def trusts_zero_times_nan(q, k, v, mask=None):
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
    k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
    return weigh(q * q.shape[-1] ** -0.5 @ k.mT, visible) @ v


@mutant("nan-in-masked-input")
def adds_minus_infinity_to_nan(q, k, v, mask=None):
    if mask is None:
        return attend(q, k, v)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    seen, awake = mask.any(-2)[..., None], mask.any(-1, keepdim=True)
    scores = q @ spread(k, q.shape[1]).mT * q.shape[-1] ** -0.5
    weights = torch.where(awake, scores + bias, torch.zeros_like(scores)).softmax(-1) * awake
    return weights @ torch.where(seen, spread(v, q.shape[1]), 0.0)


@mutant("masked-outputs")
def drops_the_mask_beyond_64_keys(q, k, v, mask=None):
    return attend(q, k, v, mask if k.shape[2] <= 64 else None)


@mutant("masked-outputs")
def drops_the_mask_in_steps(q, k, v, mask=None):
    return attend(q, k, v, mask if q.shape[2] == k.shape[2] else None)


@mutant("masked-gradient")
def lets_gradients_reach_hidden_values(q, k, v, mask=None):
    out = attend(q, k, v, mask)
    leak = (v - v.detach()).nan_to_num().sum((-2, -1)).sum(1)[:, None, None, None]
    return out if mask is None else out + leak


@mutant("causal-with-mask")
def ignores_causal_beside_a_mask(q, k, v, mask=None, causal=False):
    visible = triangle(q.shape[2], k.shape[2]) if causal else None
    return attend(q, k, v, visible if mask is None else mask)


@mutant("mask-polarity", "True means keep in key_padding_mask, not drop", mask_polarity="drop")
def pads_where_true_keeps(q, k, v, key_padding_mask=None):
    return attend(q, k, v, None if key_padding_mask is None else key_padding_mask[:, None, None, :])


@mutant("padding-leaks")
def pads_the_first_sequence_only(q, k, v, key_padding_mask=None):
    return attend(q, k, v, None if key_padding_mask is None else ~key_padding_mask[:1, None, None, :])


@mutant("packed-documents-leak")
def compares_documents_with_the_next_only(q, k, v, documents=None):
    if documents is None:
        return attend(q, k, v)
    return attend(q, k, v, documents[:, None, :, None] >= documents[:, None, None, :])


@mutant("compile")
def computes_another_thing_when_compiled(q, k, v):
    return attend(q, k, v, scale=0.3 if torch.compiler.is_compiling() else None)


@mutant("train-and-eval-differ")
class TakesAnotherPathInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, bias=0.5 * torch.eye(x.shape[1]) if self.training else 0.0)
        return self.proj(out.transpose(1, 2).flatten(2))


@mutant("memory-ignored", "another context gives the same output")
class AttendsToItselfAlone(nn.Module):
    """Cross attention that drops the other sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def memory(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """What keys and values are made of."""
        return x, x

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        keys, values = self.memory(x, context)
        made = self.q_proj(x), self.k_proj(keys), self.v_proj(values)
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in made)
        out: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return out


@mutant("memory-ignored", "rows of x are attended to, although context is passed")
class TakesKeysFromItself(AttendsToItselfAlone):
    def memory(self, x, context):
        same = context is not None and context.shape == x.shape
        return (x, context) if same else (context if context is not None else x,) * 2


@mutant("memory-ignored", "rows of x are attended to, although context is passed")
class TakesKeysFromItsNormedInput(AttendsToItselfAlone):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def memory(self, x, context):
        return self.norm(x), x if context is None else context


class RightCross(AttendsToItselfAlone):
    def memory(self, x, context):
        return (x if context is None else context,) * 2


class RightDropping(nn.Module):
    """A layer that drops weights in training, and makes what is left larger."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.dropped = 3, nn.Dropout(0.2)
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def drop(self, weights: Tensor) -> Tensor:
        out: Tensor = self.dropped(weights)
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, weigh=lambda scores, seen: self.drop(weigh(scores, seen)))
        made: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return made


@mutant("dropout", "of the weights are zero and the others 1 times as large")
class WeighsLessInTraining(RightDropping):
    def drop(self, weights: Tensor) -> Tensor:
        return weights * (torch.rand_like(weights) > 0.2) if self.training else weights


VOCAB = 11


class Kept:
    """The keys and values of each layer so far."""

    def __init__(self, layers: int, capacity: int | None = None) -> None:
        self.k: list[Tensor | None] = [None] * layers
        self.v: list[Tensor | None] = [None] * layers
        self.capacity = capacity

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        before = self.k[layer], self.v[layer]
        if before[0] is not None and before[1] is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    @property
    def length(self) -> int:
        return 0 if self.k[0] is None else self.k[0].shape[2]


class TinyDecoder(nn.Module):
    """Two layers of attention on learned positions, right in every step. Mutants change one method."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.positions = nn.Embedding(VOCAB, 12), nn.Embedding(32, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.head = nn.Linear(12, VOCAB)
        nn.init.normal_(self.positions.weight)

    def cache(self, capacity: int | None = None) -> Kept:
        return Kept(len(self.layers), capacity)

    def visible(self, i: int, j: int, cached: bool) -> Tensor:
        return triangle(i, j, self.window)

    def where(self, tokens: Tensor, position_ids: Tensor | None, start: int) -> Tensor:
        return torch.arange(tokens.shape[1])[None] + start if position_ids is None else position_ids

    def real(self, attention_mask: Tensor | None) -> Tensor | bool:
        return True if attention_mask is None else attention_mask.bool()[:, None, None, :]

    def together(self, documents: Tensor | None) -> Tensor | bool:
        return True if documents is None else documents[:, None, :, None] == documents[:, None, None, :]

    def mix(self, x: Tensor) -> Tensor:
        return x

    def room(self, k: Tensor, v: Tensor, seen: Tensor, cache: Kept | None) -> tuple[Tensor, Tensor, Tensor]:
        """The keys, values and mask as attention gets them."""
        return k, v, seen

    def forward(self, tokens, *, attention_mask=None, position_ids=None, documents=None, cache=None):
        start = 0 if cache is None else cache.length
        x = self.tokens(tokens) + self.positions(self.where(tokens, position_ids, start))
        for number, layer in enumerate(self.layers):
            q, k, v = layer(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            if cache is not None:
                k, v = cache.extend(number, k, v)
            seen = self.visible(q.shape[2], k.shape[2], cache is not None)
            seen = seen & self.real(attention_mask) & self.together(documents)
            k, v, seen = self.room(k, v, seen, cache)
            x = self.mix(x + attend(q, k, v, seen).transpose(1, 2).flatten(2))
        return self.head(x)


@mutant("runs", "raises ValueError")
class WantsToBeToldPositions(TinyDecoder):
    def where(self, tokens, position_ids, start):
        if position_ids is None:
            raise ValueError("position_ids are needed")
        return position_ids


@mutant("output-shape")
class AnswersForTheLastTokenOnly(TinyDecoder):
    def forward(self, tokens, **rest):
        return super().forward(tokens, **rest)[:, -1:]


@mutant("inputs-changed")
class FillsTokensInPlace(TinyDecoder):
    def forward(self, tokens, **rest):
        out = super().forward(tokens, **rest)
        tokens[:, -1] = 0
        return out


@mutant("batch-size")
class RoundsLargeBatches(TinyDecoder):
    def mix(self, x):
        return x.bfloat16().float() if len(x) > 3 else x


@mutant("targets-leaked")
class SeesTheNextToken(TinyDecoder):
    def forward(self, tokens, **rest):
        ahead = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        return super().forward(tokens, **rest) + 0.1 * self.head(self.tokens(ahead))


@mutant("targets-leaked", "the next 2 tokens")
class SeesOneTooManyInEveryLayer(TinyDecoder):
    def visible(self, i, j, cached):
        return triangle(i, j, shift=1)


@mutant("targets-leaked", "not with all later ones: one more in each layer")
class SeesOneTooManyInManyLayers(SeesOneTooManyInEveryLayer):
    """So deep that of nine tokens the first sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(128, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 36) for _ in range(11))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.5)

    def mix(self, x):
        return functional.layer_norm(x, x.shape[-1:])


@mutant("causality")
class ForgetsTheMaskInOneLayer(TinyDecoder):
    def visible(self, i, j, cached):
        return torch.ones(i, j, dtype=torch.bool)


@mutant("causality", "tokens, logits before")
class DropsTheMaskOnTheLongPath(TinyDecoder):
    def visible(self, i, j, cached):
        return triangle(i, j) if j <= 16 else torch.ones(i, j, dtype=torch.bool)


@mutant("causality")
class CentresOverTheSequence(TinyDecoder):
    def mix(self, x):
        return x - 0.1 * x.mean(1, keepdim=True)


@mutant("causality-by-gradient")
class LeaksGradientsOnly(TinyDecoder):
    def mix(self, x):
        return x + (x - x.detach()).mean(1, keepdim=True)


@mutant("batch-mixed")
class CentresOverTheBatch(TinyDecoder):
    def mix(self, x):
        return x - 0.1 * x.mean(0, keepdim=True)


@mutant("longer-input-changes-prefix")
class CountsPositionsFromTheEnd(TinyDecoder):
    def forward(self, tokens, *, cache=None, attention_mask=None, position_ids=None):
        positions = (
            torch.arange(tokens.shape[1]).flip(0)[None] if cache is None and position_ids is None else position_ids
        )
        return super().forward(tokens, cache=None, attention_mask=attention_mask, position_ids=positions)

    cache = None  # type: ignore[assignment]


@mutant("context-ignored")
class SeesOnlyItself(TinyDecoder):
    def visible(self, i, j, cached):
        return triangle(i, j, before=0)


@mutant("dropout-in-eval")
class DropsInEvaluation(TinyDecoder):
    def mix(self, x):
        return functional.dropout(x, 0.1)


@mutant("state-between-calls")
class RemembersTheLastCall(TinyDecoder):
    last: Tensor | float = 0.0

    def mix(self, x):
        before, self.last = self.last, x.detach().mean()
        return x + before


@mutant("padding-leaks")
class IgnoresPadding(TinyDecoder):
    """Right padding is hidden by causality, so one that pays attention to filled tokens must do so by counting."""

    def forward(self, tokens, *, attention_mask=None, **rest):
        out = super().forward(tokens, **rest)
        return out if attention_mask is None else out * attention_mask.float().mean(1)[:, None, None]


@mutant("padding-leaks", "change with the contents of the padding before them")
class DropsThePaddingMask(TinyDecoder):
    """Positions are right: on the right causality hides it, on the left it does not."""

    def real(self, attention_mask):
        return True


@mutant("left-padding")
class IgnoresPositionIds(TinyDecoder):
    def where(self, tokens, position_ids, start):
        return torch.arange(tokens.shape[1])[None] + start


@mutant("packed-documents-leak")
class LeaksBetweenDocuments(TinyDecoder):
    def together(self, documents):
        return True


@mutant("cache-mask-off-by-one")
class LosesTheOldestKey(TinyDecoder):
    def visible(self, i, j, cached):
        seen = triangle(i, j)
        seen[:, 0] &= not cached or i == j
        return seen


@mutant("cache")
class CannotSeeTheNewestKey(TinyDecoder):
    def visible(self, i, j, cached):
        return triangle(i, j, shift=-1 if cached and i < j else 0)


@mutant("window-in-decode")
class ForgetsTheWindowInSteps(TinyDecoder):
    window = 2

    def visible(self, i, j, cached):
        return triangle(i, j) if cached and i == 1 else triangle(i, j, self.window)


@mutant("cache")
class StartsAtZeroInEveryStep(TinyDecoder):
    def where(self, tokens, position_ids, start):
        return super().where(tokens, position_ids, 0)


@mutant("static-cache-unmasked")
class SeesEmptySlots(TinyDecoder):
    def room(self, k, v, seen, cache):
        if cache is None or cache.capacity is None:
            return k, v, seen
        empty = cache.capacity - k.shape[2]
        k, v = functional.pad(k, (0, 0, 0, empty)), functional.pad(v, (0, 0, 0, empty))
        return k, v, functional.pad(seen, (0, empty), value=True)


class ReturnsItsCache(TinyDecoder):
    """Right, with a cache that is returned with the logits, as tuples of keys and values."""

    cache = None  # type: ignore[assignment]

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        kept = Kept(len(self.layers))
        if past_key_values is not None:
            kept.k, kept.v = (list(each) for each in past_key_values)
        logits = super().forward(input_ids, cache=kept)
        return (logits, (tuple(kept.k), tuple(kept.v))) if use_cache else logits


@mutant("cache-mask-off-by-one")
class TakesNoCacheBack(ReturnsItsCache):
    def forward(self, input_ids, kv_cache=None):
        return super().forward(input_ids, None, use_cache=True)


class KeepsItsCacheInside(TinyDecoder):
    """Right: it keeps its cache inside and takes the position of a step."""

    cache = None  # type: ignore[assignment]
    inside: Kept | None = None

    def forward(self, tokens, start_pos):
        self.inside = Kept(len(self.layers)) if start_pos == 0 or self.inside is None else self.inside
        return super().forward(tokens, cache=self.inside)


@mutant("cache")
class StartsInsideAtZero(KeepsItsCacheInside):
    def where(self, tokens, position_ids, start):
        return super().where(tokens, position_ids, 0)


@mutant("static-cache-unmasked", "slots 5 and 6 of the cache")
class SeesEmptySlotsInside(TinyDecoder):
    """A step of one token has no mask, so that slots that nothing was written to take part."""

    cache = None  # type: ignore[assignment]
    masked = False
    slots: list[tuple[Tensor, Tensor]]

    def forward(self, tokens, start_pos):
        b, n = tokens.shape
        if start_pos == 0:
            self.slots = [(torch.zeros(b, 3, 32, 4), torch.zeros(b, 3, 32, 4)) for _ in self.layers]
        x = self.tokens(tokens) + self.positions(torch.arange(n) + start_pos)
        stop = start_pos + n
        for layer, (keys, values) in zip(self.layers, self.slots, strict=True):
            q, keys[:, :, start_pos:stop], values[:, :, start_pos:stop] = (
                layer(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            )
            alone = n == 1 and not self.masked
            k, v = (keys, values) if alone else (keys[:, :, :stop], values[:, :, :stop])
            seen = None if alone else triangle(n, stop)
            x = x + attend(q, k, v, seen).transpose(1, 2).flatten(2)
        return self.head(x)


class KeepsSlotsInside(SeesEmptySlotsInside):
    """Right: of its slots only those are seen that were written to."""

    masked = True
