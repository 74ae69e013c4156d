"""From the maps of single layers to what an output owes to each input: rollout, flow, gradients and values.

Maps are (b h i j) with the first layer first. A relevance R is (b i n): row i says what output i owes to each of the n
inputs.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_number
from regard.see.arguments import check_indices, resolve_indices
from regard.see.max_flow import layered_max_flow
from regard.see.record import Record, Seen

Maps = Seen | Sequence[Record | Tensor]
Fusion = Literal["mean", "max", "min"]
AT_ONCE = 1 << 22  # weights held at a time
CROSS = ("cross", "encdec", "enc_dec", "encoder_attn", "multihead_attn")
SCALE = 10**9  # capacities are whole numbers to the solver: one part in a thousand million


class Roles(NamedTuple):
    """The attention calls of an encoder-decoder by what they do, each in the order of the layers."""

    encoder: list[Record]
    decoder: list[Record]
    cross: list[Record]


class EncoderDecoderRelevance(NamedTuple):
    """What the outputs of a decoder owe to the inputs of the decoder, and to those of the encoder."""

    target: Float[Tensor, "b i t"]
    source: Float[Tensor, "b i s"]


def assign_roles(seen: Seen) -> Roles:
    """Calls sorted by the names of their modules: cross attention by its usual names, and "decoder" in the path.

    For a model that names them otherwise, make `Roles(encoder, decoder, cross)` of the records by hand.
    """
    _refuse_repeats(seen, "Roles(encoder, decoder, cross) of those of one pass")
    encoder, decoder, cross = (
        [record for record in seen.records if attention_role(record.name) == role]
        for role in ("encoder", "decoder", "cross")
    )
    if not encoder or not decoder or len(cross) != len(decoder):
        raise ConfigError(
            f"by their names there are {len(encoder)} encoder, {len(decoder)} decoder and {len(cross)} cross attention "
            "calls, which is no encoder-decoder; make Roles(encoder, decoder, cross) of the records by hand"
        )
    return Roles(encoder, decoder, cross)


def attention_role(name: str) -> str:
    """ "encoder", "decoder" or "cross", by the name of a layer."""
    last = name.lower().rpartition(".")[2]
    if any(word in last for word in CROSS):
        return "cross"
    return "decoder" if "decoder" in name.lower() else "encoder"


def rollout(
    maps: Maps, *, residual: float = 0.5, heads: Fusion = "mean", rows: Sequence[int] | None = None
) -> Float[Tensor, "b r n"]:
    """R = A_L ... A_2 A_1 with A = residual I + (1 - residual) W, W the heads fused. Abnar and Zuidema 2020,
    arXiv:2005.00928.

    Rows sum to one where rows of the weights do: no row is blind and no sink takes a share. residual=1 gives the
    identity, residual=0 the plain product; the last layer stands leftmost.

    heads  "mean", or the largest or smallest weight of all heads, whose rows are then divided by their sum
    rows   only these outputs: rows of numbers times the maps of records, one layer after the other, without a matrix
    """
    layers = _stack(maps)
    share = _share(residual)
    b, n = _sizes(layers[0])[:2]
    like = layers[0] if isinstance(layers[0], Tensor) else layers[0].q
    exact = torch.promote_types(like.dtype, torch.float32)
    start = torch.eye(n, dtype=exact, device=like.device).expand(b, n, n)
    if rows is None:
        relevance = start
        for layer in layers:
            relevance = share * relevance + (1 - share) * (fuse_heads(layer, heads) @ relevance)
        return relevance
    relevance = start[:, _rows(rows, n)]
    for layer in reversed(layers):
        relevance = share * relevance + (1 - share) * _times(relevance, layer, heads)
    return relevance


def encoder_decoder_rollout(parts: Seen | Roles, *, residual: float = 0.5) -> EncoderDecoderRelevance:
    """Rollout through an encoder and a decoder with cross attention.

    A decoder layer mixes its own rows by its self-attention, then takes in rows of the finished encoder by its cross
    attention. The two parts of a row sum to one together.
    """
    encoder, decoder, cross = assign_roles(parts) if isinstance(parts, Seen) else parts
    share = _share(residual)
    memory = rollout(encoder, residual=share)
    b, t = _sizes(decoder[0])[:2]
    target = torch.eye(t, dtype=memory.dtype, device=memory.device).expand(b, t, t)
    source = memory.new_zeros(b, t, memory.shape[-1])
    for own, other in zip(decoder, cross, strict=True):
        weights = fuse_heads(own, "mean")
        target, source = (share * part + (1 - share) * (weights @ part) for part in (target, source))
        target, source = share * target, share * source + (1 - share) * (fuse_heads(other, "mean") @ memory)
    return EncoderDecoderRelevance(target, source)


def flow(maps: Maps, *, rows: Sequence[int], residual: float = 0.5, heads: Fusion = "mean") -> Float[Tensor, "b r n"]:
    """The largest flow from each input to each chosen output through the layers, where an edge carries at most
    residual + (1 - residual) weight on the diagonal and (1 - residual) weight elsewhere. Abnar and Zuidema 2020,
    arXiv:2005.00928.

    At most one, and at least the rollout: a rollout is one way to send the flow. Capacities are rounded to parts of
    1e-9, so with L layers of n positions a flow is exact to L n 1e-9.
    """
    layers = _stack(maps)
    share = _share(residual)
    mixed = [(1 - share) * fuse_heads(layer, heads).cpu().double() for layer in layers]
    b, n = mixed[0].shape[:2]
    for weights in mixed:
        weights.diagonal(dim1=1, dim2=2).add_(share)
    chosen = _rows(rows, n)
    found = torch.zeros(b, len(chosen), n, dtype=torch.float64)
    for batch in range(b):
        for at, row in enumerate(chosen):
            found[batch, at] = _flows([weights[batch] for weights in mixed], row)
    return found


def _flows(layers: list[Float[Tensor, "n n"]], row: int) -> Float[Tensor, "n"]:
    """The maximum flow from every input to one output."""
    capacities = (torch.stack(layers) * SCALE).round().long().numpy()
    return torch.from_numpy(layered_max_flow(capacities, row)).double() / SCALE


def gradient_relevance(maps: Seen | Sequence[Record], *, rows: Sequence[int] | None = None) -> Float[Tensor, "b r n"]:
    """R = R + A R layer by layer from R = I, with A the mean over heads of the positive part of gradient * weight.
    Chefer et al. 2021, arXiv:2103.15679, equations 5 and 6.

    The gradient is that of what `backward` was called on, with respect to each weight. It follows from the gradient of
    the attention's output, dL/dA_ij = dL/dout_i . v_j, so no model has to keep its weights. R is the identity where no
    gradient came, and never smaller than it.

    rows  only these outputs, without any matrix
    """
    layers = [record for record in _stack(maps) if isinstance(record, Record)]
    b, n = _sizes(layers[0])[:2]
    like = layers[0].q
    start = torch.eye(n, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device).expand(b, n, n)
    if rows is None:
        relevance = start
        for record in layers:
            relevance = relevance + positive_contributions(record) @ relevance
        return relevance
    relevance = start[:, _rows(rows, n)]
    for record in reversed(layers):
        added = torch.zeros_like(relevance)
        for some in _portions(record):
            added = added + relevance[:, :, some] @ positive_contributions(record, some)
        relevance = relevance + added
    return relevance


def encoder_decoder_gradient_relevance(parts: Seen | Roles) -> EncoderDecoderRelevance:
    """Gradient relevance through an encoder and a decoder. Chefer et al. 2021, arXiv:2103.15679, equations 6 to 10.

    Self-attention adds A R to all relevance of its rows. Cross attention adds R_tt' A R_ss to what the target owes to
    the source, both made free of the identity, divided by their row sums and given the identity back.
    """
    encoder, decoder, cross = assign_roles(parts) if isinstance(parts, Seen) else parts
    memory = gradient_relevance(encoder)
    b, t = _sizes(decoder[0])[:2]
    target = torch.eye(t, dtype=memory.dtype, device=memory.device).expand(b, t, t)
    source = memory.new_zeros(b, t, memory.shape[-1])
    for own, other in zip(decoder, cross, strict=True):
        weights = positive_contributions(own)
        target, source = target + weights @ target, source + weights @ source
        source = source + normalise_off_identity(target).mT @ (
            positive_contributions(other) @ normalise_off_identity(memory)
        )
    return EncoderDecoderRelevance(target, source)


def normalise_off_identity(relevance: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """Everything but the identity divided by its row sum, and the identity given back. A row of nothing stays so."""
    own = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    return normalise_rows(relevance - own) + own


def positive_contributions(record: Record, rows: Tensor | None = None) -> Float[Tensor, "b r j"]:
    """The mean over heads of max(0, gradient * weight), for all rows or some."""
    gradient = weight_gradients(record, rows)
    weights = record.weights() if rows is None else record.statistics.rows(rows)
    return (gradient * weights).clamp(min=0).mean(1)


def weight_gradients(record: Record, rows: Tensor | None = None) -> Float[Tensor, "b h r j"]:
    """dL/dA_ij = dL/dout_i . v_j for all rows or some."""
    if record.v is None:
        raise ConfigError(f"{record.name} was recorded without its values; watch with values=True")
    if record.gradient is None:
        raise ConfigError(
            f"no gradient has reached {record.name}; inside or after the block call backward() on the number to be "
            "explained, and let the model run with gradients on"
        )
    if record.dropout:
        raise ConfigError(
            f"{record.name} dropped a share of {record.dropout} of its weights, at random; call model.eval() first"
        )
    exact = torch.promote_types(record.q.dtype, torch.float32)
    v = record.v.to(exact).repeat_interleave(record.q.shape[1] // record.v.shape[1], 1)
    gradient = record.gradient if rows is None else record.gradient[:, :, rows]
    return torch.einsum("bhie,bhje->bhij", gradient.to(exact), v)


def value_weighted(
    record: Record, *, projection: Float[Tensor, "d f"] | None = None, normalised: bool = False
) -> Float[Tensor, "b h i j"]:
    """|w_ij v_j|: a weight counts as much as the vector that it takes along. Kobayashi et al. 2020, arXiv:2004.10102.

    Where all values are equally long, and with `normalised`, these are the weights.

    projection  the weight of the layer's output projection (f = heads side by side): then |w_ij v_j W| as in the paper
    normalised  rows divided by their sum
    """
    if record.v is None:
        raise ConfigError(f"{record.name} was recorded without its values; watch with values=True")
    exact = torch.promote_types(record.q.dtype, torch.float32)
    h, e = record.q.shape[1], record.v.shape[-1]
    v = record.v.to(exact).repeat_interleave(h // record.v.shape[1], 1)
    if projection is not None:
        heads = range(h) if record.heads is None else record.heads
        if projection.shape[1] < e * (max(heads) + 1):
            raise ShapeError(
                f"projection is {tuple(projection.shape)} read as (d f), but {record.name} has {h} heads of "
                f"{format_axis('e', e)} side by side; give out_proj.weight as torch keeps it"
            )
        parts = torch.stack([projection[:, head * e : (head + 1) * e] for head in heads])
        v = torch.einsum("bhje,hde->bhjd", v, parts.to(v))
    found = record.weights() * torch.linalg.vector_norm(v, dim=-1)[:, :, None]
    return normalise_rows(found) if normalised else found


def patch_map(
    relevance: Float[Tensor, "b r n"],
    *,
    prefix: int = 1,
    pool: Literal["class", "mean"] = "class",
    grid: tuple[int, int] | None = None,
) -> Float[Tensor, "b rows columns"]:
    """What the pooled output of a vision transformer owes to each patch.

    prefix  tokens before the patches: the class token and registers, which are left out of the map
    pool    "class" takes the row of the first token, "mean" the mean over the rows of all patches
    grid    rows and columns of patches; None where they are a square
    """
    r, n = relevance.shape[-2:]
    patches = n - prefix
    side = round(max(patches, 0) ** 0.5)
    rows, columns = (side, side) if grid is None else grid
    if rows * columns != patches or patches < 1:
        raise ShapeError(
            f"{n} tokens less a prefix of {prefix} are {patches} patches, which are no {rows} x {columns} grid; "
            "give prefix= (class token and registers) and grid=(rows, columns)"
        )
    if pool == "class":
        if prefix < 1:
            raise ConfigError("pool='class' takes the row of the class token, but prefix=0 says that there is none")
        row = relevance[:, 0]
    elif pool == "mean":
        if r != n:
            raise ShapeError(f"pool='mean' needs the rows of all {n} tokens, not {r}; leave rows= out")
        row = relevance[:, prefix:].mean(1)
    else:
        raise ConfigError(f"pool is 'class' or 'mean', not {pool!r}")
    return row[:, prefix:].reshape(-1, rows, columns)


def fuse_heads(layer: Record | Tensor, heads: Fusion) -> Float[Tensor, "b i j"]:
    """The map of one layer with its heads made one."""
    weights = layer if isinstance(layer, Tensor) else layer.weights()
    if heads == "mean":
        return weights.mean(1)
    if heads not in ("max", "min"):
        raise ConfigError(f"heads are fused by 'mean', 'max' or 'min', not {heads!r}")
    return normalise_rows(weights.amax(1) if heads == "max" else weights.amin(1))


def normalise_rows(x: Float[Tensor, "... j"]) -> Float[Tensor, "... j"]:
    """Rows divided by their sum. A row of nothing stays so."""
    total = x.sum(-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def _times(x: Float[Tensor, "b r i"], layer: Record | Tensor, heads: Fusion) -> Float[Tensor, "b r j"]:
    """Rows of numbers times a map."""
    if isinstance(layer, Tensor) or heads != "mean":
        return x @ fuse_heads(layer, heads)
    return torch.stack([layer.mixed(x[:, row]).mean(1) for row in range(x.shape[1])], 1)


def _portions(record: Record) -> Sequence[Tensor]:
    b, h, i, _ = record.q.shape
    step = max(1, AT_ONCE // max(1, b * h * record.k.shape[2]))
    return list(torch.arange(i, device=record.q.device).split(step))


def _stack(maps: Maps) -> list[Record | Tensor]:
    """Layers that follow each other, checked: each takes as many positions as the one before gives.

    All that was seen has to be one stack by its names; a list was chosen by the caller, who knows.
    """
    layers: list[Record | Tensor] = list(maps.records) if isinstance(maps, Seen) else list(maps)
    if not layers:
        reasons = "; ".join(maps.left_out) if isinstance(maps, Seen) else ""
        left_out = f"there are no maps, since every call was left out: {reasons}"
        nothing = "there are no maps; run the model inside `with watch(model) as seen:` first"
        raise ConfigError(left_out if reasons else nothing)
    if isinstance(maps, Seen):
        _refuse_what_does_not_follow(maps)
    b, n = _sizes(layers[0])[:2]
    for number, layer in enumerate(layers):
        name = layer.name if isinstance(layer, Record) else f"map {number}"
        if isinstance(layer, Record) and layer.rows_kept is not None:
            raise ConfigError(
                f"{name} was recorded for some rows only, but the next layer reads all; watch without rows="
            )
        if _sizes(layer) != (b, n, n):
            raise ShapeError(
                f"{name} maps (b i j) = {_sizes(layer)}, but a stack of self-attention needs ({b}, {n}, {n}) in every "
                "layer; choose its layers with watch(layers=...), or use encoder_decoder_rollout for cross attention"
            )
    return layers


def _refuse_what_does_not_follow(seen: Seen) -> None:
    """Raise where some of the calls do not take what the one before gave, though all may have the same sizes."""
    found = sorted({attention_role(name.partition(":")[0]) for name in seen})
    if len(found) > 1:
        raise ConfigError(
            f"by their names these are {' and '.join(found)} attention calls, which are no single stack; use "
            "encoder_decoder_rollout or encoder_decoder_gradient_relevance for all of them, choose one part with "
            "watch(layers=...), or hand over a list of the records that follow each other"
        )
    _refuse_repeats(seen, "a list of those that follow each other")


def _refuse_repeats(seen: Seen, instead: str) -> None:
    again = next((name for name in seen if len(seen.calls(name)) > 1), None)
    if again is not None:
        raise ConfigError(
            f"{again} was called {len(seen.calls(again))} times, so these may be several passes; watch one pass, or, "
            f"where a layer is shared or no model was given to watch, make {instead}: seen.records has all in order, "
            f"seen.calls({again!r}) those of one name"
        )


def _rows(rows: Sequence[int], n: int) -> list[int]:
    """The outputs that were asked for, counted from the start."""
    chosen = check_indices("rows", rows)
    return list(range(n) if chosen is None else resolve_indices("rows", chosen, n, "the last layer"))


def _sizes(layer: Record | Tensor) -> tuple[int, int, int]:
    if isinstance(layer, Tensor):
        if layer.ndim != 4:
            raise ShapeError(f"a map is (b h i j), not {tuple(layer.shape)}")
        return layer.shape[0], layer.shape[2], layer.shape[3]
    return layer.q.shape[0], layer.q.shape[2], layer.k.shape[2]


def _share(residual: float) -> float:
    if not 0 <= check_number("residual", residual) <= 1:
        raise ConfigError(f"residual is the share of a row that stays with itself, from 0 to 1, not {residual}")
    return float(residual)
