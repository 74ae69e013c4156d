"""How something is asked for q, k and v: as `as_probe` does, and in some ways that need more than that.

A module around one attention is called itself, so that its masks and its order of axes are those that count. A function
may have time before the batch, or answer with weights first.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.see.adapters import Probe, as_probe
from regard.see.measure.probes.functions import LAYOUTS, merge, split
from regard.see.measure.probes.module_copies import ModuleCopies
from regard.see.measure.probes.probe import Sizes, first_tensor
from regard.see.measure.probes.projections import known_projections

# layouts with the one that each is turned into; a function that goes over channels by mistake looks like (b h c n), so
# that one is never guessed
TURNED = {"n b h c": "b h n c", "n b c": "b n c", "b h c n": "b h n c"}
TIME_FIRST = ("n b h c", "n b c")
ROLES = {"q": ("q", "query", "queries"), "k": ("k", "key", "keys"), "v": ("v", "value", "values")}


@dataclass(frozen=True)
class Asked:
    """A probe, and what there is to say about how it was made."""

    probe: Probe
    special: bool = False  # as_probe alone makes another one
    note: str = ""  # what could not be asked
    fitting: str = ""  # a layout in which it would mix nothing, where in the expected one it does


def probe_of(fn: object, **options: Any) -> Probe:
    """The probe that `check` asks."""
    return asked(fn, **options).probe


def known_layout(layout: str | None) -> None:
    """Refuse a layout that nothing is asked in."""
    known = dict.fromkeys((*LAYOUTS, *TURNED))
    if layout is not None and layout not in known:
        raise ConfigError(f"layout is one of {', '.join(map(repr, known))}, not {layout!r}")


def asked(fn: object, *, layout: str | None = None, **options: Any) -> Asked:
    """The probe, made by whichever way fits. `options` are those of as_probe."""
    known_layout(layout)
    if isinstance(fn, Probe):
        return Asked(fn)
    try:
        if isinstance(fn, nn.Module):
            return _of_module(getattr(fn, "_orig_mod", fn), layout, options)  # what torch.compile wraps
        if not callable(fn):
            return Asked(as_probe(fn))
        names = _named(fn)
        if names is None:
            return _of_function(fn, layout, options)
        return replace(_of_function(_by_name(fn, names), layout, options), special=True)
    except ConfigError as refused:
        raise ConfigError(_advised(str(refused))) from refused


def _advised(words: str) -> str:
    """The words of as_probe, less what only as_probe takes, with the layouts that are tried here."""
    words = words.replace("kv_heads=, width=, queries= or keys=", "kv_heads= or width=")
    tried = ", ".join(f"({each})" for each in dict.fromkeys((*LAYOUTS, *TIME_FIRST)))
    return re.sub(r"the layouts \(.*\) and other sizes", f"the layouts {tried} and other sizes", words)


def _of_module(module: nn.Module, layout: str | None, options: Mapping[str, Any]) -> Asked:
    inside = _inside(module)
    if len(inside) == 1:
        return _around(module, *inside.popitem(), layout, options)
    known = None if layout in TURNED else layout
    names = _named(module.forward)
    if names is None or inside or isinstance(module, nn.MultiheadAttention) or known_projections(module) is not None:
        return Asked(as_probe(module, layout=known, **options))
    return Asked(as_probe(_module_by_name(module, names), layout=known, **options), special=True)


def _named(fn: object) -> tuple[str, str, str] | None:
    """The names of its arguments for q, k and v, where it takes them in another order or by name only."""
    try:
        listed = list(inspect.signature(fn).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    names = {
        role: each.name
        for role, known in ROLES.items()
        for each in listed
        if each.name.lower() in known and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    placed = [each.name for each in listed if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(names) < 3 or placed[:3] == list(names.values()):
        return None
    return names["q"], names["k"], names["v"]


def _by_name(fn: Callable[..., Any], names: tuple[str, str, str]) -> Callable[..., object]:
    """The same function, taking q, k and v in this order."""

    @wraps(fn)
    def ordered(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> object:
        return fn(**dict(zip(names, (q, k, v), strict=True)), **settings)

    ordered.__signature__ = inspect.Signature(_in_order(fn, names))  # type: ignore[attr-defined]
    return ordered


def _module_by_name(module: nn.Module, names: tuple[str, str, str]) -> nn.Module:
    """The same module, taking q, k and v in this order."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, **settings: object) -> object:
        return self.inner(**dict(zip(names, (q, k, v), strict=True)), **settings)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([own, *_in_order(module.forward, names)])  # type: ignore[attr-defined]
    # its arguments are read off its class, so each has a class of its own
    made: nn.Module = type(type(module).__name__, (nn.Module,), {"forward": forward})()
    made.inner = module
    return made.train(module.training)


def _in_order(fn: Callable[..., Any], names: tuple[str, str, str]) -> list[inspect.Parameter]:
    """The arguments q, k and v, and all others by name only."""
    three = [inspect.Parameter(role, inspect.Parameter.POSITIONAL_OR_KEYWORD) for role in ROLES]
    further = [
        each if each.kind is each.VAR_KEYWORD else each.replace(kind=each.KEYWORD_ONLY)
        for each in inspect.signature(fn).parameters.values()
        if each.name not in names and each.kind is not each.VAR_POSITIONAL
    ]
    return [*three, *further]


def _of_function(fn: Callable[..., Any], layout: str | None, options: Mapping[str, Any]) -> Asked:
    if layout in TURNED:
        return Asked(_turned(fn, layout, options), special=True)
    if _weights_first(fn, options):
        return Asked(as_probe(_second(fn), layout=layout, **options), special=True)
    try:
        plain: Probe | ConfigError = as_probe(fn, layout=layout, **options)
    except ConfigError as refused:
        plain = refused
    if isinstance(plain, Probe) and (layout is not None or plain.tried(_sizes(plain)) is True):
        return Asked(plain)
    for other in TIME_FIRST if layout is None else ():
        try:
            turned = _turned(fn, other, options)
        except ConfigError:
            continue
        if turned.tried(_sizes(turned)) is True:
            return Asked(turned, special=True)
    if isinstance(plain, ConfigError):
        raise plain
    return Asked(plain)


def _sizes(probe: Probe) -> Sizes:
    """Sizes that it takes."""
    h, c = probe.heads or 3, probe.width or 8
    e = probe.value_width or (c if probe.equal_widths else c + 3)
    return Sizes(h, probe.kv_heads or h, 5, 5 if probe.square else 7, c, e)


def _turned(fn: Callable[..., object], layout: str, options: Mapping[str, Any]) -> Probe:
    """The probe of a function that has time before the batch, or channels before time."""

    @wraps(fn)
    def batch_first(*tensors: Tensor, **settings: object) -> Tensor:
        q, k, v = tensors
        if layout == "b h c n":
            return first_tensor(fn(*(x.mT for x in (q, k, v)), **settings)).mT
        if layout == "n b c":
            return first_tensor(fn(*(x.transpose(0, 1) for x in (q, k, v)), **settings)).transpose(0, 1)
        out = first_tensor(fn(*(x.permute(2, 0, 1, 3) for x in (q, k, v)), **settings))
        return (out if out.ndim == 4 else out.unflatten(-1, (q.shape[1], -1))).permute(1, 2, 0, 3)

    probe = as_probe(batch_first, layout=TURNED[layout], **options)
    return replace(probe, layout=layout)


def _weights_first(fn: Callable[..., object], options: Mapping[str, Any]) -> bool:
    """Whether it answers with weights (b h i j), and with the output after them."""
    h, c = options.get("heads") or 3, options.get("width") or 8
    sizes = Sizes(h, options.get("kv_heads") or h, 5, 7, c, c + 3)
    extra = {name: value for name, value in options.items() if name not in ("heads", "kv_heads", "width")}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = fn(*sizes.drawn(torch.float32, torch.device("cpu")), **extra)
    except Exception:  # it is asked in another way
        return False
    if not isinstance(out, tuple | list) or len(out) < 2 or not all(isinstance(x, Tensor) for x in out[:2]):
        return False
    return [tuple(x.shape) for x in out[:2]] == [(2, h, 5, 7), (2, h, 5, c + 3)]


def _second(fn: Callable[..., Any]) -> Callable[..., object]:
    @wraps(fn)
    def second(*tensors: Tensor, **settings: object) -> object:
        return fn(*tensors, **settings)[1]

    return second


def _inside(module: nn.Module) -> dict[str, nn.Module]:
    """The attentions among its submodules, by path, where it is none itself."""
    if isinstance(module, nn.MultiheadAttention) or known_projections(module) is not None:
        return {}
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        within = not path or any(path.startswith(f"{other}.") for other in found)
        if not within and (isinstance(part, nn.MultiheadAttention) or known_projections(part) is not None):
            found[path] = part
    return found


def _around(module: nn.Module, path: str, part: nn.Module, layout: str | None, options: Mapping[str, Any]) -> Asked:
    """A module that calls one attention: it is asked itself where it takes a sequence, else what is inside."""
    name = type(module).__name__
    names = list(inspect.signature(module.forward).parameters)
    own = {each: value for each, value in options.items() if each in names}
    inner = as_probe(part, **{each: value for each, value in options.items() if each not in names})
    inner = replace(inner, name=f"{name}.{path}")
    known = layout or ("n b c" if _says_time_first(module, part) else "b n c")
    first, other = (_outer(module, path, inner, own, time_first) for time_first in (known == "n b c", known != "n b c"))
    if isinstance(first, str):
        embeds = any(isinstance(each, nn.Embedding) for each in module.modules())
        advice = "; where it takes tokens, say kind='decoder'" if embeds else ""
        note = f"{path} alone: {name} around it could not be called with x ({known}), it {first}{advice}"
        return Asked(inner, note=note)
    mixes, fits = (isinstance(each, Probe) and each.tried(_sizes(each)) is True for each in (first, other))
    fitting = other.layout if not mixes and fits and isinstance(other, Probe) else ""
    return Asked(first, special=True, fitting=fitting)


def _says_time_first(module: nn.Module, part: nn.Module) -> bool:
    """Whether its owner, or torch for a layer of its own, says that time comes before the batch."""
    says = getattr(module, "batch_first", None)
    if says is None and type(module).__module__.startswith("torch.nn."):
        says = getattr(part, "batch_first", None)
    return says is False


def _outer(module: nn.Module, path: str, inner: Probe, own: Mapping[str, object], time_first: bool) -> Probe | str:
    """The probe of the module around an attention, or in words why there is none."""
    takes = inspect.signature(module.forward).parameters
    sequences = [
        each
        for number, (each, parameter) in enumerate(takes.items())
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and (not number or parameter.default is parameter.empty)
        and each not in own
    ]
    if not sequences:
        return "takes no sequence"
    calling = _Calling(inner, path, time_first, tuple(sequences), own)
    copies = ModuleCopies(module, calling.prepare)
    probe = Probe(
        type(module).__name__,
        lambda q, k, v, **extra: calling(copies, q, k, v, **extra),
        heads=inner.heads,
        kv_heads=inner.kv_heads,
        width=inner.width,
        equal_widths=inner.equal_widths,
        square=True,
        parameters=tuple(each for each in takes if each not in sequences),
        module=copies.shown,
        layout="n b c" if time_first else "b n c",
        value_width=inner.value_width,
        grouped=inner.grouped,
        dtype=inner.dtype,
        device=inner.device,
    )
    sizes = _sizes(probe)
    q, k, v = sizes.drawn(probe.dtype, probe.device)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            calling.settle(copies, q, k, v)
    except Exception as raised:
        return f"raises {type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
    return probe


@dataclass
class _Calling:
    """One way to call a module around an attention, with chosen q, k and v inside."""

    inner: Probe
    path: str
    time_first: bool
    sequences: tuple[str, ...]
    own: Mapping[str, object]
    through: bool = False  # the module answers with what the attention inside answers, and nothing else
    turned: bool = False  # the attention inside takes for time what the module hands over as the batch
    chosen: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def prepare(self, copy: nn.Module) -> None:
        copy.set_submodule(self.path, _Standing(copy.get_submodule(self.path), self))

    def settle(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Find out in which order the axes arrive inside, and whether anything follows there."""
        self._run(copies, q, k, v)
        if len(self.kept) != 1:
            raise ConfigError(f"calls {self.path} {len(self.kept)} times, where once was expected")
        out = self._run(copies, q, k, v)
        self.through = out.shape == merge(self.kept[0]).shape and torch.allclose(out, merge(self.kept[0]), atol=1e-5)

    def __call__(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
        out = self._run(copies, q, k, v, **extra)
        return split(out, q.shape[1]) if self.through else self.kept[0]

    def _run(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
        """What the module answers, batch first. What the attention inside answers is kept."""
        self.chosen, self.kept = [q, k, v], []
        # nothing but zeros comes in, so that what is added or gated by the input stays constant
        x = q.new_zeros(len(q), q.shape[2], *self._width(copies))
        x = x.transpose(0, 1) if self.time_first else x
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            # a layer of torch would go past the attention inside it
            torch.backends.mha.set_fastpath_enabled(False)
            out = first_tensor(copies.at(q.dtype)(**{**dict.fromkeys(self.sequences, x), **self.own, **extra}))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return out.transpose(0, 1) if self.time_first else out

    def _width(self, copies: ModuleCopies) -> tuple[int]:
        part = copies.shown.get_submodule(self.path)
        if isinstance(part, nn.MultiheadAttention):
            return (part.embed_dim,)
        known = known_projections(part)
        assert known is not None
        weight = next(x for x in part.get_submodule(known.names[0]).parameters() if x.ndim == 2)
        return (weight.shape[0] if hasattr(part.get_submodule(known.names[0]), "nf") else weight.shape[1],)

    def answer(self, given: Mapping[str, object], arrived: Tensor) -> Tensor:
        """What the attention inside gives for the chosen q, k and v, in the order of axes in which they arrive."""
        q, k, v = self.chosen
        b, n = len(q), q.shape[2]
        if b != n:
            batch_first = self.inner.layout.startswith("b")
            self.turned = arrived.shape[:2] == ((n, b) if batch_first else (b, n))
        if not self.turned:
            self.kept.append(self.inner.call(q, k, v, **given))
            return self.kept[-1]
        out = self.inner.call(*(x.transpose(0, 2) for x in (q, k, v)), **given)
        self.kept.append(out.transpose(0, 2))
        return out


class _Standing(nn.Module):
    """Stands where an attention stood, and answers in its words for q, k and v that were chosen."""

    def __init__(self, part: nn.Module, calling: _Calling) -> None:
        super().__init__()
        self.part, self.calling = part, calling

    def __getattr__(self, name: str) -> Any:
        """What the module around it reads off it: batch_first, the number of heads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, *arguments: Any, **settings: Any) -> object:
        out = self.part(*arguments, **settings)
        bound = inspect.signature(self.part.forward).bind(*arguments, **settings).arguments
        inner = self.calling.inner
        if inner.module is not None:
            inner.module.train(self.training)
        arrived = next(iter(bound.values()))
        chosen = self.calling.answer({each: bound[each] for each in bound if each in inner.parameters}, arrived)
        merged = merge(chosen) if inner.layout.startswith("b") else merge(chosen).transpose(0, 1)
        if first_tensor(out).shape != merged.shape:
            return out  # its own answer is as good for what follows, which is not looked at
        return (merged, *out[1:]) if isinstance(out, tuple | list) else merged
