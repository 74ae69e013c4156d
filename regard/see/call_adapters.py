"""Attention calls of other libraries, told in the terms of this one: q, k, v, a mask, terms, beta and places."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.input_checks import is_autocasting
from regard.core.kernels.request import Request
from regard.core.masks import causal
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import DataMask, DenseMask
from regard.core.scores import Additive, Alibi, BoundTerm, ScoreTerm, Sink, Softcap, T5Buckets, additive


@dataclass(frozen=True, eq=False)
class InterceptedCall:
    """One attention call as it was made, before anything of it is kept.

    told     whether the caller said where queries and keys stand; otherwise the mask may show it
    located  whether it is known where the queries stand
    """

    route: str
    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"] | None
    mask: Mask
    terms: tuple[ScoreTerm, ...]
    beta: float
    positions: Positions
    dropout: float = 0.0
    note: str = ""
    told: bool = False
    located: bool = True


@dataclass(frozen=True)
class ParsedCall:
    """How many heads there are, as somebody said, for calls whose axes do not show it."""

    heads: int
    note: str = ""


@runtime_checkable
class CallAdapter(Protocol):
    """How what the heads give becomes the output that was handed out, and how a gradient comes back."""

    def forth(self, heads: Float[Tensor, "b h i e"], out: Tensor) -> Tensor:
        """A change of the heads as a change of the output."""

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the heads, with (..., i, e) last, from that of the output."""


@dataclass(frozen=True)
class ArgumentOrder:
    """The output has the axes of the heads in another order."""

    axes: list[int]

    def forth(self, heads: Tensor, out: Tensor) -> Tensor:
        turned = out.permute(self.axes).shape
        return heads.reshape(turned).permute([self.axes.index(axis) for axis in range(len(self.axes))])

    def back(self, gradient: Tensor) -> Tensor:
        return gradient.permute(self.axes)


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask(Mask):
    """A mask_mod of flex_attention: a function of batch, head, query and key index, known by its answers alone.

    It is asked one pair at a time, as flex_attention does, so it may do whatever it may do there.
    """

    fn: Callable[..., Tensor]
    data: tuple[Tensor, ...] = ()
    chosen: Int[Tensor, "h"] | None = None  # the heads that were kept, by their number in the model

    def see(self, grid: Grid) -> Tensor:
        head = grid.head if self.chosen is None else self.chosen[grid.head]
        return _pairwise(self.fn, (), (grid.batch, head, grid.row, grid.column), self.data)

    def key(self) -> None:
        """What the function reads may change unseen, so nothing is remembered about it."""

    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "mask_mod"


@dataclass(frozen=True, eq=False, repr=False)
class FlexScore(ScoreTerm):
    """A score_mod of flex_attention: the score of a pair, and where it stands, to another score."""

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
            return _pairwise(self.fn, (scores,), (grid.batch, head, row, grid.column), self.data).to(scores.dtype)

        return modify


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredScores(ScoreTerm):
    """Scores as they were when the softmax was taken, in place of whatever came before."""

    scores: Float[Tensor, "b h i j"]
    name = "given"
    additive = False

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        own = self.scores.to(q.dtype)
        return lambda scores, grid: scores * 0 + own[grid.batch, grid.head, grid.row, grid.column]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.scores,)


@dataclass(frozen=True, eq=False, repr=False)
class Level(ScoreTerm):
    """Rows whose scores were all lost: every key had the lowest number of the dtype added, so all weigh alike."""

    rows: Bool[Tensor, "#b #h i 1"]
    name = "level"
    additive = False

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        def level(scores: Tensor, grid: Grid) -> Tensor:
            b, h = self.rows.shape[:2]
            batch, head = (grid.batch if b > 1 else grid.batch * 0), (grid.head if h > 1 else grid.head * 0)
            return scores.masked_fill(self.rows[batch, head, grid.row, 0], 0)

        return level

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)


def _pairwise(
    fn: Callable[..., Tensor], first: tuple[Tensor, ...], where: tuple[Tensor, ...], data: tuple[Tensor, ...]
) -> Tensor:
    """A function written for one pair, applied to every pair of a grid."""
    parts = torch.broadcast_tensors(*first, *where)
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
    said: ParsedCall | None = None,
) -> InterceptedCall:
    """A call of torch's scaled_dot_product_attention. Its is_causal counts both from 0, whatever their numbers."""
    q, k, v = lowered(query, key, value)
    note = ""
    if enable_gqa:  # there the third axis from the end is that of heads
        q, k, v = (four_axes(x) for x in (q, k, v))
    else:
        leading = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        heads = heads_within(leading, said)
        note = said.note if said is not None and heads is not None else ""
        if attn_mask is not None and attn_mask.ndim > 2:
            attn_mask = batch_and_heads(attn_mask.expand(*leading, *attn_mask.shape[-2:]), heads)
        q, k, v = (
            batch_and_heads(x if x.ndim == len(leading) + 2 else x.expand(*leading, -1, -1), heads) for x in (q, k, v)
        )
    q, k, v = spread(q, k, v)
    i, j = q.shape[2], k.shape[2]
    mask, terms, positions = read_mask(attn_mask, i, j)
    if is_causal:
        mask, positions = causal(), Positions(0, 0)
    beta = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return InterceptedCall("sdpa", q, k, v, mask, terms, beta, positions, float(dropout_p), note)


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
) -> InterceptedCall:
    """A call of torch's flex_attention: the two functions are kept and asked when something is worked out."""
    terms = () if score_mod is None or _unchanged(score_mod) else (FlexScore(score_mod, _own(score_data)),)
    mask = Full() if block_mask is None else FlexMask(block_mask[-1], _own(mask_data))
    q, k, v = spread(query, key, value)
    return InterceptedCall("flex", q, k, v, mask, terms, float(scale), Positions.last_rows(q.shape[2], k.shape[2]))


def _unchanged(score_mod: Callable[..., Tensor]) -> bool:
    """Whether a score_mod gives back the score it is handed: what flex_attention fills in where there is none."""
    graph = getattr(score_mod, "graph", None)
    if graph is None:
        return score_mod.__name__ == "_identity"
    nodes = list(graph.nodes)
    return nodes[-1].args[0] is nodes[0]


def _own(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies: what a function reads may be overwritten before it is asked."""
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in data)


def from_call(kernel: str, call: Request) -> InterceptedCall:
    """A call of our own `attend`."""
    return InterceptedCall(
        f"attend, {kernel}",
        call.q,
        call.k,
        call.v,
        call.mask,
        call.terms,
        call.beta,
        call.positions,
        call.dropout,
        told=True,
    )


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the operator sees them where autocast is on."""
    if is_autocasting(q):
        low = torch.get_autocast_dtype(q.device.type)
        return q.to(low), k.to(low), v.to(low)
    return q, k, v


def heads_within(leading: Sequence[int], said: ParsedCall | None) -> int | None:
    """How many heads share an axis with the sequences, or are two axes, groups and those in a group; None elsewhere."""
    if said is None:
        return None
    shared = len(leading) == 1 and leading[0] > 0 and said.heads > 1 and leading[0] % said.heads == 0
    grouped = len(leading) > 2 and leading[-1] != said.heads == leading[-2] * leading[-1]
    return said.heads if shared or grouped else None


def batch_and_heads(x: Shaped[Tensor, "..."], heads: int | None = None) -> Shaped[Tensor, "b h n c"]:
    """Any number of leading axes as two: with three axes every sequence has one head, unless `heads_within` says more.

    An axis of size one still serves all.
    """
    if x.ndim == 3:
        return x[:, None] if heads is None or len(x) == 1 else x.unflatten(0, (-1, heads))
    if x.ndim > 4 and heads is not None:
        return x.reshape(-1, x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return four_axes(x)


def four_axes(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "b h n c"]:
    """Four axes, those that are missing put in front as where numbers are stretched, and all in front as one."""
    if x.ndim < 4:
        return x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One batch for all three: torch's attention lets an axis of size one serve all."""
    b = max(x.shape[0] for x in (q, k, v))
    g = max(k.shape[1], v.shape[1])
    h = max(q.shape[1], g)
    return q.expand(b, h, -1, -1), k.expand(b, g, -1, -1), v.expand(b, g, -1, -1)


def read_mask(
    given: Tensor | None, i: int, j: int, sunk: bool = False
) -> tuple[Mask, tuple[ScoreTerm, ...], Positions]:
    """A tensor handed over as an attention mask: boolean with True meaning visible, or numbers to add.

    Numbers that hide (-inf, or the lowest of their dtype) become a mask where their row has anything else to see. In a
    row that has not, the lowest number swallows all scores: its softmax is the mean of those that have it, not nothing.

    sunk  whether a sink takes part in the softmax: then such a row is nothing
    """
    positions = Positions.last_rows(i, j)
    if given is None:
        return Full(), (), positions
    given = narrowed(four_axes(given.detach()))
    if given.dtype == torch.bool:
        return simplest(given, i, j), (), positions
    visible, rest, lost = apart(given if given.is_floating_point() else given.float())
    terms: list[ScoreTerm] = [additive(narrowed(rest))] if bool(rest.any()) else []
    if bool(lost.any()) and sunk:
        visible = visible & ~lost
    elif bool(lost.any()):
        terms.append(Level(narrowed(lost).expand(-1, -1, i, -1)))
    return simplest(narrowed(visible), i, j), tuple(terms), positions


def apart(
    numbers: Float[Tensor, "b h i j"],
) -> tuple[Bool[Tensor, "b h i j"], Float[Tensor, "b h i j"], Bool[Tensor, "b h i 1"]]:
    """What numbers leave visible, the numbers with zero where they hide, and the rows that the lowest swallows.

    Of such a row the highest stay visible: one step between numbers so low is more than any softmax bridges.
    """
    hidden = hides(numbers)
    lost = hidden.all(-1, keepdim=True) & (numbers > -torch.inf).any(-1, keepdim=True)
    highest = numbers == numbers.amax(-1, keepdim=True) if numbers.shape[-1] else hidden
    return ~hidden | (lost & highest), torch.where(hidden, 0.0, numbers), lost


def hides(numbers: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Where numbers are so low that they swallow whatever they are added to."""
    return numbers <= torch.finfo(numbers.dtype).min / 2


def narrowed(x: Tensor) -> Tensor:
    """One of each where a tensor was stretched, or says the same for all sequences or heads."""
    for axis in range(x.ndim - 2):
        if x.shape[axis] > 1 and (x.stride(axis) == 0 or bool((x == x.narrow(axis, 0, 1)).all())):
            x = x.narrow(axis, 0, 1)
    return x


def simplest(visible: Bool[Tensor, "b h i j"], i: int, j: int) -> Mask:
    """The same mask as a rule where it is everything or the lower triangle that ends at the last key."""
    if bool(visible.all()):
        return Full()
    if visible.shape[:2] == (1, 1) and visible.shape[2:] == (i, j):
        whole = torch.ones(i, j, dtype=torch.bool, device=visible.device)
        if torch.equal(visible[0, 0], whole.tril(j - i)):
            return causal()
    return DenseMask(visible.clone())


def moved(heard: InterceptedCall, device: torch.device | None, values: bool) -> InterceptedCall:
    """Copies of everything, on another device if one is asked for: caches are overwritten later."""

    def own(x: Tensor) -> Tensor:
        x = x.detach() if device is None else x.detach().to(device)
        return x.clone(memory_format=torch.contiguous_format)

    def own_mask(mask: Mask) -> Mask:
        if isinstance(mask, FlexMask) and device is not None:
            # the function may read tensors that stay where they are
            return DenseMask(own(mask.see(some_rows(heard, torch.arange(heard.q.shape[2], device=heard.q.device)))))
        return mask._holding(own(mask.data)) if isinstance(mask, DataMask) else mask.rebuilt(own_mask)

    def own_term(term: ScoreTerm) -> ScoreTerm:
        fields = {name: own(value) for name, value in vars(term).items() if isinstance(value, Tensor)}
        return replace(term, **fields) if fields and is_dataclass(term) else term

    keys = heard.positions.keys
    return replace(
        heard,
        q=own(heard.q),
        k=own(heard.k),
        v=own(heard.v) if values and heard.v is not None else None,
        mask=own_mask(heard.mask),
        terms=tuple(own_term(term) for term in heard.terms),
        positions=replace(heard.positions, keys=own(keys)) if isinstance(keys, Tensor) else heard.positions,
    )


def cut_heads(heard: InterceptedCall, heads: Int[Tensor, "r"]) -> InterceptedCall:
    """The call of some heads alone. Each keeps its own copy of the keys it looked at."""

    def fewer(term: ScoreTerm) -> ScoreTerm:
        if isinstance(term, Alibi):
            return Alibi(term.slopes[heads.to(term.slopes.device)])
        if isinstance(term, Sink):
            return Sink(term.logits[heads.to(term.logits.device)])
        if isinstance(term, T5Buckets):
            return replace(term, table=term.table[:, heads.to(term.table.device)])
        if isinstance(term, FlexScore):
            return replace(term, chosen=heads)
        if isinstance(term, Level):
            return Level(term.rows.index_select(1, heads)) if term.rows.shape[1] > 1 else term
        if isinstance(term, Softcap) or (not term.additive and not term.tensors()):
            return term
        values = term.scores if isinstance(term, MeasuredScores) else all_values(term, heard)
        values = values.index_select(1, heads) if values.shape[1] > 1 else values
        return MeasuredScores(values) if isinstance(term, MeasuredScores) else additive(values)

    def fewer_seen(mask: Mask) -> Mask:
        if isinstance(mask, DenseMask) and mask.heads() is not None:
            return DenseMask(mask.data.index_select(-3, heads.to(mask.data.device)))
        return replace(mask, chosen=heads) if isinstance(mask, FlexMask) else mask.rebuilt(fewer_seen)

    per_key = heads // (heard.q.shape[1] // heard.k.shape[1])
    return replace(
        heard,
        q=heard.q.index_select(1, heads),
        k=heard.k.index_select(1, per_key),
        v=None if heard.v is None else heard.v.index_select(1, per_key),
        mask=fewer_seen(heard.mask),
        terms=tuple(
            term if isinstance(term, Additive) and (1, *term.values.shape)[-3] == 1 else fewer(term)
            for term in heard.terms
        ),
    )


def cut_rows(heard: InterceptedCall, rows: Int[Tensor, "r"]) -> InterceptedCall:
    """The call of some queries alone. What positions decided is written out for them, as a matrix of few rows."""
    b, h, _, _ = heard.q.shape
    j = heard.k.shape[2]
    grid = some_rows(heard, rows)
    seen = heard.mask.see(grid)
    seen = seen.reshape(*(1,) * (4 - seen.ndim), *seen.shape)
    terms: list[ScoreTerm] = []
    for term in heard.terms:
        if isinstance(term, FlexScore):
            terms.append(replace(term, rows=rows if term.rows is None else term.rows[rows]))
        elif isinstance(term, MeasuredScores):
            terms.append(MeasuredScores(term.scores.index_select(2, rows)))
        elif isinstance(term, Level):
            terms.append(Level(term.rows.index_select(2, rows)))
        elif term.additive:
            zeros = heard.q.new_zeros(b, h, len(rows), j, dtype=torch.promote_types(heard.q.dtype, torch.float32))
            terms.append(additive(term.bind(heard.q.to(zeros.dtype), heard.beta)(zeros, grid)))
        else:
            terms.append(term)
    first = int(rows[0]) if len(rows) else 0
    return replace(
        heard,
        q=heard.q.index_select(2, rows),
        mask=simplest(seen.expand(*seen.shape[:2], len(rows), j), -1, -1),
        terms=tuple(terms),
        positions=Positions(heard.positions.queries + first, heard.positions.keys),
    )


def all_values(term: ScoreTerm, heard: InterceptedCall) -> Float[Tensor, "b h i j"]:
    """What an additive term adds to every pair."""
    rows = torch.arange(heard.q.shape[2], device=heard.q.device)
    exact = torch.promote_types(heard.q.dtype, torch.float32)
    zeros = heard.q.new_zeros(*heard.q.shape[:3], heard.k.shape[2], dtype=exact)
    return term.bind(heard.q.to(exact), heard.beta)(zeros, some_rows(heard, rows))


def some_rows(heard: InterceptedCall, rows: Int[Tensor, "r"]) -> Grid:
    """Some queries against every key."""
    device = heard.q.device
    b, h = heard.q.shape[:2]
    j = heard.k.shape[2]
    return Grid(
        batch=torch.arange(b, device=device)[:, None, None, None],
        head=torch.arange(h, device=device)[:, None, None],
        row=rows[:, None],
        column=torch.arange(j, device=device)[None, :],
        i=rows[:, None] + heard.positions.queries,
        j=key_positions(heard.positions, j, device)[None, :],
    )
