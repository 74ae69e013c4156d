"""After an edit of weights, replace the attention weights that a model returns or stores besides its output."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import InterventionError
from regard.core.attend import attend
from regard.see.leading_axes import LeadingAxes
from regard.see.record import Record


@dataclass(frozen=True, eq=False)
class EditedWeights:
    """The attention weights of some heads after an edit.

    record   the inputs of all heads after the edit
    heads    indices of the edited heads
    weights  weights of these heads before dropout
    dropped  weights of these heads after dropout
    """

    record: Record
    heads: Int[Tensor, "r"]
    weights: Float[Tensor, "b r i j"]
    dropped: Float[Tensor, "b r i j"]


@runtime_checkable
class ReturnedWeights(Protocol):
    """Protocol of attention weights that a model returns or stores, so that an edit can replace them."""

    def write(self, edited: EditedWeights) -> None:
        """Replace the weights of the edited heads; raise InterventionError if that is impossible."""


def compute_weights(record: Record) -> Float[Tensor, "b h i j"]:
    """Compute the weights of a record with gradients and without dropout.

    Unit vectors take the place of the values, so that the output of attention is the weights.
    """
    k = record.k
    units = torch.eye(k.shape[2], dtype=record.q.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    given = {"mask": record.mask, "scores": record.terms, "beta": record.beta, "positions": record.positions}
    return attend(record.q, k, units, **given)  # type: ignore[arg-type]


@dataclass(eq=False)
class ResultWeights:
    """Attention weights in the result of a function or module; `write` stores the edited weights in `value`.

    value     the weights (b h i j), or (b i j) if they are averaged over heads; without axis b if the inputs have none
    averaged  whether the weights are the mean over heads
    """

    value: Tensor
    averaged: bool = False
    _heads: Tensor | None = None  # of each head, if averaged

    def write(self, edited: EditedWeights) -> None:
        b, h, i, j = *edited.record.q.shape[:3], edited.record.k.shape[2]
        sizes = (b, i, j) if self.averaged else (b, h, i, j)
        if self.value.shape not in (sizes, sizes[1:]):
            raise InterventionError(
                f"the function returns {tuple(self.value.shape)} besides its output, which are not weights {sizes}, so "
                "they cannot be those of the edit"
            )
        if not self.averaged:
            whole = self.value.reshape(sizes).index_copy(1, edited.heads, edited.dropped.to(self.value.dtype))
        else:
            if edited.record.dropout:
                raise InterventionError(
                    "the model returns the mean of the weights of all heads after dropout, which an edit of some "
                    "heads cannot replace; call model.eval(), or pass average_attn_weights=False"
                )
            heads = compute_weights(edited.record) if self._heads is None else self._heads
            self._heads = heads.index_copy(1, edited.heads, edited.weights.to(heads.dtype))
            whole = self._heads.mean(1).to(self.value.dtype)
        self.value = whole.reshape(self.value.shape)


@dataclass(frozen=True, eq=False)
class WeightTensors:
    """The weight tensors of attention written by hand, as softmax and matmul; `write` replaces their values in place.

    tensors  pairs: a weak reference to a tensor that holds the weights, and whether dropout was applied to this tensor
    sizes    shape of the weights at the softmax
    shape    shape to which the weights are broadcast in the product with the values
    axes     which leading axes of the weights are the batch and which are the heads
    refusal  reason why the weights cannot be replaced; empty if they can
    """

    tensors: tuple[tuple["ref[Tensor]", bool], ...]
    sizes: torch.Size
    shape: torch.Size
    axes: LeadingAxes
    refusal: str = ""

    def write(self, edited: EditedWeights) -> None:
        if self.refusal:
            raise InterventionError(
                f"the model may return weights that are not those of the edit, because it {self.refusal}; ablate and "
                "patch can be used, which do not change the weights"
            )
        for reference, dropped in self.tensors:
            tensor = reference()
            if tensor is None:
                continue
            heads = self.axes.to_heads(tensor.data.reshape(self.sizes).expand(self.shape))
            numbers = (edited.dropped if dropped else edited.weights).detach().to(heads.dtype)
            whole = self.axes.from_heads(heads.index_copy(1, edited.heads, numbers))
            for axis, size in enumerate((1,) * (whole.ndim - len(self.sizes)) + tuple(self.sizes)):
                if size < whole.shape[axis]:
                    first = whole.narrow(axis, 0, 1)
                    if not torch.equal(whole, first.expand_as(whole)):
                        raise InterventionError(
                            "several heads share one map of weights, so an edit of some of them cannot be written into "
                            "it; edit all of them alike"
                        )
                    whole = first
            # not an operation for autograd: the output of the other heads still needs the graph of the weights
            tensor.data.copy_(whole.reshape(tensor.shape))
            if tensor.requires_grad:
                tensor.register_hook(_GradientCheck(self, edited.heads))


@dataclass(frozen=True, eq=False)
class _GradientCheck:
    """A gradient hook that raises an error if a loss depends on edited weights that the model returned.

    The autograd graph holds the weights before the edit, so the gradient would be wrong.
    """

    place: WeightTensors
    heads: Tensor

    def __call__(self, gradient: Tensor) -> None:
        whole = self.place.axes.to_heads(gradient.reshape(self.place.sizes).expand(self.place.shape))
        if bool(whole.index_select(1, self.heads).any()):
            raise InterventionError(
                "a loss depends on attention weights that the model returned and an edit replaced; only the outputs of "
                "edited heads have gradients"
            )


def drop(weights: Tensor, record: Record) -> Tensor:
    """Apply dropout to attention weights, with the dropout probability of the recorded call."""
    return functional.dropout(weights, record.dropout) if record.dropout else weights
