"""Precomputed results of the shipped examples, for an exported page, which has no server."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from regard.base.errors import RegardError
from regard.explorer.worker import Task

GALLERY = (
    "full()", "causal()", "causal() & window(before=3)", "window(before=2, after=2)", "causal() & dilated(2)",
    "strided(4)", "blocks(4)", "chunks(4, before=1)", "causal() & window(before=3) | global_tokens(1)",
    "causal() | prefix(4)", "causal() & documents([0,0,0,0,0,1,1,1,1,1,1,1,2,2,2,2])", "padding([12])",
)  # fmt: skip
LENGTH = 16  # number of positions of the gallery's masks
SHOWS = ("overview", "edit", "flow", "generate")


def store_model(name: str, text: str, model: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compute the responses of the Models page for one model and input, for a page without a server.

    Yields (key, response) for each tab and each head; the page looks a response up by its key.

    model  the server's task that answers a request of the Models page
    """
    base: dict[str, Any] = {
        "model": name, "text": text, "layer": 0, "head": 0, "edits": [], "source": "", "position": None, "target": "",
        "row": None, "brush": [], "why": "",
    }  # fmt: skip

    def ask(**changes: Any) -> dict[str, Any]:
        return model({**base, **changes}, lambda text: None)

    layers = ask(show="overview")["layers"]
    for show in SHOWS:
        try:
            yield f"{name}|{text}|{show}", ask(show=show)
        except RegardError:
            continue  # a model without logits has no flow: the page says what is missing
    for layer, found in enumerate(layers):
        for head in range(len(found["heads"])):
            yield f"{name}|{text}|head|{layer}|{head}", ask(show="head", layer=layer, head=head)


def store_kernels(explain: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Compute which kernel runs for each mask of the gallery, for a page without a server.

    explain  returns the response for a mask and a length
    """
    return {f"explain|{mask}|{LENGTH}|{LENGTH}": explain(mask, LENGTH) for mask in GALLERY}


def store_worked(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute the worked solutions of the examples in the Attention view, for a page without a server."""
    from regard.explorer.views.worked import work_out

    names = ("q", "k", "v", "mask", "beta", "heads")
    return {
        f"work|{json.dumps([each[name] for name in names], separators=(',', ':'))}": work_out(each) for each in examples
    }
