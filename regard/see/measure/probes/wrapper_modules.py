"""Probe a module that contains one attention, such as nn.TransformerEncoderLayer.

The whole module is called while its attention uses the chosen q, k and v, so that the module's masks and order of axes
are measured too.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.core.heads import merge_heads
from regard.see.measure.probes.module_copies import ModuleCopies
from regard.see.measure.probes.probe import Probe, ProbeOptions, first_tensor
from regard.see.measure.probes.projections import known_projections, projection_widths

ProbePart = Callable[[nn.Module, str, ProbeOptions], Probe]


def probe_wrapper(module: nn.Module, path: str, name: str, options: ProbeOptions, probe_part: ProbePart) -> Probe:
    """Build the probe of a module that contains one attention, such as a Transformer block.

    If the module cannot be called with a sequence (b n d), the result is the probe of the inner attention alone.

    path        path of the inner attention in the module
    probe_part  function that takes the inner attention, its name and options, and builds its probe
    """
    parameters = inspect.signature(module.forward).parameters
    own = {each: value for each, value in options.extra.items() if each in parameters}
    rest = {each: value for each, value in options.extra.items() if each not in parameters}
    part = module.get_submodule(path)
    inner = probe_part(part, f"{name}.{path}", replace(options, extra=rest, layout=None))
    expected = options.layout or ("n b c" if _is_time_first(module, part) else "b n c")
    probes = [_probe_with(module, path, name, inner, own, time_first) for time_first in (False, True)]
    first, other = probes if expected == "b n c" else probes[::-1]
    if isinstance(first, str):
        embeds = any(isinstance(each, nn.Embedding) for each in module.modules())
        advice = "; if it takes tokens, pass kind='decoder'" if embeds else ""
        return replace(inner, note=f"only {path}: {name} cannot be called with x ({expected}), it {first}{advice}")
    mixes = first.test_layout(first.usual_sizes()) is not True
    if mixes and isinstance(other, Probe) and other.test_layout(other.usual_sizes()) is True:
        return replace(first, other_layout=other.layout)
    return first


def _is_time_first(module: nn.Module, part: nn.Module) -> bool:
    """Return whether the module takes (n, b, d), that is, whether the attribute `batch_first` is False.

    For a module of torch.nn without this attribute, the attribute of the inner attention is used.
    """
    batch_first = getattr(module, "batch_first", None)
    if batch_first is None and type(module).__module__.startswith("torch.nn."):
        batch_first = getattr(part, "batch_first", None)
    return batch_first is False


def _probe_with(
    module: nn.Module, path: str, name: str, inner: Probe, own: Mapping[str, object], time_first: bool
) -> Probe | str:
    """Build the probe of the whole module, or return a text that says why the module cannot be called.

    inner       probe of the inner attention
    own         keyword arguments that are passed to the module, not to the inner attention
    time_first  whether the module is called with (n, b, d) instead of (b, n, d)
    """
    parameters = inspect.signature(module.forward).parameters
    sequences = [
        each
        for number, (each, parameter) in enumerate(parameters.items())
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and (not number or parameter.default is parameter.empty)
        and each not in own
    ]
    if not sequences:
        return "takes no sequence"
    call = _WrapperCall(inner, path, time_first, tuple(sequences), own)
    copies = ModuleCopies(module, call.replace_attention)
    probe = replace(
        inner,
        name=name,
        call=lambda q, k, v, **keywords: call(copies, q, k, v, **keywords),
        square=True,
        parameters=tuple(each for each in parameters if each not in sequences),
        module=copies.reference,
        layout="n b c" if time_first else "b n c",
        filled_in=(),
    )
    q, k, v = probe.usual_sizes().random_tensors(probe.dtype, probe.device)
    try:
        with torch.no_grad():
            call.test_call(copies, q, k, v)
    except Exception as raised:  # the module of the user may raise any exception
        return f"raises {type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
    return probe


@dataclass
class _WrapperCall:
    """Calls a module in which the inner attention uses the chosen q, k and v.

    path       path of the inner attention
    sequences  names of the module's arguments that are sequences
    own        keyword arguments that are passed to the module, not to the inner attention
    chosen     q, k and v of the next call
    """

    inner: Probe
    path: str
    time_first: bool
    sequences: tuple[str, ...]
    own: Mapping[str, object]
    transposed: bool = False  # the attention inside takes the module's batch axis for time
    chosen: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # outputs of the attention inside

    def replace_attention(self, copy: nn.Module) -> None:
        copy.set_submodule(self.path, _ReplacedAttention(copy.get_submodule(self.path), self))

    def test_call(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Call the module and raise ConfigError if it does not call the inner attention exactly once."""
        self._run(copies, q, k, v)
        if len(self.outputs) != 1:
            raise ConfigError(f"calls {self.path} {len(self.outputs)} times, where once was expected")

    def __call__(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        self._run(copies, q, k, v, **keywords)
        return self.outputs[0]

    def _run(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> None:
        """Run the module on zeros; the output of the inner attention is appended to `outputs`."""
        self.chosen, self.outputs = [q, k, v], []
        x = q.new_zeros(len(q), q.shape[2], self._width(copies))
        x = x.transpose(0, 1) if self.time_first else x
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # the fast path would skip the replaced attention
            copies.at(q.dtype)(**{**dict.fromkeys(self.sequences, x), **self.own, **keywords})
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def _width(self, copies: ModuleCopies) -> int:
        part = copies.reference.get_submodule(self.path)
        if isinstance(part, nn.MultiheadAttention):
            return int(part.embed_dim)
        known = known_projections(part)
        assert known is not None
        return projection_widths(part.get_submodule(known.names[0]))[0]

    def attend(self, keywords: Mapping[str, object], received: Tensor) -> Tensor:
        """Compute the inner attention on the chosen q, k and v, in place of those of the module.

        If the module passes its input to the attention with the axes of batch and time in the wrong order, they are
        exchanged in q, k and v too, so that the mistake shows in the output.

        keywords  keyword arguments that the module passes to the inner attention
        received  the input that the module passes to the inner attention
        """
        q, k, v = self.chosen
        b, n = len(q), q.shape[2]
        if b != n:
            batch_first = self.inner.layout.startswith("b")
            self.transposed = received.shape[:2] == ((n, b) if batch_first else (b, n))
        if not self.transposed:
            self.outputs.append(self.inner.call(q, k, v, **keywords))
            return self.outputs[-1]
        out = self.inner.call(*(x.transpose(0, 2) for x in (q, k, v)), **keywords)
        self.outputs.append(out.transpose(0, 2))
        return out


class _ReplacedAttention(nn.Module):
    """A module in place of the inner attention: it takes the same arguments, but uses the chosen q, k and v."""

    def __init__(self, part: nn.Module, call: _WrapperCall) -> None:
        super().__init__()
        self.part, self.wrapper_call = part, call

    def __getattr__(self, name: str) -> Any:
        """Read missing attributes, such as batch_first, from the original attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> object:
        out = self.part(*arguments, **keywords)
        bound = inspect.signature(self.part.forward).bind(*arguments, **keywords).arguments
        inner = self.wrapper_call.inner
        if inner.module is not None:
            inner.module.train(self.training)
        received = next(iter(bound.values()))
        attended = self.wrapper_call.attend({x: bound[x] for x in bound if x in inner.parameters}, received)
        merged = merge_heads(attended) if inner.layout.startswith("b") else merge_heads(attended).transpose(0, 1)
        if first_tensor(out).shape != merged.shape:
            return out  # only `outputs` is used in this case
        return (merged, *out[1:]) if isinstance(out, tuple | list) else merged
