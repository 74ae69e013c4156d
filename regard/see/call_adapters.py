"""Adapters from the attention calls of torch and other libraries to records: q, k, v, a mask, score terms, beta."""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions
from regard.core.input_checks import is_autocasting
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
    """The map from the output of the heads to the output of the intercepted call."""

    def apply(self, heads: Float[Tensor, "b h i e"], out: Tensor) -> Tensor:
        """The output of the call, of the shape of `out`, from the output of its heads."""

    def read_heads(self, out: Tensor) -> Float[Tensor, "b h i e"] | None:
        """The output of the heads, from the output of the call; None if it does not determine them."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Map a gradient of the output to one of the heads, (..., i, e)."""


@dataclass(frozen=True)
class AxisPermutation:
    """The output has the axes of the heads in another order."""

    axes: list[int]

    def apply(self, heads: Tensor, out: Tensor) -> Tensor:
        permuted = out.permute(self.axes).shape
        return heads.reshape(permuted).permute([self.axes.index(axis) for axis in range(len(self.axes))])

    def pull_back(self, gradient: Tensor) -> Tensor:
        return gradient.permute(self.axes)

    read_heads = pull_back


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """From (b h i e) to the leading axes of a call, and then to its output."""

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
    """A mask_mod of flex_attention: a function of batch, head, query and key index, called for one pair at a time."""

    fn: Callable[..., Tensor]
    data: tuple[Tensor, ...] = ()
    chosen: Int[Tensor, "h"] | None = None  # the recorded heads, by their index in the model

    def see(self, grid: Grid) -> Tensor:
        head = grid.head if self.chosen is None else self.chosen[grid.head]
        return _map_pairs(self.fn, (), (grid.batch, head, grid.row, grid.column), self.data)

    def key(self) -> None:
        """No cache key: the tensors that the function reads may change."""

    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "mask_mod"


@dataclass(frozen=True, eq=False, repr=False)
class FlexScore(ScoreTerm):
    """A score_mod of flex_attention: a function of the score, batch, head, query and key index of one pair."""

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
    """The scores that the softmax was taken of, in place of beta q . k."""

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
    """Rows with equal weights: the lowest number of the dtype was added to every score, which rounded them away."""

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
    """Apply a function of one pair to every pair of a grid, with vmap."""
    parts = torch.broadcast_tensors(*first, *indices)
    flat = [part.reshape(-1) for part in parts]
    if not flat[0].numel():
        return torch.zeros(parts[0].shape, dtype=torch.bool, device=parts[0].device)
    found = torch.vmap(lambda *pair: fn(*pair, *data))(*flat)
    return found.reshape(parts[0].shape)


def from_sdpa(
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
    """Record a call of scaled_dot_product_attention. With is_causal, queries and keys both start at position 0.

    axes  how the leading axes of the output are read, if they are not (b, h)
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


def from_flex(
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
    """Record a call of flex_attention. Its two functions are kept and called when a statistic is computed."""
    terms = () if score_mod is None or _is_identity(score_mod) else (FlexScore(score_mod, _copy_data(score_data)),)
    mask = Full() if block_mask is None else FlexMask(block_mask[-1], _copy_data(mask_data))
    q, k, v = expand_batch(query, key, value)
    return Record(q, k, v, mask, terms, float(scale), Positions.last_rows(q.shape[2], k.shape[2]), "flex")


def _is_identity(score_mod: Callable[..., Tensor]) -> bool:
    """Whether a score_mod returns its score unchanged, as flex_attention's default does."""
    graph = getattr(score_mod, "graph", None)
    if graph is None:
        return score_mod.__name__ == "_identity"
    nodes = list(graph.nodes)
    return nodes[-1].args[0] is nodes[0]


def _copy_data(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of tensors that a function reads: they may be overwritten before it is called."""
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in data)


def from_attend(kernel: str, call: Request) -> Record:
    """Record a call of `regard.attend`."""
    return Record(
        call.q, call.k, call.v, call.mask, call.terms, call.beta, call.positions, f"attend, {kernel}", call.dropout
    )


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for the operator."""
    if is_autocasting(q):
        low = torch.get_autocast_dtype(q.device.type)
        return q.to(low), k.to(low), v.to(low)
    return q, k, v


def to_four_axes(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "b h n c"]:
    """Add missing leading axes, as broadcasting does, or merge the first ones."""
    if x.ndim < 4:
        return x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def expand_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast batch and heads of q, k and v, as torch's attention does."""
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
    """The mask, score terms and positions that a tensor `attn_mask` means: boolean (True is visible) or additive.

    Numbers so low that they hide a key, whatever the scores are, become a mask if the row has a visible key. If it has
    none, the softmax is that of the other keys, or uniform where the number rounds all scores away.

    has_sink  whether a sink takes part in the softmax: then such a row has no weights
    """
    i, j = q.shape[2], k.shape[2]
    positions = Positions.last_rows(i, j)
    if mask is None:
        return Full(), (), positions
    mask = collapse_repeated(to_four_axes(mask))
    if mask.dtype == torch.bool:
        return simplify_mask(mask, i, j), (), positions
    visible, rest, uniform = split_hidden(mask if mask.is_floating_point() else mask.float(), score_bound(q, k, beta))
    terms: list[ScoreTerm] = [additive(collapse_repeated(rest))] if bool(rest.any()) else []
    if bool(uniform.any()) and has_sink:
        visible = visible & ~uniform
    elif bool(uniform.any()):
        terms.append(UniformRows(collapse_repeated(uniform).expand(-1, -1, i, -1)))
    return simplify_mask(collapse_repeated(visible), i, j), tuple(terms), positions


def score_bound(q: Tensor, k: Tensor, beta: float) -> float:
    """A number that no |beta q . k| exceeds; inf if q or k is not finite."""
    if not q.numel() or not k.numel():
        return 0.0
    longest = [torch.linalg.vector_norm(x.detach().float(), dim=-1).amax() for x in (q, k)]
    bound = abs(beta) * float(longest[0] * longest[1])
    return bound if math.isfinite(bound) else math.inf


def split_hidden(
    added: Float[Tensor, "b h i j"], bound: float
) -> tuple[Bool[Tensor, "b h i j"], Float[Tensor, "b h i j"], Bool[Tensor, "b h i 1"]]:
    """Split added numbers into what is visible, the numbers at visible pairs, and the rows that become uniform.

    In a row that is hidden as a whole, the keys with the highest numbers are visible. It is uniform if adding such a
    number rounds all scores away.

    bound  of the scores
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
    """Where added numbers are so low that they hide a pair: its weight is below rounding error, whatever the scores.

    They are lower than all other numbers by more than scores can make up for: -inf, the lowest number of the dtype,
    -1e9, -1e4, or -100 if scores are small. A bias that falls gradually, such as ALiBi, hides nothing.
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
    """How much lower a score has to be for a weight below rounding error."""
    return 2 * bound + MARGIN


def collapse_repeated(x: Tensor) -> Tensor:
    """Reduce the batch and head axes to size one where all entries along them are equal."""
    for axis in range(x.ndim - 2):
        if x.shape[axis] > 1 and (x.stride(axis) == 0 or bool((x == x.narrow(axis, 0, 1)).all())):
            x = x.narrow(axis, 0, 1)
    return x


def simplify_mask(visible: Bool[Tensor, "b h i j"], i: int, j: int) -> Mask:
    """`Full()` or `causal()` if the matrix equals one of them, else a dense mask."""
    if bool(visible.all()):
        return Full()
    if visible.shape[:2] == (1, 1) and visible.shape[2:] == (i, j):
        whole = torch.ones(i, j, dtype=torch.bool, device=visible.device)
        if torch.equal(visible[0, 0], whole.tril(j - i)):
            return causal()
    return DenseMask(visible.clone())


def copy_record(record: Record, device: torch.device | None, values: bool) -> Record:
    """Copy all tensors, to another device if given: the model may overwrite them later, as in a KV cache."""

    def copy(x: Tensor) -> Tensor:
        x = x.detach() if device is None else x.detach().to(device)
        return x.clone(memory_format=torch.contiguous_format)

    def copy_mask(mask: Mask) -> Mask:
        if isinstance(mask, FlexMask) and device is not None:
            # the function may read tensors on its own device
            return DenseMask(copy(mask.see(pair_grid(record, torch.arange(record.q.shape[2], device=record.q.device)))))
        return mask.map_children(copy_mask) if mask.children() else mask.map_tensors(copy)

    def copy_term(term: ScoreTerm) -> ScoreTerm:
        fields = {name: copy(value) for name, value in vars(term).items() if isinstance(value, Tensor)}
        return replace(term, **fields) if fields and is_dataclass(term) else term

    keys = record.positions.keys
    return replace(
        record,
        q=copy(record.q),
        k=copy(record.k),
        v=copy(record.v) if values and record.v is not None else None,
        mask=copy_mask(record.mask),
        terms=tuple(copy_term(term) for term in record.terms),
        positions=replace(record.positions, keys=copy(keys)) if isinstance(keys, Tensor) else record.positions,
    )


def keep_heads(record: Record, heads: Int[Tensor, "r"]) -> Record:
    """The record of some heads. Each head has its own copy of its keys."""

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

    def keep_in_mask(mask: Mask) -> Mask:
        if isinstance(mask, DenseMask) and mask.heads() is not None:
            return DenseMask(mask.data.index_select(-3, heads.to(mask.data.device)))
        return replace(mask, chosen=heads) if isinstance(mask, FlexMask) else mask.map_children(keep_in_mask)

    key_heads = heads // (record.q.shape[1] // record.k.shape[1])
    return replace(
        record,
        q=record.q.index_select(1, heads),
        k=record.k.index_select(1, key_heads),
        v=None if record.v is None else record.v.index_select(1, key_heads),
        mask=keep_in_mask(record.mask),
        terms=tuple(map(keep_in_term, record.terms)),
    )


def keep_rows(record: Record, rows: Int[Tensor, "r"]) -> Record:
    """The record of some queries. Masks and terms that depend on positions become matrices of these rows."""
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
    """What an additive term adds to every pair, or to those of some queries."""
    b, h, i, _ = record.q.shape
    rows = torch.arange(i, device=record.q.device) if rows is None else rows
    exact = torch.promote_types(record.q.dtype, torch.float32)
    zeros = record.q.new_zeros(b, h, len(rows), record.k.shape[2], dtype=exact)
    return term.bind(record.q.to(exact), record.beta)(zeros, pair_grid(record, rows))
