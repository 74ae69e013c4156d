"""Probe a layer with projections: in a copy of the layer, the projections return the chosen q, k and v."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.core.heads import merge_heads, split_heads
from regard.see.measure.mask_argument import MASK_NAMES
from regard.see.measure.probes.bare_weights import (
    OUTPUT_WEIGHTS,
    Axes,
    bare_weight,
    heads_before_output,
    set_bare_weight,
)
from regard.see.measure.probes.module_copies import ModuleCopies, dtypes_and_device
from regard.see.measure.probes.probe import (
    AS_FUNCTION,
    Probe,
    ProbeOptions,
    ProbeSizes,
    first_tensor,
    first_working,
    missing_argument_hint,
)
from regard.see.measure.probes.projections import LayerSizes, Projections, has_known_heads, layer_sizes

# submodules that follow the heads and are replaced by the identity: output projections and their dropout
OUTPUT_MODULES = (
    *("out_proj", "o_proj", "c_proj", "proj", "to_out", "out", "o", "wo", "w_o", "W_o", "Wo", "W_O", "WO", "out_lin"),
    *("out_linear", "linear_out", "fc_out", "fc_o", "output_proj", "proj_out", "projection", "dense", "output"),
    *("proj_drop", "resid_dropout", "resid_drop", "out_drop", "out_dropout", "proj_dropout", "sublayer_dropout"),
)
KEYS, VALUES = ("key", "keys", "k"), ("value", "values", "v")
MEMORIES = ("memory", "context", "encoder_hidden_states", "key_value_states", "encoder_output", "source", "y")


def probe_layer(module: nn.Module, known: Projections, name: str, options: ProbeOptions) -> Probe:
    """Build the probe of an attention layer with projections.

    Trial calls find which arguments are sequences, whether the batch is the first axis, and how the heads are ordered:
    the first combination in which the output of a head does not depend on other heads and sequences.

    known  names of the layer's projections, such as q_proj, and which of q, k and v each computes
    """
    # bare weights may be (in, out) or (out, in)
    bare = bare_weight(module, known.names[0]) is not None
    for transposed in (False, True) if bare else (False,):
        try:
            sized = options
            if not has_known_heads(module, options):
                sized = replace(options, heads=_count_heads(module, known, name, options, transposed))
            sizes = layer_sizes(module, known, name, sized, transposed)
        except ConfigError:
            if bare and not transposed:
                continue
            raise
        found = first_working(_attempts(module, known, sizes, name, sized))
        if isinstance(found, Probe):
            break
    if isinstance(found, Probe):
        return found
    probe, _ = next(_attempts(module, known, sizes, name, sized))
    lacking = tuple(each for each in probe.filled_in if each not in probe.filled_values)
    raise ConfigError(
        f"{name} was read as an attention by its {known} with {sizes.h} heads of width {sizes.c} and {sizes.g} key "
        f"heads, but raised {type(found).__name__}: {str(found).rstrip('.')}. "
        f"{missing_argument_hint('layer', lacking, 'x (b n d)')}Pass heads= and kv_heads= if these are wrong, or "
        f"{AS_FUNCTION}. A layer that accepts one length only can be measured by regard.see.xray(layer, queries=...), "
        "but not checked"
    )


def _count_heads(
    module: nn.Module, known: Projections, name: str, options: ProbeOptions, transposed: bool
) -> int | None:
    """Find the number of heads of a layer with a trial call; return None if no call works.

    All columns of v are equal in this call, so neighbouring columns of the output differ only where the next head
    begins.

    transposed  whether weights that are parameters of the layer itself are (out, in) instead of (in, out)
    """
    sizes = layer_sizes(module, known, name, replace(options, heads=1), transposed)
    for probe, shape in _attempts(module, known, sizes, name, options):
        q, k, _ = shape.random_tensors(probe.dtype, probe.device)
        try:
            with torch.no_grad():
                out = probe.call(q, k, k[..., :1].expand(*k.shape[:3], shape.e))
        except Exception:  # the module may raise any exception if it is called wrongly  # nosec B112
            continue
        changes = (out.diff(dim=-1).abs() > 1e-3 * out.abs().max()).any(2).any(0)[0]
        heads = int(changes.sum()) + 1
        width = shape.e // heads
        if heads * width == shape.e and bool(changes[width - 1 :: width].all()):
            return heads
    return None


def _attempts(
    module: nn.Module, known: Projections, sizes: LayerSizes, name: str, options: ProbeOptions
) -> Iterator[tuple[Probe, ProbeSizes]]:
    """Yield a `Probe` and sizes to test it with, for each combination of sequence arguments, axes and head order."""
    (dtype, *_), device = dtypes_and_device(module, options)
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes = {key: each for key, each in inspect.signature(module.forward).parameters.items() if each.kind not in stars}
    packings = ("blocks", "groups") if known.parts[-1] != "v" and sizes.c == sizes.e else ("blocks",)
    needs_mask = any(takes[each].default is inspect.Parameter.empty for each in takes if each in MASK_NAMES)
    masks = (False, True) if needs_mask else (False,)
    arguments = _sequence_arguments(tuple(takes), sizes)
    weight = bare_weight(module, known.names[0])
    split = weight is not None and weight.ndim == 3
    for masked, inputs, time_first, packing in product(masks, arguments, (False, True), packings):
        layer = _LayerCall(name, sizes, inputs, takes, options, _Chosen(packing, time_first, split), masked)
        copies = ModuleCopies(module, partial(_replace_projections, known=known, chosen=layer.chosen))
        probe = Probe(
            name,
            partial(layer.call, copies),
            heads=sizes.h,
            kv_heads=sizes.g,
            width=sizes.c,
            equal_widths=sizes.e == sizes.c,
            square=len(inputs) == 1,
            parameters=tuple(each for each in takes if each not in inputs),
            module=copies.reference,
            layout="n b (h c)" if time_first else "b n (h c)",
            value_width=sizes.e,
            grouped=sizes.g < sizes.h,
            dtype=dtype,
            device=device,
            filled_in=layer.filled_in,
            filled_values={each: FILLED_VALUES[each] for each in layer.filled_in if each in FILLED_VALUES}
            | ({each: "True everywhere" for each in layer.required if each in MASK_NAMES} if masked else {}),
            inputs=dict(zip(inputs, layer.input_shapes(2, *options.lengths()[0]), strict=False)),
            find_sources=partial(layer.find_sources, copies),
        )
        i, j = options.lengths()[0]
        yield probe, ProbeSizes(sizes.h, sizes.g, i, i if probe.square else j, sizes.c, sizes.e)


def _sequence_arguments(names: tuple[str, ...], sizes: LayerSizes) -> list[tuple[str, ...]]:
    """Return the possible sequence arguments: x; x and a memory (cross-attention); or query, key and value."""
    if len(names) > 2 and names[1] in KEYS and names[2] in VALUES:
        return [names[:3]]
    with_memory: list[tuple[str, ...]] = [(names[0], each) for each in names if each in MEMORIES]
    return with_memory if with_memory and sizes.d != sizes.m else [names[:1], *with_memory]


@dataclass
class _Chosen:
    """The q, k and v that the replaced projections return at the next call, in the layout of the layer.

    packing     order of the columns of a projection that computes several of q, k and v: "blocks" (all heads of q, then
                all of k, then all of v) or "groups" (for each key head, its q, k and v)
    time_first  whether the layer's tensors are (n, b, ...), with positions before sequences
    tensors     q, k and v by name, each (b h n c)
    """

    packing: str
    time_first: bool
    split: bool = False  # bare weights have an axis for heads
    tensors: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, list[Tensor]] = field(default_factory=dict)  # the inputs of the projections in the last call

    def keep_input(self, parts: str, x: Tensor) -> None:
        """Store `x` as the input of the projection that computes `parts`: "q", "kv", "qkv" and so on."""
        for part in parts:
            self.read.setdefault(part, []).append(x)

    def output(self, parts: str) -> Tensor:
        """Return the output of a replaced projection: the chosen tensors, concatenated in the order of the layer.

        parts  what the projection computes: "q", "kv", "qkv" and so on
        """
        heads = [self.tensors[part] for part in parts]
        if self.packing == "groups":  # each key head next to its queries and values
            g = heads[-1].shape[1]
            heads = [torch.cat([x.unflatten(1, (g, -1)) for x in heads], 2).flatten(1, 2)]
        merged = torch.cat([merge_heads(x) for x in heads], -1)
        return merged.transpose(0, 1) if self.time_first else merged

    def product(self, parts: str, other: Tensor, axes: Axes) -> Tensor:
        """Return the chosen tensors in place of `other` @ weight, where the weight is a bare nn.Parameter of the layer.

        If the weight has an axis of heads, the tensors are returned as (b h n c) or (b n h c).

        parts  which of q, k and v the product computes: "q", "kv", "qkv" and so on
        other  the input that is multiplied by the weight
        axes   pair: the axis of positions in `other`, and the axis of positions in the product
        """
        self.keep_input(parts, other)
        one = self.tensors[parts[0]]
        if self.split and len(parts) == 1:
            return one if axes[1] == 2 else one.transpose(1, 2)
        return self.output(parts)


class _ChosenProjection(nn.Module):
    """A module that replaces a projection: it returns the chosen tensors for every input."""

    def __init__(self, original: nn.Module, chosen: _Chosen, parts: str) -> None:
        super().__init__()
        self.original, self.chosen, self.parts = original, chosen, parts

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        self.chosen.keep_input(self.parts, x)
        out = self.chosen.output(self.parts)
        if any(True for _ in self.original.children()):  # a module around a matrix may split heads too
            shape = first_tensor(self.original(x)).shape
            return out.reshape(*out.shape[:2], *shape[2:])
        return out


class FirstArgument(nn.Module):
    """A module that replaces an output projection: it returns its first argument."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


def _replace_projections(copy: nn.Module, known: Projections, chosen: _Chosen) -> None:
    """Replace input projections by modules that return the chosen tensors, and output modules by the identity."""
    for projection, parts in zip(known.names, known.parts, strict=True):
        if bare_weight(copy, projection) is not None:
            set_bare_weight(copy, projection, partial(chosen.product, parts), chosen.time_first)
            continue
        copy.set_submodule(projection, _ChosenProjection(copy.get_submodule(projection), chosen, parts))
    own = {name for name, _ in copy.named_modules(remove_duplicate=False)}
    container = known.names[0].rpartition(".")[0]  # in a list of projections the next one is the output projection
    for output in (*OUTPUT_MODULES, f"{container}.{len(known.names)}"):
        if output in own and output not in known.names:
            after_heads = copy.get_submodule(output)
            # a layer indexes a list of modules, as in diffusers: to_out = ModuleList([Linear, Dropout])
            listed = isinstance(after_heads, nn.ModuleList)
            for each in [f"{output}.{name}" for name, _ in after_heads.named_children()] if listed else [output]:
                copy.set_submodule(each, FirstArgument())
    for output in OUTPUT_WEIGHTS:
        if bare_weight(copy, output) is not None:
            set_bare_weight(copy, output, heads_before_output, chosen.time_first)


@dataclass(frozen=True)
class _LayerCall:
    """One way to call an attention layer: which arguments are sequences, and whether their first axis is batch or time.

    inputs  names of the arguments that are sequences
    takes   all parameters of the layer's `forward` by name
    """

    name: str
    sizes: LayerSizes
    inputs: tuple[str, ...]
    takes: dict[str, inspect.Parameter]
    options: ProbeOptions
    chosen: _Chosen
    masked: bool = False  # a mask is required, and None is not accepted

    @property
    def required(self) -> list[str]:
        """Names of the layer's arguments without a default, except the first argument."""
        return [each for each in list(self.takes)[1:] if self.takes[each].default is inspect.Parameter.empty]

    @property
    def filled_in(self) -> tuple[str, ...]:
        """Names of the arguments for which a value is chosen because the caller did not pass one.

        These are required arguments, and known arguments of Hugging Face layers such as position_ids (FILLED_VALUES).
        """
        filled = dict.fromkeys((*self.required, *(each for each in FILLED_VALUES if each in self.takes)))
        return tuple(each for each in filled if each not in (*self.inputs, *self.options.extra))

    def input_shapes(self, b: int, i: int, j: int) -> list[tuple[int, ...]]:
        """Return the shapes of the sequence arguments: x and the memory, or query, key and value.

        b, i, j  numbers of sequences, queries and keys
        """
        shapes = (b, i, self.sizes.d), (b, j, self.sizes.m), (b, j, self.sizes.m)
        return [(n, batch, d) if self.chosen.time_first else (batch, n, d) for batch, n, d in shapes]

    def find_sources(self, copies: ModuleCopies) -> dict[str, set[str]]:
        """Return, for each of q, k and v, the names of the sequence arguments from which the layer computes it."""
        (dtype, *_), device = dtypes_and_device(copies.reference, self.options)
        sizes = ProbeSizes(self.sizes.h, self.sizes.g, *self.options.lengths()[0], self.sizes.c, self.sizes.e)
        inputs = [
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            for shape in self.input_shapes(sizes.b, sizes.i, sizes.j)
        ]
        with torch.enable_grad():
            q, k, v = sizes.random_tensors(dtype, device)
            self.call(copies, q, k, v, inputs=inputs)
        named = dict(zip(self.inputs, inputs, strict=False))
        return {
            part: {name for name, x in named.items() if _depends(read, x)} for part, read in self.chosen.read.items()
        }

    def call(
        self,
        copies: ModuleCopies,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Sequence[Tensor] | None = None,
        **keywords: object,
    ) -> Tensor:
        """Run the layer while its projections return q, k and v; return the output of the heads, (b h i e).

        inputs  tensors for the sequence arguments; None passes zeros
        """
        copy, sizes, time_first = copies.at(q.dtype), self.sizes, self.chosen.time_first
        b, i, j = len(q), q.shape[2], k.shape[2]
        x, *others = inputs or (q.new_zeros(shape) for shape in self.input_shapes(b, i, j))
        settings: dict[str, object] = {
            **dict.fromkeys(self.required),
            **dict(zip(self.inputs[1:], others, strict=False)),
            # arguments whose shape follows the length, such as rotary phases, are computed from the input
            **{each: value(x) if inspect.isfunction(value) else value for each, value in self.options.extra.items()},
            **keywords,
        }
        if self.masked:
            ones = torch.ones(b, 1, i, j, dtype=torch.bool, device=q.device)
            settings |= {each: ones for each in self.required if each in MASK_NAMES and settings.get(each) is None}
        for each in FILLED_VALUES:
            if each in self.takes and settings.get(each) is None:
                settings[each] = _fill_in(each, copy, self, x)
        self.chosen.tensors, self.chosen.read = {"q": q, "k": k, "v": v}, {}
        try:
            out = first_tensor(copy(**{self.inputs[0]: x}, **settings))
        finally:
            self.chosen.tensors = {}
        out = (out.transpose(0, 1) if time_first else out).flatten(2)
        if out.shape != (b, i, sizes.h * sizes.e):
            raise ValueError(
                f"{self.name} returned {tuple(out.shape)} once its output projection was removed, "
                f"not {(b, i, sizes.h * sizes.e)} for (b n (h e))"
            )
        return split_heads(out, sizes.h)


def _depends(outputs: list[Tensor], x: Tensor) -> bool:
    """Return whether at least one of the outputs was computed from x, according to autograd."""
    graphs = [out for out in outputs if out.requires_grad]
    if not graphs:
        return False
    (gradient,) = torch.autograd.grad([out.sum() for out in graphs], x, allow_unused=True, retain_graph=True)
    return gradient is not None


# arguments of Hugging Face layers that are filled in, with what is passed
FILLED_VALUES = {
    "position_embeddings": "the cosines and sines of its own rotary class",
    "position_ids": "0, 1, 2, ...",
    "residual": "zeros",
    "alibi": "the tensor of its own build_alibi_tensor",
}


def _fill_in(argument: str, module: nn.Module, layer: _LayerCall, x: Tensor) -> object:
    """Return a value for an argument that the caller did not pass, such as position_ids.

    argument  a name in FILLED_VALUES
    """
    b, n = x.shape[:2]
    if argument == "position_embeddings":
        return rotary_phases(module, layer.name, x, n)
    if argument == "position_ids":
        return torch.arange(n, device=x.device).expand(b, n)
    build = vars(sys.modules[type(module).__module__]).get("build_alibi_tensor")
    if argument == "alibi" and build is not None:
        return build(torch.ones(b, n, device=x.device), layer.sizes.h, x.dtype)
    return torch.zeros_like(x) if argument == "residual" else None


def rotary_phases(module: nn.Module, name: str, x: Tensor, length: int) -> object:
    """Compute the position_embeddings (cos, sin) of a Hugging Face layer with the rotary class of its Python module."""
    beside = vars(sys.modules[type(module).__module__])
    kinds = [kind for kind in beside if kind.endswith("RotaryEmbedding") and inspect.isclass(beside[kind])]
    config = getattr(module, "config", None)
    if len(kinds) != 1 or config is None:
        raise ConfigError(
            f"{name} takes position_embeddings, but its file has {len(kinds)} rotary classes where one was expected; "
            "pass position_embeddings=(cos, sin)"
        )
    rotary = beside[kinds[0]](config).to(x.device)
    positions = torch.arange(length, device=x.device)[None]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return rotary(x, positions, config.layer_types[getattr(module, "layer_idx", 0)])
    return rotary(x, positions)
