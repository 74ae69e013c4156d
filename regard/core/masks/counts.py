"""Count visible pairs exactly, without the matrix.

A mask expression is a polynomial in the indicators (1 visible, 0 hidden) of its basic masks: `~a` is 1 - a, `a & b` is
a b, `a | b` is a + b - a b. So the number of visible pairs is a sum of integer factors times the counts of conjunctions
(`a & b & c`). The pairs of one conjunction are counted in one of these ways:

    windows        are counted by a formula
    linear ranges  are summed as arithmetic series, if the bounds of `key_range` are linear functions of the query
                   position (`_count_linear_rows`)
    other masks    are counted some rows at a time: the ranges of keys are intersected, keys with equal labels are
                   counted by binary search, and listed keys are tested one by one

The number of terms of the polynomial doubles with every basic mask. A long expression, all of whose basic masks define
`key_range`, is therefore not expanded. Along the keys of a query, its visibility changes only at the bounds of these
ranges, so it is evaluated at one key between each two neighbouring bounds. If a basic mask defines none of `key_range`,
`labels` and `listed_keys`, every pair is evaluated, a few rows at a time.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.masks.algebra import And, CompoundMask, Full, Mask, Not, Or, resolve_positions
from regard.core.masks.plan_cache import planning

Polynomial = dict[frozenset[Mask], int]
_MOST_TERMS = 256  # with more terms, evaluating every pair is cheaper than the sum
_FEW_FORMS = 4  # with at most this many forms, the sum is cheaper than sorting bounds
_PAIRS_AT_ONCE = 1 << 24
_ROWS_AT_ONCE = 1 << 22
_MOST_POSITIONS = 1 << 27
_MANY_ROWS = 1 << 16  # with fewer rows, evaluating each is quick


@planning()
def count(mask: Mask, queries: int, keys: int | None = None, positions: Positions | None = None) -> int:
    """Return the exact number of visible query-key pairs of a mask; see `Mask.count`."""
    positions, keys = resolve_positions(queries, keys, positions)
    mask.check(positions, queries, keys)
    mask = mask.to(torch.device("cpu"))
    first = positions.keys
    if not isinstance(first, int) or positions.offsets is not None or mask.opaque() or not queries or not keys:
        return _count_pairs(mask, queries, keys, positions)
    rows = range(positions.queries, positions.queries + queries)
    columns = range(first, first + keys)
    i, j = _positions(rows[:1]), _positions(columns[:1])
    sequences = range(mask.batch() or 1)
    forms = set(_forms(mask))
    ranges = {form for form in forms if form.key_range(i, 0) is not None}
    rules = all(form in ranges or form.labels(i, j, 0) or form.listed_keys(i) for form in forms)
    polynomial = expand(mask) if rules else None
    long = len(forms) > _FEW_FORMS and (polynomial is None or queries <= _ROWS_AT_ONCE)
    if long and ranges == forms:
        return sum(_count_between_bounds(mask, ranges, rows, columns, sequence) for sequence in sequences)
    if polynomial is None:
        return _count_pairs(mask, queries, keys, positions)
    if forms - ranges:
        _check_size(columns)
    return sum(
        factor * _count_conjunction(term, rows, columns, sequence)
        for sequence in sequences
        for term, factor in polynomial.items()
    )


def _positions(span: range) -> Tensor:
    return torch.arange(span.start, span.stop)


def _check_size(span: range) -> None:
    """Raise ConfigError if a range of positions is so long that a tensor with its positions would take gigabytes."""
    if len(span) > _MOST_POSITIONS:
        raise ConfigError(
            f"counting pairs of {len(span):,} positions would take {8 * len(span):,} bytes or more for this mask; "
            f"count at most {_MOST_POSITIONS:,} positions, or any number for masks of ranges of keys"
        )


def _split(span: range, size: int) -> Iterator[range]:
    return (span[start : start + size] for start in range(0, len(span), size))


def expand(mask: Mask) -> Polynomial | None:
    """Expand a mask expression into a polynomial: a sum of products of basic masks with integer factors.

    Returns the factor of each product, or None if there are too many products. The docstring of this module explains
    the polynomial.
    """
    match mask:
        case Full():
            return {frozenset(): 1}
        case CompoundMask():
            return expand(mask.expand())
        case Not(part):
            inner = expand(part)
            return None if inner is None else _sum([({frozenset(): 1}, 1), (inner, -1)])
        case And(parts):
            return _product(expand(part) for part in parts)
        case Or(parts):
            hidden = _product(expand(~part) for part in parts)
            return None if hidden is None else _sum([({frozenset(): 1}, 1), (hidden, -1)])
        case _:
            return {frozenset([mask]): 1}


def _product(factors: Iterable[Polynomial | None]) -> Polynomial | None:
    result: Polynomial = {frozenset(): 1}
    for factor in factors:
        if factor is None or len(result) * len(factor) > _MOST_TERMS:
            return None
        result = _sum([({a | b: x * y}, 1) for a, x in result.items() for b, y in factor.items()])
    return result


def _sum(pieces: Iterable[tuple[Polynomial, int]]) -> Polynomial:
    total: Polynomial = {}
    for polynomial, factor in pieces:
        for term, value in polynomial.items():
            total[term] = total.get(term, 0) + factor * value
    return {term: value for term, value in total.items() if value}


def _forms(mask: Mask) -> Iterator[Mask]:
    """Yield the basic masks that a mask expression combines (its leaves)."""
    children = (mask.expand(),) if isinstance(mask, CompoundMask) else mask.children()
    if not children:
        yield mask
    for child in children:
        yield from _forms(child)


def _count_between_bounds(mask: Mask, ranges: set[Mask], rows: range, columns: range, sequence: int) -> int:
    """Count the visible pairs of a mask in which every basic mask shows each query one range of keys.

    For each query, all bounds of the ranges are sorted. Visibility is constant between two neighbouring bounds,
    so only one key is evaluated there.

    ranges  the masks in the expression, all of which define `key_range`
    """
    total, first, end = 0, columns.start, columns.stop
    for some in _split(rows, max(1, _PAIRS_AT_ONCE // (8 * len(ranges)))):
        i = _positions(some)
        bounds = [torch.full_like(i, first), torch.full_like(i, end)]
        for form in ranges:
            found = form.key_range(i, sequence) or ()
            bounds += [torch.as_tensor(bound).expand_as(i) for bound in found if bound is not None]
        keys = torch.stack(bounds, 1).clamp(first, end).sort(1).values
        start, zero = keys[:, :-1], torch.zeros_like(i)[:, None]
        seen = mask.see(Grid(zero + sequence, zero, zero, start - first, i[:, None], start))
        total += int((keys.diff(dim=1) * seen).sum())
    return total


def _count_conjunction(term: frozenset[Mask], rows: range, columns: range, sequence: int) -> int:
    """Count the query-key pairs that are visible in every mask of `term`, for these rows and columns."""
    window = And((Full(), *term)).as_window()
    if window is not None:
        return count_window(window, rows, columns)
    pieces = [mask.row_pieces() for mask in term]
    known = [piece for piece in pieces if piece is not None]
    period = math.lcm(*(piece.period for piece in known))
    if len(rows) > max(_MANY_ROWS, period) and len(known) == len(pieces) and period <= _ROWS_AT_ONCE:
        breaks = {row for piece in known for row in piece.breaks if rows.start < row < rows.stop}
        edges = sorted({rows.start, rows.stop, *breaks})
        spans = [range(start, stop) for start, stop in itertools.pairwise(edges)]
        return sum(_count_linear_rows(term, span, period, columns, sequence) for span in spans)
    return sum(_count_rows(term, _positions(some), columns, sequence) for some in _split(rows, _ROWS_AT_ONCE))


def _count_linear_rows(term: frozenset[Mask], rows: range, period: int, columns: range, sequence: int) -> int:
    """Count the pairs that are visible in every mask of `term`, for rows in which all bounds of key ranges are linear.

    The rows are divided into runs: each run has every `period`-th row. Along a run, each bound is a linear function of
    the query position. So the first visible key is a maximum of linear functions, and the end of the visible keys is a
    minimum of linear functions. A run is halved until, in each part, both are linear and the range of keys is empty in
    all rows or in none. Then the numbers of visible keys in the rows of a part are an arithmetic series.
    """
    start = _positions(rows[:period])
    steps = (rows.stop - 1 - start) // period  # the rows of a run are start + n * period, n = 0 .. steps
    total = 0
    while len(start):
        low, high = _intersect_key_ranges(term, start, columns, sequence)
        next_low, next_high = _intersect_key_ranges(term, start + period * steps.clamp(max=1), columns, sequence)
        last_low, last_high = _intersect_key_ranges(term, start + period * steps, columns, sequence)
        # a maximum of lines that ends where its first step points is one line
        linear = (last_low - low == (next_low - low) * steps) & (last_high - high == (next_high - high) * steps)
        first, last = high - low, last_high - last_low
        done = linear & (((first >= 0) & (last >= 0)) | ((first <= 0) & (last <= 0)))
        ends, lengths = (first + last).clamp(min=0)[done].tolist(), (steps + 1)[done].tolist()
        total += sum(end * length for end, length in zip(ends, lengths, strict=True)) // 2
        start, steps = start[~done], steps[~done]
        half = steps // 2
        start = torch.cat([start, start + period * (half + 1)])
        steps = torch.cat([half, steps - half - 1])
    return total


def count_window(window: tuple[int | None, int | None], rows: range, columns: range) -> int:
    """Count the pairs with i - before <= j <= i + after by a formula. A limit of None means no limit.

    window   (before, after)
    rows     query positions i
    columns  key positions j
    """
    before, after = window

    def up_to(distance: int) -> int:
        """Return the number of pairs with j - i <= distance."""
        shift = distance + 1 - columns.start
        return _sum_clamped(rows.stop - 1 + shift, len(columns)) - _sum_clamped(rows.start - 1 + shift, len(columns))

    seen = len(rows) * len(columns) if after is None else up_to(after)
    return seen if before is None else max(0, seen - up_to(-before - 1))


def _sum_clamped(last: int, most: int) -> int:
    """Return the sum of min(n, most) for n = 1 .. last."""
    inside = max(0, min(last, most))
    return inside * (inside + 1) // 2 + max(0, last - most) * most


def _intersect_key_ranges(term: frozenset[Mask], i: Tensor, columns: range, sequence: int) -> tuple[Tensor, Tensor]:
    """Return the intersection of the key ranges of all masks in `term`, for each query.

    The result is the first key of the intersection and the key after its last one.
    """
    low, high = torch.full_like(i, columns.start), torch.full_like(i, columns.stop)
    for mask in term:
        below, above = mask.key_range(i, sequence) or (None, None)
        low = low if below is None else torch.maximum(low, torch.as_tensor(below))
        high = high if above is None else torch.minimum(high, torch.as_tensor(above))
    return low, high


def _count_rows(term: frozenset[Mask], i: Tensor, columns: range, sequence: int) -> int:
    first, end = columns.start, columns.stop
    low, high = _intersect_key_ranges(term, i, columns, sequence)
    labelled: list[Mask] = []
    listed: Mask | None = None
    for mask in term:
        if mask.key_range(i[:1], sequence) is not None:
            continue
        if mask.labels(i[:1], i[:1], sequence) is not None:
            labelled.append(mask)
        else:
            listed = mask
    if listed is not None:
        return _count_listed(listed, [mask for mask in term if mask is not listed], i, low, high, sequence)
    if labelled:
        j = _positions(columns)
        labels = [found for mask in labelled if (found := mask.labels(i, j, sequence)) is not None]
        return _count_labelled(labels, i, j, low.clamp(first, end) - first, high.clamp(first, end) - first)
    return int((high - low).clamp(min=0).sum())


def _count_labelled(labels: list[tuple[Tensor, Tensor]], i: Tensor, j: Tensor, low: Tensor, high: Tensor) -> int:
    """Count the pairs with equal labels whose key index is at least `low` and below `high`.

    Keys are sorted by label. Then two binary searches for each query count the keys with the label of the query.
    """
    joint = torch.zeros(len(i) + len(j), dtype=torch.long)
    for pair in labels:
        values, which = torch.unique(torch.cat(pair), return_inverse=True)
        joint = torch.unique(joint * len(values) + which, return_inverse=True)[1]
    own, width = joint[: len(i)] * (len(j) + 1), len(j) + 1
    order = torch.sort(joint[len(i) :] * width + torch.arange(len(j))).values
    below, above = (torch.searchsorted(order, own + bound) for bound in (low, high))
    return int(torch.where(high > low, above - below, 0).sum())


def _count_listed(listed: Mask, others: list[Mask], i: Tensor, low: Tensor, high: Tensor, sequence: int) -> int:
    """Count the pairs that the mask `listed` lists (see `Mask.listed_keys`) and that are visible in all `others`.

    low, high  for each query, only keys at positions of at least `low` and below `high` are counted
    """
    total = 0
    zero = torch.zeros_like(i)
    for j, exists in listed.listed_keys(i) or ():
        seen = exists & (j >= low) & (j < high)
        grid = Grid(zero + sequence, zero, zero, zero, i, torch.where(seen, j, i))
        for mask in others:
            seen = seen & mask.see(grid)
        total += int(seen.sum())
    return total


def _count_pairs(mask: Mask, queries: int, keys: int, positions: Positions) -> int:
    """Count the visible pairs by evaluating every pair, a few rows at a time."""
    total = 0
    b = mask.batch() or (1 if positions.offsets is None else len(positions.offsets))
    rows = max(1, _PAIRS_AT_ONCE // max(keys * b * (mask.heads() or 1), 1))
    batch = torch.arange(b)[:, None, None, None]
    head = torch.arange(mask.heads() or 1)[:, None, None]
    _check_size(range(keys))
    column = torch.arange(keys)[None, :]
    j = key_positions(positions, keys, torch.device("cpu"))[None, :]
    for start in range(0, queries, rows):
        row = torch.arange(start, min(start + rows, queries))[:, None]
        seen = mask.see(Grid(batch, head, row, column, positions.query_positions(row), j))
        total += int(seen.expand(*seen.shape[:-2], len(row), keys).sum())
    return total
