"""`regard.show`: a mask, two masks, a recorded forward pass or a report as a view of the explorer in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.display import show_page
from regard.base.errors import ConfigError
from regard.conform.report import Report
from regard.explorer.page import build_page
from regard.integrations import notebook
from regard.integrations.notebook import MaskComparison, MaskPicture
from regard.see.record import Seen

MOST_DRAWN = 4096  # keys of a mask that the page holds as runs
MOST_HEADS = 64  # heads of a recorded pass whose weights the page holds
HEIGHT = 720


class EmbeddedPicture(MaskPicture):
    """A mask drawn: as text, and as the Masks view of the explorer in a notebook."""

    def _repr_html_(self) -> str:
        return show_mask([self.visible[0, 0]]) or super()._repr_html_()


class EmbeddedComparison(MaskComparison):
    """Two masks with their difference: as text, and as the Masks view of the explorer in a notebook."""

    def _repr_html_(self) -> str:
        b, h = (self.first_difference or (0, 0))[:2]
        return show_mask([each[b, h] for each in self.visible]) or super()._repr_html_()


@dataclass(frozen=True)
class EmbeddedView:
    """A view of the explorer that a notebook shows in a frame; its text elsewhere."""

    page: str
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return show_page(self.page, HEIGHT, scripts=True)


def show(
    thing: Any,
    against: Any = None,
    *,
    queries: int | None = None,
    keys: int | None = None,
    tokens: Sequence[str] | Tensor | None = None,
) -> MaskPicture | MaskComparison | EmbeddedView:
    """Show a mask, two masks, a recorded pass or a report: a view of the explorer in a notebook, text elsewhere.

    thing    a mask of regard; a boolean tensor, True meaning visible; an additive tensor; the (b, n) attention_mask of
             a tokenizer; a mask_mod; a BlockMask; the mask of a Hugging Face model; the `seen` of `regard.watch`; or
             a report of `regard.check`
    against  another mask of any of these kinds, to compare
    queries  number of queries of a mask; default that of a tensor, or 12
    keys     number of keys of a mask; default that of a tensor, or `queries`
    tokens   labels of the positions of a recorded pass, or its token ids

    >>> print(regard.show(causal(), against=torch.ones(3, 3).tril(-1).bool()).summary)
    3 cells differ; the first is query 0, key 0: visible in causal(), hidden in boolean (3, 3)
    they would be equal if causal() hid the query's own key
    """
    if isinstance(thing, Seen):
        return EmbeddedView(build_page(recorded_data(thing, tokens)), repr(thing))
    if isinstance(thing, Report):
        from regard.explorer.views.reports import read_report

        data = {"report": {"report": read_report(thing.json(), "the report")}, "start": "check", "embedded": True}
        return EmbeddedView(build_page(data), str(thing))
    found = notebook.show(thing, against, queries=queries, keys=keys)
    if isinstance(found, MaskPicture):
        return EmbeddedPicture(found.name, found.visible)
    return EmbeddedComparison(found.names, found.visible, found.conventions)


def show_mask(masks: Sequence[Tensor]) -> str | None:
    """The Masks view of one mask, or of two that are compared; None for masks that are too large to hold."""
    queries, size = masks[0].shape
    if size > MOST_DRAWN or queries > size:
        return None
    names = ("my_mask", "other_mask")[: len(masks)]
    given = [
        {"name": name, "queries": queries, "rows": [_runs(row) for row in mask]}
        for name, mask in zip(names, masks, strict=True)
    ]
    against = "&against=other_mask()" if len(masks) > 1 else ""
    start = f"masks?mask=my_mask()&keys={size}&queries={queries}{against}"
    return show_page(build_page({"masks": given, "start": start, "embedded": True}), HEIGHT, scripts=True)


def _runs(row: Tensor) -> list[list[int]]:
    """The visible keys of a query as runs [start, stop)."""
    edges = torch.diff(row.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()[:, 0]
    return [[int(start), int(stop)] for start, stop in edges.reshape(-1, 2)]


def recorded_data(seen: Seen, tokens: Sequence[str] | Tensor | None) -> dict[str, Any]:
    """The data of a page that shows a recorded forward pass: every head, small, and the weights of each."""
    from regard.explorer.views.models import OpenedModel, describe, describe_head

    if not seen:
        raise ConfigError(f"nothing was recorded: {'; '.join(seen.left_out) or 'run the model inside the block'}")
    count = seen.records[0].k.shape[2]
    ids = tokens if isinstance(tokens, Tensor) else None
    labels = [str(int(token)) for token in ids.reshape(-1)[:count]] if ids is not None else list(map(str, tokens or []))
    labels = labels or [str(at + 1) for at in range(count)]
    if len(labels) != count:
        raise ConfigError(f"tokens has {len(labels)} labels, but the first record has {count} keys")
    opened = OpenedModel(
        name="recorded",
        model=nn.Identity(),
        run=lambda: None,
        tokens=labels,
        ids=None if ids is None else ids.reshape(-1, count)[:1],
        label=str,
        setup="import torch\nimport regard\n# model and tokens are those of your notebook",
    )
    answer = describe(seen, opened) | {"position": count - 1, "before": [], "after": [], "target": ""}
    stored = {"recorded|pass|overview": answer}
    places = [(at, head) for at, record in enumerate(seen.records) for head in range(record.q.shape[1])]
    for layer, head in places[:MOST_HEADS]:
        own = {"head": describe_head(seen.records, opened, layer, head)}
        stored[f"recorded|pass|head|{layer}|{head}"] = answer | own
    return {
        "models": [{"name": "recorded", "what": "a forward pass that was watched", "example": "pass"}],
        "stored": stored,
        "tabs": ["overview", "head"],
        "start": "models?model=recorded&text=pass",
        "embedded": True,
    }
