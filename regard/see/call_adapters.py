"""Convert the arguments of an attention call to a `Record`: q, k, v, mask, score terms and beta.

Score terms are biases and other changes of the scores beta q . k, where beta is the scale. The call may be one of
torch, of `regard.attend` or of another library.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions
from regard.core.input_checks import is_autocasting
from regard.core.kernels.gradients import score_bound
from regard.core.kernels.request import Request
from regard.core.masks import causal
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import DenseMask
from regard.core.scores import Additive, Alibi, BoundTerm, ScoreTerm, Sink, T5Buckets, additive
from regard.see.leading_axes import LeadingAxes
from regard.see.record import Record, pair_grid

MARGIN = 40.0  # exp(-40) is far below the rounding error of float32


@runtime_checkable
class OutputTransform(Protocol):
    """Converts between the output of the attention heads and the output of the intercepted operation.

    The operation can return the heads in another order of axes, or after a projection.
    """

    def apply(self, heads: Float[Tensor, "b h i e"], out: Tensor) -> Tensor:
        """Convert the output of the heads to the output of the intercepted operation, in the shape of `out`."""

    def read_heads(self, out: Tensor) -> Float[Tensor, "b h i e"] | None:
        """Recover the output of the heads from the output of the operation; None if that is not possible."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Convert the gradient of the operation's output to the gradient of the output of the heads, (..., i, e)."""


@dataclass(frozen=True)
class AxisPermutation:
    """An output transform that permutes the axes.

    axes  for each axis of the heads' output (..., i, e), the index of this axis in the operation's output
    """

    axes: list[int]

    def apply(self, heads: Tensor, out: Tensor) -> Tensor:
        permuted = out.permute(self.axes).shape
        return heads.reshape(permuted).permute([self.axes.index(axis) for axis in range(len(self.axes))])

    def pull_back(self, gradient: Tensor) -> Tensor:
        return gradient.permute(self.axes)

    read_heads = pull_back


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """An output transform for calls whose leading axes, those before (i, e), are not (b, h).

    The output of the heads (b h i e) is reshaped to the leading axes of the call, then another transform is applied.

    axes  the leading axes of the call, with the functions that convert them from and to (b h i e)
    rest  the second transform
    """

    axes: LeadingAxes
    rest: OutputTransform

    def apply(self, heads: Tensor, out: Tensor) -> Tensor:
        return self.rest.apply(self.axes.from_heads(heads), out)

    def read_heads(self, out: Tensor) -> Tensor | None:
        heads = self.rest.read_heads(out)
        return None if heads is None else self.axes.to_heads(heads)

    def pull_back(self, gradient: Tensor) -> Tensor:
        return self.axes.to_heads(self.rest.pull_back(gradient))


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask(Mask):
    """The mask of a recorded flex_attention call, given by its mask_mod.

    fn      the mask_mod: a function of the batch, head, query and key indices of one pair
    data    further tensor arguments of `fn`
    chosen  for each recorded head, its index among all heads of the model's call; None if all heads are recorded
    """

    fn: Callable[..., Tensor]
    data: tuple[Tensor, ...] = ()
    chosen: Int[Tensor, "h"] | None = None  # the recorded heads, by their index in the model

    def see(self, grid: Grid) -> Tensor:
        head = grid.head if self.chosen is None else self.chosen[grid.head]
        return _map_pairs(self.fn, (), (grid.batch, head, grid.row, grid.column), self.data)

    def key(self) -> None:
        """Return None: the mask cannot be cached, because the tensors that the mask_mod reads may change."""

    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "mask_mod"


@dataclass(frozen=True, eq=False, repr=False)
class FlexScore(ScoreTerm):
    """The score term of a recorded flex_attention call, given by its score_mod.

    fn      the score_mod: a function of the score and the batch, head, query and key indices of one pair
    data    further tensor arguments of `fn`
    chosen  for each recorded head, its index among all heads of the model's call; None if all heads are recorded
    rows    for each recorded query, its index among all queries of the model's call; None if all queries are recorded
    """

    fn: Callable[..., Tensor]
    data: tuple[Tensor, ...] = ()
    chosen: Int[Tensor, "h"] | None = None
    rows: Int[Tensor, "i"] | None = None
    name = "score_mod"
    additive = False

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        def modify(scores: Tensor, grid: Grid) -> Tensor:
            head = grid.head if self.chosen is None else self.chosen[grid.head]
            row = grid.row if self.rows is None else self.rows[grid.row]
            return _map_pairs(self.fn, (scores,), (grid.batch, head, row, grid.column), self.data).to(scores.dtype)

        return modify


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredScores(ScoreTerm):
    """A score term that replaces beta q . k by the scores that the model passed to its softmax."""

    scores: Float[Tensor, "b h i j"]
    name = "measured"
    additive = False

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        own = self.scores.to(q.dtype)
        return lambda scores, grid: scores * 0 + own[grid.batch, grid.head, grid.row, grid.column]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.scores,)


@dataclass(frozen=True, eq=False, repr=False)
class UniformRows(ScoreTerm):
    """A score term that gives all keys of some queries equal scores, and so equal weights.

    A model has such queries if its mask adds the lowest number of the dtype to all their scores: all sums are rounded
    to this number. `rows` is True for these queries.
    """

    rows: Bool[Tensor, "#b #h i 1"]
    name = "uniform"
    additive = False

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        def set_equal(scores: Tensor, grid: Grid) -> Tensor:
            b, h = self.rows.shape[:2]
            batch, head = (grid.batch if b > 1 else grid.batch * 0), (grid.head if h > 1 else grid.head * 0)
            return scores.masked_fill(self.rows[batch, head, grid.row, 0], 0)

        return set_equal

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)


def _map_pairs(
    fn: Callable[..., Tensor], first: tuple[Tensor, ...], indices: tuple[Tensor, ...], data: tuple[Tensor, ...]
) -> Tensor:
    """Apply a function of one query-key pair, such as a mask_mod, to many pairs with torch.vmap.

    fn       the function: fn(*first, *indices, *data)
    first    arguments of `fn` before the indices, such as the scores
    indices  batch, head, query and key indices, as four tensors that are broadcast to one shape; each entry is one pair
    data     further arguments, the same for each pair
    """
    parts = torch.broadcast_tensors(*first, *indices)
    flat = [part.reshape(-1) for part in parts]
    if not flat[0].numel():
        return torch.zeros(parts[0].shape, dtype=torch.bool, device=parts[0].device)
    found = torch.vmap(lambda *pair: fn(*pair, *data))(*flat)
    return found.reshape(parts[0].shape)


def build_sdpa_record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    axes: LeadingAxes | None = None,
) -> Record:
    """Build the record of a scaled_dot_product_attention call from its arguments.

    With is_causal=True, torch aligns the mask at the top left: the first query and the first key are both at position
    0.

    axes  which of the axes before (n, c), the positions and the width, are the batch and which are the heads; None if
          these axes are (b, h)
    """
    q, k, v = cast_for_autocast(query, key, value)
    note = ""
    if axes is None or enable_gqa:  # the third axis from the end is that of heads
        q, k, v = (to_four_axes(x) for x in (q, k, v))
    else:
        note = axes.note
        q, k, v = map(axes.to_heads, (q, k, v))
        attn_mask = axes.to_heads(attn_mask) if attn_mask is not None and attn_mask.ndim > 2 else attn_mask
    q, k, v = expand_batch(q, k, v)
    beta = query.shape[-1] ** -0.5 if scale is None else float(scale)
    mask, terms, positions = read_mask(attn_mask, q, k, beta)
    if is_causal:
        mask, positions = causal(), Positions(0, 0)
    return Record(q, k, v, mask, terms, beta, positions, "sdpa", float(dropout_p), note)


def build_flex_record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: tuple[Any, ...] | None,
    scale: float,
    kernel_options: object = None,
    score_data: tuple[Any, ...] = (),
    mask_data: tuple[Any, ...] = (),
) -> Record:
    """Build the record of a flex_attention call from its arguments.

    The record keeps the functions score_mod and mask_mod. They are called later, when a statistic is computed.
    """
    terms = () if score_mod is None or _is_identity(score_mod) else (FlexScore(score_mod, _copy_data(score_data)),)
    mask = Full() if block_mask is None else FlexMask(block_mask[-1], _copy_data(mask_data))
    q, k, v = expand_batch(query, key, value)
    return Record(q, k, v, mask, terms, float(scale), Positions.last_rows(q.shape[2], k.shape[2]), "flex")


def _is_identity(score_mod: Callable[..., Tensor]) -> bool:
    """Return whether a score_mod returns the score unchanged, like the default score_mod of flex_attention."""
    graph = getattr(score_mod, "graph", None)
    if graph is None:
        return score_mod.__name__ == "_identity"
    nodes = list(graph.nodes)
    return nodes[-1].args[0] is nodes[0]


def _copy_data(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy the tensors that a mask_mod or score_mod reads, because the model can overwrite them before that."""
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in data)


def build_attend_record(kernel: str, call: Request) -> Record:
    """Build the record of a `regard.attend` call.

    kernel  name of the kernel that ran
    call    the inputs of the call
    """
    return Record(
        call.q, call.k, call.v, call.mask, call.terms, call.beta, call.positions, f"attend, {kernel}", call.dropout
    )


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to the autocast dtype if autocast is on for their device."""
    if is_autocasting(q):
        low = torch.get_autocast_dtype(q.device.type)
        return q.to(low), k.to(low), v.to(low)
    return q, k, v


def to_four_axes(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "b h n c"]:
    """Reshape a tensor to four axes: add leading axes of size 1, or merge all axes before the last three into one."""
    if x.ndim < 4:
        return x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def expand_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast q, k and v to a common batch size, and k and v to a common number of heads.

    If q has fewer heads than k, q is broadcast to the heads of k.
    """
    b = max(x.shape[0] for x in (q, k, v))
    g = max(k.shape[1], v.shape[1])
    h = max(q.shape[1], g)
    return q.expand(b, h, -1, -1), k.expand(b, g, -1, -1), v.expand(b, g, -1, -1)


def read_mask(
    mask: Tensor | None,
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    beta: float,
    has_sink: bool = False,
) -> tuple[Mask, tuple[ScoreTerm, ...], Positions]:
    """Convert an `attn_mask` tensor, boolean (True is visible) or additive, to a mask, score terms and positions.

    Values of an additive mask that are low enough to hide a key become part of the mask; the other values become a
    score term. Rows with no other values are treated as in `split_hidden`. The positions are those of queries at the
    end of the keys.

    has_sink  whether an attention sink takes part in the softmax; if so, a row that would have uniform weights hides
              all keys instead
    """
    i, j = q.shape[2], k.shape[2]
    positions = Positions.last_rows(i, j)
    if mask is None:
        return Full(), (), positions
    mask = collapse_repeated(to_four_axes(mask))
    if mask.dtype == torch.bool:
        return simplify_mask(mask, i, j), (), positions
    visible, rest, uniform = split_hidden(
        mask if mask.is_floating_point() else mask.float(), finite_score_bound(q, k, beta)
    )
    terms: list[ScoreTerm] = [additive(collapse_repeated(rest))] if bool(rest.any()) else []
    if bool(uniform.any()) and has_sink:
        visible = visible & ~uniform
    elif bool(uniform.any()):
        terms.append(UniformRows(collapse_repeated(uniform).expand(-1, -1, i, -1)))
    return simplify_mask(collapse_repeated(visible), i, j), tuple(terms), positions


def finite_score_bound(q: Tensor, k: Tensor, beta: float) -> float:
    """Return an upper bound of |beta * q . k| as a float: 0 without queries or keys, inf if q or k is not finite."""
    bound = float(score_bound(q, k, beta)) if q.numel() and k.numel() else 0.0
    return bound if math.isfinite(bound) else math.inf


def split_hidden(
    added: Float[Tensor, "b h i j"], bound: float
) -> tuple[Bool[Tensor, "b h i j"], Float[Tensor, "b h i j"], Bool[Tensor, "b h i 1"]]:
    """Split an additive mask into three tensors: visible pairs, values at these pairs, and rows of uniform weights.

    A value hides its pair if it is low enough compared with `bound` (see `is_hiding`). If all values of a row are that
    low, but not all are -inf, the highest value is subtracted from all values of the row, which does not change the
    softmax. Keys with values at most 2 * bound + MARGIN below the highest value are then visible. The weights of such a
    row are uniform if adding the highest value to its scores rounds them all to the same number.

    added  the additive mask
    bound  upper bound of the absolute scores |beta q . k|
    """
    hidden = is_hiding(added, bound)
    empty = hidden.all(-1, keepdim=True) & (added > -torch.inf).any(-1, keepdim=True)
    if not bool(empty.any()):
        return ~hidden, torch.where(hidden, 0.0, added), empty
    highest = added.amax(-1, keepdim=True)
    below = torch.where(empty, added - highest, added).nan_to_num(-math.inf, neginf=-math.inf)
    visible = torch.where(empty, below >= -_negligible(bound), ~hidden)
    uniform = empty & (highest.abs() * torch.finfo(added.dtype).eps > 4 * min(bound, 1e30))
    return visible, torch.where(visible, below, 0.0), uniform


def is_hiding(added: Float[Tensor, "..."], bound: float) -> Bool[Tensor, "..."]:
    """Return True where an additive mask hides a pair: the weight of the pair is rounded to 0, whatever its score is.

    A value hides its pair if it is so far below the values of all visible pairs that even the highest possible score
    cannot compensate for it. Examples are -inf, the lowest number of the dtype, -1e9, -1e4, and -100 if scores are
    small. The values of a bias that decreases gradually, such as ALiBi, do not hide a pair.

    bound  upper bound of the absolute scores |beta q . k|
    """
    added, lowest = added.detach(), torch.finfo(added.dtype).min / 2
    if not added.numel() or float(added.amin()) > -MARGIN:
        return torch.zeros_like(added, dtype=torch.bool)
    room = _negligible(bound)
    highest = float(added.amax())
    for cut in (highest - room, -5e3, -5e5):
        hidden = added <= cut
        if lowest < cut and bool(hidden.any()) and not bool(hidden.all()):
            above = float(torch.where(hidden, math.inf, added).amin())
            if above - float(torch.where(hidden, added, -math.inf).amax()) >= room:
                return hidden
        if lowest < cut < 0 and bool(hidden.all()) and -highest > room:
            return hidden
    return added <= lowest


def _negligible(bound: float) -> float:
    """Return how far a value of an additive mask must be below another, so that the weight of its pair is rounded to 0.

    bound  upper bound of the absolute scores |beta q . k|
    """
    return 2 * bound + MARGIN


def collapse_repeated(x: Tensor) -> Tensor:
    """Shorten each leading axis (all but the last two) to size 1 if all entries along this axis are equal."""
    for axis in range(x.ndim - 2):
        if x.shape[axis] > 1 and (x.stride(axis) == 0 or bool((x == x.narrow(axis, 0, 1)).all())):
            x = x.narrow(axis, 0, 1)
    return x


def simplify_mask(visible: Bool[Tensor, "b h i j"], i: int, j: int) -> Mask:
    """Convert a boolean matrix to `Full()` or `causal()` if it equals one of them, else to a dense mask.

    i, j  numbers of queries and keys
    """
    if bool(visible.all()):
        return Full()
    if visible.shape[:2] == (1, 1) and visible.shape[2:] == (i, j):
        whole = torch.ones(i, j, dtype=torch.bool, device=visible.device)
        if torch.equal(visible[0, 0], whole.tril(j - i)):
            return causal()
    return DenseMask(visible.clone())


def copy_record(record: Record, device: torch.device | None, values: bool, **fields: Any) -> Record:
    """Return a copy of a recorded attention call, with copied tensors, because the model can overwrite the originals.

    device  device of the copies; None keeps the device
    values  whether to copy v
    fields  further fields to set in the copy, such as `name`
    """

    def copy(x: Tensor) -> Tensor:
        return _copy_tensor(x, device)

    def copy_term(term: ScoreTerm) -> ScoreTerm:
        tensors = {name: copy(value) for name, value in vars(term).items() if isinstance(value, Tensor)}
        return replace(term, **tensors) if tensors and is_dataclass(term) else term

    keys = record.positions.keys
    return replace(
        record,
        q=copy(record.q),
        k=copy(record.k),
        v=copy(record.v) if values and record.v is not None else None,
        mask=_copy_mask(record.mask, record, device),
        terms=tuple(copy_term(term) for term in record.terms),
        positions=replace(record.positions, keys=copy(keys)) if isinstance(keys, Tensor) else record.positions,
        **fields,
    )


def _copy_tensor(x: Tensor, device: torch.device | None) -> Tensor:
    x = x.detach() if device is None else x.detach().to(device)
    return x.clone(memory_format=torch.contiguous_format)


# not a function inside copy_record: one that calls itself would keep the record alive until the garbage collector runs
def _copy_mask(mask: Mask, record: Record, device: torch.device | None) -> Mask:
    if isinstance(mask, FlexMask) and device is not None:
        # the function may read tensors on its own device
        rows = torch.arange(record.q.shape[2], device=record.q.device)
        return DenseMask(_copy_tensor(mask.see(pair_grid(record, rows)), device))
    if mask.children():
        return mask.map_children(lambda child: _copy_mask(child, record, device))
    return mask.map_tensors(lambda x: _copy_tensor(x, device))


def keep_heads(record: Record, heads: Int[Tensor, "r"]) -> Record:
    """Return a recorded attention call reduced to the heads with these indices.

    With grouped-query attention, each remaining query head gets its own copy of its keys and values.
    """

    def keep_in_term(term: ScoreTerm) -> ScoreTerm:
        if isinstance(term, Additive) and (1, *term.values.shape)[-3] == 1:
            return term
        if isinstance(term, Alibi):
            return Alibi(term.slopes[heads.to(term.slopes.device)])
        if isinstance(term, Sink):
            return Sink(term.logits[heads.to(term.logits.device)])
        if isinstance(term, T5Buckets):
            return replace(term, table=term.table[:, heads.to(term.table.device)])
        if isinstance(term, FlexScore):
            return replace(term, chosen=heads)
        if isinstance(term, UniformRows):
            return UniformRows(term.rows.index_select(1, heads)) if term.rows.shape[1] > 1 else term
        if isinstance(term, MeasuredScores):
            return MeasuredScores(term.scores.index_select(1, heads))
        if not term.additive and not term.tensors():
            return term
        values = term_values(term, record)
        return additive(values.index_select(1, heads) if values.shape[1] > 1 else values)

    key_heads = heads // (record.q.shape[1] // record.k.shape[1])
    return replace(
        record,
        q=record.q.index_select(1, heads),
        k=record.k.index_select(1, key_heads),
        v=None if record.v is None else record.v.index_select(1, key_heads),
        mask=_keep_heads_in_mask(record.mask, heads),
        terms=tuple(map(keep_in_term, record.terms)),
    )


def _keep_heads_in_mask(mask: Mask, heads: Int[Tensor, "r"]) -> Mask:
    if isinstance(mask, DenseMask) and mask.heads() is not None:
        return DenseMask(mask.data.index_select(-3, heads.to(mask.data.device)))
    if isinstance(mask, FlexMask):
        return replace(mask, chosen=heads)
    return mask.map_children(lambda child: _keep_heads_in_mask(child, heads))


def keep_rows(record: Record, rows: Int[Tensor, "r"]) -> Record:
    """Return a recorded attention call reduced to the queries with these indices.

    Masks and score terms that depend on positions become matrices, because the positions of the remaining queries may
    not be consecutive.
    """
    j = record.k.shape[2]
    seen = to_four_axes(record.mask.see(pair_grid(record, rows)))
    terms: list[ScoreTerm] = []
    for term in record.terms:
        if isinstance(term, FlexScore):
            terms.append(replace(term, rows=rows if term.rows is None else term.rows[rows]))
        elif isinstance(term, MeasuredScores):
            terms.append(MeasuredScores(term.scores.index_select(2, rows)))
        elif isinstance(term, UniformRows):
            terms.append(UniformRows(term.rows.index_select(2, rows)))
        else:
            terms.append(additive(term_values(term, record, rows)) if term.additive else term)
    first = int(rows[0]) if len(rows) else 0
    return replace(
        record,
        q=record.q.index_select(2, rows),
        mask=simplify_mask(seen.expand(*seen.shape[:2], len(rows), j), -1, -1),
        terms=tuple(terms),
        positions=Positions(record.positions.queries + first, record.positions.keys),
    )


def term_values(term: ScoreTerm, record: Record, rows: Int[Tensor, "r"] | None = None) -> Float[Tensor, "b h r j"]:
    """Return the number that an additive score term adds to the score of each query-key pair, (b h r j).

    rows  indices of the queries (the axis r of the result); None is all
    """
    b, h, i, _ = record.q.shape
    rows = torch.arange(i, device=record.q.device) if rows is None else rows
    exact = torch.promote_types(record.q.dtype, torch.float32)
    zeros = record.q.new_zeros(b, h, len(rows), record.k.shape[2], dtype=exact)
    return term.bind(record.q.to(exact), record.beta)(zeros, pair_grid(record, rows))
