"""A layer that makes q, k and v itself as a probe: a copy whose projections hand out the chosen ones."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.see.measure.probes.functions import merge, split
from regard.see.measure.probes.module_copies import ModuleCopies, home
from regard.see.measure.probes.probe import AS_FUNCTION, Probe, Sizes, Wanted, first_fitting, first_tensor
from regard.see.measure.probes.projections import Inner, Projections, inner_sizes

# what stands behind the heads, and is taken away: output projections, then dropout of the output
BEHIND = (
    *("out_proj", "o_proj", "c_proj", "proj", "to_out", "out", "o", "wo", "w_o", "W_o", "Wo", "W_O", "WO", "out_lin"),
    *("out_linear", "linear_out", "fc_out", "fc_o", "output_proj", "proj_out", "projection", "dense"),
    *("proj_drop", "resid_dropout", "resid_drop", "out_drop", "out_dropout", "proj_dropout", "sublayer_dropout"),
)
KEYS, VALUES = ("key", "keys", "k"), ("value", "values", "v")
MEMORIES = ("memory", "context", "encoder_hidden_states", "key_value_states", "encoder_output", "source")


def probe_layer(module: nn.Module, known: Projections, name: str, wanted: Wanted) -> Probe:
    """The probe of a layer, with the arguments and in the order of axes and heads that mix nothing."""
    inner = inner_sizes(module, known, name, wanted)
    found = first_fitting(_attempts(module, known, inner, name, wanted))
    if isinstance(found, Probe):
        return found
    raise ConfigError(
        f"{name} was read as an attention by its {known} with {inner.h} heads of width {inner.c} and {inner.g} key "
        f"heads, but raised {type(found).__name__}: {found}; hand over what it lacks by name, say heads= and "
        f"kv_heads=, queries= where it takes one length only, or {AS_FUNCTION}"
    )


def _attempts(
    module: nn.Module, known: Projections, inner: Inner, name: str, wanted: Wanted
) -> Iterator[tuple[Probe, Sizes]]:
    """Every way to call the layer."""
    (dtype, *_), device = home(module, wanted)
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes = {key: each for key, each in inspect.signature(module.forward).parameters.items() if each.kind not in stars}
    packings = ("blocks", "groups") if known.parts[-1] != "v" and inner.c == inner.e else ("blocks",)
    for feed, time_first, packing in product(_feeds(tuple(takes), inner), (False, True), packings):
        layer = _Layer(name, inner, feed, takes, wanted, _Hand(packing, time_first))
        copies = ModuleCopies(module, partial(_swap, known=known, hand=layer.hand))
        probe = Probe(
            name,
            partial(layer.asked, copies),
            heads=inner.h,
            kv_heads=inner.g,
            width=inner.c,
            equal_widths=inner.e == inner.c,
            square=len(feed) == 1,
            parameters=tuple(each for each in takes if each not in feed),
            module=copies.shown,
            layout="n b (h c)" if time_first else "b n (h c)",
            value_width=inner.e,
            grouped=inner.g < inner.h,
            dtype=dtype,
            device=device,
            made_up=layer.made_up,
        )
        i, j = wanted.lengths()[0]
        yield probe, Sizes(inner.h, inner.g, i, i if probe.square else j, inner.c, inner.e)


def _feeds(names: tuple[str, ...], inner: Inner) -> list[tuple[str, ...]]:
    """Which arguments may be sequences: x alone, x and a memory, or query, key and value."""
    if len(names) > 2 and names[1] in KEYS and names[2] in VALUES:
        return [names[:3]]
    with_memory: list[tuple[str, ...]] = [(names[0], each) for each in names if each in MEMORIES]
    return with_memory if with_memory and inner.d != inner.m else [names[:1], *with_memory]


@dataclass
class _Hand:
    """What the projections of one copy hand out at the next call, in the order and layout of that layer."""

    packing: str
    time_first: bool
    chosen: dict[str, Tensor] = field(default_factory=dict)

    def out(self, parts: str) -> Tensor:
        heads = [self.chosen[part] for part in parts]
        if self.packing == "groups":  # each key head beside its queries and values
            g = heads[-1].shape[1]
            heads = [torch.cat([x.unflatten(1, (g, -1)) for x in heads], 2).flatten(1, 2)]
        merged = torch.cat([merge(x) for x in heads], -1)
        return merged.transpose(0, 1) if self.time_first else merged


class _Handed(nn.Module):
    """Stands where a projection stood, and hands out what was chosen, whatever comes in."""

    def __init__(self, hand: _Hand, parts: str) -> None:
        super().__init__()
        self.hand, self.parts = hand, parts

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.hand.out(self.parts)


def _swap(copy: nn.Module, known: Projections, hand: _Hand) -> None:
    """Let a copy's projections hand out what the hand holds, and take away what stands behind the heads."""
    for projection, parts in zip(known.names, known.parts, strict=True):
        copy.set_submodule(projection, _Handed(hand, parts))
    own = {name for name, _ in copy.named_modules(remove_duplicate=False)}
    container = known.names[0].rpartition(".")[0]  # of a list of projections the next one stands behind
    for behind in (*BEHIND, f"{container}.{len(known.names)}"):
        if behind in own and behind not in known.names:
            copy.set_submodule(behind, nn.Identity())


@dataclass(frozen=True)
class _Layer:
    """One way to call a layer: which arguments are sequences, and in which order it has its axes."""

    name: str
    inner: Inner
    feed: tuple[str, ...]
    takes: dict[str, inspect.Parameter]
    wanted: Wanted
    hand: _Hand

    @property
    def missing(self) -> list[str]:
        """The arguments after the first that have no default."""
        return [each for each in list(self.takes)[1:] if self.takes[each].default is inspect.Parameter.empty]

    @property
    def made_up(self) -> tuple[str, ...]:
        """Those that nobody handed over, with the phases that are made from the layer's config."""
        filled = dict.fromkeys((*self.missing, *({"position_embeddings"} & self.takes.keys())))
        return tuple(each for each in filled if each not in (*self.feed, *self.wanted.extra))

    def asked(self, copies: ModuleCopies, q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
        copy, inner, time_first = copies.at(q.dtype), self.inner, self.hand.time_first
        b, i, j = len(q), q.shape[2], k.shape[2]
        # nothing but zeros comes in, so that what a layer adds or gates by its input stays constant
        shapes = (b, i, inner.d), (b, j, inner.m), (b, j, inner.m)
        x, *others = (q.new_zeros(shape).transpose(0, 1) if time_first else q.new_zeros(shape) for shape in shapes)
        settings: dict[str, object] = {
            **dict.fromkeys(self.missing),
            **dict(zip(self.feed[1:], others, strict=False)),
            **self.wanted.extra,
            **extra,
        }
        if "position_embeddings" in self.takes and settings.get("position_embeddings") is None:
            settings["position_embeddings"] = _phases(copy, self.name, x, i)
        self.hand.chosen = {"q": q, "k": k, "v": v}
        try:
            out = first_tensor(copy(x, **settings))
        finally:
            self.hand.chosen = {}
        out = (out.transpose(0, 1) if time_first else out).flatten(2)
        if out.shape != (b, i, inner.h * inner.e):
            raise ValueError(
                f"{self.name} gave {tuple(out.shape)} once its output projection was taken away, "
                f"not {(b, i, inner.h * inner.e)} for (b n (h e))"
            )
        return split(out, inner.h)


def _phases(module: nn.Module, name: str, x: Tensor, length: int) -> object:
    """The cosines and sines that a Hugging Face layer is handed, from the rotary class in the file of that layer."""
    beside = vars(sys.modules[type(module).__module__])
    kinds = [kind for kind in beside if kind.endswith("RotaryEmbedding") and inspect.isclass(beside[kind])]
    config = getattr(module, "config", None)
    if len(kinds) != 1 or config is None:
        raise ConfigError(
            f"{name} takes position_embeddings, and {len(kinds)} rotary classes stand beside it where one was "
            "expected; hand over position_embeddings=(cos, sin)"
        )
    rotary = beside[kinds[0]](config).to(x.device)
    positions = torch.arange(length, device=x.device)[None]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return rotary(x, positions, config.layer_types[getattr(module, "layer_idx", 0)])
    return rotary(x, positions)
