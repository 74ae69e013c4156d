"""Save and load recorded attention calls: a safetensors file with all tensors, and other fields as JSON in its header.

Masks and score terms are objects: the name of their class and their fields are saved. A mask that is a function is
saved as a boolean matrix. A record that cannot be saved, such as a call of flex_attention with a score_mod, is listed
in `left_out`.
"""

import json
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError
from regard.base.files import describe, is_file, parse_json
from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Mask, Predicate
from regard.core.masks.data import DenseMask
from regard.core.scores import ScoreTerm
from regard.see.call_adapters import FlexMask, FlexScore, collapse_repeated, to_four_axes
from regard.see.record import Record, Seen, pair_grid

FORMAT = "regard-seen-2"
LARGEST_MASK = 1 << 28  # entries of a mask that is saved as a matrix


def save(seen: Seen, path: str | os.PathLike[str]) -> None:
    """Save all records in a safetensors file; on error, an existing file stays as it was.

    If a record cannot be saved, the reason is added to `seen.left_out`.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise CheckpointError(f"{file} cannot be written: there is no folder {file.parent}; create it first")
    tensors: dict[str, Tensor] = {}
    saved = []
    errors: list[CheckpointError] = []
    for number, record in enumerate(seen.records):
        own: dict[str, Tensor] = {}
        try:
            saved.append(_encode(_without_functions(record), f"{number}", own))
        except CheckpointError as error:
            errors.append(error)
        else:
            tensors |= own
    if errors and not saved:
        raise errors[0]
    seen.left_out |= {f"not saved: {error}": 1 for error in errors}
    text = json.dumps({"format": FORMAT, "records": saved, "left_out": seen.left_out})
    write_atomically(file, lambda unfinished: save_file(tensors, unfinished, metadata={"regard": text}))


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Seen:
    """Load the records of a file that `save` wrote; their statistics are the same as before saving."""
    file = Path(path)
    if not is_file(file, CheckpointError):
        raise CheckpointError(f"there is no file {file}; seen.save(path) writes one")
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            header = parse_json(file, (opened.metadata() or {}).get("regard", "{}"), CheckpointError)
            # cloned, because sums depend on the alignment of memory, and the file does not align tensors
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a valid safetensors file: {error}") from None
    saved = header.get("format") if isinstance(header, dict) else None
    if saved != FORMAT:
        raise CheckpointError(f"{file} has no attention records: its format is {saved!r:.60}, not {FORMAT!r}")
    try:
        return Seen([_decode(each, tensors) for each in header["records"]], header["left_out"])
    except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{file} is damaged: {describe(error)}") from None


def _classes() -> dict[str, type]:
    """Return the dataclasses that a saved file may contain, by name."""

    def subclasses(kind: type) -> list[type]:
        below: list[type] = kind.__subclasses__()
        return [kind, *(each for child in below for each in subclasses(child))]

    found = [Record, Positions, *subclasses(Mask), *subclasses(ScoreTerm)]
    return {kind.__name__: kind for kind in found if is_dataclass(kind)}


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON. A tensor is stored in `tensors` under a key, and the JSON contains this key.

    key  the key in `tensors` if the value is a tensor, otherwise the prefix of the keys of the tensors inside it
    """
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, tuple | list):
        return [_encode(each, f"{key}.{at}", tensors) for at, each in enumerate(value)]
    if is_dataclass(value):
        entries = {
            field.name: _encode(getattr(value, field.name), f"{key}.{field.name}", tensors) for field in fields(value)
        }
        return {"class": type(value).__name__, "fields": entries}
    return value


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each, tensors) for each in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    classes = _classes()
    if value["class"] not in classes:
        raise CheckpointError(f"the file names the class {value['class']!r}, which is none of {', '.join(classes)}")
    entries = {name: _decode(each, tensors) for name, each in value["fields"].items()}
    if "gradients" in entries:
        entries["gradients"] = list(entries["gradients"])
    return classes[value["class"]](**entries)


def _without_functions(record: Record) -> Record:
    """Return the record with a boolean matrix in place of each mask that is a function.

    Raises CheckpointError if the record has a score_mod.
    """
    if any(isinstance(term, FlexScore) for term in record.terms):
        raise CheckpointError(
            f"the score_mod of {record.name} is a function and cannot be saved; save the model's inputs and watch again"
        )
    return replace(record, mask=_evaluate_masks(record.mask, record))


def _evaluate_masks(mask: Mask, record: Record) -> Mask:
    if is_dataclass(type(mask)) and not isinstance(mask, Predicate | FlexMask):
        return mask.map_children(lambda part: _evaluate_masks(part, record))
    b, h, i, _ = record.q.shape
    pairs = i * record.k.shape[2] * (b * h if isinstance(mask, FlexMask) else 1)
    if pairs > LARGEST_MASK:
        raise CheckpointError(
            f"the mask {mask!r} of {record.name} is a function, and its matrix of {pairs:,} entries is too large to "
            "save; write it with masks of regard, or watch fewer rows"
        )
    seen = mask.see(pair_grid(record, torch.arange(i, device=record.q.device)))
    return DenseMask(collapse_repeated(to_four_axes(seen)))
