"""Compute what the Models view shows: maps of all heads, one head, predictions, effects of edits, and attributions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.explorer.worker import Progress
from regard.see.heads import HeadSummary, measure_heads
from regard.see.record import Record, Seen
from regard.see.relevance import weight_gradients
from regard.see.watch import watch

MAP_CELLS = 24  # largest side of a small map in the overview, in cells
HEAD_CELLS = 48  # largest side of the map of one head with more than MOST_EXACT positions
MOST_EXACT = 48  # positions up to which every weight is sent
MOST_HEADS = 1024
MOST_ABLATED = 64  # heads that are ablated one by one
MOST_PARTS = 64  # parts of a number that are listed, the largest
TOP = 8
LABEL_FROM = 0.5  # a head has a kind if it spends at least half of its weight on it


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model and one input for it.

    run     runs one forward pass and returns the model's output
    tokens  labels of the positions
    ids     the token ids, for the induction score; None for an image
    label   returns the text of an output index: a token of the vocabulary or a class
    setup   Python code that loads the model and makes its input
    call    Python code that runs the model
    image   for an image model: {"rows", "columns", "address"}
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
    """Answer a request of the explorer's Models page: run the model, apply the edits, describe its attention.

    request     the fields of `regard.explorer.api.ModelRequest`
    progress    called with a message at each stage
    open_model  returns the `OpenedModel` for a model name and an input text
    """
    progress(f"loading {request['model']}")
    opened = open_model(request["model"], request["text"])
    progress(f"running {opened.name} on {len(opened.tokens)} positions")
    with torch.no_grad(), watch(opened.model) as seen:
        before = logits_of(opened.run())
    if not seen:
        raise ConfigError(f"no attention was recorded in {opened.name}: {_reasons(seen)}")
    source = _run_source(request, open_model)
    after = before
    if request["edits"]:
        with torch.no_grad(), _edited(opened, request, source), watch(opened.model) as seen:
            after = logits_of(opened.run())
    position = _position(before, request["position"])
    if request["show"] == "why":
        with _edited(opened, request, source):
            return explain_number(opened, _records(seen), request["why"], position)
    progress("measuring the heads")
    answer = describe(seen, opened)
    target = _target(opened, before, position, request["target"])
    answer |= {"position": len(opened.tokens) - 1 if position is None else position}
    answer |= _predictions(opened, before, after, position, target)
    if request["show"] == "head":
        answer["head"] = describe_head(_records(seen), opened, request["layer"], request["head"], request["row"])
        if target is not None and "pooled" not in answer["head"]:
            with _edited(opened, request, source):
                answer["head"] |= _relevance(opened, request["layer"], request["head"], position, target)
    if request["show"] == "flow":
        with _edited(opened, request, source):
            answer |= _flow(opened, position, target)
    if request["show"] == "edit":
        heads = request["brush"] or [
            (at, h) for at, each in enumerate(answer["layers"]) for h in range(len(each["heads"]))
        ]
        answer["ablations"] = _ablations(opened, request, source, after, position, target, heads, progress)
    return answer


def describe(seen: Seen, opened: OpenedModel) -> dict[str, Any]:
    """Describe every head of a recorded forward pass as JSON data: a small map of its weights, and statistics."""
    tokens = ["class"] * (seen.records[0].k.shape[2] - len(opened.tokens)) if opened.image else []
    return {
        "tokens": [*tokens, *opened.tokens],
        "layers": [_layer(record, opened) for record in _records(seen)],
        "image": opened.image is not None,
        "setup": opened.setup,
        "call": opened.call,
        "causal": _is_causal(seen),
        "cacheBytes": _cache_bytes(seen),
    }


def logits_of(output: Any) -> Float[Tensor, "b ... classes"] | None:
    """Return the logits in a model's output, or None if the output has no float tensor of 2 or 3 axes."""
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
    """Return whether the recorded pass looks causal: the first queries give later keys no weight.

    Only the first 8 queries of the first head in the first layer are checked.
    """
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
    """Classify a head by its largest score: "induction", "previous token" or "first token".

    If no score reaches LABEL_FROM, the label is "uniform" or "mixed", and the value is the spread of the
    weights.
    """
    kinds = {"induction": summary.induction, "previous token": summary.previous, "first token": summary.first}
    label, value = max(((kind, value or 0.0) for kind, value in kinds.items()), key=lambda each: each[1])
    if value >= LABEL_FROM:
        return {"label": label, "value": value}
    return {"label": "uniform" if summary.spread >= 0.95 else "mixed", "value": summary.spread}


def describe_head(
    records: list[Record], opened: OpenedModel, layer: int, head: int, row: int | None = None
) -> dict[str, Any]:
    """Return the attention weights of one head as JSON data.

    Long sequences get a pooled map and the exact weights of one query instead.

    row  the query of the exact weights; None takes the last
    """
    if not (layer < len(records) and head < records[layer].q.shape[1]):
        raise ConfigError(f"there is no layer {layer + 1} head {head + 1} in {opened.name}")
    record = records[layer]
    sizes = (record.q.shape[2], record.k.shape[2])
    if max(sizes) > MOST_EXACT and opened.image is None:
        rows, columns = (min(HEAD_CELLS, size) for size in sizes)
        at = sizes[0] - 1 if row is None else min(row, sizes[0] - 1)
        exact = [round(weight, 6) for weight in record.rows([at])[0, head, 0].tolist()]
        return {"weights": _lists(record.pooled((rows, columns))[0, head]), "pooled": True, "row": at, "exact": exact}
    weights = record.rows(torch.arange(sizes[0]))[0, head]
    answer: dict[str, Any] = {"weights": _lists(weights), "image": opened.image}
    if record.v is not None:
        own = record.v[0, head * record.v.shape[1] // record.q.shape[1]]  # grouped heads share their values
        answer["contribution"] = _lists(weights * own.norm(dim=-1))
    return answer


def _lists(values: Tensor) -> list[Any]:
    """Convert a tensor of 2 or 3 axes to nested lists, rounded to four decimals to keep the response small."""
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
    """Return the `count` most likely outputs, each with token, id, probability and logit.

    row    logits of one position
    count  number of outputs
    more   ids of further outputs to include
    """
    share = row.softmax(-1)
    ids = {*share.topk(min(count, len(share))).indices.tolist(), *([] if more is None else more.tolist())}
    return [
        {"token": opened.label(at), "id": at, "probability": float(share[at]), "logit": float(row[at])}
        for at in sorted(ids, key=lambda at: -float(share[at]))
    ]


def _target(opened: OpenedModel, logits: Tensor | None, position: int | None, asked: str) -> int | None:
    """Return the id of the output (token or class) whose logit the page explains; None without logits.

    The output labelled `asked` is returned if it is among the 50 most likely outputs, else the most likely output.
    """
    if logits is None:
        return None
    row = _row(logits, position)
    top: list[int] = row.topk(min(50, len(row))).indices.tolist()
    return next((at for at in top if asked and opened.label(at) == asked), top[0])


def _predictions(
    opened: OpenedModel, before: Tensor | None, after: Tensor | None, position: int | None, target: int | None
) -> dict[str, Any]:
    if before is None or after is None or target is None:
        return {"before": [], "after": [], "target": ""}
    rows = _row(before, position), _row(after, position)
    tops = [row.topk(min(TOP, len(row))).indices for row in rows]
    return {
        "before": _top(opened, rows[0], more=tops[1]),
        "after": _top(opened, rows[1], more=tops[0]),
        "target": opened.label(target),
    }


def _run_source(request: dict[str, Any], open_model: Open) -> Seen:
    """Record a forward pass on the source text, whose head outputs the "patch" edits insert.

    Returns an empty recording if the request has no "patch" edit.
    """
    if not any(edit["kind"] == "patch" for edit in request["edits"]):
        return Seen()
    if not request["source"]:
        raise ConfigError("patching needs the other text to take the outputs from")
    other = open_model(request["model"], request["source"])
    with torch.no_grad(), watch(other.model) as source:
        other.run()
    return source


@contextmanager
def _edited(opened: OpenedModel, request: dict[str, Any], source: Seen) -> Iterator[None]:
    """Context manager: apply the interventions of a request to the model.

    source  recorded forward pass from which "patch" edits take the head outputs
    """
    from regard.see.interventions.intervene import intervene

    if not request["edits"]:
        yield
        return
    with intervene(opened.model) as change:
        for edit in request["edits"]:
            layer, heads, value = edit["layer"], None if edit["head"] is None else [edit["head"]], edit["value"]
            if edit["kind"] in ("ablate", "mean"):
                change.ablate(layer, heads=heads, how="zero" if edit["kind"] == "ablate" else "mean")
            elif edit["kind"] == "patch":
                change.patch(layer, heads=heads, source=source)
            elif value is None:
                raise ConfigError(f"the edit {edit['kind']} needs a value")
            elif edit["kind"] == "beta":
                change.scale_beta(layer, float(value), heads=heads)
            else:
                change.hide(layer, keys=[int(value)], heads=heads)
        yield


def _ablations(
    opened: OpenedModel,
    request: dict[str, Any],
    source: Seen,
    after: Tensor | None,
    position: int | None,
    target: int | None,
    heads: Sequence[tuple[int, int]],
    progress: Progress,
) -> list[dict[str, Any]] | None:
    """Return how the target's logit changes when each head is set to zero, and all selected heads together.

    Returns None without logits or target, or for more than MOST_ABLATED heads.

    after  logits with the edits of the request
    heads  (layer, head) pairs to ablate; those in request["brush"] if the user selected some
    """
    if after is None or target is None or len(heads) > MOST_ABLATED:
        return None
    groups = [[head] for head in heads] + ([list(heads)] if request["brush"] and len(heads) > 1 else [])
    found = []
    for count, group in enumerate(groups):
        progress(f"ablating head {count + 1} of {len(groups)}")
        edits = [{"kind": "ablate", "layer": layer, "head": head, "value": None} for layer, head in group]
        changed = {**request, "edits": [*request["edits"], *edits]}
        with torch.no_grad(), _edited(opened, changed, source):
            without = logits_of(opened.run())
        if without is not None:
            difference = _row(without, position)[target] - _row(after, position)[target]
            where = {"layer": group[0][0], "head": group[0][1]} if len(group) == 1 else {}
            found.append({**where, "heads": len(group), "change": float(difference)})
    return found


def _relevance(opened: OpenedModel, layer: int, head: int, position: int | None, target: int) -> dict[str, Any]:
    """Return the gradient relevance map of one head (Chefer et al. 2021): max(0, weight * gradient).

    The gradient is the derivative of the target's logit by the weight. Returns an empty dict if gradients were not
    recorded.
    """
    with torch.enable_grad(), watch(opened.model) as seen:
        logits = logits_of(opened.run())
        if logits is None or not logits.requires_grad:
            return {}
        _row(logits, position)[target].backward()
    opened.model.zero_grad(set_to_none=True)
    record = seen.records[layer]
    if record.gradient is None or record.v is None or record.dropout:
        return {}
    products = (weight_gradients(record) * record.weights()).clamp(min=0)
    return {"relevance": _lists(products[0, head].detach())}


def _flow(opened: OpenedModel, position: int | None, target: int | None) -> dict[str, Any]:
    """Return the logit lens of each layer and the direct logit attribution of the target's logit."""
    from regard.see.interventions.logit_attribution import direct_logit_attribution
    from regard.see.interventions.logit_lens import logit_lens

    if target is None:
        raise ConfigError(f"{opened.name} has no logits, so there is nothing to follow")
    lens = logit_lens(opened.model, opened.run, progress=False)
    found = direct_logit_attribution(opened.model, opened.run, target, position=-1 if position is None else position)
    states = ["embedding", *(f"after layer {at + 1}" for at in range(len(lens) - 1))]
    layers = list(found.gradients)
    return {
        "lens": [
            {"name": name, "top": _top(opened, _row(row, position), 4)} for name, row in zip(states, lens, strict=True)
        ],
        "attribution": [
            {"name": _part_name(part, layers), **_part_place(part, layers), "value": float(value)}
            for part, value in zip(found.parts, found.values[0], strict=True)
        ],
        "targetId": target,
    }


def _part_place(part: str, layers: list[str]) -> dict[str, int]:
    """Return the layer and head indices of a component such as "NAME head 3"; an empty dictionary for other components.

    part    name of a component in a direct logit attribution
    layers  names of the attention layers, in order
    """
    layer, found, head = part.rpartition(" head ")
    return {"layer": layers.index(layer), "head": int(head)} if found else {}


def _part_name(part: str, layers: list[str]) -> str:
    """Return the displayed name of a component of a logit: "layer 1 head 4", counted from 1, or the name unchanged."""
    place = _part_place(part, layers)
    return f"layer {place['layer'] + 1} head {place['head'] + 1}" if place else part


def explain_number(opened: OpenedModel, records: list[Record], key: str, position: int | None) -> dict[str, Any]:
    """Explain how a number on the page is computed: a logit, a head's part of a logit, a weight or a score.

    key  logit.TOKEN, head.LAYER.HEAD.TOKEN, weight.LAYER.HEAD.QUERY.KEY or score.LAYER.HEAD.QUERY.KEY
    """
    kind, *rest = key.split(".")
    sizes = {"logit": 1, "head": 3, "weight": 4, "score": 4}
    if len(rest) != sizes.get(kind) or not all(part.isdecimal() for part in rest):
        raise ConfigError(f"{key!r} names no number of this page")
    at = [int(part) for part in rest]
    if kind == "logit":
        return _explain_logit(opened, at[0], position)
    if not (at[0] < len(records) and at[1] < records[at[0]].q.shape[1]):
        raise ConfigError(f"there is no layer {at[0] + 1} head {at[1] + 1} in {opened.name}")
    if kind == "head":
        return _explain_head(opened, records[at[0]], *at, position=position)
    return _explain_pair(opened, records[at[0]], kind, *at)


def _explain_logit(opened: OpenedModel, token: int, position: int | None) -> dict[str, Any]:
    from regard.see.interventions.logit_attribution import direct_logit_attribution

    found = direct_logit_attribution(opened.model, opened.run, token, position=-1 if position is None else position)
    layers, parts = list(found.gradients), []
    for part, value in zip(found.parts, found.values[0].tolist(), strict=True):
        place = _part_place(part, layers)
        into = {"key": f"head.{place['layer']}.{place['head']}.{token}"} if place else {}
        parts.append({"label": _part_name(part, layers), "value": value, **into})
    return {
        "title": f"logit of {opened.label(token)}",
        "value": float(found.logits[0]),
        "formula": "the parts of the residual stream, each through the final norm and the output layer",
        "note": "Direct logit attribution: the norms' factors are held constant, so the parts sum to the logit.",
        "parts": sorted(parts, key=lambda part: -abs(part["value"])),
    }


def _explain_head(
    opened: OpenedModel, record: Record, layer: int, head: int, token: int, *, position: int | None
) -> dict[str, Any]:
    from regard.see.interventions.logit_attribution import direct_logit_attribution

    found = direct_logit_attribution(opened.model, opened.run, token, position=-1 if position is None else position)
    values = found.of_keys(record, head)[0]
    row = record.q.shape[2] - 1 if position is None else position
    labels = _key_labels(opened, record)
    order = values.abs().argsort(descending=True)[:MOST_PARTS].tolist()
    return {
        "title": f"layer {layer + 1} head {head + 1} \N{RIGHTWARDS ARROW} {opened.label(token)}",
        "value": float(found.of(f"{record.name} head {head}")[0]),
        "formula": "sum over the keys: weight \N{MULTIPLICATION SIGN} value through W_o, norm and output layer",
        "note": "After an ablation the head writes 0, whatever these parts are.",
        "parts": [
            {"label": f"from {labels[j]}", "value": float(values[j]), "key": f"weight.{layer}.{head}.{row}.{j}"}
            for j in order
        ],
    }


def _explain_pair(
    opened: OpenedModel, record: Record, kind: str, layer: int, head: int, i: int, j: int
) -> dict[str, Any]:
    """Explain an attention weight by the scores of its query, or a score by the products of q and k entries.

    kind  "weight" or "score"
    i, j  indices of the query and the key
    """
    if not (i < record.q.shape[2] and j < record.k.shape[2]):
        raise ConfigError(f"there is no query {i + 1} or key {j + 1} in {record.name}")
    labels = _key_labels(opened, record)
    query, shift = record.q[0, head, i].float(), record.k.shape[2] - record.q.shape[2]
    keys = record.k[0, head * record.k.shape[1] // record.q.shape[1]].float()
    products, weights = keys @ query, record.rows([i])[0, head, 0]
    pair = f"{labels[min(i + shift, len(labels) - 1)]} \N{RIGHTWARDS ARROW} {labels[j]}"
    if kind == "score":
        terms = query * keys[j]
        order = terms.abs().argsort(descending=True).tolist()
        # masks and score terms add the rest of the logarithm of the weight
        added = float(weights[j].log() + record.lse[0, head, i] - record.beta * products[j])
        note = f"Score terms add {added:.4g} after it is multiplied by beta." if record.terms and weights[j] > 0 else ""
        return {
            "title": f"score {pair}",
            "value": float(products[j]),
            "formula": f"q \N{MIDDLE DOT} k, the sum of these products; beta = {record.beta:.4g}",
            "note": note,
            "parts": [{"label": f"q[{c}] \N{MULTIPLICATION SIGN} k[{c}]", "value": float(terms[c])} for c in order],
        }
    order = weights.argsort(descending=True)[:MOST_PARTS].tolist()
    return {
        "title": f"weight {pair}",
        "value": float(weights[j]),
        "formula": "softmax of the scores over the visible keys" if weights[j] > 0 else "hidden, or too small to show",
        "note": f"The scores q \N{MIDDLE DOT} k are multiplied by beta = {record.beta:.4g} first.",
        "parts": [
            {"label": f"score of {labels[at]}", "value": float(products[at]), "key": f"score.{layer}.{head}.{i}.{at}"}
            for at in order
            if weights[at] > 0
        ],
    }


def _key_labels(opened: OpenedModel, record: Record) -> list[str]:
    labels = ["class"] * (record.k.shape[2] - len(opened.tokens)) + list(opened.tokens)
    return [f"{label} ({at + 1})" for at, label in enumerate(labels)]
