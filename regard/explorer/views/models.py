"""What the Models view shows of a model that Python runs: heads, one head, predictions, edits, flow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.explorer.worker import Progress
from regard.see.heads import HeadSummary, measure_heads
from regard.see.record import Record, Seen
from regard.see.watch import watch

MAP_CELLS = 24  # of a small map in the overview
HEAD_CELLS = 48  # of the map of one head, where it has more positions than MOST_EXACT
MOST_EXACT = 48  # positions up to which every weight is sent
MOST_HEADS = 1024
TOP = 8
LABEL_FROM = 0.5  # a head has a kind if it spends at least half of its weight on it


@dataclass(frozen=True)
class OpenedModel:
    """A model with one input.

    run     one forward pass, which returns the model's output
    tokens  labels of the positions
    ids     the token ids, for the induction score; None for an image
    label   the text of an output: a token of the vocabulary or a class
    setup   Python that loads the model and makes its input
    call    Python that runs it
    image   of an image model: {"rows", "columns", "address"}
    """

    name: str
    model: nn.Module
    run: Callable[[], Any]
    tokens: Sequence[str]
    ids: Tensor | None
    label: Callable[[int], str]
    setup: str = ""
    call: str = "model(tokens)"
    image: dict[str, Any] | None = None


Open = Callable[[str, str], OpenedModel]  # by name and text


def analyse(request: dict[str, Any], progress: Progress, open_model: Open) -> dict[str, Any]:
    """The answer to one request of the Models view."""
    progress(f"loading {request['model']}")
    opened = open_model(request["model"], request["text"])
    progress(f"running {opened.name} on {len(opened.tokens)} positions")
    with torch.no_grad(), watch(opened.model) as seen:
        before = logits_of(opened.run())
    if not seen:
        raise ConfigError(f"no attention was recorded in {opened.name}: {_reasons(seen)}")
    progress("measuring the heads")
    position = _position(before, request["position"])
    layers = [_layer(record, opened) for record in _records(seen)]
    tokens = ["class"] * (seen.records[0].k.shape[2] - len(opened.tokens)) if opened.image else []
    answer: dict[str, Any] = {
        "tokens": [*tokens, *opened.tokens],
        "layers": layers,
        "image": opened.image is not None,
        "setup": opened.setup,
        "call": opened.call,
        "causal": _is_causal(seen),
        "cacheBytes": _cache_bytes(seen),
    }
    answer |= {"position": len(opened.tokens) - 1 if position is None else position}
    answer |= _predictions(opened, before, request, position, open_model)
    if request["show"] in ("head", "edit"):
        answer["head"] = _head(_records(seen), opened, request["layer"], request["head"])
    if request["show"] == "flow":
        answer |= _flow(opened, before, position, request["target"])
    if request["show"] == "edit":
        answer["ablations"] = _ablations(
            opened, before, position, _target(opened, before, position, request["target"]), layers, progress
        )
    return answer


def logits_of(output: Any) -> Float[Tensor, "b ... classes"] | None:
    """The logits of a model's output; None if it has none."""
    found = getattr(output, "logits", output)
    return found if isinstance(found, Tensor) and found.ndim in (2, 3) and found.is_floating_point() else None


def _records(seen: Seen) -> list[Record]:
    records = seen.records
    if sum(record.q.shape[1] for record in records) > MOST_HEADS:
        raise ConfigError(f"the page shows at most {MOST_HEADS} heads; this model has more")
    return records


def _reasons(seen: Seen) -> str:
    return "; ".join(seen.left_out) or "it has no attention with weights"


def _is_causal(seen: Seen) -> bool:
    """Whether no query of the first layer sees a later key."""
    record = seen.records[0]
    rows = torch.arange(min(record.q.shape[2], 8))
    weights = record.rows(rows)[0, 0]
    return bool((weights.triu(1 + record.k.shape[2] - record.q.shape[2]) == 0).all())


def _cache_bytes(seen: Seen) -> int:
    parts = [part for record in seen.records for part in (record.k, record.v) if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def _layer(record: Record, opened: OpenedModel) -> dict[str, Any]:
    fits = opened.ids is not None and opened.ids.shape[-1] == record.k.shape[2] == record.q.shape[2]
    summaries = measure_heads(record, opened.ids if fits else None)
    rows, columns = (min(MAP_CELLS, size) for size in (record.q.shape[2], record.k.shape[2]))
    maps = _lists(record.pooled((rows, columns))[0])
    return {
        "name": record.name,
        "heads": [
            {"numbers": _numbers(summary), **_label(summary), "map": map_}
            for summary, map_ in zip(summaries, maps, strict=True)
        ],
    }


def _numbers(summary: HeadSummary) -> dict[str, float | None]:
    return {name: getattr(summary, name) for name in ("spread", "previous", "first", "induction")}


def _label(summary: HeadSummary) -> dict[str, Any]:
    """The kind of a head by its largest number, with that number."""
    kinds = {"induction": summary.induction, "previous token": summary.previous, "first token": summary.first}
    label, value = max(((kind, value or 0.0) for kind, value in kinds.items()), key=lambda each: each[1])
    if value >= LABEL_FROM:
        return {"label": label, "value": value}
    return {"label": "uniform" if summary.spread >= 0.95 else "mixed", "value": summary.spread}


def _head(records: list[Record], opened: OpenedModel, layer: int, head: int) -> dict[str, Any]:
    if not (layer < len(records) and head < records[layer].q.shape[1]):
        raise ConfigError(f"there is no layer {layer + 1} head {head + 1} in {opened.name}")
    record = records[layer]
    sizes = (record.q.shape[2], record.k.shape[2])
    if max(sizes) > MOST_EXACT and opened.image is None:
        rows, columns = (min(HEAD_CELLS, size) for size in sizes)
        return {"weights": _lists(record.pooled((rows, columns))[0, head]), "pooled": True}
    weights = record.rows(torch.arange(sizes[0]))[0, head]
    answer = {"weights": _lists(weights), "image": opened.image}
    if record.v is not None:
        own = record.v[0, head * record.v.shape[1] // record.q.shape[1]]  # grouped heads share their values
        answer["contribution"] = _lists(weights * own.norm(dim=-1))
    return answer


def _lists(values: Tensor) -> list[Any]:
    """Numbers with four digits, as lists: enough for a picture, and a third of the bytes."""
    return (
        [[[round(x, 4) for x in row] for row in map_] for map_ in values.tolist()]
        if values.ndim == 3
        else [[round(x, 4) for x in row] for row in values.tolist()]
    )


def _position(logits: Tensor | None, asked: int | None) -> int | None:
    if logits is None or logits.ndim == 2:
        return None
    return logits.shape[1] - 1 if asked is None else min(asked, logits.shape[1] - 1)


def _row(logits: Tensor, position: int | None) -> Float[Tensor, "classes"]:
    return (logits[0] if position is None else logits[0, position]).float()


def _top(opened: OpenedModel, row: Tensor, count: int = TOP, more: Tensor | None = None) -> list[dict[str, Any]]:
    """The most likely outputs, and those of `more` ids, by falling probability."""
    share = row.softmax(-1)
    ids = {*share.topk(min(count, len(share))).indices.tolist(), *([] if more is None else more.tolist())}
    return [
        {"token": opened.label(at), "id": at, "probability": float(share[at]), "logit": float(row[at])}
        for at in sorted(ids, key=lambda at: -float(share[at]))
    ]


def _target(opened: OpenedModel, logits: Tensor | None, position: int | None, asked: str) -> int | None:
    """The output whose logit is followed: the one with this label, or the most likely one."""
    if logits is None:
        return None
    row = _row(logits, position)
    top: list[int] = row.topk(min(50, len(row))).indices.tolist()
    return next((at for at in top if asked and opened.label(at) == asked), top[0])


def _predictions(
    opened: OpenedModel, before: Tensor | None, request: dict[str, Any], position: int | None, open_model: Open
) -> dict[str, Any]:
    if before is None:
        return {"before": [], "after": [], "target": ""}
    after = before
    if request["edits"]:
        after = _run_edited(opened, request, open_model)
    target = _target(opened, before, position, request["target"])
    rows = _row(before, position), _row(after, position)
    tops = [row.topk(min(TOP, len(row))).indices for row in rows]
    return {
        "before": _top(opened, rows[0], more=tops[1]),
        "after": _top(opened, rows[1], more=tops[0]),
        "target": "" if target is None else opened.label(target),
    }


def _run_edited(opened: OpenedModel, request: dict[str, Any], open_model: Open) -> Tensor:
    """The logits with the edits of a request."""
    from regard.see.interventions.intervene import intervene

    source = Seen()
    if any(edit["kind"] == "patch" for edit in request["edits"]):
        if not request["source"]:
            raise ConfigError("patching needs the other text to take the outputs from")
        other = open_model(request["model"], request["source"])
        with torch.no_grad(), watch(other.model) as source:
            other.run()
    with torch.no_grad(), intervene(opened.model) as change:
        for edit in request["edits"]:
            layer, heads, value = edit["layer"], None if edit["head"] is None else [edit["head"]], edit["value"]
            if edit["kind"] in ("ablate", "mean"):
                change.ablate(layer, heads=heads, how="zero" if edit["kind"] == "ablate" else "mean")
            elif edit["kind"] == "beta":
                change.scale_beta(layer, float(value), heads=heads)
            elif edit["kind"] == "hide":
                change.hide(layer, keys=[int(value)], heads=heads)
            else:
                change.patch(layer, heads=heads, source=source)
        after = logits_of(opened.run())
    if after is None:
        raise ConfigError(f"{opened.name} returned no logits")
    return after


def _ablations(
    opened: OpenedModel,
    before: Tensor | None,
    position: int | None,
    target: int | None,
    layers: list[Any],
    progress: Progress,
) -> list[dict[str, Any]] | None:
    """The change of the target's logit for each head set to zero alone; None for models of many heads."""
    from regard.see.interventions.intervene import intervene

    heads = [(at, head) for at, layer in enumerate(layers) for head in range(len(layer["heads"]))]
    if before is None or target is None or len(heads) > 64:
        return None
    found = []
    for count, (layer, head) in enumerate(heads):
        progress(f"ablating head {count + 1} of {len(heads)}")
        with torch.no_grad(), intervene(opened.model) as change:
            change.ablate(layer, heads=[head], how="zero")
            after = logits_of(opened.run())
        if after is not None:
            difference = _row(after, position)[target] - _row(before, position)[target]
            found.append({"layer": layer, "head": head, "change": float(difference)})
    return found


def _flow(opened: OpenedModel, logits: Tensor | None, position: int | None, asked: str) -> dict[str, Any]:
    """Logit lens and direct logit attribution of one logit."""
    from regard.see.interventions.logit_attribution import direct_logit_attribution
    from regard.see.interventions.logit_lens import logit_lens

    target = _target(opened, logits, position, asked)
    if target is None or position is None:
        raise ConfigError(f"{opened.name} predicts no token at a position, so there is no logit to follow")
    lens = logit_lens(opened.model, opened.run, progress=False)
    found = direct_logit_attribution(opened.model, opened.run, target, position=position)
    states = ["embedding", *(f"after layer {at + 1}" for at in range(len(lens) - 1))]
    return {
        "lens": [
            {"name": name, "top": _top(opened, _row(row, position), 4)} for name, row in zip(states, lens, strict=True)
        ],
        "attribution": [
            {"name": part, "value": float(value)} for part, value in zip(found.parts, found.values[0], strict=True)
        ],
    }
