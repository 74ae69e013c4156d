"""Direct logit attribution: what each head and feed-forward layer adds to a logit through the residual stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError, InterventionError
from regard.see.arguments import check_index
from regard.see.interventions.edits import ReplaceOutput
from regard.see.interventions.frozen_functions import FrozenFunctions
from regard.see.interventions.intervene import intervene
from regard.see.interventions.layer_names import LayerChoice
from regard.see.interventions.residual_stream import SUPPORTED, find_residual_stream, read_logits
from regard.see.record import Record

TOLERANCE = 1e-4  # largest error of the sum, relative to the sum of magnitudes; norms may compute in float32


@dataclass(frozen=True)
class LogitAttribution(TextDisplay):
    """The contributions of a model's components to one logit of each sequence; they sum to the logit.

    parts      names of the components: "embedding", "LAYER head N", the path of each feed-forward layer, and "bias"
    values     contribution of each component to the logit of each sequence, in the order of `parts`
    logits     the logit of each sequence
    gradients  for each layer, the gradient of the logit with respect to the outputs of the layer's heads, along the
               residual stream only
    """

    parts: tuple[str, ...]
    values: Float[Tensor, "b parts"]
    logits: Float[Tensor, "b"]
    gradients: dict[str, Float[Tensor, "b h i e"]] = field(default_factory=dict, repr=False)

    def of(self, part: str) -> Float[Tensor, "b"]:
        """Return the contribution of one component to the logit of each sequence.

        part  a name in `parts`
        """
        if part not in self.parts:
            raise ConfigError(f"there is no part {part!r}; parts are {', '.join(self.parts[:6])} and so on")
        return self.values[:, self.parts.index(part)]

    def of_keys(self, record: Record, head: int) -> Float[Tensor, "b j"]:
        """Return the contribution of each key to the logit through one head.

        The contribution of a key comes from weight times value, summed over the queries. The contributions of all keys
        sum to the contribution of the head.

        record  the record of the layer by `watch` on the same forward pass, with `values=True`
        head    index of the head; negative indices count from the end
        """
        if record.name not in self.gradients or record.v is None:
            raise ConfigError(f"there are no values of {record.name!r}; watch the pass that was attributed")
        head = check_index("head", head, record.q.shape[1], f"heads of {record.name}")
        v = record.v[:, head * record.v.shape[1] // record.q.shape[1]]  # grouped heads share their values
        gradient = self.gradients[record.name][:, head]
        return torch.einsum("bij,bie,bje->bj", record.weights()[:, head].to(v), gradient.to(v), v)

    def __str__(self) -> str:
        means = self.values.mean(0)
        width = max(map(len, self.parts))
        order = means.abs().argsort(descending=True).tolist()
        lines = [f"{self.parts[at].ljust(width)}  {float(means[at]):+.3f}" for at in order]
        return "\n".join([*lines, f"{'sum, the logit'.ljust(width)}  {float(self.logits.mean()):+.3f}"])


def direct_logit_attribution(
    model: nn.Module,
    run: Callable[[], Any],
    token: int,
    *,
    against: int | None = None,
    position: int = -1,
) -> LogitAttribution:
    """Direct logit attribution: what the embedding, heads, feed-forward layers and biases add to a logit.

    Elhage et al. 2021, *A Mathematical Framework for Transformer Circuits*. Only the direct path counts: what a
    component adds to the residual stream, without the effect on later components. This path is made linear: norms
    multiply by a factor that is treated as a constant, and so is the factor f(x) / x of an activation function in the
    output head, the part that computes the logits after the last block (that of BERT has one). The contributions
    therefore sum to the logit; an error is raised if they do not.

    run       function without arguments that calls the model with gradients and returns its output, such as lambda:
              model(x)
    token     index of the logit: a token, or a class
    against   a second index, whose logit is subtracted
    position  position of the logit; ignored if the model returns one vector of logits for each sequence

    In this example the token 1 at the end was followed by 5 before, which an induction head predicts:

    >>> model, tokens = regard.load("induction-gpt"), torch.tensor([[7, 3, 9, 1, 5, 7, 3, 9, 1]])
    >>> parts = direct_logit_attribution(model, lambda: model(tokens), token=5)  # 5 followed 1 before
    >>> str(parts).splitlines()[0]
    'blocks.1.attention head 0  +3.958'
    """
    stream = find_residual_stream(model)
    leaves: dict[str, Tensor] = {}

    def start(x: Tensor) -> Tensor:
        return leaves.setdefault("embedding", x.detach().requires_grad_())

    def cut(path: str, x: Tensor) -> Tensor:
        leaves[path] = x.detach().requires_grad_()
        return leaves[path]

    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    with torch.enable_grad(), _with_gradients(biases), stream.changed(inputs=start, feedforward=cut):
        with intervene(model) as edit, FrozenFunctions():
            edit.edits.append(
                ReplaceOutput("attribution", LayerChoice(), None, lambda call, heads: cut(call.name, heads))
            )
            logits = read_logits(run())
        chosen = logits
        if logits.ndim == 3:
            chosen = logits[:, check_index("position", position, logits.shape[1], "positions of the logits")]
        logit = chosen[:, check_index("token", token, chosen.shape[1], "logits", negative=False)]
        if against is not None:
            logit = logit - chosen[:, check_index("against", against, chosen.shape[1], "logits", negative=False)]
        if not logit.requires_grad or "embedding" not in leaves:
            raise InterventionError("run() must call the model without torch.no_grad() and return its logits")
        found, gradients = _contributions(logit, leaves, biases)
    parts: list[str] = []
    for name, leaf in leaves.items():
        parts += [f"{name} head {head}" for head in range(leaf.shape[1])] if leaf.ndim == 4 else [name]
    missing = (found.sum(1) - logit.detach()).abs()
    if bool((missing > TOLERANCE * found.abs().sum(1)).any()):
        raise InterventionError(
            f"the parts of {type(model).__name__} do not sum to the logit ({float(missing.max()):.2g} is missing): "
            "something else than its heads and feed-forward layers writes into the residual stream, or its head is not "
            f"made of linear layers, norms and activation functions; supported are {SUPPORTED}"
        )
    return LogitAttribution((*parts, "bias"), found, logit.detach(), gradients)


def _contributions(
    logit: Float[Tensor, "b"], leaves: dict[str, Tensor], biases: list[nn.Parameter]
) -> tuple[Float[Tensor, "b parts"], dict[str, Tensor]]:
    """Return the contributions of a model's components to the logit, and the gradients at the heads of each layer.

    The contribution of a component is its output times the gradient of the logit, summed over all entries. The columns
    of the first result are in the order of `leaves`: one column for each head of a layer, and one for any other
    component. The last column is the contribution of all biases together. The second result has, for each layer name,
    the gradient of the logit with respect to the output of its heads.

    leaves  outputs of the components, by name; an output of four axes is that of the heads of a layer
    """
    rows, of_heads = [], {name: torch.zeros_like(leaf) for name, leaf in leaves.items() if leaf.ndim == 4}
    for at, each in enumerate(logit):
        gradients = torch.autograd.grad(each, [*leaves.values(), *biases], retain_graph=True, allow_unused=True)
        row = []
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=False):
            product = torch.zeros_like(leaf[at]) if gradient is None else (leaf * gradient)[at].detach()
            row.append(product.sum((1, 2)) if leaf.ndim == 4 else product.sum().reshape(1))
            if name in of_heads and gradient is not None:
                of_heads[name][at] = gradient[at].detach()
        reached = zip(biases, gradients[len(leaves) :], strict=True)
        row.append(sum((bias * g).sum() for bias, g in reached if g is not None) + logit.new_zeros(1))
        rows.append(torch.cat(row).detach())
    return torch.stack(rows), {name: found.detach() for name, found in of_heads.items()}


@contextmanager
def _with_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Context manager: set requires_grad of parameters to True inside the `with` block."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
