"""Rules that convert weights between Hugging Face's or timm's names and layouts and ours, in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.base.errors import CheckpointError

Convert = Callable[[list[Tensor]], list[Tensor]]
BOTH = ("weight", "bias")


@dataclass(frozen=True)
class WeightRule:
    """Some of our tensors and some of theirs that hold the same numbers. `{n}` in a name is the number of a block."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Convert = list  # theirs to ours
    write: Convert = list  # ours to theirs

    def for_block(self, n: int) -> "WeightRule":
        """The rule of block n."""
        ours, theirs = (tuple(name.replace("{n}", str(n)) for name in names) for names in (self.ours, self.theirs))
        return replace(self, ours=ours, theirs=theirs)


def rename(ours: str, theirs: str) -> WeightRule:
    """One tensor under two names."""
    return WeightRule((ours,), (theirs,))


def rename_all(names: Mapping[str, str], parts: Sequence[str] = BOTH) -> list[WeightRule]:
    """The weight and bias of modules, by our names and theirs."""
    return [rename(f"{ours}.{part}", f"{theirs}.{part}") for ours, theirs in names.items() for part in parts]


def transpose(ours: str, theirs: str) -> WeightRule:
    """A matrix that they store as (inputs, outputs)."""
    return WeightRule((ours,), (theirs,), _transpose, _transpose)


def squeeze(ours: str, theirs: str, axes: int) -> WeightRule:
    """A tensor that they store with `axes` more axes of size one in front."""
    return WeightRule(
        (ours,), (theirs,), lambda parts: [parts[0].flatten(0, axes)], lambda parts: [parts[0][(None,) * axes]]
    )


def concatenate(
    ours: str, theirs: Sequence[str], parts: Sequence[str] = BOTH, shares: tuple[int, ...] = (1, 1, 1)
) -> list[WeightRule]:
    """The weight and bias of several of their modules as rows of one of ours, such as query, key and value.

    shares  how many rows each of theirs has, relative to the others
    """

    def write(whole: list[Tensor]) -> list[Tensor]:
        unit = len(whole[0]) // sum(shares)
        return list(whole[0].split([unit * share for share in shares]))

    return [
        WeightRule(
            (f"{ours}.{part}",), tuple(f"{name}.{part}" for name in theirs), lambda pieces: [torch.cat(pieces)], write
        )
        for part in parts
    ]


def expand_blocks(rules: Iterable[WeightRule], depth: int) -> list[WeightRule]:
    """The rules with `{n}` replaced by the number of every block."""
    return [
        each
        for rule in rules
        for each in ([rule.for_block(n) for n in range(depth)] if "{n}" in rule.ours[0] else [rule])
    ]


def read_weights(rules: Iterable[WeightRule], weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Our tensors from theirs. Every one of theirs must be used."""
    ours: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule in rules:
        missing = [name for name in rule.theirs if name not in weights]
        if missing:
            raise CheckpointError(f"{source} lacks {', '.join(missing)}, needed for {', '.join(rule.ours)}")
        ours |= dict(zip(rule.ours, rule.read([weights[name] for name in rule.theirs]), strict=True))
        used.update(rule.theirs)
    unused = sorted(set(weights) - used)
    if unused:
        raise CheckpointError(
            f"{source} has {len(unused)} tensors that the model does not have: {', '.join(unused[:5])}"
        )
    return ours


def write_weights(rules: Iterable[WeightRule], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours."""
    theirs: dict[str, Tensor] = {}
    for rule in rules:
        theirs |= dict(zip(rule.theirs, rule.write([weights[name] for name in rule.ours]), strict=True))
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def with_prefix(weights: Mapping[str, Tensor], prefix: str, top: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights of a base model under the names of the full model; names that start with `top` stay."""
    if any(name.startswith(prefix) for name in weights):
        return dict(weights)
    return {name if name.startswith(top) else f"{prefix}{name}": tensor for name, tensor in weights.items()}


def _transpose(parts: list[Tensor]) -> list[Tensor]:
    return [part.mT.contiguous() for part in parts]
