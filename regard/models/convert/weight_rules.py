"""Names and layouts of another project's weights against ours, as rules that are read in both directions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.errors import CheckpointError

Move = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Rule:
    """Some of our tensors, the same numbers in theirs, and the way there and back. `{n}` is a block's number."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Move  # theirs to ours
    write: Move  # ours to theirs

    def numbered(self, n: int) -> "Rule":
        ours, theirs = (tuple(name.replace("{n}", str(n)) for name in names) for names in (self.ours, self.theirs))
        return Rule(ours, theirs, self.read, self.write)


def same(ours: str, theirs: str) -> Rule:
    """One tensor under two names."""
    return Rule((ours,), (theirs,), list, list)


def turned(ours: str, theirs: str) -> Rule:
    """A matrix that they keep as (inputs, outputs)."""
    return Rule((ours,), (theirs,), _transposed, _transposed)


def squeezed(ours: str, theirs: str, axes: int) -> Rule:
    """A tensor that they keep with `axes` more axes of size one in front."""
    return Rule((ours,), (theirs,), lambda parts: [parts[0].flatten(0, axes)], lambda parts: [parts[0][(None,) * axes]])


def joined(ours: str, *theirs: str, shares: tuple[int, ...] = ()) -> Rule:
    """Several of theirs, one below the other in ours: in equal shares, or in these."""
    parts = shares or (1,) * len(theirs)

    def write(whole: list[Tensor]) -> list[Tensor]:
        unit = len(whole[0]) // sum(parts)
        return list(whole[0].split([unit * share for share in parts]))

    return Rule((ours,), theirs, lambda pieces: [torch.cat(pieces)], write)


def unrolled(rules: Iterable[Rule], depth: int) -> list[Rule]:
    """The rules with `{n}` written out for every block."""
    return [
        numbered
        for rule in rules
        for numbered in ([rule.numbered(n) for n in range(depth)] if "{n}" in rule.ours[0] else [rule])
    ]


def read(rules: Iterable[Rule], weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Our tensors from theirs. Every one of theirs must be used."""
    ours: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule in rules:
        lacking = [name for name in rule.theirs if name not in weights]
        if lacking:
            raise CheckpointError(f"{source} lacks {', '.join(lacking)}, from which {', '.join(rule.ours)} is made")
        ours |= dict(zip(rule.ours, rule.read([weights[name] for name in rule.theirs]), strict=True))
        used.update(rule.theirs)
    left = sorted(set(weights) - used)
    if left:
        raise CheckpointError(f"{source} has {len(left)} tensors without a place in the model: {', '.join(left[:5])}")
    return ours


def write(rules: Iterable[Rule], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours."""
    theirs: dict[str, Tensor] = {}
    for rule in rules:
        theirs |= dict(zip(rule.theirs, rule.write([weights[name] for name in rule.ours]), strict=True))
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def _transposed(parts: list[Tensor]) -> list[Tensor]:
    return [part.mT.contiguous() for part in parts]
