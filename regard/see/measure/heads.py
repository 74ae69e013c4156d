"""Measure which key head each query head uses, and whether heads or sequences are mixed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.see.measure.raw_weights import RawWeights


@dataclass(frozen=True, kw_only=True)
class HeadReading:
    """The measured key head of each query head (grouped-query attention), once for the values and once for the keys."""

    value_heads: tuple[int, ...] | None = None  # the key head whose values each query head reads
    key_heads: tuple[int, ...] = ()  # the key head whose keys each query head is compared with
    grouping: str | None = None  # "repeat", "tile", "one to one", "shared" or "other"


def read_heads(raw: RawWeights, steady: bool) -> HeadReading:
    """Find the key head from which each query head takes its values, and the key head that determines its weights.

    Setting v = 1 in one key head shows which query heads read the values of this key head. Changing the keys of one key
    head shows which query heads compute their weights from these keys.

    steady  whether two readings of the weights with the same input agree
    """
    reader, notes = raw.reader, raw.notes
    share, changed = torch.zeros(reader.h, reader.g), torch.zeros(reader.h, reader.g, dtype=torch.bool)
    leak = 0.0
    for head in range(reader.g):
        v, other = torch.zeros_like(raw.v), raw.k.clone()
        v[:1, head] = 1
        out = reader.output(*raw.neutral, v)[..., 0].masked_fill(~raw.nonempty, 0)
        share[:, head] = out[0].sum(-1) / raw.nonempty[0].sum(-1).clamp(min=1)
        leak = max(leak, float(out[1:].abs().max()))
        other[:, head] *= -1
        change = (reader.weights(raw.q, other) - raw.random).masked_fill(~raw.visible, 0)
        changed[:, head] = change.abs().amax((0, 2, 3)) > 1e-6
    if leak > 1e-6:
        notes.append(f"sequences are mixed: values of the first reach others with a weight of {leak:.2g}")
    by_value, by_key = tuple(share.abs().argmax(1).tolist()), tuple(changed.int().argmax(1).tolist())
    mixed = [head for head, count in enumerate((share.abs() > 1e-4).sum(1).tolist()) if count != 1]
    if mixed:
        notes.append(f"query heads {mixed} read the values of no key head or of several")
    if steady and bool((changed.sum(1) > 1).any()):
        notes.append("the weights of a query head depend on several key heads: heads are mixed")
    unique = bool((changed.sum(1) == 1).all())
    if unique and not mixed and by_key != by_value:
        notes.append(f"keys are used in another order than values: {list(by_key)}")
    key_heads = by_key if unique else by_value
    if mixed:
        return HeadReading(key_heads=key_heads)
    return HeadReading(value_heads=by_value, key_heads=key_heads, grouping=name_grouping(by_value, reader.g))


def name_grouping(heads: Sequence[int], g: int) -> str:
    """Name the assignment of query heads to key heads: "one to one", "shared", "repeat", "tile" or "other".

    For 4 query heads and 2 key heads, the key heads of the query heads are 0 0 1 1 with "repeat", 0 1 0 1 with "tile".

    heads  the key head of each query head
    g      number of key heads
    """
    h = len(heads)
    if list(heads) == list(range(h)):
        return "one to one"
    if g == 1:
        return "shared"
    if h % g == 0 and list(heads) == [head // (h // g) for head in range(h)]:
        return "repeat"
    return "tile" if list(heads) == [head % g for head in range(h)] else "other"
