"""Compute the replacement for the output of heads: zeros, a mean, or the output of another sequence or forward pass."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError, InterventionError, ShapeError
from regard.see.interventions.attention_call import AttentionCall
from regard.see.record import Record, Seen
from regard.see.softmax_tracer import AFTER_SOFTMAX

Source = Seen | Record


def check_source(what: str, source: object) -> Source:
    """Check that `source` is a `Seen` or `Record` made by `watch`, else raise ConfigError; return it.

    what  name of the argument, for the error message
    """
    if not isinstance(source, Seen | Record):
        raise ConfigError(
            f"{what} takes what was recorded by `with regard.watch(model) as seen:`, not {type(source).__name__}"
        )
    return source


def zeros(call: AttentionCall, heads: Tensor) -> Tensor:
    """Zero ablation: return zeros in place of the output of the heads."""
    return torch.zeros_like(heads)


def mean_of_source(source: Source | None, call: AttentionCall, heads: Tensor) -> Tensor:
    """Mean ablation: return the mean output of each head over sequences and positions.

    source  recorded forward pass to average; None averages the output of the call itself
    """
    outputs = heads if source is None else recorded_output(source, call)
    return outputs.mean((0, 2), keepdim=True).expand(heads.shape)


def resample_source(source: Source, seed: int, call: AttentionCall, heads: Tensor) -> Tensor:
    """Resample ablation: return the head outputs of randomly chosen sequences of `source`, at the same positions.

    Chan et al. 2022, *Causal Scrubbing*. The choice depends only on the seed, so that all layers use the same
    sequences.
    """
    outputs = recorded_output(source, call)
    _check_shape(outputs, heads, call)
    draws = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(outputs), (len(heads),), generator=draws)
    return outputs[drawn.to(outputs.device)]


def patch_from(source: Source, call: AttentionCall, heads: Tensor) -> Tensor:
    """Activation patching: return the outputs that the same heads had in another forward pass.

    The sequences and positions correspond; if `source` has one sequence, it is used for all.
    """
    outputs = recorded_output(source, call)
    _check_shape(outputs, heads, call)
    if len(outputs) not in (1, len(heads)):
        raise ShapeError(
            f"the source of {call.name} has {len(outputs)} sequences, but the call has {len(heads)}; record as many, "
            "or one"
        )
    return outputs.expand(len(heads), -1, -1, -1)


def recorded_output(source: Source, call: AttentionCall) -> Float[Tensor, "b h i e"]:
    """Compute the output of the heads of a recorded call from its recorded inputs.

    Raises InterventionError if values, heads or rows were not recorded, or if dropout was active.
    """
    record = source if isinstance(source, Record) else source[call.name if call.name in source else call.path]
    reason = None
    if record.v is None:
        reason = "its values were not recorded; use watch(model, values=True)"
    elif record.heads is not None or record.rows_kept is not None:
        reason = "only some of its heads or rows were recorded; watch without heads= and rows="
    elif record.dropout:
        reason = "its dropout was active; call model.eval() before recording"
    elif AFTER_SOFTMAX in record.note:
        reason = f"the model changes its weights after the softmax ({record.note})"
    if reason is not None:
        raise InterventionError(f"the output of {record.name} cannot be computed from its record: {reason}")
    return record.out.to(call.out.device)


def _check_shape(outputs: Tensor, heads: Tensor, call: AttentionCall) -> None:
    if outputs.shape[1:] != heads.shape[1:]:
        raise ShapeError(
            f"the source of {call.name} has (h i e) = {tuple(outputs.shape[1:])}, but the call has "
            f"{tuple(heads.shape[1:])}; record a run with inputs of the same length"
        )
