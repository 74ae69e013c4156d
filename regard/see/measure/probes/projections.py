"""Find the projections of an attention layer by their usual names, and the sizes that follow from them."""

from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.see.measure.probes.bare_weights import bare_weight
from regard.see.measure.probes.probe import AS_FUNCTION, ProbeOptions


@dataclass(frozen=True)
class Projections:
    """The names of an attention layer's projections, and for each what it computes: "q", "kv", "qkv" and so on."""

    names: tuple[str, ...]
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.names)


# families are separated by commas; a longer set comes before one that it contains
NAMES = {
    "q k v": "q_proj k_proj v_proj, query key value, to_q to_k to_v, q k v, wq wk wv, w_q w_k w_v, W_q W_k W_v, "
    "Wq Wk Wv, W_Q W_K W_V, WQ WK WV, W_query W_key W_value, q_lin k_lin v_lin, q_linear k_linear v_linear, "
    "linear_q linear_k linear_v, fc_q fc_k fc_v, query_proj key_proj value_proj, queries keys values, "
    "linears.0 linears.1 linears.2",
    "q kv": "q_attn c_attn, to_q to_kv, query key_value, q_proj kv_proj, q kv, wq wkv",
    "qkv": "qkv, query_key_value, c_attn, to_qkv, qkv_proj, in_proj, Wqkv, wqkv, w_qkv, W_qkv, W_pack, "
    "attn_qkv, linear_qkv, in_proj_weight",
}
KNOWN = [
    Projections(tuple(names.split()), tuple(parts.split()))
    for parts, families in NAMES.items()
    for names in families.split(", ")
]
HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "nheads", "n_local_heads", "h")
KV_HEADS = ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
WIDTHS = ("head_width", "head_dim", "dim_head", "attention_head_size", "head_size", "d_head", "d_k", "d_kv")


def known_projections(module: nn.Module) -> Projections | None:
    """Return the first known set of projection names that all exist in a module; None if there is none.

    An example of a set is q_proj, k_proj and v_proj. A projection may be a submodule or a parameter.
    """
    modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
    bare = {name for name, weight in module.named_parameters(recurse=False) if weight.ndim in (2, 3)}
    return next((known for own in (modules, bare) for known in KNOWN if own.issuperset(known.names)), None)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of an attention layer: numbers of heads, widths of a head, and widths of the layer's inputs."""

    h: int  # query heads
    g: int  # key heads
    c: int  # width of q and k in one head
    e: int  # width of v in one head
    d: int  # input width of the query projection
    m: int  # input width of the value projection


def has_known_heads(module: nn.Module, options: ProbeOptions) -> bool:
    """Return whether the number or width of heads is known from an option, an attribute or an axis of a weight."""
    if any(weight.ndim == 3 for weight in module.parameters(recurse=False)):
        return True
    found = options.heads or options.width or _attribute(module, HEADS) or _attribute(module, WIDTHS)
    return found is not None


def layer_sizes(
    module: nn.Module, known: Projections, name: str, options: ProbeOptions, transposed: bool = False
) -> LayerSizes:
    """Find the numbers and widths of heads from the shapes of the projections and from attributes of usual names.

    transposed  whether weights that are parameters of the layer itself are (out, in) instead of (in, out)
    """
    bare = [weight for each in known.names if (weight := bare_weight(module, each)) is not None]
    if bare:
        widths = [_bare_widths(weight, transposed) for weight in bare]
        if bare[0].ndim == 3 and not options.heads:
            options = replace(options, heads=len(bare[0]))
    else:
        widths = [projection_widths(module.get_submodule(each), name, each) for each in known.names]
    totals = [out for _, out in widths]
    h = options.heads or _attribute(module, HEADS)
    g = options.kv_heads or _attribute(module, KV_HEADS)
    c = options.width or _attribute(module, WIDTHS)
    if len(totals) > 1:  # the query projection gives the width of a head, and that gives the number of key heads
        h = h or (totals[0] // c if c else 0)
        c = totals[0] // h if h else 0
        g = totals[1] // (c if len(totals) == 3 else 2 * c) if c else 0
    elif h:
        g = g or ((totals[0] // c - h) // 2 if c else h)
        c = totals[0] // (h + 2 * g)
    if not h or not c or not g:
        raise ConfigError(
            f"the number of heads of {name} is unknown: looked for {', '.join(HEADS)} on it and on its config; "
            "pass heads= (and kv_heads=, if there are fewer)"
        )
    e = totals[2] // g if len(totals) == 3 else c
    if totals != {3: [h * c, g * c, g * e], 2: [h * c, 2 * g * c], 1: [(h + 2 * g) * c]}[len(totals)]:
        raise ConfigError(
            f"{name} has projections of width {totals} ({known}), which do not match {h} heads of width {c} and {g} "
            "key heads; pass the right heads=, kv_heads= and width="
        )
    return LayerSizes(h, g, c, e, d=widths[0][0], m=widths[-1][0])


def projection_widths(projection: nn.Module, name: str = "", path: str = "") -> tuple[int, int]:
    """Return the input and output widths of a projection module; raise ConfigError if it has no weight matrix."""
    ends = []
    for part in projection.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            # Hugging Face's Conv1D stores its matrix transposed and has an attribute `nf`
            rows, columns = weight.shape
            ends.append((rows, columns) if hasattr(part, "nf") else (columns, rows))
    if not ends:
        raise ConfigError(f"{name}.{path} has no weight matrix to read its width from; {AS_FUNCTION}")
    return ends[0][0], ends[-1][1]


def _bare_widths(weight: Tensor, transposed: bool) -> tuple[int, int]:
    """Return the input and output widths of a weight: (in, out), or (heads, in, width of a head).

    transposed  whether a weight of two axes is (out, in) instead
    """
    if weight.ndim == 3:
        return weight.shape[1], len(weight) * weight.shape[2]
    rows, columns = weight.shape
    return (columns, rows) if transposed else (rows, columns)


def _attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first named attribute, of the module or its config, that is a positive integer; None if none is."""
    values = (getattr(owner, name, None) for owner, name in product((module, getattr(module, "config", None)), names))
    return next((value for value in values if type(value) is int and value > 0), None)
