"""What was seen of a model: one record for each attention call, with every statistic worked out when asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError, UnknownNameError
from regard.core.absolute_positions import Positions, key_positions
from regard.core.masks.algebra import Mask
from regard.core.scores import ScoreTerm
from regard.see.statistics import Statistics, Top, statistics

if TYPE_CHECKING:
    from regard.see.heads import HeadTable


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """One attention call: what went in, where in the model, and by which way it was seen.

    name      the module's path; the second call of the same module is `path:2`
    route     how the model asked for attention: "sdpa", "flex", "softmax" (written by hand), "nn.MultiheadAttention",
              "hugging face ...", or "attend, ..." with the kernel
    dropout   the share of weights that was dropped: statistics are of the weights before that
    note      what was done to the weights afterwards, or is not known
    heads     the model's numbers of the heads that were kept, None for all
    rows_kept the model's numbers of the queries that were kept, None for all
    located   whether it is known where the queries stand; where it is not, nothing is told of distances
    """

    name: str
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
    heads: tuple[int, ...] | None = None
    rows_kept: tuple[int, ...] | None = None
    located: bool = True
    gradients: list[Float[Tensor, "b h i e"]] = field(default_factory=list)

    @cached_property
    def statistics(self) -> Statistics:
        return statistics(
            self.q, self.k, mask=self.mask, scores=self.terms, beta=self.beta, positions=self.positions, v=self.v
        )

    @property
    def gradient(self) -> Float[Tensor, "b h i e"] | None:
        """The gradient of the attention's output, once some backward pass has reached it: that of the latest."""
        return self.gradients[-1] if self.gradients else None

    @property
    def lse(self) -> Float[Tensor, "b h i"]:
        return self.statistics.lse

    @property
    def entropy(self) -> Float[Tensor, "b h i"]:
        return self.statistics.entropy

    @property
    def largest(self) -> Float[Tensor, "b h i"]:
        return self.statistics.largest

    @property
    def where(self) -> Int[Tensor, "b h i"]:
        return self.statistics.where

    @property
    def distance(self) -> Float[Tensor, "b h i"] | None:
        """The mean of |i - j| under the weights, by the positions in the model; None where they are not known."""
        if not self.located:
            return None
        if self.rows_kept is None or _in_a_row(self.rows_kept):
            return self.statistics.distance
        weights = self.weights()  # few rows
        i = self.query_positions[:, None]
        far = (i - key_positions(self.positions, self.k.shape[2], self.q.device)).abs()
        total = weights.sum(-1)
        return (weights * far).sum(-1) / total.masked_fill(total == 0, 1)

    @property
    def received(self) -> Float[Tensor, "b h j"]:
        return self.statistics.received

    @property
    def query_positions(self) -> Int[Tensor, "i"]:
        """Where the queries that were kept stood, by their numbers alone where that is not known."""
        i = self.q.shape[2]
        if self.rows_kept is None:
            return torch.arange(i, device=self.q.device) + self.positions.queries
        rows = torch.tensor(self.rows_kept, device=self.q.device)
        return rows + self.positions.queries - (self.rows_kept[0] if self.rows_kept else 0)

    def pooled(self, cells: int | tuple[int, int]) -> Float[Tensor, "b h rows columns"]:
        return self.statistics.pooled(cells)

    def top(self, count: int, rows: list[int] | None = None) -> Top:
        return self.statistics.top(count, rows)

    def rows(self, rows: list[int]) -> Float[Tensor, "b h r j"]:
        return self.statistics.rows(rows)

    def weights(self) -> Float[Tensor, "b h i j"]:
        return self.statistics.weights()

    def mixed(self, x: Float[Tensor, "b i"] | Float[Tensor, "b h i"]) -> Float[Tensor, "b h j"]:
        return self.statistics.mixed(x)

    def __repr__(self) -> str:
        b, h, i, _ = self.q.shape
        terms = "".join(f" + {term!r}" for term in self.terms)
        return f"{self.name}: b={b} h={h} i={i} j={self.k.shape[2]}, {self.mask!r}{terms}, by {self.route}"


def _in_a_row(rows: tuple[int, ...]) -> bool:
    return not rows or rows == tuple(range(rows[0], rows[0] + len(rows)))


class Seen(Mapping[str, Record]):
    """The attention calls of a model by the names of its layers, in the order in which they were made.

    left_out  why calls were not recorded, each reason with how often it came up
    """

    def __init__(self, records: Sequence[Record] = (), left_out: Mapping[str, int] | None = None) -> None:
        self._records = {record.name: record for record in records}
        self.left_out: dict[str, int] = dict(left_out or {})

    def __getitem__(self, name: str) -> Record:
        if name in self._records:
            return self._records[name]
        if not self._records:
            raise UnknownNameError(
                f"no layer {name!r} was seen: no attention was; run the model inside `with watch(model) as seen:`"
            )
        near = get_close_matches(name, self._records, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"no layer {name!r} was seen{hint} (there are: {', '.join(self._records)})")

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
        """All calls in the order in which they were made."""
        return list(self._records.values())

    def calls(self, name: str) -> list[Record]:
        """Every call of one layer: `name`, `name:2`, and so on."""
        first = self[name]
        return [first, *(record for record in self.records if _numbered(record.name, name))]

    def table(self, tokens: Int[Tensor, "b n"] | None = None) -> "HeadTable":
        """All heads side by side: how spread, how far, and what they look at.

        tokens  the ids that went in, for the induction score
        """
        from regard.see.heads import table_of  # it reads records

        return table_of(self, tokens)

    def save(self, path: str | PathLike[str]) -> None:
        """Write all records into one safetensors file. One that cannot be written is told in `left_out`, there too."""
        from regard.see.serialization import save  # it makes records

        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> "Seen":
        """What `save` has written."""
        from regard.see.serialization import load

        return load(path, device=device)

    def add(self, record: Record) -> None:
        if record.name in self._records:
            raise ConfigError(f"{record.name!r} was recorded already")
        self._records[record.name] = record

    def __repr__(self) -> str:
        lines = [repr(record) for record in self.records] or ["nothing seen"]
        return "\n".join([*lines, *(f"left out {count}: {reason}" for reason, count in self.left_out.items())])


def _numbered(name: str, first: str) -> bool:
    stem, _, number = name.rpartition(":")
    return stem == first and number.isdigit()
