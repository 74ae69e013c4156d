"""The mask: what it is called, where it stands, how one is handed in, and what a row gives that sees nothing."""

import math
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.see.measure.mask_names import OWN, describe
from regard.see.measure.measurement import Plate, seen
from regard.see.measure.read_weights import first_line

ARGUMENTS = ("mask", "attn_mask", "attention_mask", "visible", "src_mask")


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Who sees whom, in words."""

    described: str  # in the words of regard.core.masks
    alignment: str | None = None  # where queries stand among more keys: "top-left" or "bottom-right"
    blind_rows: str | None = None  # what a row gives that sees nothing: "zeros", "NaN", "mean" or "unmasked"
    mask_argument: str | None = None  # the keyword that takes a mask
    mask_means: str | None = None  # what its True does: "keep" or "drop"; "added" where it takes numbers


@dataclass(frozen=True)
class _Argument:
    """A keyword, with the form of the mask that it takes."""

    name: str
    means: str
    lead: tuple[int, ...]  # the axes before (i j)

    def handed(self, visible: Bool[Tensor, "i j"], plate: Plate) -> dict[str, Tensor]:
        shaped = ~visible if self.means == "drop" else visible
        if self.means == "added":
            shaped = torch.zeros(visible.shape, dtype=plate.eye.dtype).masked_fill(~visible, -math.inf)
        return {self.name: shaped.expand(*self.lead, *visible.shape).to(plate.eye.probe.device)}


def read_mask(plate: Plate) -> Masked:
    words, alignment = _words(plate)
    blind = None
    if not bool(plate.awake.all()):
        blind = "NaN" if bool(plate.flat[~plate.awake].isnan().any()) else "zeros"
    argument = _argument(plate)
    if argument is not None:
        blind = _blind_row(plate, argument) or blind
    _look_for_finite(plate)
    return Masked(
        described=words,
        alignment=alignment,
        blind_rows=blind,
        mask_argument=None if argument is None else argument.name,
        mask_means=None if argument is None else argument.means,
    )


def _words(plate: Plate) -> tuple[str, str | None]:
    """The mask in words, and its alignment, which only more keys than queries show."""
    eye, visible = plate.eye, plate.visible
    words, aligned = zip(*(describe(head) for head in visible[0]), strict=True)
    if not bool((visible == visible[:1]).all()):
        described = f"{OWN}, which differs between sequences"
    elif len(set(words)) == 1 and (words[0] != OWN or bool((visible == visible[:, :1]).all())):
        described = words[0]
    else:
        described = "; ".join(f"head {head}: {word}" for head, word in enumerate(words))
    if eye.i != eye.j or eye.probe.square or words[0] == "full()" or OWN in words:
        return described, aligned[0]
    longer = eye.i + 4
    try:
        flat = eye.weights(0 * plate.q, plate.k.new_zeros(eye.b, eye.g, longer, eye.c))
    except Exception as error:  # whatever a function of somebody else raises means that it cannot be asked
        plate.notes.append(f"alignment was not asked: {eye.i} queries of {longer} keys gave {first_line(error)}")
        return described, aligned[0]
    return described, describe(seen(flat)[0, 0])[1]


def _argument(plate: Plate) -> _Argument | None:
    """Hand in a mask, where one is taken, and look what it hides."""
    eye = plate.eye
    pattern = (torch.arange(eye.i)[:, None] + 2 * torch.arange(eye.j)) % 3 != 0
    names = [name for name in ARGUMENTS if name in eye.probe.parameters and name not in eye.extra]
    forms = (("keep", ()), ("keep", (eye.b, 1)), ("added", (eye.b, 1)), ("added", ()))
    for name, (means, lead) in product(names, forms):
        try:
            left = seen(eye.weights(0 * plate.q, 0 * plate.k, **_Argument(name, means, lead).handed(pattern, plate)))
        except Exception:  # not taken in this form; the next may be
            continue
        for meant, kept in ((means, pattern), ("drop", ~pattern)):
            if torch.equal(left, plate.visible & kept) and not torch.equal(left, plate.visible):
                return _Argument(name, meant, lead)
    return None


def _blind_row(plate: Plate, argument: _Argument) -> str | None:
    """What a row gives that a mask handed in hides everything from."""
    eye, row = plate.eye, plate.eye.i // 2
    handed = argument.handed((torch.arange(eye.i) != row)[:, None].expand(-1, eye.j), plate)
    try:
        read = eye.weights(plate.q, plate.k, **handed)[:, :, row]
    except Exception as error:  # whatever a function of somebody else raises is its answer
        plate.notes.append(f"a row that sees nothing raises {first_line(error)}")
        return None
    if bool(read.isnan().any()):
        return "NaN"
    if bool((read == 0).all()):
        return "zeros"
    if bool((read - read.mean(-1, keepdim=True)).abs().max() < 1e-6):
        return "mean"
    if bool((read - plate.drawn[:, :, row]).abs().max() < 1e-6):
        return "unmasked"
    plate.notes.append("a row that sees nothing gives neither zeros nor NaN nor a mean")
    return None


def _look_for_finite(plate: Plate) -> None:
    """Very negative scores lose against a hidden key where the mask value is finite."""
    hidden = ~plate.visible & plate.awake[..., None]
    if not bool(hidden.any()):
        return
    try:
        found = plate.eye.weights(torch.full_like(plate.q, 1e6), torch.full_like(plate.k, -1e6))[hidden]
    except Exception as error:  # whatever a function of somebody else raises is its answer
        plate.notes.append(f"very negative scores raise {first_line(error)}")
        return
    if bool((found > 0).any()):
        plate.notes.append("hidden keys win against very negative scores: the mask value is finite")
