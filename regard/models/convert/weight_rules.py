"""Tables that convert names and layouts of weights between regard and Hugging Face or timm, in both directions.

A table maps modules or single tensors of regard to those of the other library; `*` is the number of a block. The weight
and the bias of a module are converted by the same rule. Entries for modules that a model does not have are ignored.
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
    """How one tensor of regard corresponds to one or more tensors of another library, and how to convert them.

    theirs  names of the other library's tensors
    read    function from the other library's tensors to regard's tensor
    write   function from regard's tensor and configuration to the other library's tensors
    """

    theirs: tuple[str, ...]
    read: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    write: Callable[[Tensor, Any], Sequence[Tensor]] = lambda whole, config: [whole]


WeightTable = Mapping[str, "str | WeightRule"]


def transpose(theirs: str) -> WeightRule:
    """Return the rule for a module whose matrix the other library stores transposed, as (inputs, outputs).

    Its bias is stored in the same way in both libraries.

    theirs  the other library's name of the module
    """
    return WeightRule((theirs,), lambda parts: parts[0].t(), lambda whole, config: [whole.t()])


def squeeze(theirs: str, axes: int) -> WeightRule:
    """Return the rule for a tensor that has `axes` additional leading axes of size one in the other library.

    theirs  the other library's name of the tensor
    """
    return WeightRule((theirs,), lambda parts: parts[0].flatten(0, axes), lambda whole, config: [whole[(None,) * axes]])


def skip_rows(theirs: str, rows: int) -> WeightRule:
    """Return the rule for a table that has `rows` unused rows at its start in the other library.

    theirs  the other library's name of the table
    """
    return WeightRule((theirs,), lambda parts: parts[0][rows:], lambda whole, config: [pad(whole, (0, 0, rows, 0))])


def concatenate(theirs: str, parts: Sequence[str]) -> WeightRule:
    """Return the rule for query, key and value that are separate tensors in the other library and one tensor in regard.

    theirs  the other library's name, in which {} is replaced by each of the `parts`
    parts   the other library's words for query, key and value, such as "q", "k" and "v"
    """
    return WeightRule(tuple(theirs.format(part) for part in parts), torch.cat, split_query_key_value)


def split_query_key_value(whole: Tensor, config: Any) -> Sequence[Tensor]:
    """Split the joint query, key and value weight (or bias) of regard into three tensors along its first axis.

    Keys and values have fewer rows than queries in a model with fewer key and value heads.
    """
    kv_heads = getattr(getattr(config, "mixer", None), "kv_heads", None) or config.heads
    unit = len(whole) // (config.heads + 2 * kv_heads)
    return whole.split([unit * config.heads, unit * kv_heads, unit * kv_heads])


def find_rule(table: WeightTable, name: str) -> WeightRule:
    """Return the conversion rule for the tensor of regard with this name.

    Each `*` in the other library's names is replaced by the block number in `name`.
    """
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
    """Convert another library's weights to regard's. Raises CheckpointError if a tensor is missing or not used.

    table   the conversion rules
    ours    names of regard's tensors
    source  where the weights come from, for error messages
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
        except (RuntimeError, IndexError) as error:  # for example matrices of different widths
            raise CheckpointError(f"{name} cannot be made of {', '.join(rule.theirs)} in {source}: {error}") from None
        used.update(rule.theirs)
    unused = sorted(set(weights) - used)
    if unused:
        raise CheckpointError(
            f"{source} has {len(unused)} tensors that the model does not have: {', '.join(unused[:5])}"
        )
    return read


def write_weights(table: WeightTable, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert regard's weights to those of another library.

    table  the conversion rules
    """
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        rule = find_rule(table, name)
        theirs |= zip(rule.theirs, (part.contiguous() for part in rule.write(tensor, config)), strict=True)
    return theirs


def _fill(pattern: str, name: str) -> str:
    """Return the pattern with each `*` replaced by the next number that occurs in `name`."""
    numbers = iter(re.findall(r"\d+", name))
    return re.sub(r"\*", lambda match: next(numbers), pattern)
