"""Statistics of attention weights without the i x j matrix: entropy, largest weight, distance, sum per key, maps."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions
from regard.core.attend import Scores, prepare_request
from regard.core.kernels.request import Request
from regard.core.masks.algebra import Mask
from regard.core.scores import ScoreTerm
from regard.see import triton_statistics
from regard.see.row_blocks import RowBlock, iterate_row_blocks
from regard.see.triton_statistics import RowStatistics

SPANS = 64  # rows of the map that is computed together with the statistics of each row


@dataclass(frozen=True)
class Top:
    """The keys on which each query has its largest weights, computed exactly.

    keys     indices of the keys; -1 if fewer keys are visible than asked for
    weights  weights of these keys, largest first
    rest     sum of all other weights

    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 4.0, 2.0]).log().reshape(1, 1, 3, 1)
    >>> statistics(q, k).top(2)  # the weights are 1/7, 4/7 and 2/7
    Top(keys=tensor([[[[1, 2]]]]), weights=tensor([[[[0.5714, 0.2857]]]]), rest=tensor([[[0.1429]]]))
    """

    keys: Int[Tensor, "b h r count"]
    weights: Float[Tensor, "b h r count"]
    rest: Float[Tensor, "b h r"]


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Statistics of the attention weights of one call, each computed on first access and then cached.

    Statistics are computed in float32 (in float64 if the inputs are float64) and have no gradient.

    >>> found = statistics(q, k, mask=causal())
    >>> found.entropy.shape, found.received.shape
    (torch.Size([1, 4, 5]), torch.Size([1, 4, 5]))
    """

    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"] | None
    mask: Mask
    terms: tuple[ScoreTerm, ...]
    beta: float
    positions: Positions

    def __repr__(self) -> str:
        b, h, i, _ = self.q.shape
        return f"Statistics(b={b} h={h} i={i} j={self.k.shape[2]}, mask={self.mask!r})"

    @cached_property
    def _request(self) -> Request:
        values = self.k if self.v is None else self.v
        return prepare_request(self.q, self.k, values, self.mask, self.terms, self.beta, 0.0, self.positions)

    @property
    def lse(self) -> Float[Tensor, "b h i"]:
        """The log-sum-exp of the scores of each query, with the logit of an attention sink; -inf if it sees no key.

        If a visible score is NaN or inf, the log-sum-exp, entropy, distance and weights of the query are NaN.
        """
        return self._row_statistics.lse

    @property
    def entropy(self) -> Float[Tensor, "b h i"]:
        """The entropy -sum w log w of each query's weights, in nats: 0 for a single key, log n for n equal weights."""
        return self._row_statistics.entropy

    @property
    def largest(self) -> Float[Tensor, "b h i"]:
        """The largest weight of each query."""
        return self._row_statistics.largest

    @property
    def where(self) -> Int[Tensor, "b h i"]:
        """The index of the key with the largest weight for each query.

        If several keys have the largest weight, the index is that of the first of these keys. The index is -1 for a
        query that sees no key or has NaN weights.
        """
        return self._row_statistics.where

    @property
    def distance(self) -> Float[Tensor, "b h i"]:
        """The distance |i - j| from query position i to key position j, averaged with the weights of the query.

        With an attention sink, the weights of the keys sum to less than 1. The weighted sum of |i - j| is then divided
        by the sum of these weights.
        """
        return self._row_statistics.distance

    @property
    def received(self) -> Float[Tensor, "b h j"]:
        """The sum of the weights on each key, over all queries."""
        return self._row_statistics.received

    @cached_property
    def out(self) -> Float[Tensor, "b h i e"]:
        """The output of the attention; raises ConfigError if no values were passed."""
        if self.v is None:
            raise ConfigError("there is no output without values; pass them: statistics(q, k, v=...)")
        return self._forward[0]

    def pooled(self, cells: int | tuple[int, int]) -> Float[Tensor, "b h rows columns"]:
        """Return the weights at a lower resolution, as a map of cells.

        Along each side, query or key n of N is in cell n * cells // N. The value of a cell is the sum of the weights
        over the keys of the cell, averaged over the queries of the cell. If the weights of each query sum to 1, the
        cells of each row sum to 1 too.

        cells  the number of cells along each side, or the pair (rows, columns)
        """
        pair = cells if isinstance(cells, tuple) else (cells, cells)
        if len(pair) != 2:
            raise ConfigError(f"pooled takes a number of cells, or (rows, columns), not {cells!r}")
        rows, columns = pair
        _, _, _, i, j, _, _ = self._request.sizes
        for name, number, size in (("rows", rows, i), ("columns", columns, j)):
            if check_integer(f"pooled({name})", number, 1) > max(size, 1):
                raise ShapeError(f"pooled({name}={number}) has more cells than the {size} positions")
        if (rows, columns) not in self._pooled:
            self._pooled[rows, columns] = self._pool(rows, columns)
        return self._pooled[rows, columns]

    @cached_property
    def _pooled(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def _pool(self, rows: int, columns: int) -> Tensor:
        b, h, _, i, j, _, _ = self._request.sizes
        if self._row_statistics.cells is not None:
            return triton_statistics.pool_map(self._request, self._row_statistics, rows, columns)
        device, exact = self.q.device, torch.promote_types(self.q.dtype, torch.float32)
        row_cell, key_cell = (
            torch.arange(n, device=device) * cells // max(n, 1) for n, cells in ((i, rows), (j, columns))
        )
        sums = torch.zeros(b, h, rows, columns, device=device, dtype=exact)
        row_sums = self._row_statistics.row_sums
        if row_sums is not None and SPANS % rows == 0:
            sums.index_add_(3, key_cell, row_sums.unflatten(2, (rows, -1)).sum(3))
        else:
            inside = torch.nn.functional.one_hot(key_cell, columns).to(exact)
            with torch.no_grad():
                for block in iterate_row_blocks(self._request, lse=self.lse):
                    sums.index_add_(2, row_cell[block.rows], block.weights @ inside[block.columns])
        counts = row_cell.bincount(minlength=rows).clamp(min=1)
        return sums / counts[:, None]

    def top(self, count: int, rows: list[int] | Tensor | None = None) -> Top:
        """Return the `count` keys with the largest weights for each query.

        rows  indices of the queries; None is all
        """
        b, h, _, _, j, _, _ = self._request.sizes
        count = check_integer("top(count)", count, 1, "keys")
        found: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for block in iterate_row_blocks(self._request, self._resolve_rows(rows)):
                weights = block.weights
                values, at = weights.topk(min(count, weights.shape[-1]), -1)
                keys = torch.arange(j, device=weights.device)[block.columns][at]
                if block.hidden is not None:
                    hidden = block.hidden.expand_as(weights).gather(-1, at)
                    values, keys = values.masked_fill(hidden, 0), keys.masked_fill(hidden, -1)
                rest = (weights.sum(-1) - values.sum(-1)).clamp(min=0)
                padding = (0, count - at.shape[-1])
                found.append((pad(keys, padding, value=-1), pad(values, padding), rest))
        if not found:
            empty = self.q.new_zeros(b, h, 0, dtype=torch.promote_types(self.q.dtype, torch.float32))
            nothing = empty[..., None].expand(b, h, 0, count)
            return Top(nothing.long(), nothing, empty)
        return Top(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))

    def rows(self, rows: list[int] | Tensor) -> Float[Tensor, "b h r j"]:
        """Return the weights of some queries on all keys.

        rows  indices of the queries
        """
        chosen = self._resolve_rows(rows)
        assert chosen is not None
        return self._weights(chosen)

    def weights(self) -> Float[Tensor, "b h i j"]:
        """Return the full matrix of attention weights."""
        return self._weights(torch.arange(self.q.shape[2], device=self.q.device))

    def mixed(self, x: Float[Tensor, "b i"] | Float[Tensor, "b h i"]) -> Float[Tensor, "b h j"]:
        """Return the sum over queries i of x_i w_ij for each key j, without forming the matrix of weights w.

        x  one number for each query
        """
        b, h, _, i, _, _, _ = self._request.sizes
        x = x[:, None] if x.ndim == 2 else x
        if x.ndim != 3 or x.shape[0] != b or x.shape[1] not in (1, h) or x.shape[2] != i:
            raise ShapeError(
                f"mixed takes one number for each query, (b i) or (b h i) = {(b, h, i)}, not {tuple(x.shape)}"
            )
        return self._multiply(x.expand(b, h, i))

    def _multiply(self, x: Tensor) -> Tensor:
        b, h, _, _, j, _, _ = self._request.sizes
        exact = torch.promote_types(self.q.dtype, torch.float32)
        total = torch.zeros(b, h, j, device=self.q.device, dtype=exact)
        with torch.no_grad():
            for block in iterate_row_blocks(self._request, lse=self.lse):
                part = (x[:, :, block.rows].to(exact)[:, :, None] @ block.weights)[:, :, 0]
                total[:, :, block.columns] += part
        return total

    def _weights(self, rows: Tensor) -> Tensor:
        b, h, _, _, j, _, _ = self._request.sizes
        exact = torch.promote_types(self.q.dtype, torch.float32)
        found = torch.zeros(b, h, len(rows), j, device=self.q.device, dtype=exact)
        start = 0
        with torch.no_grad():
            for block in iterate_row_blocks(self._request, rows):
                stop = start + len(block.rows)
                found[:, :, start:stop, block.columns] = block.weights
                start = stop
        return found

    def _resolve_rows(self, rows: list[int] | Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        i = self.q.shape[2]
        chosen = torch.as_tensor(rows, device=self.q.device)
        if chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise ConfigError(f"rows takes indices of queries, such as [0, 5], not {rows!r}")
        if len(chosen) and not (-i <= int(chosen.min()) and int(chosen.max()) < i):
            raise ShapeError(f"rows has index {int(chosen.abs().max())}, but q has {format_axis('i', i)}")
        return chosen.long() % max(i, 1)

    @cached_property
    def _forward(self) -> tuple[Tensor, Tensor | None]:
        """The output of the attention, and its log-sum-exp if the kernel returns one, else None."""
        with torch.no_grad():
            return triton_statistics.attend_with_lse(self._request)

    @cached_property
    def _row_statistics(self) -> RowStatistics:
        with torch.no_grad():
            if triton_statistics.is_supported(self._request):
                found = triton_statistics.compute_row_statistics(
                    self._request, None if self.v is None else self._forward[1]
                )
                if triton_statistics.is_exact(found):
                    return found
            return self._compute_by_blocks()

    def _compute_by_blocks(self) -> RowStatistics:
        b, h, _, i, j, c, _ = self._request.sizes
        device, exact = self.q.device, torch.promote_types(self.q.dtype, torch.float32)
        # sums over spans of rows give maps without a second pass; they take no more memory than q and k
        spans = SPANS if i >= SPANS and SPANS * j <= 2 * i * c else 1
        row_sums = torch.zeros(b, h, spans, j, device=device, dtype=exact)
        parts: list[tuple[Tensor, ...]] = []
        for block in iterate_row_blocks(self._request):
            weights = block.weights
            first, start = int(block.rows[0]) if len(block.rows) else 0, 0
            while start < len(block.rows):
                span = (first + start) * spans // i
                stop = min(-(-(span + 1) * i // spans) - first, len(block.rows))  # the first row of the next span
                row_sums[:, :, span, block.columns] += weights[:, :, start:stop].sum(-2)
                start = stop
            index = torch.arange(j, device=device)[block.columns]
            empty = ~(block.lse > -torch.inf)
            where = torch.zeros_like(block.where) if not len(index) else index[block.where]
            total = weights.sum(-1)
            distance = _summed_distance(block, self._request) / total.masked_fill(total == 0, 1)
            parts.append((block.lse, block.entropy, block.largest, where.masked_fill(empty, -1), distance))
        if not parts:
            empty = torch.zeros(b, h, 0, device=device, dtype=exact)
            return RowStatistics(empty, empty, empty, empty.long(), empty, row_sums.sum(2), None)
        lse, entropy, largest, where, distance = (torch.cat(lines, 2) for lines in zip(*parts, strict=True))
        received, kept = row_sums.sum(2), row_sums if spans > 1 else None
        return RowStatistics(lse, entropy, largest, where, distance, received, None, kept)


def _summed_distance(block: RowBlock, call: Request) -> Float[Tensor, "b h r"]:
    """Return the sum over keys j of w_ij |i - j|, for positions i and j, for each query of the block."""
    i, j = (each.to(block.weights.dtype) for each in (block.grid.i, block.grid.j))
    band = call.mask.as_window()
    if len(i) and band is not None and band[1] is not None and band[1] <= 0:
        # no key is later than its query, so |i - j| = i - j, and the sum over keys is a matrix product
        return (block.weights @ (i[0] - j).flatten()) + block.weights.sum(-1) * (i - i[0]).flatten()
    return torch.einsum("bhrs,rs->bhr", block.weights, (i - j).abs())


def statistics(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    *,
    mask: Mask | Tensor | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    positions: Positions | None = None,
    v: Float[Tensor, "b g j e"] | None = None,
) -> Statistics:
    """Return statistics of the weights of `attend(q, k, v, ...)`, without forming the i x j matrix.

    mask, scores, beta, positions  as in `attend`
    v                              values; needed only for `.out`, the output of the attention

    For 1 sequence, 4 heads and 100 positions, the result of each statistic is much smaller than 100 x 100:

    >>> q, k = torch.randn(2, 1, 4, 100, 16)
    >>> found = regard.see.statistics(q, k, mask=regard.causal())
    >>> found.entropy.shape, found.received.shape, found.pooled(10).shape
    (torch.Size([1, 4, 100]), torch.Size([1, 4, 100]), torch.Size([1, 4, 10, 10]))
    """
    with torch.no_grad():
        # prepare_request raises an error for what is not a tensor
        q, k, values = (x.detach() if isinstance(x, Tensor) else x for x in (q, k, k if v is None else v))
        call = prepare_request(q, k, values, mask, scores, beta, 0.0, positions)
    return Statistics(call.q, call.k, None if v is None else call.v, call.mask, call.terms, call.beta, call.positions)
