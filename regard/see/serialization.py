"""What was seen, on disk: one safetensors file with all tensors, and the rest of each record as JSON in its header.

Masks that are rules are written as the expression that makes them, masks that hold data with their tensors beside. A
mask known only by its answers is written as the matrix of them, and a score_mod as the scores that it gave, while that
is not too large. A record that cannot be written is left out, and the file says so.
"""

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.base.errors import CheckpointError
from regard.core import scores
from regard.core.absolute_positions import Positions
from regard.core.masks import algebra, data, positional
from regard.core.masks.algebra import And, Full, Mask, Not, Or, Predicate
from regard.core.masks.data import DenseMask
from regard.core.scores import ScoreTerm
from regard.see import call_adapters
from regard.see.call_adapters import FlexMask, FlexScore, InterceptedCall, MeasuredScores, some_rows
from regard.see.record import Record, Seen

FORMAT = "regard-seen-1"
LARGEST = 1 << 28  # answers of a mask that are still written out
LARGEST_SCORES = 1 << 24  # scores of a score_mod that are: 64 MiB
AT_ONCE = 1 << 20  # scores worked out at a time
MASKS: dict[str, type[Mask]] = {
    kind.__name__: kind
    for kind in (
        algebra.Full, positional.Causal, positional.Window, positional.Chunks, positional.Prefix, positional.FirstRows,
        positional.GlobalTokens,         positional.Dilated, positional.RandomLinks, data.PaddingMask, data.DocumentMask, data.DenseMask,
    )
}  # fmt: skip
TERMS: dict[str, type[ScoreTerm]] = {
    kind.__name__: kind
    for kind in (
        scores.Alibi, scores.T5Buckets, scores.Shaw, scores.Softcap, scores.Sink, scores.Additive,
        call_adapters.MeasuredScores, call_adapters.Level,
    )
}  # fmt: skip


def save(seen: Seen, path: str | os.PathLike[str]) -> None:
    """Write all records; the file is there as a whole or not at all."""
    file = Path(path)
    if not file.parent.is_dir():
        raise CheckpointError(f"{file} cannot be written: there is no folder {file.parent}; make it first")
    tensors: dict[str, Tensor] = {}
    told = []
    failed: list[CheckpointError] = []
    for number, record in enumerate(seen.records):
        own: dict[str, Tensor] = {}
        try:
            told.append(_about(record, _Tensors(own, str(number))))
        except CheckpointError as error:
            failed.append(error)
        else:
            tensors |= own
    if failed and not told:
        raise failed[0]
    seen.left_out |= {f"not saved: {error}": 1 for error in failed}
    text = json.dumps({"format": FORMAT, "records": told, "left_out": seen.left_out})
    handle, name = tempfile.mkstemp(prefix=".unfinished-", dir=file.parent)
    os.close(handle)
    try:
        save_file(tensors, name, metadata={"regard": text})
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _about(record: Record, kept: "_Tensors") -> dict[str, Any]:
    """A record as JSON holds it, with its tensors put beside."""
    about: dict[str, Any] = {
        name: getattr(record, name)
        for name in ("name", "route", "beta", "dropout", "note", "heads", "rows_kept", "located")
    }
    for name in ("q", "k", "v", "gradient"):
        about[name] = kept.put(name, getattr(record, name))
    about["mask"] = _mask(record.mask, record, kept)
    terms = record.terms
    if (last := max((at for at, term in enumerate(terms) if isinstance(term, FlexScore)), default=None)) is not None:
        terms = (_scores(record, terms[: last + 1]), *terms[last + 1 :])
        about["note"] = "; ".join(part for part in (record.note, "saved with the scores of its score_mod") if part)
    about["terms"] = [_fields(term, TERMS, f"the term {term!r} of {record.name}", kept) for term in terms]
    about["positions"] = [record.positions.queries, kept.put("positions", record.positions.keys)]
    return about


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Seen:
    """Records with the same statistics as those that were saved."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"{file} is not there; seen.save(path) writes such a file")
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            about = json.loads((opened.metadata() or {}).get("regard", "{}"))
            # copied: a file's layout leaves tensors at odd addresses, which sum in another order
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from None
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} holds no records of attention: its format is {about.get('format')!r}, not {FORMAT!r}"
        )
    return Seen([_record(each, tensors) for each in about["records"]], about["left_out"])


def _record(about: dict[str, Any], tensors: dict[str, Tensor]) -> Record:
    gradient = _got(about["gradient"], tensors)
    queries, keys = about["positions"]
    return Record(
        name=about["name"],
        route=about["route"],
        q=_got(about["q"], tensors),
        k=_got(about["k"], tensors),
        v=_got(about["v"], tensors),
        mask=_made_mask(about["mask"], tensors),
        terms=tuple(_made(each, TERMS, tensors) for each in about["terms"]),
        beta=about["beta"],
        positions=Positions(queries, _got(keys, tensors)),
        dropout=about["dropout"],
        note=about["note"],
        heads=None if about["heads"] is None else tuple(about["heads"]),
        rows_kept=None if about["rows_kept"] is None else tuple(about["rows_kept"]),
        located=about.get("located", True),  # files of earlier versions do not say
        gradients=[] if gradient is None else [gradient],
    )


class _Tensors:
    """The tensors of one record, each under a name of its own."""

    def __init__(self, all_of_them: dict[str, Tensor], prefix: str) -> None:
        self._all, self._prefix = all_of_them, prefix

    def put(self, name: str, value: Any) -> Any:
        """Plain values as they are, a tensor by the name it is kept under."""
        if not isinstance(value, Tensor):
            return value
        key = f"{self._prefix}.{name}"
        while key in self._all:
            key += "+"
        self._all[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}


def _got(value: Any, tensors: dict[str, Tensor]) -> Any:
    return tensors[value["tensor"]] if isinstance(value, dict) else value


def _fields(thing: Any, known: dict[str, Any], what: str, kept: _Tensors) -> dict[str, Any]:
    kind = type(thing).__name__
    if known.get(kind) is not type(thing):
        raise CheckpointError(f"{what} is a function and cannot be written; save the model's inputs and watch again")
    return {
        "kind": kind,
        "fields": {each.name: kept.put(kind.lower(), getattr(thing, each.name)) for each in fields(thing)},
    }


def _made(about: dict[str, Any], known: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if about["kind"] not in known:
        raise CheckpointError(f"the file names {about['kind']!r}, which is none of {', '.join(known)}")
    return known[about["kind"]](**{name: _got(value, tensors) for name, value in about["fields"].items()})


def _mask(mask: Mask, record: Record, kept: _Tensors) -> dict[str, Any]:
    if isinstance(mask, And | Or | Not):
        return {"kind": type(mask).__name__, "parts": [_mask(part, record, kept) for part in mask.children()]}
    if isinstance(mask, Predicate | FlexMask):
        mask = _answers(mask, record)
    return _fields(mask, MASKS, f"the mask {mask!r} of {record.name}", kept)


def _answers(mask: Mask, record: Record) -> Mask:
    """A mask that is a function, as the matrix of what it says."""
    b, h, i, _ = record.q.shape
    pairs = i * record.k.shape[2] * (b * h if isinstance(mask, FlexMask) else 1)
    if pairs > LARGEST:
        raise CheckpointError(
            f"the mask {mask!r} of {record.name} is a function, and its {pairs:,} answers are too many to write; "
            "write it with masks of this package, or watch fewer rows"
        )
    heard = InterceptedCall("", record.q, record.k, None, mask, (), record.beta, record.positions)
    seen = mask.see(some_rows(heard, torch.arange(i, device=record.q.device)))
    return DenseMask(call_adapters.narrowed(call_adapters.four_axes(seen)))


def _scores(record: Record, terms: tuple[ScoreTerm, ...]) -> MeasuredScores:
    """What a score_mod, which is a function, made of the scores, as numbers."""
    b, h, i, _ = record.q.shape
    g, j = record.k.shape[1:3]
    if (pairs := b * h * i * j) > LARGEST_SCORES:
        raise CheckpointError(
            f"the score_mod of {record.name} is a function, and its {pairs:,} scores are too many to write; "
            "watch fewer rows or heads"
        )
    exact = torch.promote_types(record.q.dtype, torch.float32)
    q, k = record.q.to(exact), record.k.to(exact).repeat_interleave(h // g, 1)
    heard = InterceptedCall("", record.q, record.k, None, Full(), (), record.beta, record.positions)
    bound = [term.bind(q, record.beta) for term in terms]
    found = []
    for rows in torch.arange(i, device=q.device).split(max(1, AT_ONCE // max(1, b * h * j))):
        scores, grid = torch.einsum("bhic,bhjc->bhij", q[:, :, rows], k) * record.beta, some_rows(heard, rows)
        for modify in bound:
            scores = modify(scores, grid)
        found.append(scores)
    return MeasuredScores(torch.cat(found, 2))


def _made_mask(about: dict[str, Any], tensors: dict[str, Tensor]) -> Mask:
    if "parts" not in about:
        mask: Mask = _made(about, MASKS, tensors)
        return mask
    parts = tuple(_made_mask(part, tensors) for part in about["parts"])
    return Not(parts[0]) if about["kind"] == "Not" else And(parts) if about["kind"] == "And" else Or(parts)
