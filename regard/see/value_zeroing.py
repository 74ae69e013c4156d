"""Value zeroing: what changes in a block's output when one key has nothing to give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, UnknownNameError
from regard.see.arguments import check_indices, resolve_indices
from regard.see.heads import weights_at
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
    """1 - cos(y_i, y_i without v_j) for every row y_i of the block around an attention layer: how much output i changes
    when the value of key j is zero in all heads of that layer, and nothing else. Mohebbi et al. 2023, arXiv:2301.12971.

    A key whose value is zero already, or that nobody looks at, changes nothing: its column is zero. Attention is linear
    in its values, so w_ij v_j is taken off its output; weights stay as they are, and any kind of attention will do. The
    model runs once for each key, in the mode it is in, and should be in eval mode.

    run         calls the model on its inputs, for instance lambda: model(x)
    layer       the name of the attention in `watch(model)`
    keys        numbers of the keys to zero; None is all
    block       the path of the module whose output is compared; None is the numbered block that the layer is part of
    normalised  rows divided by their sum, as in the paper
    progress    called with the keys done and those there are
    """
    asked = check_indices("keys", keys)
    block = _block_of(model, layer) if block is None else block
    whole, record = _output(model, run, layer, block, None)
    j = record.k.shape[2]
    chosen = range(j) if asked is None else resolve_indices("keys", asked, j, layer)
    columns = []
    for done, key in enumerate(chosen):
        other, _ = _output(model, run, layer, block, key)
        columns.append(1 - torch.cosine_similarity(whole, other, dim=-1))
        if progress is not None:
            progress(done + 1, len(chosen))
    found = torch.stack(columns, -1).clamp(min=0) if columns else whole.new_zeros(*whole.shape[:2], 0)
    return normalise_rows(found) if normalised else found


def _output(
    model: nn.Module, run: Callable[[], Any], layer: str, block: str, key: int | None
) -> tuple[Float[Tensor, "b i d"], Record]:
    """The block's output, with the value of one key taken out, and the record of the layer."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        outputs.append(first.detach().to(torch.promote_types(first.dtype, torch.float32)))

    def take_out(record: Record) -> Tensor | None:
        return None if key is None or record.name != layer else -_share_of(record, key)

    watcher = Watcher(model, layers=layer.partition(":")[0], change=take_out)
    handle = model.get_submodule(block).register_forward_hook(keep)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # there nothing between the heads and the layer's end can be reached
    try:
        with torch.no_grad(), watcher.recording():
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        handle.remove()
    if layer not in watcher.seen:
        raise UnknownNameError(f"{layer!r} made no attention call when run() was called; see watch(model).keys()")
    if not outputs:
        raise ConfigError(f"block {block!r} was not called by run(); name the module whose output is to be compared")
    return outputs[-1], watcher.seen[layer]


def _share_of(record: Record, key: int) -> Float[Tensor, "b h i e"]:
    """w_ij v_j of one key, for every row."""
    assert record.v is not None
    rows = torch.arange(record.q.shape[2], device=record.q.device)[None]
    weights = weights_at(record, rows, torch.full_like(rows, key))
    v = record.v[:, :, key].repeat_interleave(record.q.shape[1] // record.v.shape[1], 1)
    return weights[..., None] * v.to(weights.dtype)[:, :, None]


def _block_of(model: nn.Module, layer: str) -> str:
    """The innermost numbered module around a layer, or its parent."""
    parts = layer.partition(":")[0].split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    end = numbered[-1] + 1 if numbered else max(len(parts) - 1, 0)
    path = ".".join(parts[:end])
    return path if path in dict(model.named_modules()) else ""
