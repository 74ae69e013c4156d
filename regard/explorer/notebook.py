"""`regard.show`: show a mask, two masks, a recorded forward pass or a report in a notebook, as the explorer does."""

import tempfile
import webbrowser
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from torch import Tensor, nn

from regard.base.atomic_write import write_output
from regard.base.display import show_page
from regard.base.errors import ConfigError, RegardError
from regard.conform.report import Report
from regard.core.masks.expression import parse_mask
from regard.explorer.page import build_page
from regard.integrations import notebook
from regard.integrations.notebook import MaskComparison, MaskPicture
from regard.see.record import Seen

MOST_DRAWN = 4096  # keys of a mask that the page holds as runs
OWN_NAMES = ("my_mask", "other_mask")  # names of masks that are not expressions
MOST_HEADS = 64  # heads of a recorded pass whose weights the page holds
HEIGHT = 720


class Page(ABC):
    """Base class of views of the explorer. A notebook shows them in a frame, and a web browser can open them."""

    @abstractmethod
    def data(self) -> dict[str, Any] | None:
        """Return the data that the page shows; None if there is too much for one page."""

    def save(self, path: str | Path) -> Path:
        """Write the view to an HTML file that needs no server, and return its path."""
        data = self.data()
        if data is None:
            raise ConfigError(f"a page shows masks of up to {MOST_DRAWN} keys, and no more queries than keys")
        page = build_page(data)
        write_output(Path(path), lambda file: file.write_text(page, encoding="utf-8"))
        return Path(path)

    def open(self) -> Path:
        """Write the view to a temporary file, open it in a web browser if there is one, and return its path."""
        path = self.save(Path(tempfile.mkdtemp(prefix="regard-")) / "view.html")
        webbrowser.open(path.as_uri())
        return path

    def _repr_html_(self) -> str:
        data = self.data()
        # a frame has no address of its own
        return "" if data is None else show_page(build_page(data | {"embedded": True}), HEIGHT, scripts=True)


class EmbeddedPicture(Page, MaskPicture):
    """A mask that prints as text and displays as the explorer's Masks view in a notebook."""

    def data(self) -> dict[str, Any] | None:
        return mask_data([self.visible[0, 0]], [self.name])

    def _repr_html_(self) -> str:
        return Page._repr_html_(self) or MaskPicture._repr_html_(self)


class EmbeddedComparison(Page, MaskComparison):
    """Two masks and their difference; prints as text and displays as the explorer's Masks view in a notebook."""

    def data(self) -> dict[str, Any] | None:
        b, h = (self.first_difference or (0, 0))[:2]
        data = mask_data([each[b, h] for each in self.visible], self.names)
        # the page sees no numbers, sequences or heads
        where = [f"That is in sequence {b}, head {h}."] if b or h else []
        found = [f"They would be equal if {each}." for each in self.conventions]
        return None if data is None else data | {"note": " ".join(where + found)}

    def _repr_html_(self) -> str:
        return Page._repr_html_(self) or MaskComparison._repr_html_(self)


@dataclass(frozen=True)
class EmbeddedView(Page):
    """An explorer page that a notebook displays in a frame; elsewhere `text` is printed."""

    content: dict[str, Any]
    text: str

    def data(self) -> dict[str, Any]:
        return self.content

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def show(
    thing: Any,
    against: Any = None,
    *,
    queries: int | None = None,
    keys: int | None = None,
    tokens: Sequence[str] | Tensor | None = None,
) -> MaskPicture | MaskComparison | EmbeddedView:
    """Show a mask, two masks, a recorded pass or a report: a view of the explorer in a notebook, text elsewhere.

    In a script, `.open()` of the result opens the view in a browser and `.save("view.html")` writes it.

    thing    a mask of regard; a boolean tensor, True meaning visible; an additive tensor; the (b, n) attention_mask of
             a tokenizer; a mask_mod; a BlockMask; the mask of a Hugging Face model; the `seen` of `regard.watch`; or
             a report of `regard.check`
    against  another mask of any of these kinds, to compare
    queries  number of queries of a mask; by default that of a tensor, or 12 for a mask without sizes
    keys     number of keys of a mask; by default that of a tensor, or `queries` for a mask without sizes
    tokens   labels of the positions of a recorded pass, or its token ids

    Here a causal mask is compared with one that also hides each query's own key:

    >>> print(regard.show(causal(), against=torch.ones(3, 3).tril(-1).bool()).summary)
    3 cells differ; the first is query 0, key 0: visible in causal(), hidden in boolean (3, 3)
    they would be equal if causal() hid the query's own key
    """
    if isinstance(thing, Seen):
        return EmbeddedView(recorded_data(thing, tokens), repr(thing))
    if isinstance(thing, Report):
        from regard.explorer.views.reports import read_report

        data = {"report": {"report": read_report(thing.json(), "the report")}, "start": "check"}
        return EmbeddedView(data, str(thing))
    found = notebook.show(thing, against, queries=queries, keys=keys)
    if isinstance(found, MaskPicture):
        return EmbeddedPicture(found.name, found.visible)
    return EmbeddedComparison(found.names, found.visible, found.conventions)


def mask_data(masks: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the JSON data of the Masks view for one mask, or for two to compare; None if they are too large.

    names  names of the masks. If a name is a mask expression such as "causal()" and gives this mask, the page computes
           the mask from it
    """
    queries, size = masks[0].shape
    if size > MOST_DRAWN or queries > size:
        return None
    shown = [
        name if _is_expression(name, mask) else f"{own}()"
        for name, mask, own in zip(names, masks, OWN_NAMES, strict=False)
    ]
    given = [
        {"name": own, "queries": queries, "keys": size, "rows": [_runs(row) for row in mask]}
        for mask, own, name in zip(masks, OWN_NAMES, shown, strict=False)
        if name == f"{own}()"
    ]
    state = {"mask": shown[0], "keys": size, "queries": queries} | ({"against": shown[1]} if len(shown) > 1 else {})
    return {"masks": given, "start": f"masks?{urlencode(state)}"}


def _is_expression(name: str, visible: Tensor) -> bool:
    """Return whether a name is a mask expression, such as "causal()", whose mask equals `visible`."""
    try:
        matrix = parse_mask(name).dense(*visible.shape)
    except RegardError:
        return False
    return torch.equal(matrix.expand(1, 1, *visible.shape)[0, 0], visible)


def _runs(row: Tensor) -> list[list[int]]:
    """Return the visible keys of one query as intervals [start, stop) of consecutive keys."""
    edges = torch.diff(row.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()[:, 0]
    return [[int(start), int(stop)] for start, stop in edges.reshape(-1, 2)]


def recorded_data(seen: Seen, tokens: Sequence[str] | Tensor | None) -> dict[str, Any]:
    """Return the JSON data of a page that shows the attention weights of a recorded forward pass.

    tokens  labels of the positions, or token ids; None numbers the positions from 1
    """
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
    }
