"""Exact numbers of visible pairs, without the matrix.

An expression is a polynomial in the indicators of its forms (`~a` is 1 - a, `a & b` is a b, `a | b` is a + b - a b),
so its count is a signed sum of counts of conjunctions. In a conjunction the bands of a row meet in one run of keys,
documents and dilations become one label that query and key must share, and random links are a list of points.
That sum doubles with every form; where all forms are bands, a long expression is asked once between any two ends.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.masks.algebra import FAR, And, Full, Mask, Not, Or, Position, settle
from regard.core.masks.data import DocumentMask, PaddingMask
from regard.core.masks.positional import BandMask, Dilated, FirstRows, GlobalTokens, RandomLinks

Polynomial = dict[frozenset[Mask], int]
_MOST_TERMS = 256  # beyond this a sweep is cheaper than the sum
_FEW_FORMS = 4  # up to this the sum is cheaper than sorting ends
_SWEEP = 1 << 24  # pairs looked at in one go


@_disable_current_modes()  # a count is a real number even where its caller traces with fake tensors
def count(mask: Mask, queries: int, keys: int | None = None, positions: Positions | None = None) -> int:
    positions, keys = settle(queries, keys, positions)
    mask.check(positions, queries, keys)
    mask = mask.to(torch.device("cpu"))
    first = positions.keys
    if not isinstance(first, int) or mask.opaque() or not queries or not keys:
        return _swept(mask, queries, keys, positions)
    i = torch.arange(queries) + positions.queries
    sequences = range(mask.batch() or 1)
    forms = set(_forms(mask))
    if len(forms) > _FEW_FORMS and all(isinstance(form, BandMask | FirstRows | PaddingMask) for form in forms):
        return sum(_between_ends(mask, forms, i, first, first + keys, sequence) for sequence in sequences)
    polynomial = expand(mask)
    if polynomial is None:
        return _swept(mask, queries, keys, positions)
    return sum(
        factor * _conjunction(term, i, first, first + keys, sequence)
        for sequence in sequences
        for term, factor in polynomial.items()
    )


def expand(mask: Mask) -> Polynomial | None:
    """The polynomial of an expression, or None where it has too many terms."""
    match mask:
        case Full():
            return {frozenset(): 1}
        case GlobalTokens():
            return expand(mask.meaning())
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
    """The masks that an expression is made of."""
    if isinstance(mask, GlobalTokens):
        mask = mask.meaning()
    if not mask.children():
        yield mask
    for child in mask.children():
        yield from _forms(child)


def _ends(mask: BandMask | PaddingMask, i: Tensor, sequence: int) -> tuple[Position | None, Position | None]:
    """The first visible key of each query and the one after the last; None where that side is open."""
    if isinstance(mask, BandMask):
        return mask.bounds(i)
    length = int(mask.data[sequence])
    return (None, length) if mask.width is None else (mask.width - length, None)


def _between_ends(mask: Mask, forms: set[Mask], i: Tensor, first: int, end: int, sequence: int) -> int:
    """Pairs visible by bands alone: between two neighbouring ends nothing changes, so one key there tells of all."""
    total = 0
    bands = [form for form in forms if isinstance(form, BandMask | PaddingMask)]
    for rows in i.split(max(1, _SWEEP // (8 * len(bands)))):
        edges = [torch.full_like(rows, first), torch.full_like(rows, end)]
        for band in bands:
            edges += [torch.as_tensor(edge).expand_as(rows) for edge in _ends(band, rows, sequence) if edge is not None]
        keys = torch.stack(edges, 1).clamp(first, end).sort(1).values
        start, zero = keys[:, :-1], torch.zeros_like(rows)[:, None]
        seen = mask.see(Grid(zero + sequence, zero, zero, start - first, rows[:, None], start))
        total += int((keys.diff(dim=1) * seen).sum())
    return total


def _conjunction(term: frozenset[Mask], i: Tensor, first: int, end: int, sequence: int) -> int:
    """How many pairs are visible to every mask of the term, over queries i and keys first..end - 1."""
    low, high = torch.full_like(i, first), torch.full_like(i, end)
    period = 1
    documents: list[DocumentMask] = []
    links: list[RandomLinks] = []
    for mask in term:
        if isinstance(mask, BandMask | PaddingMask):
            start, stop = _ends(mask, i, sequence)
            low = low if start is None else torch.maximum(low, torch.as_tensor(start))
            high = high if stop is None else torch.minimum(high, torch.as_tensor(stop))
        elif isinstance(mask, FirstRows):
            high = torch.where(i < mask.size, high, -FAR)
        elif isinstance(mask, Dilated):
            period = math.lcm(period, mask.step)
        elif isinstance(mask, DocumentMask):
            documents.append(mask)
        else:
            assert isinstance(mask, RandomLinks)
            links.append(mask)
    if links:
        return _linked(links, i, low, high, term, sequence)
    if documents:
        return _labelled(documents, i, low, high, first, end, period, sequence)
    # keys congruent to i: those up to high - 1 less those up to low - 1
    runs = torch.div(high - 1 - i, period, rounding_mode="floor") - torch.div(
        low - 1 - i, period, rounding_mode="floor"
    )
    return int(torch.where(high > low, runs, 0).sum())


def _labelled(
    documents: list[DocumentMask],
    i: Tensor,
    low: Tensor,
    high: Tensor,
    first: int,
    end: int,
    period: int,
    sequence: int,
) -> int:
    """Pairs with one label in common: keys sorted by label, then position, and two searches for each query."""
    at = torch.tensor(sequence)
    j = torch.arange(first, end)
    columns = [mask.labels(j, at) for mask in documents] + [j % period]
    rows = [mask.labels(i, at) for mask in documents] + [i % period]
    labels = torch.zeros(len(j) + len(i), dtype=torch.long)
    for pair in zip(columns, rows, strict=True):
        values, which = torch.unique(torch.cat(pair), return_inverse=True)
        labels = labels * len(values) + which
    width = end - first + 1
    order = torch.sort(labels[: len(j)] * width + (j - first)).values
    own = labels[len(j) :] * width
    inside = [torch.searchsorted(order, own + edge.clamp(first, end) - first) for edge in (high, low)]
    return int(torch.where(high > low, inside[0] - inside[1], 0).sum())


def _linked(
    links: list[RandomLinks], i: Tensor, low: Tensor, high: Tensor, term: frozenset[Mask], sequence: int
) -> int:
    """Pairs that are links: every link of the first such mask, asked of all the others."""
    total = 0
    others = [mask for mask in term if mask is not links[0]]
    zero = torch.zeros_like(i)
    for which in range(links[0].links):
        j, seen = links[0].link(i, which)
        seen = seen & (j >= low) & (j < high)
        grid = Grid(zero + sequence, zero, zero, zero, i, torch.where(seen, j, i))
        for mask in others:
            seen = seen & mask.see(grid)
        total += int(seen.sum())
    return total


def _swept(mask: Mask, queries: int, keys: int, positions: Positions) -> int:
    """The count by looking, a few rows at a time."""
    total = 0
    rows = max(1, _SWEEP // max(keys * (mask.batch() or 1) * (mask.heads() or 1), 1))
    batch = torch.arange(mask.batch() or 1)[:, None, None, None]
    head = torch.arange(mask.heads() or 1)[:, None, None]
    column = torch.arange(keys)[None, :]
    j = key_positions(positions, keys, torch.device("cpu"))[None, :]
    for start in range(0, queries, rows):
        row = torch.arange(start, min(start + rows, queries))[:, None]
        seen = mask.see(Grid(batch, head, row, column, row + positions.queries, j))
        total += int(seen.expand(*seen.shape[:-2], len(row), keys).sum())
    return total
