"""Value zeroing: measure how much the output of a block changes when the value of one key is set to zero."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, UnknownNameError
from regard.see.arguments import check_indices, resolve_indices
from regard.see.heads import weights_at
from regard.see.interventions.attention_call import AttentionCall
from regard.see.multihead import disable_fused_layers
from regard.see.record import Record
from regard.see.relevance import normalise_rows
from regard.see.watch import Watcher


def value_zeroing(
    model: nn.Module,
    run: Callable[[], Any],
    layer: str,
    *,
    keys: Sequence[int] | None = None,
    block: str | None = None,
    normalised: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Float[Tensor, "b i r"]:
    """Value zeroing: how much output i of a block changes if the value of key j is set to zero in all heads of a layer.

    Mohebbi et al. 2023, arXiv:2301.12971. The result is 1 - cos(y_i, y_i without v_j): one minus the cosine similarity
    of output i of the block that contains the attention layer, before and after the value of key j is set to zero. If
    the value of a key is zero, or all weights on the key are zero, then the column of this key is zero.

    Attention is linear in the values, so w_ij v_j is subtracted from attention output i, and the weights w are not
    computed again. Every attention call that `watch` records is supported. The model runs once for each key and should
    be in eval mode.

    run         function without arguments that calls the model on its inputs, such as lambda: model(x)
    layer       the name of the attention in `watch(model)`
    keys        indices of the keys to zero; None is all
    block       path of the module whose output is compared; None selects the block that contains the layer, the
                innermost module with a number as its name
    normalised  whether to divide the changes of each output by their sum over keys, as in the paper
    progress    function that is called with the number of keys done and the total number

    >>> changed = value_zeroing(model, lambda: model(tokens), "blocks.0.attention", keys=[0, 18])
    >>> changed.shape
    torch.Size([1, 19, 2])
    """
    indices = check_indices("keys", keys)
    block = _enclosing_block(model, layer) if block is None else block
    whole, record = _run_without(model, run, layer, block, None)
    j = record.k.shape[2]
    chosen = range(j) if indices is None else resolve_indices("keys", indices, j, layer)
    columns = []
    for done, key in enumerate(chosen):
        other, _ = _run_without(model, run, layer, block, key)
        columns.append(1 - torch.cosine_similarity(whole, other, dim=-1))
        if progress is not None:
            progress(done + 1, len(chosen))
    found = torch.stack(columns, -1).clamp(min=0) if columns else whole.new_zeros(*whole.shape[:2], 0)
    return normalise_rows(found) if normalised else found


def _run_without(
    model: nn.Module, run: Callable[[], Any], layer: str, block: str, key: int | None
) -> tuple[Float[Tensor, "b i d"], Record]:
    """Run the model with the value of one key set to zero; return the block's output and the layer's record.

    key  index of the key; None changes nothing
    """
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        outputs.append(first.detach().to(torch.promote_types(first.dtype, torch.float32)))

    def subtract_value(call: AttentionCall) -> Tensor | None:
        if call.name != layer:
            return None
        records.append(call.record)
        return None if key is None else call.heads - _value_contribution(call.record, key)

    records: list[Record] = []
    watcher = Watcher(model, layers=layer.partition(":")[0], change=subtract_value)
    handle = model.get_submodule(block).register_forward_hook(keep)
    try:
        with torch.no_grad(), disable_fused_layers(), watcher.recording():
            run()
    finally:
        handle.remove()
    if not records:
        raise UnknownNameError(f"{layer!r} made no attention call in run(); list(seen) has the names of all layers")
    if not outputs:
        raise ConfigError(
            f"block {block!r} was not called in run(); give the path of the module whose output is compared"
        )
    return outputs[-1], records[0]


def _value_contribution(record: Record, key: int) -> Float[Tensor, "b h i e"]:
    """Return the contribution w_ij v_j of key j to attention output i, for every i.

    key  the index j
    """
    assert record.v is not None
    rows = torch.arange(record.q.shape[2], device=record.q.device)[None]
    weights = weights_at(record, rows, torch.full_like(rows, key))
    v = record.v[:, :, key].repeat_interleave(record.q.shape[1] // record.v.shape[1], 1)
    return weights[..., None] * v.to(weights.dtype)[:, :, None]


def _enclosing_block(model: nn.Module, layer: str) -> str:
    """Return the path of the innermost module with a number as its name, such as blocks.3, that contains a layer.

    If there is none, the path of the layer's parent is returned.
    """
    parts = layer.partition(":")[0].split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    end = numbered[-1] + 1 if numbered else max(len(parts) - 1, 0)
    path = ".".join(parts[:end])
    return path if path in dict(model.named_modules()) else ""
