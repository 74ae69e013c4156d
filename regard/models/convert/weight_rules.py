"""Tables that convert weights between Hugging Face's or timm's names and layouts and ours, in both directions.

A table maps our modules, or single tensors, to theirs; `*` is the number of a block. The weight and the bias of a
module are converted alike. Entries for parts that a model does not have are ignored.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import CheckpointError


@dataclass(frozen=True)
class WeightRule:
    """Which of their tensors hold the values of one of our tensors, and how to convert.

    theirs  names of their tensors
    read    function from their tensors to ours
    write   function from our tensor and our configuration to theirs
    """

    theirs: tuple[str, ...]
    read: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    write: Callable[[Tensor, Any], Sequence[Tensor]] = lambda whole, config: [whole]


WeightTable = Mapping[str, "str | WeightRule"]


def transpose(theirs: str) -> WeightRule:
    """The rule for a matrix that they store transposed, as (inputs, outputs). A bias stays as it is."""
    return WeightRule((theirs,), lambda parts: parts[0].t(), lambda whole, config: [whole.t()])


def squeeze(theirs: str, axes: int) -> WeightRule:
    """The rule for a tensor that they store with `axes` more leading axes of size one."""
    return WeightRule((theirs,), lambda parts: parts[0].flatten(0, axes), lambda whole, config: [whole[(None,) * axes]])


def skip_rows(theirs: str, rows: int) -> WeightRule:
    """The rule for a table that they store with `rows` more rows at its start, which are never used."""
    return WeightRule((theirs,), lambda parts: parts[0][rows:], lambda whole, config: [pad(whole, (0, 0, rows, 0))])


def concatenate(theirs: str, parts: Sequence[str]) -> WeightRule:
    """The rule for query, key and value, which are separate in their model and rows of one tensor in ours.

    theirs  their name with {} for one of the `parts`
    """
    return WeightRule(tuple(theirs.format(part) for part in parts), torch.cat, split_query_key_value)


def split_query_key_value(whole: Tensor, config: Any) -> Sequence[Tensor]:
    """Split the rows of our fused tensor into queries, keys and values. Keys and values may have fewer heads."""
    kv_heads = getattr(getattr(config, "mixer", None), "kv_heads", None) or config.heads
    unit = len(whole) // (config.heads + 2 * kv_heads)
    return whole.split([unit * config.heads, unit * kv_heads, unit * kv_heads])


def find_rule(table: WeightTable, name: str) -> WeightRule:
    """The rule for one of our tensors, with the block number of its name filled into their names."""
    pattern = re.sub(r"\d+", "*", name)
    module, _, part = pattern.rpartition(".")
    for key, suffix in ((pattern, ""), (module, f".{part}")):
        if key in table:
            rule = table[key]
            rule = WeightRule((rule,)) if isinstance(rule, str) else rule
            return replace(rule, theirs=tuple(_fill(theirs, name) + suffix for theirs in rule.theirs))
    raise CheckpointError(f"there is no rule for the weights {name}")


def read_weights(
    table: WeightTable, weights: Mapping[str, Tensor], ours: Iterable[str], source: str
) -> dict[str, Tensor]:
    """Convert their weights to ours. Raises CheckpointError if one of theirs is not used.

    ours    our tensors by name, for names and shapes
    source  where the weights come from, for errors
    """
    read: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in ours:
        rule = find_rule(table, name)
        missing = [each for each in rule.theirs if each not in weights]
        if missing:
            raise CheckpointError(f"{source} lacks {', '.join(missing)}, needed for {name}")
        try:
            read[name] = rule.read([weights[each] for each in rule.theirs]).contiguous()
        except (RuntimeError, IndexError) as error:  # such as matrices of different widths
            raise CheckpointError(f"{name} cannot be made of {', '.join(rule.theirs)} in {source}: {error}") from None
        used.update(rule.theirs)
    unused = sorted(set(weights) - used)
    if unused:
        raise CheckpointError(
            f"{source} has {len(unused)} tensors that the model does not have: {', '.join(unused[:5])}"
        )
    return read


def write_weights(table: WeightTable, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert our weights to theirs."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        rule = find_rule(table, name)
        theirs |= zip(rule.theirs, (part.contiguous() for part in rule.write(tensor, config)), strict=True)
    return theirs


def _fill(pattern: str, name: str) -> str:
    """The pattern with each `*` replaced by the next number in `name`."""
    numbers = iter(re.findall(r"\d+", name))
    return re.sub(r"\*", lambda match: next(numbers), pattern)
