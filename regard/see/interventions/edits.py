"""Edits of an attention call: scale beta, hide keys, set the weights, or replace the output of heads.

`ablate` and `intervene`, which apply edits to a model, are in intervene.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import InterventionError, ShapeError
from regard.core.masks.data import DenseMask
from regard.see.arguments import resolve_indices
from regard.see.call_adapters import MeasuredScores, keep_heads
from regard.see.interventions.attention_call import AttentionCall, attend_record
from regard.see.interventions.layer_names import LayerChoice
from regard.see.interventions.returned_weights import EditedWeights, compute_weights, drop
from regard.see.record import Record
from regard.see.softmax_tracer import AFTER_SOFTMAX


@dataclass(eq=False)
class HeadState:
    """The state of an attention call while edits are applied to the call.

    heads            the output of the heads after the edits so far
    edited           the record of the changed inputs; None if no edit changed the inputs
    weights_changed  whether an edit changed the weights of a head
    """

    call: AttentionCall
    heads: Float[Tensor, "b h i e"]
    edited: Record | None = None
    weights_changed: bool = False

    @property
    def record(self) -> Record:
        """The inputs of the attention call as a `Record`, after the edits so far."""
        return self.call.record if self.edited is None else self.edited

    def chosen(self, heads: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the chosen head indices with negative indices converted to positive ones; None chooses all heads."""
        count = self.heads.shape[1]
        return tuple(range(count)) if heads is None else resolve_indices("heads", heads, count, self.call.name)

    def mark(self, heads: tuple[int, ...] | None) -> Tensor:
        """Return a boolean tensor that is True for the chosen heads; None chooses all. The shape is (h 1 1)."""
        marked = torch.zeros(self.heads.shape[1], 1, 1, dtype=torch.bool, device=self.heads.device)
        marked[list(self.chosen(heads))] = True
        return marked


@dataclass(frozen=True, eq=False)
class Edit(ABC):
    """Base class of edits, which change the chosen heads in the chosen attention calls.

    text   the user's call that created the edit, such as "ablate(...)", for messages
    layer  which attention calls to edit: the name or index that the user passed, as a `LayerChoice`
    heads  indices of the heads; None is all
    calls  names of the attention calls that were changed so far
    """

    text: str
    layer: LayerChoice
    heads: tuple[int, ...] | None
    calls: list[str] = field(default_factory=list, kw_only=True)
    stage: ClassVar[int]  # edits of scores come before those of weights, and these before those of outputs

    @abstractmethod
    def apply(self, state: HeadState) -> None:
        """Apply the edit: change the inputs of the attention call, or the output of its heads, in `state`."""


class ScoreEdit(Edit):
    """Base class of edits that change queries or mask and compute the attention of the chosen heads again."""

    stage = 0

    def apply(self, state: HeadState) -> None:
        if AFTER_SOFTMAX in state.record.note:
            raise InterventionError(
                f"{self.text}: the model changes its weights after the softmax ({state.record.note}), so they cannot "
                "be computed again; ablate, patch and set_weights can be used"
            )
        state.edited = self.change(state)
        state.weights_changed = True
        heads = torch.tensor(state.chosen(self.heads), dtype=torch.long, device=state.heads.device)
        some = keep_heads(state.record, heads)
        assert some.v is not None
        if state.call.weights is None:
            attended = attend_record(some)
        else:
            weights = compute_weights(some)
            dropped = drop(weights, some)
            attended = dropped @ some.v if some.dropout else attend_record(some)
            state.call.weights.write(EditedWeights(state.record, heads, weights, dropped))
        state.heads = state.heads.index_copy(1, heads, attended.to(state.heads.dtype))

    @abstractmethod
    def change(self, state: HeadState) -> Record:
        """Return the inputs of the attention call as a `Record` with changed queries or mask."""


@dataclass(frozen=True, eq=False)
class ScaleBeta(ScoreEdit):
    """Multiply beta, the inverse temperature that scales q . k, by a factor. Masks and score terms stay as they are."""

    factor: float

    def change(self, state: HeadState) -> Record:
        if any(isinstance(term, MeasuredScores) for term in state.record.terms):
            raise InterventionError(
                f"{self.text}: the scores of {state.call.name} are not a traced product of queries and keys with "
                "masks and biases, so beta is unknown; set_weights, ablate and patch can be used"
            )
        # beta is one number for all heads, and q is multiplied by it
        q = state.record.q
        return replace(state.record, q=q * q.new_ones(()).masked_fill(state.mark(self.heads), self.factor))


@dataclass(frozen=True, eq=False)
class HideKeys(ScoreEdit):
    """Hide keys from all queries. The output of a query whose keys are all hidden is zero."""

    keys: tuple[int, ...]

    def change(self, state: HeadState) -> Record:
        j = state.record.k.shape[2]
        hidden = torch.zeros(j, dtype=torch.bool, device=state.heads.device)
        hidden[list(resolve_indices("keys", self.keys, j, state.call.name))] = True
        visible = DenseMask(~(hidden & state.mark(self.heads))[None])
        return replace(state.record, mask=state.record.mask & visible)


@dataclass(frozen=True, eq=False)
class SetWeights(Edit):
    """Replace the attention weights of the chosen heads by a given tensor."""

    weights: Float[Tensor, "..."]
    stage = 1

    def apply(self, state: HeadState) -> None:
        (b, h, i, _), v = state.heads.shape, state.record.v
        assert v is not None
        heads = state.chosen(self.heads)
        shape = (b, len(heads), i, v.shape[2])
        try:
            weights = self.weights.to(v).expand(shape)
        except RuntimeError:
            raise ShapeError(
                f"{self.text}: weights are {tuple(self.weights.shape)}, which do not fit {state.call.name}: "
                f"(b, chosen heads, i, j) = {shape}"
            ) from None
        values = v[:, [head // (h // v.shape[1]) for head in heads]]
        index = torch.tensor(heads, dtype=torch.long, device=v.device)
        state.weights_changed = True
        if state.call.weights is not None:
            state.call.weights.write(EditedWeights(state.record, index, weights, weights))
        state.heads = state.heads.index_copy(1, index, (weights @ values).to(state.heads.dtype))


@dataclass(frozen=True, eq=False)
class ReplaceOutput(Edit):
    """Replace the output of heads: ablation or activation patching.

    Ablation replaces the output by zeros, a mean or the output for other sequences. Activation patching replaces it by
    the output in another forward pass.

    values     function that takes the call and the current output of its heads, and returns the new output (b h i e)
    positions  indices of the queries to change; None is all
    """

    values: Callable[[AttentionCall, Tensor], Tensor]
    positions: tuple[int, ...] | None = None
    stage = 2

    def apply(self, state: HeadState) -> None:
        i = state.heads.shape[2]
        marked = state.mark(self.heads)
        if self.positions is not None:
            rows = torch.zeros(i, 1, dtype=torch.bool, device=marked.device)
            rows[list(resolve_indices("positions", self.positions, i, state.call.name))] = True
            marked = marked & rows
        other = self.values(state.call, state.heads)
        state.heads = torch.where(marked, other.to(state.heads), state.heads)
