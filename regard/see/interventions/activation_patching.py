"""Activation patching and path patching: find the heads that cause the difference between two forward passes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError
from regard.see.arguments import check_indices, resolve_indices
from regard.see.interventions.intervene import Interventions, intervene
from regard.see.interventions.progress import show_progress
from regard.see.record import Record, Seen
from regard.see.watch import watch

Head = tuple[str, int]
Metric = Callable[[Any], Tensor | float]
INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class HeadEffects(TextDisplay):
    """The metric after patching each head, or each head at each position.

    To patch a head is to replace its output by its output in another forward pass. The metric is a number computed from
    the output of the model.

    heads     the layer and index of each head
    values    the metric after patching each head; if positions were patched one at a time, one column for each position
    baseline  the metric without patching
    """

    heads: tuple[Head, ...]
    values: Float[Tensor, "heads"] | Float[Tensor, "heads positions"]
    baseline: float

    def of(self, layer: str, head: int) -> Tensor:
        """Return the metric after patching one head.

        The result has one entry for each position if positions were patched one at a time.
        """
        if (layer, head) not in self.heads:
            raise ConfigError(f"there is no head {head} of {layer!r}; heads are {self.heads[:3]} and so on")
        return self.values[self.heads.index((layer, head))]

    def sorted(self) -> list[Head]:
        """Return the heads sorted by how much patching changes the metric: largest absolute change first."""
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
    """Activation patching: measure a metric while one head's output is replaced by that of another forward pass.

    Meng et al. 2022, arXiv:2202.05262; for heads as in Wang et al. 2022, arXiv:2211.00593. The method is used in two
    directions. Denoising: with `source` from the clean input and `run` on the corrupted input, a head is sufficient if
    patching it restores the metric of the clean input. Noising: with the two inputs exchanged, a head is necessary if
    patching it lowers the metric.

    run        function without arguments that calls the model on an input and returns its output
    source     another forward pass, recorded by `watch`, with inputs of the same shape
    metric     function that takes the output of `run` and returns a number
    layers     names of layers in `source`; None is all
    positions  positions to patch, one at a time; None patches all positions of a head together

    >>> with watch(model) as source:
    ...     out = model(tokens)
    >>> run, metric = lambda: model(tokens.flip(1)), lambda out: out[0, -1, 0].item()
    >>> effects = activation_patching(model, run, source, metric, progress=False)
    >>> str(effects).splitlines()[0]
    'layer               head  change'
    """
    heads = list_heads(_check_seen("activation_patching", source), layers)
    rows = _check_positions(positions, {name: source[name].q.shape[2] for name, _ in heads})
    places = [(head, at) for head in heads for at in (rows if rows is not None else [None])]
    values = []
    with torch.no_grad():
        baseline = float(metric(run()))
        for (layer, head), at in show_progress(places, "activation patching", progress):
            with intervene(model) as edit:
                edit.patch(layer, heads=[head], positions=None if at is None else [at], source=source)
                values.append(float(metric(run())))
    found = torch.tensor(values, dtype=torch.float64)
    return HeadEffects(tuple(heads), found if rows is None else found.reshape(len(heads), -1), baseline)


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
    """Path patching: measure the effect of each head along one path, to the logits or through one later head.

    Wang et al. 2022, arXiv:2211.00593, appendix B. Each head is the sender once: the model runs with the sender's
    output taken from `source`, and the outputs of all other heads fixed to their values without patching. Feed-forward
    layers are computed as usual. Without a receiver, the metric is computed on the output of this first pass. With a
    receiver, the model runs a second time, and the metric is computed on the output of this second pass. The second
    pass replaces only the output of the receiver. It is computed from the queries, keys and values of the first pass;
    those not named in `inputs` are as without patching.

    run, source, metric, layers  as in `activation_patching`
    receiver                     layer and index of a later head; only heads of earlier layers are senders. None
                                 measures the path to the logits
    inputs                       which inputs of the receiver are taken from the first pass: some of "q", "k", "v"

    >>> with watch(model) as source:
    ...     out = model(tokens)
    >>> run, metric = lambda: model(tokens.flip(1)), lambda out: out[0, -1, 0].item()
    >>> effects = path_patching(model, run, source, metric, progress=False)
    >>> str(effects).splitlines()[0]
    'layer               head  change'
    """
    chosen = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    if unknown := [each for each in chosen if each not in INPUTS]:
        raise ConfigError(f"inputs are some of {', '.join(INPUTS)}, not {unknown[0]!r}")
    if not chosen:
        raise ConfigError(f"inputs is empty: name the inputs of the receiver that change, some of {', '.join(INPUTS)}")
    senders = list_heads(_check_seen("path_patching", source), layers)
    with torch.no_grad(), watch(model) as clean:
        baseline = float(metric(run()))
    order = list(clean)
    if missing := [name for name, _ in senders if name not in clean]:
        raise ConfigError(
            f"source has a record of {missing[0]!r}, but run() makes no such call; it makes {', '.join(order[:8])}"
        )
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
                output = _run_receiver(model, run, receiver, clean[receiver[0]], seen[receiver[0]], chosen)
            values.append(float(metric(output)))
    return HeadEffects(tuple(senders), torch.tensor(values, dtype=torch.float64), baseline)


def _freeze_heads(edit: Interventions, clean: Seen, source: Seen, sender: Head) -> None:
    """Patch the sender with its output from `source`, and every other head with its output from `clean`.

    clean   the forward pass without patching
    sender  layer and index of the head whose effect is measured
    """
    for name in clean:
        edit.patch(name, source=clean)
    edit.patch(sender[0], heads=[sender[1]], source=source)


def _run_receiver(
    model: nn.Module, run: Callable[[], Any], receiver: Head, clean: Record, changed: Record, inputs: Sequence[str]
) -> Any:
    """Run the model with the output of one head, the receiver, recomputed from changed queries, keys or values.

    clean    record of the receiver's layer in the forward pass without patching
    changed  record of the same layer in the forward pass in which the sender was patched
    inputs   which of "q", "k" and "v" to take from `changed`
    """
    name, head = receiver
    mixed = replace(clean, **{each: getattr(changed, each) for each in inputs})
    with intervene(model) as edit:
        edit.patch(name, heads=[head], source=mixed)
        return run()


def list_heads(seen: Seen, layers: Sequence[str] | None) -> list[Head]:
    """Return the layer name and index of every head of a recorded forward pass.

    layers  names of the layers; None is all
    """
    if isinstance(layers, str):
        raise ConfigError(f"layers takes a list of names, such as [{layers!r}], or None for all, not {layers!r}")
    names = list(seen) if layers is None else list(layers)
    if not names:
        raise ConfigError("layers is empty; pass names of recorded layers, or None for all")
    return [(name, head) for name in names for head in range(seen[name].q.shape[1])]


def _check_seen(what: str, source: object) -> Seen:
    """Check that `source` is a `Seen` with at least one recorded attention call, else raise ConfigError.

    what  name of the function, for the error message
    """
    if not isinstance(source, Seen):
        raise ConfigError(
            f"{what}(source) takes what was recorded by `with regard.watch(model) as seen:`, not "
            f"{type(source).__name__}"
        )
    if not len(source):
        reasons = "".join(f"; left out: {reason}" for reason in source.left_out)
        raise ConfigError(f"{what}(source) has no records; run the model inside `with regard.watch(model)`{reasons}")
    return source


def _check_positions(positions: Sequence[int] | None, sizes: dict[str, int]) -> tuple[int, ...] | None:
    """Check that every layer has queries at the positions to patch, else raise an error. Returns the positions."""
    rows = check_indices("positions", positions)
    if rows == ():
        raise ConfigError("positions is empty; pass indices of queries, or None to patch all together")
    for name, size in sizes.items():
        resolve_indices("positions", rows or (), size, name)
    return rows
