"""`AttentionCall`: one intercepted attention call, whose output can be replaced."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from regard.base.errors import InterventionError
from regard.core.attend import attend
from regard.see.call_adapters import OutputTransform
from regard.see.interventions.returned_weights import ReturnedWeights
from regard.see.record import Record


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """An intercepted attention call of a running model.

    path       path of the module that makes the call, such as "blocks.0.attention"
    name       name that `watch` gives the call: the second call of a module is `path:2`
    build      function that builds the record of the inputs, with gradients
    out        the output that the model receives
    transform  converts the output of the heads (b h i e) to `out`
    weights    the attention weights that the model returns or stores, which an edit can replace; None if the model
               computes no weights
    edited     the inputs of the call after the edits `scale_beta` and `hide`, as a list of one record; empty if the
               call has no such edit
    """

    path: str
    name: str
    build: Callable[[], Record]
    out: Tensor
    transform: OutputTransform
    weights: ReturnedWeights | None = None
    edited: list[Record] = field(default_factory=list)

    @cached_property
    def record(self) -> Record:
        """The inputs of the attention call as a `Record`, with gradients."""
        try:
            return self.build()
        except Exception as error:
            raise InterventionError(f"the inputs of {self.name} cannot be read: {error}") from error

    @cached_property
    def heads(self) -> Float[Tensor, "b h i e"]:
        """The output of the attention heads, before the output projection."""
        heads = self.transform.read_heads(self.out)
        return attend_record(self.record) if heads is None else heads

    def output(self, heads: Float[Tensor, "b h i e"]) -> Tensor:
        """Convert an output of the heads to the output of the attention call.

        The result has the shape and dtype that the model expects.
        """
        return self.transform.apply(heads.to(self.out.dtype), self.out)


OutputChange = Callable[[AttentionCall], Float[Tensor, "b h i e"] | None]


def attend_record(record: Record) -> Float[Tensor, "b h i e"]:
    """Compute the output of a recorded attention call from its inputs, with dropout and with gradients."""
    assert record.v is not None
    return attend(
        record.q,
        record.k,
        record.v.to(record.q.dtype),
        mask=record.mask,
        scores=record.terms,
        beta=record.beta,
        dropout=record.dropout,
        positions=record.positions,
    )
