"""Attentions with one fault each, and the property that has to catch it.

`naive` is right and made of small steps. A mutant replaces one step, or what goes in, by a mistake that people make.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop_weights

from regard import Mask, Positions, full, padding, prefix, window
from regard.core.absolute_positions import Grid, whole_grid
from regard.core.masks import as_mask
from regard.core.masks.algebra import And, Or
from regard.core.masks.data import DenseMask
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.chunks import Chunks
from regard.core.masks.forms.documents import DocumentMask
from regard.core.masks.forms.global_tokens import GlobalTokens
from regard.core.masks.forms.padding import PaddingMask
from regard.core.masks.forms.prefix import Prefix
from regard.core.masks.forms.window import Window
from regard.core.scores import Alibi, ScoreTerm, Shaw, T5Buckets, as_terms

Attention = Callable[..., Tensor]

MUTANTS: dict[str, tuple[Attention, str]] = {}


def see(mask: Mask, grid: Grid) -> Tensor:
    return mask.see(grid)


def clear(x: Tensor, visible: Tensor) -> Tensor:
    """Keys or values with those set to zero that no query of their key head may see."""
    g, h = x.shape[1], visible.shape[1]
    seen = visible.any(2).unflatten(1, (g, h // g)).any(2)
    return torch.where(seen[..., None], x, 0)


def spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def sharpness(beta: float | None, c: int) -> float:
    return c**-0.5 if beta is None else beta


def score(q: Tensor, k: Tensor, beta: float) -> Tensor:
    return q @ k.mT * (beta if math.isfinite(beta) else 1.0)


def add(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
    return term.bind(q, beta)(scores, grid)


def hide(visible: Tensor, hidden: Tensor) -> Tensor:
    return visible & ~hidden


def centre(bias: Tensor, visible: Tensor) -> Tensor:
    """What is added, less the largest visible number of its row: only differences count, and large numbers round."""
    top = bias.expand_as(visible).masked_fill(~visible, -math.inf).amax(-1, keepdim=True) if bias.numel() else bias
    return bias - top.detach().masked_fill(top.isneginf(), 0)


def weigh(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
    hidden, awake = ~visible, visible.any(-1, keepdim=True)
    if math.isinf(beta):
        scores = scores.masked_fill(hidden, -math.inf)
        best = visible & (scores == scores.amax(-1, keepdim=True))
        return best / best.sum(-1, keepdim=True).clamp(min=1)
    scores = torch.where(awake, scores, 0)
    return scores.masked_fill(hidden & awake, -math.inf).softmax(-1) * awake if scores.numel() else scores


def mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights.to(v.dtype) @ v


STEPS = {
    "see": see, "hide": hide, "clear": clear, "spread": spread, "sharpness": sharpness, "score": score, "add": add,
    "centre": centre, "weigh": weigh, "drop": drop_weights, "mix": mix,
}  # fmt: skip


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scores: object = None,
    beta: float | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
    **faults: Callable[..., object],
) -> Tensor:
    """Right in every step that is not replaced by a fault, with the whole matrix, in float32 or better."""
    if unknown := faults.keys() - STEPS.keys():
        raise TypeError(f"there is no step {unknown}")
    step = SimpleNamespace(**STEPS | faults)
    (b, h, i, c), j, dtype = q.shape, k.shape[2], q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    grid = whole_grid(positions or Positions.last_rows(i, j), b, h, i, j, q.device)
    visible = step.see(as_mask(mask).to(q.device), grid).expand(b, h, i, j)
    terms = as_terms(scores)
    for hidden in (term.hidden(grid) for term in terms):
        visible = visible if hidden is None else step.hide(visible, hidden)
    k, v = (step.spread(step.clear(x, visible), h) for x in (k, v))
    beta = step.sharpness(beta, c)
    total = step.score(q, k, beta)
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    for term in terms:
        bias = step.add(bias, term, q, beta, grid)
    total = total + step.centre(bias, visible) if terms else total
    weights = step.drop(step.weigh(total, visible, beta), dropout)
    return step.mix(weights, v).to(dtype)


def mutant(caught_by: str) -> Callable[[Attention], Attention]:
    def keep(attention: Attention) -> Attention:
        MUTANTS[attention.__name__] = (attention, caught_by)
        return attention

    return keep


def swap(mask: Mask | Tensor | None, kind: type[Mask], other: Callable[..., Mask]) -> Mask:
    """The mask with every part of one kind replaced."""
    mask = as_mask(mask)
    return other(mask) if isinstance(mask, kind) else mask.map_children(lambda part: swap(part, kind, other))


def standing_at(grid: Grid, i: Tensor | None = None, j: Tensor | None = None) -> Grid:
    return replace(grid, i=grid.i if i is None else i, j=grid.j if j is None else j)


@mutant("dense_masks_show_where_true")
def reads_true_as_hidden(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=~as_mask(mask) if isinstance(as_mask(mask), DenseMask) else mask, **rest)


@mutant("queries_are_the_last_rows")
def aligns_causal_top_left(q, k, v, **rest):
    return naive(q, k, v, **rest, see=lambda mask, grid: mask.see(standing_at(grid, i=grid.row)))


@mutant("causality_is_bitwise")
def drops_causal_on_the_long_path(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Causal, lambda _: full()) if k.shape[2] > 100 else mask, **rest)


@mutant("causality_holds_beside_another_mask")
def ignores_causal_beside_another_mask(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Causal, lambda _: full()) if isinstance(mask, And) else mask, **rest)


@mutant("windows_count_neighbours")
def counts_itself_as_a_neighbour(q, k, v, *, mask=None, **rest):
    shorter = swap(mask, Window, lambda w: window(max((w.before or 0) - 1, 0), w.after))
    return naive(q, k, v, mask=shorter, **rest)


@mutant("windows_count_neighbours")
def sees_one_neighbour_too_many(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Window, lambda w: window((w.before or 0) + 1, w.after)), **rest)


@mutant("windows_count_neighbours")
def looks_as_far_ahead_as_back(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Window, lambda w: window(w.before, w.before)), **rest)


@mutant("windows_count_neighbours")
def never_sees_itself(q, k, v, **rest):
    return naive(q, k, v, **rest, see=lambda mask, grid: mask.see(grid) & (grid.i != grid.j))


@mutant("masks_combine")
def reads_or_as_and(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Or, lambda either: And(either.parts)), **rest)


@mutant("chunks_are_whole_and_counted_from_zero")
def counts_chunks_from_the_first_query(q, k, v, **rest):
    def sliding(mask: Mask, grid: Grid) -> Tensor:
        start = grid.i.min() if isinstance(mask, Chunks) else 0
        return mask.see(standing_at(grid, grid.i - start, grid.j - start))

    return naive(q, k, v, **rest, see=sliding)


@mutant("chunks_are_whole_and_counted_from_zero")
def cuts_chunks_at_the_query(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Chunks, lambda own: own & Causal()), **rest)


@mutant("a_prefix_is_seen_by_all")
def ends_the_prefix_one_early(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Prefix, lambda first: prefix(max(first.size - 1, 0))), **rest)


@mutant("global_tokens_see_all_and_are_seen_by_all")
def keeps_global_tokens_from_looking_out(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, GlobalTokens, lambda tokens: prefix(tokens.size)), **rest)


@mutant("padding_amount_and_side_do_not_matter")
def ignores_padding(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, PaddingMask, lambda _: full()), **rest)


@mutant("padding_amount_and_side_do_not_matter")
def takes_left_padding_for_right(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, PaddingMask, lambda real: padding(real.data)), **rest)


@mutant("packed_documents_are_separate_sequences")
def leaks_between_packed_documents(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, DocumentMask, lambda _: full()), **rest)


@mutant("places_put_queries_into_a_fixed_cache")
def stands_one_place_too_early_in_the_cache(q, k, v, *, positions=None, **rest):
    return naive(q, k, v, positions=positions and replace(positions, queries=positions.queries - 1), **rest)


@mutant("places_put_queries_into_a_fixed_cache")
def takes_the_first_key_for_position_zero(q, k, v, *, positions=None, **rest):
    moved = positions and isinstance(positions.keys, int)
    return naive(q, k, v, positions=replace(positions, keys=0) if moved else positions, **rest)


@mutant("places_put_keys_into_a_rolling_cache")
def reads_a_rolling_cache_in_slot_order(q, k, v, *, positions=None, **rest):
    return naive(q, k, v, positions=positions and replace(positions, keys=0), **rest)


@mutant("keys_may_lie_in_any_order_of_positions")
def sorts_positions_without_their_keys(q, k, v, *, positions=None, **rest):
    placed = positions and isinstance(positions.keys, Tensor)
    return naive(
        q, k, v, positions=replace(positions, keys=positions.keys.sort().values) if placed else positions, **rest
    )


@mutant("cache_steps_keep_the_window")
def forgets_the_window_when_decoding(q, k, v, *, mask=None, **rest):
    return naive(q, k, v, mask=swap(mask, Window, lambda _: full()) if q.shape[2] == 1 else mask, **rest)


@mutant("cache_steps_equal_the_whole")
def counts_distance_from_the_first_row_of_the_step(q, k, v, **rest):
    def shifted(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
        return add(scores, term, q, beta, standing_at(grid, i=grid.row))

    return naive(q, k, v, **rest, add=shifted)


@mutant("default_beta_comes_from_the_width_of_q")
def scales_twice(q, k, v, **rest):
    return naive(q, k, v, **rest, sharpness=lambda beta, c: 1 / c if beta is None else beta)


@mutant("default_beta_comes_from_the_width_of_q")
def drops_the_scale(q, k, v, **rest):
    return naive(q, k, v, **rest, sharpness=lambda beta, c: 1.0 if beta is None else beta)


@mutant("default_beta_comes_from_the_width_of_q")
def inverts_the_scale(q, k, v, **rest):
    return naive(q, k, v, **rest, sharpness=lambda beta, c: c**0.5 if beta is None else beta)


@mutant("default_beta_comes_from_the_width_of_q")
def scales_by_the_width_of_v(q, k, v, *, beta=None, **rest):
    return naive(q, k, v, beta=v.shape[-1] ** -0.5 if beta is None else beta, **rest)


@mutant("default_beta_comes_from_the_width_of_q")
def scales_by_the_width_of_all_heads(q, k, v, *, beta=None, **rest):
    return naive(q, k, v, beta=(q.shape[1] * q.shape[-1]) ** -0.5 if beta is None else beta, **rest)


@mutant("beta_is_taken_as_it_is")
def scales_by_the_width_whatever_beta_says(q, k, v, *, beta=None, **rest):
    return naive(q, k, v, beta=None if beta else beta, **rest)


@mutant("beta_zero_is_the_mean_of_the_visible")
def takes_zero_for_no_beta(q, k, v, *, beta=None, **rest):
    return naive(q, k, v, beta=beta or None, **rest)


@mutant("beta_infinity_is_hard_and_shares_ties")
def picks_the_first_of_ties(q, k, v, **rest):
    def first(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        weights = weigh(scores, visible, beta)
        one = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
        return weights if math.isfinite(beta) else one

    return naive(q, k, v, **rest, weigh=first)


@mutant("larger_beta_is_sharper")
def takes_beta_for_a_temperature(q, k, v, **rest):
    return naive(q, k, v, **rest, sharpness=lambda beta, c: c**-0.5 if beta is None else 1 / beta if beta else 0.0)


@mutant("scaling_q_and_beta_cancel")
def normalises_queries(q, k, v, **rest):
    return naive(q / q.norm(dim=-1, keepdim=True).clamp(min=1e-6), k, v, **rest)


@mutant("rows_sum_to_one")
def runs_softmax_over_the_queries(q, k, v, **rest):
    def down(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return weigh(scores.mT, visible.mT, beta).mT

    return naive(q, k, v, **rest, weigh=down)


@mutant("rows_sum_to_one")
def masks_after_the_softmax(q, k, v, **rest):
    return naive(q, k, v, **rest, weigh=lambda scores, visible, beta: scores.softmax(-1) * visible)


@mutant("identity_values_read_the_weights")
def keeps_the_three_largest_weights(q, k, v, **rest):
    def pruned(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        weights = weigh(scores, visible, beta)
        kept = weights * (weights >= weights.topk(min(3, weights.shape[-1])).values[..., -1:])
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)

    return naive(q, k, v, **rest, weigh=pruned)


@mutant("large_scores_do_not_overflow")
def exponentiates_without_the_maximum(q, k, v, **rest):
    def bare(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        weights = scores.exp() * visible
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)

    return naive(q, k, v, **rest, weigh=bare)


@mutant("very_negative_scores_do_not_beat_the_mask")
def fills_with_minus_1e9(q, k, v, **rest):
    def finite(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return scores.masked_fill(~visible, -1e9).softmax(-1) * visible.any(-1, keepdim=True)

    return naive(q, k, v, **rest, weigh=finite)


@mutant("blind_rows_give_zeros")
def fills_with_the_smallest_number(q, k, v, **rest):
    """A blind row is then the mean of the forbidden values."""
    fill = torch.finfo(torch.float32).min
    return naive(q, k, v, **rest, weigh=lambda scores, visible, beta: scores.masked_fill(~visible, fill).softmax(-1))


@mutant("blind_rows_of_a_dense_mask_give_zeros")
def lets_blind_rows_be_nan(q, k, v, **rest):
    def bare(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return scores.masked_fill(~visible, -math.inf).softmax(-1)

    return naive(q, k, v, **rest, weigh=bare)


@mutant("blind_rows_give_zeros")
def sweeps_nan_under_nan_to_num(q, k, v, **rest):
    def swept(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)

    return naive(q, k, v, **rest, weigh=swept)


@mutant("nothing_asked_gives_nothing")
def pads_an_empty_step_to_one_row(q, k, v, **rest):
    return naive(q if q.shape[2] else q.new_zeros(*q.shape[:2], 1, q.shape[3]), k, v, **rest)


@mutant("no_keys_give_zeros")
def divides_by_a_sum_of_nothing(q, k, v, **rest):
    return naive(q, k, v, **rest, mix=lambda weights, v: weights @ v / weights.sum(-1, keepdim=True))


@mutant("poison_in_padding_stays_out")
def trusts_zero_times_nan(q, k, v, **rest):
    return naive(q, k, v, **rest, clear=lambda x, visible: x)


@mutant("poison_in_padding_stays_out")
def clears_poisoned_values_only(q, k, v, **rest):
    """The output is clean, and the gradient of q is 0 * NaN."""
    return naive(q, k, v, **rest, clear=lambda x, visible: clear(x, visible) if x.shape[-1] == v.shape[-1] else x)


@mutant("poison_in_unused_slots_stays_out")
def clears_padding_only(q, k, v, *, positions=None, **rest):
    return naive(q, k, v, positions=positions, **rest, clear=clear if positions is None else lambda x, visible: x)


@mutant("poison_behind_a_dense_mask_stays_out")
def clears_what_no_head_at_all_sees(q, k, v, **rest):
    return naive(q, k, v, **rest, clear=lambda x, visible: clear(x, visible.any(1, True).expand_as(visible)))


@mutant("heads_do_not_mix")
def forgets_to_transpose_heads_back(q, k, v, **rest):
    out = naive(q, k, v, **rest)
    return out.transpose(1, 2).reshape(out.shape)


@mutant("grouped_heads_repeat")
def tiles_grouped_heads(q, k, v, **rest):
    return naive(q, k, v, **rest, spread=lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1))


@mutant("batch_entries_do_not_mix")
def centres_keys_over_the_batch(q, k, v, **rest):
    return naive(q, k - k.mean(0, keepdim=True), v, **rest)


@mutant("batch_size_does_not_change_a_result")
def rounds_large_batches(q, k, v, **rest):
    return naive(q.half().to(q) if len(q) > 4 else q, k, v, **rest)


@mutant("queries_do_not_mix")
def centres_queries_over_the_rows(q, k, v, **rest):
    return naive(q - q.mean(2, keepdim=True), k, v, **rest)


@mutant("key_order_does_not_matter")
def prefers_the_first_keys(q, k, v, **rest):
    late = 0.01 * torch.arange(k.shape[2], device=k.device)
    return naive(q, k, v, **rest, score=lambda *args: score(*args) - late)


@mutant("output_is_linear_in_v")
def clips_values(q, k, v, **rest):
    return naive(q, k, v.clamp(-2, 2), **rest)


@mutant("memory_layout_does_not_matter")
def reads_memory_as_it_lies(q, k, v, **rest):
    q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return naive(q, k, v, **rest)


@mutant("inputs_are_left_as_they_were")
def clears_padding_in_place(q, k, v, **rest):
    return naive(q, k, v, **rest, clear=lambda x, visible: x.copy_(clear(x, visible)))


@mutant("no_dropout_is_exact")
def drops_in_evaluation_too(q, k, v, *, dropout=0.0, **rest):
    return naive(q, k, v, dropout=dropout or 0.1, **rest)


@mutant("dropout_drops_weights_and_keeps_their_mean")
def drops_scores(q, k, v, *, dropout=0.0, **rest):
    return naive(q, k, v, **rest, score=lambda q, k, beta: drop_weights(score(q, k, beta), dropout))


@mutant("dropout_drops_weights_and_keeps_their_mean")
def does_not_scale_what_is_left(q, k, v, **rest):
    return naive(q, k, v, **rest, drop=lambda weights, share: drop_weights(weights, share) * (1 - share))


@mutant("dropout_drops_weights_and_keeps_their_mean")
def drops_whole_keys(q, k, v, **rest):
    keys = torch.ones_like(k[:1, :1, :1, :1].expand(1, 1, 1, k.shape[2]))
    return naive(q, k, v, **rest, drop=lambda weights, share: weights * drop_weights(keys, share))


@mutant("gradients_of_q_match_the_truth")
def detaches_q(q, k, v, **rest):
    return naive(q.detach(), k, v, **rest)


@mutant("gradients_of_k_match_the_truth")
def detaches_k(q, k, v, **rest):
    return naive(q, k.detach(), v, **rest)


@mutant("gradients_of_v_match_the_truth")
def scales_the_gradient_of_v(q, k, v, **rest):
    return naive(q, k, 0.9 * v + 0.1 * v.detach(), **rest)


@mutant("gradients_of_k_match_the_truth")
def sums_one_query_head_of_each_group(q, k, v, **rest):
    """The backward pass of grouped heads forgets that several query heads share a key head."""

    def first(x: Tensor, heads: int) -> Tensor:
        copies = spread(x.detach(), heads)
        copies[:, :: heads // x.shape[1]] += x - x.detach()
        return copies

    return naive(q, k, v, **rest, spread=first)


@mutant("gradients_reach_learned_terms")
def detaches_terms(q, k, v, **rest):
    def constant(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
        return scores + add(torch.zeros_like(scores), term, q, beta, grid).detach()

    return naive(q, k, v, **rest, add=constant)


@mutant("outputs_match_the_truth")
def computes_in_bfloat16(q, k, v, **rest):
    return naive(*(x.bfloat16() for x in (q, k, v)), **rest).to(q.dtype)


@mutant("outputs_match_the_truth_when_all_is_visible")
def rounds_weights_when_nothing_is_hidden(q, k, v, **rest):
    def coarse(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        weights = weigh(scores, visible, beta)
        return weights.half().to(weights) if visible.all() else weights

    return naive(q, k, v, **rest, weigh=coarse)


@mutant("half_precision_accumulates_in_float32")
def keeps_scores_in_the_input_precision(q, k, v, **rest):
    return naive(q, k, v, **rest, score=lambda a, b, beta: score(a, b, beta).to(q.dtype).to(a))


@mutant("terms_keep_their_precision")
def rounds_terms_to_the_input_precision(q, k, v, **rest):
    def rounded(scores: Tensor, term: ScoreTerm, wide: Tensor, beta: float, grid: Grid) -> Tensor:
        return scores + add(torch.zeros_like(scores), term, wide, beta, grid).to(q.dtype)

    return naive(q, k, v, **rest, add=rounded)


@mutant("dtype_is_kept")
def returns_float32(q, k, v, **rest):
    return naive(q, k, v, **rest).float()


@mutant("added_scores_are_not_scaled")
def scales_added_scores_too(q, k, v, **rest):
    def inside(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
        return scores + beta * add(torch.zeros_like(scores), term, q, beta, grid)

    return naive(q, k, v, **rest, add=inside)


@mutant("alibi_fades_with_distance")
def flips_the_sign_of_alibi(q, k, v, **rest):
    def grows(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
        added = add(scores, term, q, beta, grid)
        return 2 * scores - added if isinstance(term, Alibi) else added

    return naive(q, k, v, **rest, add=grows)


@mutant("alibi_fades_with_distance")
def counts_alibi_from_the_first_key(q, k, v, **rest):
    """+m j: the same under causal(), and only there."""

    def by_key(scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
        slopes = term.slopes.to(q.device)[:, None, None] if isinstance(term, Alibi) else 0
        return scores + slopes * grid.j if isinstance(term, Alibi) else add(scores, term, q, beta, grid)

    return naive(q, k, v, **rest, add=by_key)


@mutant("shaw_counts_from_query_to_key")
def counts_shaw_from_key_to_query(q, k, v, **rest):
    return naive(q, k, v, **rest, add=lambda *args: backwards(Shaw, *args))


@mutant("t5_buckets_count_from_query_to_key")
def counts_t5_from_key_to_query(q, k, v, **rest):
    return naive(q, k, v, **rest, add=lambda *args: backwards(T5Buckets, *args))


def backwards(kind: type[ScoreTerm], scores: Tensor, term: ScoreTerm, q: Tensor, beta: float, grid: Grid) -> Tensor:
    return add(scores, term, q, beta, standing_at(grid, grid.j, grid.i) if isinstance(term, kind) else grid)


class FromLogSumExp(torch.autograd.Function):
    """Softmax attention whose backward pass computes the weights once more, as fused kernels do."""

    @staticmethod
    def forward(ctx, scores, v):
        ctx.save_for_backward(scores, v, scores.logsumexp(-1, keepdim=True))
        return scores.softmax(-1) @ v

    @staticmethod
    def backward(ctx, grad):
        scores, v, lse = ctx.saved_tensors
        weights = (scores - lse).exp()
        of_weights = grad @ v.mT
        mean = (grad * (weights @ v)).sum(-1, keepdim=True)
        return weights * (of_weights - mean), weights.mT @ grad


@mutant("gradients_hold_at_every_magnitude")
def computes_weights_again_from_the_log_sum_exp(q, k, v, **rest):
    """Right at small scores; at large ones the log-sum-exp has no digits left for the sum."""
    kept = {}

    def keep(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        kept["scores"] = scores.masked_fill(~visible & visible.any(-1, keepdim=True), -math.inf)
        return weigh(scores, visible, beta)

    return naive(q, k, v, **rest, weigh=keep, mix=lambda weights, v: FromLogSumExp.apply(kept["scores"], v))


@mutant("gradients_hold_at_every_magnitude")
def adds_large_numbers_as_they_are(q, k, v, **rest):
    """A row of -1e9 then leaves no digits of the scores."""
    return naive(q, k, v, **rest, centre=lambda bias, visible: bias)


@mutant("gradients_hold_at_every_magnitude")
def clamps_large_scores(q, k, v, **rest):
    return naive(q, k, v, **rest, score=lambda *args: score(*args).clamp(-1e4, 1e4))


@mutant("visible_nan_gives_nan")
def takes_nan_for_hidden(q, k, v, **rest):
    def blind(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return weigh(scores.nan_to_num(0.0), visible & ~scores.isnan(), beta)

    return naive(q, k, v, **rest, weigh=blind)


@mutant("a_score_of_minus_infinity_hides")
def adds_minus_infinity_like_any_number(q, k, v, **rest):
    """NaN in a hidden value goes on: 0 * NaN."""
    return naive(q, k, v, **rest, hide=lambda visible, hidden: visible)


@mutant("a_score_of_plus_infinity_makes_its_row_nan")
def lets_plus_infinity_take_all_weight(q, k, v, **rest):
    def winner(scores: Tensor, visible: Tensor, beta: float) -> Tensor:
        return weigh(scores.masked_fill(visible & (scores.isnan() | (scores == math.inf)), 1e30), visible, beta)

    return naive(q, k, v, **rest, weigh=winner, centre=lambda bias, visible: bias)
