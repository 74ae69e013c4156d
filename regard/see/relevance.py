"""Compute the relevance of each input for each output from the weights of all layers: rollout, flow, gradients.

Inputs and outputs are the positions before the first and after the last layer. Attention maps are the weights of a
layer, (b h i j). A relevance R is (b i n): row i has the relevance of each of the n inputs for output i.
`value_weighted` weights the attention of a single layer by the norms of its values.
"""

import itertools
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
from regard.see.record import Record, Seen, attention_role

Maps = Seen | Sequence[Record | Tensor]
Fusion = Literal["mean", "max", "min"]
AT_ONCE = 1 << 22  # weights in memory at a time
SCALE = 10**9  # capacities of the flow solver are integers, in units of 1e-9


class Roles(NamedTuple):
    """The recorded attention calls of an encoder-decoder by role; each list is in the order of the layers."""

    encoder: list[Record]
    decoder: list[Record]
    cross: list[Record]


class EncoderDecoderRelevance(NamedTuple):
    """The relevance of the decoder inputs (target) and of the encoder inputs (source) for the decoder outputs."""

    target: Float[Tensor, "b i t"]
    source: Float[Tensor, "b i s"]


def assign_roles(seen: Seen) -> Roles:
    """Sort recorded attention calls into encoder, decoder and cross-attention by the names of their modules.

    For a model with other names, build `Roles(encoder, decoder, cross)` from lists of the records yourself.
    """
    _refuse_repeats(seen, "Roles(encoder, decoder, cross) of the calls of one pass")
    encoder, decoder, cross = (
        [record for record in seen.records if attention_role(record.name) == role]
        for role in ("encoder", "decoder", "cross")
    )
    if not encoder or not decoder or len(cross) != len(decoder):
        raise ConfigError(
            f"by their names there are {len(encoder)} encoder, {len(decoder)} decoder and {len(cross)} cross attention "
            "calls, which is not an encoder-decoder; build Roles(encoder, decoder, cross) from the records by hand"
        )
    return Roles(encoder, decoder, cross)


def rollout(
    maps: Maps, *, residual: float = 0.5, heads: Fusion = "mean", rows: Sequence[int] | None = None
) -> Float[Tensor, "b r n"]:
    """Attention rollout: R = A_L ... A_2 A_1, where A_l mixes the identity and the weights W of layer l.

    Abnar and Zuidema 2020, arXiv:2005.00928. A = residual I + (1 - residual) W, where W is combined over heads and the
    identity I stands for the residual connection. Each row of R sums to one if each row of the weights does, that is,
    if every query sees a key and there is no attention sink. residual=1 gives the identity, residual=0 the product of
    the weights.

    maps      records of `watch`, or weights (b h i j), one for each layer
    residual  the weight of the identity, from 0 to 1
    heads     how the heads of a layer are combined: "mean", "max" or "min"; after "max" and "min", rows are divided by
              their sum
    rows      indices of the outputs to compute, without computing the full matrix; None is all

    >>> with watch(model) as seen:
    ...     out = model(tokens)
    >>> rollout(seen, rows=[-1]).sum(-1)
    tensor([[1.]])
    """
    layers = _check_stack(maps)
    share = _check_residual(residual)
    relevance = _identity(layers[0])
    if rows is None:
        for layer in layers:
            relevance = share * relevance + (1 - share) * (fuse_heads(layer, heads) @ relevance)
        return relevance
    relevance = relevance[:, _resolve_rows(rows, relevance.shape[1])]
    for layer in reversed(layers):
        relevance = share * relevance + (1 - share) * _multiply_rows(relevance, layer, heads)
    return relevance


def encoder_decoder_rollout(parts: Seen | Roles, *, residual: float = 0.5) -> EncoderDecoderRelevance:
    """Attention rollout through an encoder and a decoder with cross-attention.

    In each decoder layer, self-attention combines the decoder positions, then cross-attention adds the encoder output.
    Row i of both results is for decoder output i: its entries in the target relevance (decoder inputs) and in the
    source relevance (encoder inputs) together sum to one.

    parts     records of `watch`, or `Roles`
    residual  the weight of the identity, as in `rollout`
    """
    encoder, decoder, cross = assign_roles(parts) if isinstance(parts, Seen) else parts
    share = _check_residual(residual)
    memory = rollout(encoder, residual=share)
    target = _identity(decoder[0]).to(memory)
    source = memory.new_zeros(*target.shape[:2], memory.shape[-1])
    for own, other in zip(decoder, cross, strict=True):
        weights = fuse_heads(own, "mean")
        target, source = (share * part + (1 - share) * (weights @ part) for part in (target, source))
        target, source = share * target, share * source + (1 - share) * (fuse_heads(other, "mean") @ memory)
    return EncoderDecoderRelevance(target, source)


def flow(maps: Maps, *, rows: Sequence[int], residual: float = 0.5, heads: Fusion = "mean") -> Float[Tensor, "b r n"]:
    """Attention flow: the maximum flow from each input to some outputs.

    Abnar and Zuidema 2020, arXiv:2005.00928.

    The graph has an edge from input j to output i of each layer. Its capacity is A_ij, where A is the matrix of the
    layer in `rollout`, a weighted mean of the identity and the weights. A flow is at least as large as the rollout, and
    at most one. Capacities are rounded to 1e-9, so the error of a flow is at most L n 1e-9 for L layers of n positions.

    maps, residual, heads  as in `rollout`
    rows                   indices of the outputs to which flows are computed

    >>> with watch(model) as seen:
    ...     out = model(tokens)
    >>> flow(seen, rows=[-1]).shape
    torch.Size([1, 1, 19])
    """
    layers = _check_stack(maps)
    share = _check_residual(residual)
    mixed = torch.stack([(1 - share) * fuse_heads(layer, heads).cpu().double() for layer in layers], 1)
    mixed.diagonal(dim1=2, dim2=3).add_(share)
    capacities = (mixed * SCALE).round().long().numpy()
    chosen = _resolve_rows(rows, mixed.shape[-1])
    found = torch.zeros(len(mixed), len(chosen), mixed.shape[-1], dtype=torch.float64)
    for batch, at in itertools.product(range(len(mixed)), range(len(chosen))):
        found[batch, at] = torch.from_numpy(layered_max_flow(capacities[batch], chosen[at]))
    return found / SCALE


def gradient_relevance(maps: Seen | Sequence[Record], *, rows: Sequence[int] | None = None) -> Float[Tensor, "b r n"]:
    """Gradient relevance: start with R = I, the identity, and set R = R + A R for each layer in order.

    A is the mean over heads of max(0, gradient * weight), for each attention weight. The gradient is that of L, the
    number to explain, with respect to the weight. Chefer et al. 2021, arXiv:2103.15679, equations 5 and 6.

    Call `backward` on L first. The gradient of each weight is computed from the gradient of the attention output:
    dL/dw_ij = dL/dout_i . v_j. No entry of R is smaller than the entry of the identity, and R is the identity if all
    gradients are zero.

    maps  records of `watch`, one for each layer
    rows  indices of the outputs to compute, without computing the full matrix; None is all

    >>> with watch(model) as seen:
    ...     model(tokens)[0, -1].max().backward()
    >>> gradient_relevance(seen, rows=[-1]).shape
    torch.Size([1, 1, 19])
    """
    layers = [record for record in _check_stack(maps) if isinstance(record, Record)]
    relevance = _identity(layers[0])
    if rows is None:
        for record in layers:
            relevance = relevance + positive_contributions(record) @ relevance
        return relevance
    relevance = relevance[:, _resolve_rows(rows, relevance.shape[1])]
    for record in reversed(layers):
        added = torch.zeros_like(relevance)
        for some in _split_rows(record):
            added = added + relevance[:, :, some] @ positive_contributions(record, some)
        relevance = relevance + added
    return relevance


def encoder_decoder_gradient_relevance(parts: Seen | Roles) -> EncoderDecoderRelevance:
    """Gradient relevance through an encoder and a decoder with cross-attention.

    Chefer et al. 2021, arXiv:2103.15679, equations 6 to 10. With A as in `gradient_relevance`, self-attention adds A R
    to a relevance R. Cross-attention adds R_tt' A R_ss to the relevance of the encoder inputs. Here R_tt is the
    relevance of decoder positions for each other, R_ss that of encoder positions for each other, both normalised by
    `normalise_off_identity`, and ' is the transpose.
    """
    encoder, decoder, cross = assign_roles(parts) if isinstance(parts, Seen) else parts
    memory = gradient_relevance(encoder)
    target = _identity(decoder[0]).to(memory)
    source = memory.new_zeros(*target.shape[:2], memory.shape[-1])
    for own, other in zip(decoder, cross, strict=True):
        weights = positive_contributions(own)
        target, source = target + weights @ target, source + weights @ source
        across = positive_contributions(other) @ normalise_off_identity(memory)
        source = source + normalise_off_identity(target).mT @ across
    return EncoderDecoderRelevance(target, source)


def normalise_off_identity(relevance: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """Subtract the identity, divide each nonzero row by its sum, and add the identity again."""
    own = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    return normalise_rows(relevance - own) + own


def positive_contributions(record: Record, rows: Tensor | None = None) -> Float[Tensor, "b r j"]:
    """Return the mean over heads of max(0, gradient * weight), for each query-key pair.

    rows  indices of the queries; None is all
    """
    gradient = weight_gradients(record, rows)
    weights = record.weights() if rows is None else record.rows(rows)
    return (gradient * weights).clamp(min=0).mean(1)


def weight_gradients(record: Record, rows: Tensor | None = None) -> Float[Tensor, "b h r j"]:
    """Return the gradient of each attention weight, dL/dw_ij = dL/dout_i . v_j.

    rows  indices of the queries; None is all
    """
    if record.gradient is None:
        raise ConfigError(
            f"no gradient has reached {record.name}; run the model with gradients enabled and call backward() on the "
            "number to explain, inside or after the block"
        )
    if record.dropout:
        raise ConfigError(f"{record.name} has dropout with probability {record.dropout}; call model.eval() first")
    gradient = record.gradient if rows is None else record.gradient[:, :, rows]
    v = _values_per_head(record)
    return torch.einsum("bhie,bhje->bhij", gradient.to(v.dtype), v)


def value_weighted(
    record: Record, *, projection: Float[Tensor, "d f"] | None = None, normalised: bool = False
) -> Float[Tensor, "b h i j"]:
    """Return value-weighted attention |w_ij v_j|: the norm of the contribution of key j to output i.

    Kobayashi et al. 2020, arXiv:2004.10102.

    projection  the weight W of the output projection, as in `nn.Linear` (d outputs, f = width of all heads); if passed,
                the result is the norm of the contribution after the projection, as in the paper
    normalised  divide rows by their sum; the result equals the weights if all values have the same norm

    >>> with watch(model) as seen:
    ...     out = model(tokens)
    >>> value_weighted(seen["blocks.0.attention"]).shape
    torch.Size([1, 8, 19, 19])
    """
    v = _values_per_head(record)
    h, e = v.shape[1], v.shape[-1]
    if projection is not None:
        heads = range(h) if record.heads is None else record.heads
        if projection.shape[1] < e * (max(heads) + 1):
            raise ShapeError(
                f"projection is {tuple(projection.shape)} read as (d f), but {record.name} has {h} concatenated heads "
                f"of {format_axis('e', e)}; give out_proj.weight of the torch layer"
            )
        parts = torch.stack([projection[:, head * e : (head + 1) * e] for head in heads])
        v = torch.einsum("bhje,hde->bhjd", v, parts.to(v))
    found = record.weights() * torch.linalg.vector_norm(v, dim=-1)[:, :, None]
    return normalise_rows(found) if normalised else found


def _values_per_head(record: Record) -> Float[Tensor, "b h j e"]:
    if record.v is None:
        raise ConfigError(f"{record.name} was recorded without its values; use watch(values=True)")
    exact = torch.promote_types(record.q.dtype, torch.float32)
    return record.v.to(exact).repeat_interleave(record.q.shape[1] // record.v.shape[1], 1)


def patch_map(
    relevance: Float[Tensor, "b r n"],
    *,
    prefix: int = 1,
    pool: Literal["class", "mean"] = "class",
    grid: tuple[int, int] | None = None,
) -> Float[Tensor, "b rows columns"]:
    """Return the relevance of each image patch for the output of a vision Transformer, as a grid.

    relevance  relevance of tokens, as `rollout` returns it
    prefix     number of tokens before the patches (class token and registers), which are left out
    pool       which outputs to explain: "class" takes the relevance for the first token (class token), "mean" averages
               the relevance for all patches
    grid       rows and columns of patches; None is a square
    """
    r, n = relevance.shape[-2:]
    patches = n - prefix
    side = round(max(patches, 0) ** 0.5)
    rows, columns = (side, side) if grid is None else grid
    if rows * columns != patches or patches < 1:
        raise ShapeError(
            f"{n} tokens less a prefix of {prefix} are {patches} patches, which do not form a {rows} x {columns} grid; "
            "give prefix= (class token and registers) and grid=(rows, columns)"
        )
    if pool == "class":
        if prefix < 1:
            raise ConfigError("pool='class' takes the row of the class token, but prefix=0 means there is none")
        row = relevance[:, 0]
    elif pool == "mean":
        if r != n:
            raise ShapeError(f"pool='mean' needs the rows of all {n} tokens, not {r}; omit rows=")
        row = relevance[:, prefix:].mean(1)
    else:
        raise ConfigError(f"pool is 'class' or 'mean', not {pool!r}")
    return row[:, prefix:].reshape(-1, rows, columns)


def fuse_heads(layer: Record | Tensor, heads: Fusion) -> Float[Tensor, "b i j"]:
    """Combine the weights of a layer's heads by their "mean", "max" or "min".

    After "max" or "min", rows are divided by their sum.
    """
    weights = layer if isinstance(layer, Tensor) else layer.weights()
    if heads == "mean":
        return weights.mean(1)
    if heads not in ("max", "min"):
        raise ConfigError(f"heads are fused by 'mean', 'max' or 'min', not {heads!r}")
    return normalise_rows(weights.amax(1) if heads == "max" else weights.amin(1))


def normalise_rows(x: Float[Tensor, "... j"]) -> Float[Tensor, "... j"]:
    """Divide each row by its sum; a row of zeros stays zero."""
    total = x.sum(-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def _identity(layer: Record | Tensor) -> Float[Tensor, "b n n"]:
    b, n = _map_shape(layer)[:2]
    like = layer if isinstance(layer, Tensor) else layer.q
    exact = torch.promote_types(like.dtype, torch.float32)
    return torch.eye(n, dtype=exact, device=like.device).expand(b, n, n)


def _multiply_rows(x: Float[Tensor, "b r i"], layer: Record | Tensor, heads: Fusion) -> Float[Tensor, "b r j"]:
    """Multiply rows of relevance by the attention weights of a layer, combined over its heads.

    x      the rows of relevance
    heads  how the heads are combined; for a record and "mean", the weight matrix is not computed
    """
    if isinstance(layer, Tensor) or heads != "mean":
        return x @ fuse_heads(layer, heads)
    return torch.stack([layer.mixed(x[:, row]).mean(1) for row in range(x.shape[1])], 1)


def _split_rows(record: Record) -> Sequence[Tensor]:
    b, h, i, _ = record.q.shape
    step = max(1, AT_ONCE // max(1, b * h * record.k.shape[2]))
    return list(torch.arange(i, device=record.q.device).split(step))


def _check_stack(maps: Maps) -> list[Record | Tensor]:
    """Return the layers as a list; raise an error if they are not a stack of self-attention layers of equal size.

    The layers of a `Seen` must belong to one stack according to their names, not to an encoder and a decoder. A list is
    used in the given order.
    """
    layers: list[Record | Tensor] = list(maps.records) if isinstance(maps, Seen) else list(maps)
    if not layers:
        reasons = "; ".join(maps.left_out) if isinstance(maps, Seen) else ""
        left_out = f"there are no maps, because every call was left out: {reasons}"
        nothing = "there are no maps; run the model inside `with watch(model) as seen:` first"
        raise ConfigError(left_out if reasons else nothing)
    if isinstance(maps, Seen):
        _check_one_stack(maps)
    b, n = _map_shape(layers[0])[:2]
    for number, layer in enumerate(layers):
        name = layer.name if isinstance(layer, Record) else f"map {number}"
        if isinstance(layer, Record) and layer.rows_kept is not None:
            raise ConfigError(f"{name} was recorded for some rows only, but rollout needs all; omit rows= of watch")
        if _map_shape(layer) != (b, n, n):
            raise ShapeError(
                f"{name} has a map (b i j) = {_map_shape(layer)}, but a stack of self-attention needs ({b}, {n}, {n}) "
                "in every layer; select layers with watch(layers=...), or use encoder_decoder_rollout"
            )
    return layers


def _check_one_stack(seen: Seen) -> None:
    """Raise ConfigError if the recorded calls are not one stack of layers.

    All layers must have the same role, according to their names: encoder, decoder or cross-attention. No layer may be
    called more than once.
    """
    found = sorted({attention_role(name.partition(":")[0]) for name in seen})
    if len(found) > 1:
        raise ConfigError(
            f"by their names these are {' and '.join(found)} attention calls, which are not one stack; use "
            "encoder_decoder_rollout or encoder_decoder_gradient_relevance for all of them, select one part with "
            "watch(layers=...), or pass a list of consecutive records"
        )
    _refuse_repeats(seen, "a list of consecutive records")


def _refuse_repeats(seen: Seen, instead: str) -> None:
    again = next((name for name in seen if len(seen.calls(name)) > 1), None)
    if again is not None:
        raise ConfigError(
            f"{again} was called {len(seen.calls(again))} times, so there may be several passes; watch one pass. If a "
            f"layer is shared or no model was passed to watch, pass {instead}: seen.records has all calls in order, "
            f"seen.calls({again!r}) those of one name"
        )


def _resolve_rows(rows: Sequence[int], n: int) -> list[int]:
    """Return the indices of output rows, with negative indices counted from the end of n rows."""
    chosen = check_indices("rows", rows)
    return list(range(n) if chosen is None else resolve_indices("rows", chosen, n, "the last layer"))


def _map_shape(layer: Record | Tensor) -> tuple[int, int, int]:
    if isinstance(layer, Tensor):
        if layer.ndim != 4:
            raise ShapeError(f"a map is (b h i j), not {tuple(layer.shape)}")
        return layer.shape[0], layer.shape[2], layer.shape[3]
    return layer.q.shape[0], layer.q.shape[2], layer.k.shape[2]


def _check_residual(residual: float) -> float:
    if not 0 <= check_number("residual", residual) <= 1:
        raise ConfigError(f"residual is the weight of the identity, from 0 to 1, not {residual}")
    return float(residual)
