"""Activation patching and path patching: which heads carry the difference between two runs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError
from regard.see.interventions.intervene import Interventions, intervene
from regard.see.interventions.progress import show_progress
from regard.see.record import Record, Seen
from regard.see.watch import watch

Head = tuple[str, int]
Metric = Callable[[Any], Tensor | float]
INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class HeadEffects(TextDisplay):
    """A number for every head, or for every head and position.

    heads     the layer and index of each head
    values    the metric after patching each head; with positions, one column for each
    baseline  the metric without patching
    """

    heads: tuple[Head, ...]
    values: Float[Tensor, "heads"] | Float[Tensor, "heads positions"]
    baseline: float

    def of(self, layer: str, head: int) -> Tensor:
        """The value of one head."""
        if (layer, head) not in self.heads:
            raise ConfigError(f"there is no head {head} of {layer!r}; heads are {self.heads[:3]} and so on")
        return self.values[self.heads.index((layer, head))]

    def sorted(self) -> list[Head]:
        """The heads, those with the largest change of the metric first."""
        change = (self.values - self.baseline).abs()
        order = (change if change.ndim == 1 else change.amax(1)).argsort(descending=True, stable=True)
        return [self.heads[at] for at in order.tolist()]

    def __str__(self) -> str:
        width = max((len(layer) for layer, _ in self.heads), default=5)
        lines = [f"{'layer'.ljust(width)}  head  change"]
        for head in self.sorted():
            change = self.of(*head) - self.baseline
            largest = change if change.ndim == 0 else change[change.abs().argmax()]
            lines.append(f"{head[0].ljust(width)}  {head[1]:4d}  {float(largest):+.4f}")
        return "\n".join(lines)


def activation_patching(
    model: nn.Module,
    run: Callable[[], Any],
    source: Seen,
    metric: Metric,
    *,
    layers: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    progress: bool = True,
) -> HeadEffects:
    """Activation patching: the metric after replacing the output of each head by that of another run, one at a time.

    Meng et al. 2022, arXiv:2202.05262; for heads as in Wang et al. 2022, arXiv:2211.00593. With the source from the
    clean input and `run` on the corrupted one, a head that restores the metric is sufficient for it (denoising); the
    other way round, a head that lowers it is necessary (noising).

    run        calls the model on its inputs and returns its output
    source     another run, recorded by `watch`, with inputs of the same shape
    metric     from the output of `run` to a number
    layers     names in `source`; None is all
    positions  patch one position at a time, these; None patches all positions of a head together

    >>> with watch(model) as source:
    ...     out = model(tokens)
    >>> run, metric = lambda: model(tokens.flip(1)), lambda out: out[0, -1, 0].item()
    >>> effects = activation_patching(model, run, source, metric, progress=False)
    >>> str(effects).splitlines()[0]
    'layer               head  change'
    """
    heads = list_heads(source, layers)
    places = [(head, at) for head in heads for at in (positions if positions is not None else [None])]
    values = []
    with torch.no_grad():
        baseline = float(metric(run()))
        for (layer, head), at in show_progress(places, "activation patching", progress):
            with intervene(model) as edit:
                edit.patch(layer, heads=[head], positions=None if at is None else [at], source=source)
                values.append(float(metric(run())))
    found = torch.tensor(values, dtype=torch.float64)
    return HeadEffects(tuple(heads), found if positions is None else found.reshape(len(heads), -1), baseline)


def path_patching(
    model: nn.Module,
    run: Callable[[], Any],
    source: Seen,
    metric: Metric,
    *,
    receiver: Head | None = None,
    inputs: Sequence[str] = INPUTS,
    layers: Sequence[str] | None = None,
    progress: bool = True,
) -> HeadEffects:
    """Path patching: the metric if only one path differs, from each head to the logits or to one later head.

    Wang et al. 2022, arXiv:2211.00593, appendix B. The output of the sender comes from the source, all other heads keep
    their outputs of `run`, and feed-forward layers are computed again. Without a receiver that is the effect on the
    logits. With one, its queries, keys and values are those of that run, and a last run with its output, in which
    all other parts are computed as usual, has the effect.

    receiver  the layer and index of a head; senders are the heads of earlier layers. None is the logits
    inputs    which inputs of the receiver the path goes into: some of "q", "k", "v"

    >>> with watch(model) as source:
    ...     out = model(tokens)
    >>> run, metric = lambda: model(tokens.flip(1)), lambda out: out[0, -1, 0].item()
    >>> effects = path_patching(model, run, source, metric, progress=False)
    >>> str(effects).splitlines()[0]
    'layer               head  change'
    """
    if unknown := [each for each in inputs if each not in INPUTS]:
        raise ConfigError(f"inputs are some of {', '.join(INPUTS)}, not {unknown[0]!r}")
    with torch.no_grad(), watch(model) as clean:
        baseline = float(metric(run()))
    order = list(clean)
    senders = list_heads(source, layers)
    if receiver is not None:
        if receiver not in list_heads(clean, None):
            raise ConfigError(f"receiver is (layer, head) of {order[0]!r} and so on, not {receiver!r}")
        senders = [head for head in senders if order.index(head[0]) < order.index(receiver[0])]
    values = []
    with torch.no_grad():
        for sender in show_progress(senders, "path patching", progress):
            with intervene(model) as edit, watch(model) if receiver is not None else nullcontext(clean) as seen:
                _freeze_heads(edit, clean, source, sender)
                output = run()
            if receiver is not None:
                output = _run_receiver(model, run, receiver, clean[receiver[0]], seen[receiver[0]], inputs)
            values.append(float(metric(output)))
    return HeadEffects(tuple(senders), torch.tensor(values, dtype=torch.float64), baseline)


def _freeze_heads(edit: Interventions, clean: Seen, source: Seen, sender: Head) -> None:
    """Give the sender its output in the source, and every other head that of the clean run."""
    for name in clean:
        edit.patch(name, source=clean)
    edit.patch(sender[0], heads=[sender[1]], source=source)


def _run_receiver(
    model: nn.Module, run: Callable[[], Any], receiver: Head, clean: Record, changed: Record, inputs: Sequence[str]
) -> Any:
    """Run the model with the receiver's output for changed queries, keys or values."""
    name, head = receiver
    mixed = replace(clean, **{each: getattr(changed, each) for each in inputs})
    with intervene(model) as edit:
        edit.patch(name, heads=[head], source=mixed)
        return run()


def list_heads(seen: Seen, layers: Sequence[str] | None) -> list[Head]:
    """The layer and index of every head of a run, or of some of its layers."""
    names = list(seen) if layers is None else list(layers)
    return [(name, head) for name in names for head in range(seen[name].q.shape[1])]
