"""Records of attention calls: the inputs of each call that `watch` intercepted, and statistics computed from them.

`watch`, in see/watch.py, installs the hooks that make the records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.display import show_grids, show_text
from regard.base.errors import ConfigError, UnknownNameError
from regard.base.validation import suggest
from regard.core.absolute_positions import Grid, key_positions
from regard.core.masks.drawing import shade_cells
from regard.see.row_statistics import Statistics

if TYPE_CHECKING:
    from regard.see.heads import HeadTable

DRAWN_HEADS, DRAWN_CELLS = 8, 32


# words in the names of cross-attention modules
CROSS = ("cross", "encdec", "enc_dec", "encoder_attn", "multihead_attn")


class UnsupportedAttention(Exception):  # noqa: N818
    """Raised while recording a call that cannot be recorded; its text is the reason in `Seen.left_out`."""


@dataclass(frozen=True, eq=False, repr=False)
class Record(Statistics):
    """One recorded attention call: its inputs, its statistics, the name of its module, and how it was intercepted.

    route            how the call was intercepted, as the function that the model called: "sdpa", "flex", "softmax"
                     (written by hand), "nn.MultiheadAttention", "hugging face ...", or "attend, ..." with the kernel
    dropout          the dropout probability of the weights; statistics are computed from the weights before dropout
    note             remarks, such as what the model did to the weights after the softmax, or what is unknown about the
                     call
    positions_known  whether the positions of queries and keys are known and refer to the same sequence; if not,
                     `distance` is None
    over_channels    whether rows and columns are channels, not positions, as in the channel attention of a DaViT
    name             the path of the module; the second call of a module is `path:2`
    heads            for each recorded head, its index among all heads of the layer; None if all are recorded
    rows_kept        for each recorded query, its index among all queries of the call; None if all are recorded

    A model with 8 heads is called with one sequence of 19 tokens:

    >>> with watch(model) as seen:
    ...     out = model(tokens)
    >>> record = seen["blocks.0.attention"]
    >>> record.route, record.entropy.shape
    ('attend, sdpa', torch.Size([1, 8, 19]))
    """

    route: str
    dropout: float = 0.0
    note: str = ""
    positions_known: bool = True
    over_channels: bool = False
    name: str = ""
    heads: tuple[int, ...] | None = None
    rows_kept: tuple[int, ...] | None = None
    gradients: list[Float[Tensor, "b h i e"]] = field(default_factory=list)

    @property
    def gradient(self) -> Float[Tensor, "b h i e"] | None:
        """The gradient of the attention output in the latest backward pass; None before the first backward pass."""
        return self.gradients[-1] if self.gradients else None

    @property
    def distance(self) -> Float[Tensor, "b h i"] | None:  # type: ignore[override]
        """The distance |i - j| from query i to key j, averaged with the weights; None if the positions are unknown."""
        if not self.positions_known:
            return None
        if self.rows_kept is None or _is_contiguous(self.rows_kept):
            return super().distance
        weights = self.weights()  # few rows
        i = self.query_positions[:, None]
        distances = (i - key_positions(self.positions, self.k.shape[2], self.q.device)).abs()
        total = weights.sum(-1)
        return (weights * distances).sum(-1) / total.masked_fill(total == 0, 1)

    @property
    def query_positions(self) -> Int[Tensor, "i"]:
        """The positions of the recorded queries; if the positions are unknown, the indices of the queries."""
        i = self.q.shape[2]
        if self.rows_kept is None:
            return torch.arange(i, device=self.q.device) + self.positions.queries
        rows = torch.tensor(self.rows_kept, device=self.q.device)
        return rows + self.positions.queries - (self.rows_kept[0] if self.rows_kept else 0)

    def __repr__(self) -> str:
        b, h, i, _ = self.q.shape
        terms = "".join(f" + {term!r}" for term in self.terms)
        over = " over channels" if self.over_channels else ""
        return f"{self.name}: b={b} h={h} i={i} j={self.k.shape[2]}{over}, {self.mask!r}{terms}, by {self.route}"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: maps of the first heads for the first sequence, at a low resolution."""
        cells = min(self.q.shape[2], DRAWN_CELLS), min(self.k.shape[2], DRAWN_CELLS)
        maps = self.pooled(cells)[0, :DRAWN_HEADS].cpu()
        heads = self.heads or range(len(maps))
        grids = [(f"head {head}", shade_cells(each / each.max())) for head, each in zip(heads, maps, strict=False)]
        return show_text(repr(self)) + show_grids(grids)


def _is_contiguous(rows: tuple[int, ...]) -> bool:
    return not rows or rows == tuple(range(rows[0], rows[0] + len(rows)))


def pair_grid(record: Record, rows: Tensor, columns: Tensor | None = None) -> Grid:
    """Return the `Grid` of query-key pairs, on which masks and score terms are evaluated, from indices.

    rows     query indices among those of the record: (r,) to pair these queries with every key, or (b, 1, p) to select
             p single pairs in each sequence
    columns  key indices of the single pairs, in the shape of `rows`; None pairs the queries with every key
    """
    b, h = record.q.shape[:2]
    device = record.q.device
    if columns is None:
        rows, columns = rows[:, None], torch.arange(record.k.shape[2], device=device)[None, :]
    trailing = (1, 1) if rows.ndim == 2 else (1,)
    batch = torch.arange(b, device=device).reshape(b, 1, *trailing)
    head = torch.arange(h, device=device).reshape(h, *trailing)
    j = key_positions(record.positions, record.k.shape[2], device)
    # selected rows have a dense mask, so the index of a row counts, not its position in the model
    return Grid(batch, head, rows, columns, rows + record.positions.queries, j[columns])


class Seen(Mapping[str, Record]):
    """A mapping from names to the recorded attention calls of `watch`, in the order of the calls.

    A name is the path of the module; the second call of a module is `path:2`.

    left_out  the reasons why calls were not recorded, each with the number of such calls

    >>> with watch(model) as seen:
    ...     out = model(tokens)
    >>> print(seen)
    blocks.0.attention: b=1 h=8 i=19 j=19, causal(), by attend, sdpa
    blocks.1.attention: b=1 h=8 i=19 j=19, causal(), by attend, sdpa
    """

    def __init__(self, records: Sequence[Record] = (), left_out: Mapping[str, int] | None = None) -> None:
        self._records = {record.name: record for record in records}
        self.left_out: dict[str, int] = dict(left_out or {})

    def __getitem__(self, name: str) -> Record:
        if name in self._records:
            return self._records[name]
        if not self._records:
            raise UnknownNameError(
                f"there is no record of {name!r}: no attention was recorded; run the model inside "
                "`with watch(model) as seen:`"
            )
        recorded = f"(recorded: {', '.join(self._records)})"
        raise UnknownNameError(f"there is no record of {name!r}{suggest(name, self._records)} {recorded}")

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str, default: Record | None = None) -> Record | None:  # type: ignore[override]
        return self._records.get(name, default)

    @property
    def records(self) -> list[Record]:
        """A list of all recorded attention calls, in order."""
        return list(self._records.values())

    def calls(self, name: str) -> list[Record]:
        """Return the records of all calls of one module, with the names `name`, `name:2` and so on."""
        first = self[name]
        return [first, *(record for record in self.records if _is_repeat(record.name, name))]

    def table(self, tokens: Int[Tensor, "b n"] | None = None) -> "HeadTable":
        """Return a table of all heads: entropy, distance, and the weight on the previous, first and induction token.

        The induction token is the token after the previous occurrence of the query's token.

        tokens  the token ids of the input, from which the induction score is computed; if None, this score is None
        """
        from regard.see.heads import build_head_table  # heads imports this module

        return build_head_table(self, tokens)

    def save(self, path: str | PathLike[str]) -> None:
        """Save all records in one safetensors file.

        If a record cannot be saved, the reason is added to `left_out`.
        """
        from regard.see.serialization import save  # serialization imports this module

        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> "Seen":
        """Load the records of a file that `save` wrote."""
        from regard.see.serialization import load

        return load(path, device=device)

    def add(self, record: Record) -> None:
        """Add a recorded attention call; raise ConfigError if its name is already used."""
        if record.name in self._records:
            raise ConfigError(f"{record.name!r} is already recorded")
        self._records[record.name] = record

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: all records, and a table of the heads."""
        return show_text(f"{self!r}\n\n{self.table()}" if self._records else repr(self))

    def __repr__(self) -> str:
        lines = [repr(record) for record in self.records] or ["nothing recorded"]
        return "\n".join([*lines, *(f"left out {count}: {reason}" for reason, count in self.left_out.items())])


def _is_repeat(name: str, first: str) -> bool:
    stem, _, number = name.rpartition(":")
    return stem == first and number.isdigit()


def attention_role(name: str) -> str:
    """Return "encoder", "decoder" or "cross" (cross-attention), inferred from the name of a layer."""
    last = name.lower().rpartition(".")[2]
    if any(word in last for word in CROSS):
        return "cross"
    return "decoder" if "decoder" in name.lower() else "encoder"
