"""Measure the mask: its name, its alignment, its keyword, and the output for a query whose keys are all hidden."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.see.measure.mask_argument import MASK_NAMES, MaskArgument, find_mask_argument, fully_masked_row
from regard.see.measure.mask_names import UNNAMED, describe_mask
from regard.see.measure.raw_weights import RawWeights, visible_pairs
from regard.see.measure.read_weights import first_line


@dataclass(frozen=True, kw_only=True)
class MaskReading:
    """The measured mask: which keys a query sees without a mask argument, and how a mask is passed."""

    mask: str  # the mask in the notation of regard.core.masks
    alignment: str | None = None  # how queries are aligned with more keys: "top-left" or "bottom-right"
    fully_masked_rows: str | None = None  # the output of a row that sees no key: "zeros", "nan", "mean" or "unmasked"
    mask_argument: str | None = None  # the keyword that takes a mask
    mask_polarity: str | None = None  # what True means in this mask: "keep" or "drop"; "additive" if it holds numbers


def read_mask(raw: RawWeights) -> MaskReading:
    """Find the mask that an attention function applies by itself, and the keyword with which a mask is passed."""
    name, alignment = _name_and_alignment(raw)
    empty = None
    if not bool(raw.nonempty.all()):
        empty = "nan" if bool(raw.flat[~raw.nonempty].isnan().any()) else "zeros"
    argument = _find_argument(raw)
    if argument is not None:
        empty = _fully_masked(raw, argument) or empty
    _note_finite_mask_value(raw)
    return MaskReading(
        mask=name,
        alignment=alignment,
        fully_masked_rows=empty,
        mask_argument=None if argument is None else argument.name,
        mask_polarity=None if argument is None else "additive" if argument.values == "additive" else argument.polarity,
    )


def _name_and_alignment(raw: RawWeights) -> tuple[str, str | None]:
    """Return the name of the mask, and its alignment: at which positions the queries are if there are more keys.

    If there are as many keys as queries, the attention is called again with four more keys.
    """
    reader, visible = raw.reader, raw.visible
    names, aligned = zip(*(describe_mask(head) for head in visible[0]), strict=True)
    if not bool((visible == visible[:1]).all()):
        name = f"{UNNAMED}, which differs between sequences"
    elif len(set(names)) == 1 and (names[0] != UNNAMED or bool((visible == visible[:, :1]).all())):
        name = names[0]
    else:
        name = "; ".join(f"head {head}: {word}" for head, word in enumerate(names))
    if reader.i != reader.j or reader.probe.square or names[0] == "full()" or UNNAMED in names:
        return name, aligned[0]
    longer = reader.i + 4
    try:
        flat = reader.weights(0 * raw.q, raw.k.new_zeros(reader.b, reader.g, longer, reader.c))
    except Exception as error:  # the function of the user may raise any exception
        raw.notes.append(f"the alignment is unknown: {reader.i} queries and {longer} keys raise {first_line(error)}")
        return name, aligned[0]
    return name, describe_mask(visible_pairs(flat)[0, 0])[1]


def _shape(raw: RawWeights) -> tuple[int, ...]:
    return tuple(raw.visible.shape)


def _find_argument(raw: RawWeights) -> MaskArgument | None:
    reader = raw.reader
    names = [name for name in MASK_NAMES if name in reader.probe.parameters and name not in reader.extra]

    def read(**keywords: Tensor) -> Tensor:
        return reader.weights(0 * raw.q, 0 * raw.k, **{x: y.to(reader.probe.device) for x, y in keywords.items()})

    found = find_mask_argument(read, names, _shape(raw), reader.dtype)
    return found if found is not None and found.works else None


def _fully_masked(raw: RawWeights, argument: MaskArgument) -> str | None:
    reader = raw.reader

    def read(**keywords: Tensor) -> Tensor:
        return reader.weights(raw.q, raw.k, **{x: y.to(reader.probe.device) for x, y in keywords.items()})

    try:
        found = fully_masked_row(read, argument, _shape(raw), reader.dtype)
    except Exception as error:  # the function of the user may raise any exception
        raw.notes.append(f"a fully masked row raises {first_line(error)}")
        return None
    if found == "other":
        raw.notes.append("a fully masked row gives neither zeros nor NaN nor a mean")
    return None if found == "other" else found


def _note_finite_mask_value(raw: RawWeights) -> None:
    """Add a note if the mask hides keys with a finite value such as -1e9.

    This is measured with very negative scores: if all visible scores are lower than this value, the hidden keys get a
    weight above 0.
    """
    hidden = ~raw.visible & raw.nonempty[..., None]
    if not bool(hidden.any()):
        return
    try:
        found = raw.reader.weights(torch.full_like(raw.q, 1e6), torch.full_like(raw.k, -1e6))[hidden]
    except Exception as error:  # the function of the user may raise any exception
        raw.notes.append(f"very negative scores raise {first_line(error)}")
        return
    if bool((found > 0).any()):
        raw.notes.append("hidden keys get weight when visible scores are very negative: the mask value is finite")
