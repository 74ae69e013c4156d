"""`Records`: base class of data sets stored in columns, with one entry per record in each field."""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import DataError

R = TypeVar("R", bound="Records")


class Records:
    """Base class of data sets in columns: each field named in `PER_RECORD` has one entry per record (example)."""

    PER_RECORD: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        counts = {name: len(getattr(self, name)) for name in self.PER_RECORD}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise DataError(f"{type(self).__name__} needs the same number of {', '.join(counts)}, but has {found}")

    def __len__(self) -> int:
        return len(getattr(self, self.PER_RECORD[0]))

    def select(self: R, records: Int64[Tensor, "_"]) -> R:
        """Return a data set with the records at these indices."""
        chosen: dict[str, Any] = {}
        for name in self.PER_RECORD:
            values = getattr(self, name)
            entries = isinstance(values, Tensor)
            chosen[name] = values[records] if entries else tuple(values[each] for each in records.tolist())
        return replace(self, **chosen)  # type: ignore[type-var]
