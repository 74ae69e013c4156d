"""`regard.show`: draw a mask, or compare two masks of any library and name the convention by which they differ."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.base.display import show_grids, show_text
from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Mask
from regard.core.masks.drawing import default_sizes, draw_matrix, pool_shares, shade_cells
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.key_padding import KeyPaddingMask
from regard.core.masks.forms.window import Window

HIDDEN_BELOW = -1e4  # an additive mask hides with -inf, the lowest number of its dtype, -1e9 or -1e4
ONLY_FIRST, ONLY_SECOND, SAME = "#c2410c", "#0d9488", "transparent"


@dataclass(frozen=True)
class MaskPicture:
    """A mask that prints as text and displays as a picture in a notebook."""

    name: str
    visible: Bool[Tensor, "b h i j"]

    def __str__(self) -> str:
        return f"{self.name}: {_count(self.visible)}\n{draw_matrix(self.visible[0, 0])}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return show_grids([(self.name, _colours(self.visible[0, 0]))]) + show_text(_count(self.visible))


@dataclass(frozen=True)
class MaskComparison:
    """Two masks and their difference; prints as text and displays as a picture in a notebook.

    first_difference  sequence, head, query and key of the first cell that differs; None if the masks are equal
    conventions       what would make the masks equal, as the end of a sentence "they would be equal if ...", such as
                      "causal() hid the query's own key"
    """

    names: tuple[str, str]
    visible: tuple[Bool[Tensor, "b h i j"], Bool[Tensor, "b h i j"]]
    conventions: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the same query-key pairs are visible in both masks."""
        return torch.equal(*self.visible)

    @property
    def first_difference(self) -> tuple[int, int, int, int] | None:
        differs = (self.visible[0] != self.visible[1]).nonzero()
        return tuple(differs[0].tolist()) if len(differs) else None

    @property
    def summary(self) -> str:
        """A text: whether the masks are equal, where they differ first, and after which change they would be equal."""
        if self.first_difference is None:
            return f"equal: {_count(self.visible[0])}"
        b, h, i, j = self.first_difference
        shown, hidden = self.names if self.visible[0][b, h, i, j] else self.names[::-1]
        where = f"query {i}, key {j}" + (f" of sequence {b}, head {h}" if b or h else "")
        count = int((self.visible[0] != self.visible[1]).sum())
        lines = [f"{count} cells differ; the first is {where}: visible in {shown}, hidden in {hidden}"]
        lines += [f"they would be equal if {convention}" for convention in self.conventions]
        return "\n".join(lines if self.conventions else [*lines, "no usual convention explains the difference"])

    def __str__(self) -> str:
        b, h = (self.first_difference or (0, 0))[:2]
        first, second = (each[b, h] for each in self.visible)
        parts = [f"{name}\n{draw_matrix(each)}" for name, each in zip(self.names, (first, second), strict=True)]
        if not self.equal:
            signs = {(True, False): " -", (False, True): " +"}
            rows = zip(first.tolist(), second.tolist(), strict=True)
            drawn = ("".join(signs.get(pair, " ·") for pair in zip(*row, strict=True)) for row in rows)
            parts.append("difference: - only in the first, + only in the second\n" + "\n".join(drawn))
        return "\n\n".join([*parts, self.summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        b, h = (self.first_difference or (0, 0))[:2]
        first, second = (each[b, h] for each in self.visible)
        grids = [(name, _colours(each)) for name, each in zip(self.names, (first, second), strict=True)]
        if not self.equal:
            rows = zip(first.tolist(), second.tolist(), strict=True)
            paint = {(True, False): ONLY_FIRST, (False, True): ONLY_SECOND}
            drawn = [[paint.get(pair, SAME) for pair in zip(*row, strict=True)] for row in rows]
            grids.append(("difference: orange only in the first, green only in the second", drawn))
        return show_grids(grids) + show_text(self.summary)


def show(
    mask: Any, against: Any = None, *, queries: int | None = None, keys: int | None = None
) -> MaskPicture | MaskComparison:
    """Draw a mask or compare two masks; the result displays itself in a notebook and prints as text.

    mask     a mask of regard; a boolean tensor, True meaning visible; an additive tensor; the (b, n) attention_mask of
             a tokenizer; a mask_mod or a BlockMask of FlexAttention; or the mask of a Hugging Face model
    against  a second mask, in any of these formats, to compare with the first
    queries  number of queries; the default is the size of a tensor or BlockMask, or 12 if neither mask has a size
    keys     number of keys; the default is the size of a tensor or BlockMask, or `queries` if neither mask has a size

    The second mask of this example hides each query's own key:

    >>> print(regard.show(causal(), against=torch.ones(3, 3).tril(-1).bool()).summary)
    3 cells differ; the first is query 0, key 0: visible in causal(), hidden in boolean (3, 3)
    they would be equal if causal() hid the query's own key
    """
    sizes = _sizes(mask, against, queries, keys)
    first = _to_matrix(mask, *sizes)
    if against is None:
        return MaskPicture(_name(mask), first)
    first, second = _broadcast(first, _to_matrix(against, *sizes))
    names = (_name(mask), _name(against))
    names = names if names[0] != names[1] else (f"the first, {names[0]}", f"the second, {names[1]}")
    found = () if torch.equal(first, second) else tuple(_explain(mask, against, names, first, second, *sizes))
    return MaskComparison(names, (first, second), found)


def _explain(
    mask: Any, against: Any, names: tuple[str, str], first: Tensor, second: Tensor, i: int, j: int
) -> Iterator[str]:
    """Yield each change after which two masks would be equal, such as "the second mask were inverted".

    names          names of the masks in the yielded sentences
    first, second  visible pairs of the two masks, as boolean matrices
    i, j           numbers of queries and keys
    """
    if torch.equal(first, ~second):
        yield f"{names[1]} were inverted: True hides in one of them"
    if i == j and torch.equal(first, second.mT):
        yield f"{names[1]} were transposed: its rows are keys"
    sides = (mask, names[0], first, second), (against, names[1], second, first)
    for mine, name, _, other in sides:
        if isinstance(mine, Tensor) and mine.dtype != torch.bool and mine.shape[-2:] == (i, j):
            flags, use = _four_axes(mine != 0, i, j), "to add" if mine.is_floating_point() else "for each key"
            if (mine < HIDDEN_BELOW).any():
                continue
            if _equal(flags, other):
                yield f"the numbers of {name} were factors (1 visible, 0 hidden) instead of numbers {use}"
            if _equal(~flags, other):
                yield f"the numbers of {name} were flags (1 hidden, 0 visible) instead of numbers {use}"
    rules = [(_rule(mine), name, other) for mine, name, _, other in sides]
    found = [words for rule, name, other in rules if rule is not None for words in _shifts(rule, name, other, i, j)]
    if not found:
        # a matrix may be a band too; both sides would say the same, so that one is enough
        fitted = ((_fit_band(visible), name, other) for _, name, visible, other in sides)
        every = (list(_shifts(rule, name, other, i, j)) for rule, name, other in fitted if rule is not None)
        found = next((words for words in every if words), [])
    yield from found


def _shifts(rule: Mask, name: str, other: Tensor, i: int, j: int) -> Iterator[str]:
    """Yield each change of a mask after which it would have the same visible pairs as another mask.

    The tested changes are top-left alignment (queries at the first positions), a window that is one position larger or
    smaller, and a causal mask that shows one key more or less.

    rule   the mask
    name   name of the mask in the yielded sentences
    other  visible pairs of the other mask, as a boolean matrix
    i, j   numbers of queries and keys
    """
    if i != j and _equal(_four_axes(rule.dense(i, j, positions=Positions(0, 0)), i, j), other):
        yield f"{name} counted queries from the first key (top-left) instead of to the last (bottom-right)"
    for step, words in ((1, "one larger"), (-1, "one smaller")):
        for before, after, side in ((step, step, ""), (step, 0, " before the query"), (0, step, " after the query")):
            changed = _change_windows(rule, before, after)
            if changed is not None and _equal(_four_axes(changed.dense(i, j), i, j), other):
                yield f"the window of {name} were {words}{side}"
                break
    for after, words in ((1, "showed the key after the query's own"), (-1, "hid the query's own key")):
        shifted = _change_causal(rule, after)
        if shifted is not None and _equal(_four_axes(shifted.dense(i, j), i, j), other):
            yield f"{name} {words}"


def _rule(mask: Any) -> Mask | None:
    """Convert a mask or mask_mod to a `Mask` that is a rule of positions, without data; None if that is impossible."""
    if isinstance(mask, Mask):
        return None if mask.by_pair() else mask
    if callable(mask) and not isinstance(mask, Tensor):
        return Mask.from_mask_mod(mask)
    return None


def _fit_band(visible: Bool[Tensor, "b h i j"]) -> Mask | None:
    """Find the window mask with exactly these visible pairs, alone or with key padding; None if there is none."""
    i, j = visible.shape[-2:]
    distance = torch.arange(j) - torch.arange(i)[:, None] - (j - i)
    some = visible.any((0, 1))
    if not some.any():
        return None
    low, high = int(distance[some].min()), int(distance[some].max())
    if low > 0 or high < 0:
        return None
    before, after = (None if low == 1 - j else -low), (None if high == i - 1 else high)
    band: Mask = Window(before, after)
    if after == 0:
        band = Causal() if before is None else Causal() & Window(before, None)
    inside = (distance >= low) & (distance <= high)
    if torch.equal(visible, inside.expand_as(visible)):
        return band
    real = visible.any(2)[:, 0]
    if torch.equal(visible, inside & real[:, None, None]):
        return band & KeyPaddingMask(real)
    return None


def _change_windows(mask: Mask, before: int, after: int) -> Mask | None:
    """Return the mask with `before` and `after` added to the sizes of every window in it.

    A window shows some keys before and some keys after the query.

    A size of 0 or None (no limit) is not changed. Returns None if no size was changed.
    """
    found = False

    def change(part: Mask) -> Mask:
        nonlocal found
        if not isinstance(part, Window) or (not part.before and not part.after):
            return part.map_children(change)
        found = True
        limits = ((part.before, before), (part.after, after))
        return Window(*(max(0, size + step) if size else size for size, step in limits))

    changed = change(mask)
    return changed if found else None


def _change_causal(mask: Mask, after: int) -> Mask | None:
    """Return the mask with every causal mask in it shifted by one key; None if there is no causal mask in it.

    after  1 also shows the next key, -1 also hides the query's own key
    """
    found = False

    def change(part: Mask) -> Mask:
        nonlocal found
        if not isinstance(part, Causal):
            return part.map_children(change)
        found = True
        return Window(None, 1) if after > 0 else ~Window(0, None)

    changed = change(mask)
    return changed if found else None


def _to_matrix(mask: Any, i: int, j: int) -> Bool[Tensor, "b h i j"]:
    """Convert a mask of any supported format to the boolean matrix of its visible pairs."""
    if isinstance(mask, Mask):
        return _four_axes(mask.dense(i, j), i, j)
    if isinstance(mask, Tensor):
        return _four_axes(_read_tensor(mask), i, j)
    if hasattr(mask, "kv_num_blocks"):
        return _four_axes(Mask.from_block_mask(mask).dense(i, j), i, j)
    if hasattr(mask, "to_dense"):  # the mask of a Hugging Face model that runs on regard
        return _four_axes(mask.to_dense(), i, j)
    try:
        return _four_axes(Mask.from_mask_mod(mask).dense(i, j), i, j)
    except IndexError as error:
        raise ShapeError(
            f"{_name(mask)} cannot be evaluated for {i} queries and {j} keys ({error}); pass queries= and keys="
        ) from None


def _read_tensor(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask if mask.ndim != 1 else mask[None]
    if not mask.is_floating_point():
        if mask.ndim == 2 and not mask.is_complex():
            return mask.bool()[:, None, None]  # the attention_mask of a tokenizer: a row of real keys for each sequence
        raise ShapeError(
            f"a mask of {mask.dtype} must be (b, n), the attention_mask of a tokenizer, not {tuple(mask.shape)}"
        )
    return mask > HIDDEN_BELOW


def _four_axes(visible: Tensor, i: int, j: int) -> Tensor:
    if visible.ndim < 4:
        visible = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
    if visible.shape[-2] not in (1, i) or visible.shape[-1] not in (1, j):
        raise ShapeError(f"a mask is {tuple(visible.shape)}, but the masks are compared for {i} queries and {j} keys")
    return visible.cpu().expand(*visible.shape[:2], i, j)


def _sizes(mask: Any, against: Any, queries: int | None, keys: int | None) -> tuple[int, int]:
    """Return the numbers of queries and keys to draw.

    The arguments `queries` and `keys` are used if they are not None. Otherwise the sizes are those of a tensor, a
    BlockMask or the data in one of the masks, or 12.
    """
    found: list[tuple[int, int]] = []
    for each in (mask, against):
        if isinstance(each, Tensor) and each.ndim >= 2 and not (each.ndim == 2 and _is_row(each)):
            found.append((int(each.shape[-2]), int(each.shape[-1])))
        elif isinstance(each, Tensor):
            found.append((int(each.shape[-1]), int(each.shape[-1])))
        elif hasattr(each, "seq_lengths"):
            found.append((int(each.seq_lengths[0]), int(each.seq_lengths[1])))
        elif isinstance(each, Mask):
            own = default_sizes(each)
            if own is not None:
                found.append(own)
        elif each is not None and not callable(each):
            raise ConfigError(
                f"show takes a mask, a tensor, a mask_mod or a BlockMask, not {type(each).__name__}: {each!r}"
            )
    i, j = found[0] if found else (queries or 12, keys or queries or 12)
    return (i if queries is None else queries), (j if keys is None else keys)


def _is_row(mask: Tensor) -> bool:
    return mask.dtype != torch.bool and not mask.is_floating_point()


def _broadcast(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    try:
        a, b = torch.broadcast_tensors(first, second)
    except RuntimeError:
        raise ShapeError(
            f"the masks differ in sequences or heads: {tuple(first.shape)} and {tuple(second.shape)} read as (b h i j)"
        ) from None
    return a, b


def _equal(first: Tensor, second: Tensor) -> bool:
    try:
        return torch.equal(*torch.broadcast_tensors(first, second))
    except RuntimeError:
        return False


def _name(mask: Any) -> str:
    if isinstance(mask, Tensor):
        kind = "additive" if mask.is_floating_point() else "boolean" if mask.dtype == torch.bool else "attention_mask"
        return f"{kind} {tuple(mask.shape)}"
    if isinstance(mask, Mask):
        return repr(mask)
    if hasattr(mask, "kv_num_blocks"):
        return f"BlockMask {tuple(mask.shape)}"
    if hasattr(mask, "to_dense"):
        return f"Hugging Face mask {tuple(mask.shape)}"
    return f"mask_mod {getattr(mask, '__name__', type(mask).__name__)}"


def _count(visible: Tensor) -> str:
    share = visible.float().mean().item() if visible.numel() else math.nan
    return f"{int(visible.sum()):,} of {visible.numel():,} pairs visible ({share:.1%})"


def _colours(visible: Tensor) -> list[list[str]]:
    return shade_cells(pool_shares(visible))
