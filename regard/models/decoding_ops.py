"""The operations of one decoding step, which computes one new token for each of several sequences.

Each operation has two implementations: torch operations, as in the forward passes of the modules, and a Triton kernel
for a GPU. No operation waits for the GPU or branches on values of tensors, so that a CUDA graph can capture the step.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.core.positions import Rotary
from regard.nn.attention import Attention, KeysValues, merge_heads, split_heads
from regard.nn.embeddings import TokenEmbedding
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.int8 import Int8Linear, Int8Weight
from regard.nn.projection import linear

FEW_ROWS = 4  # up to this number, one product of weights and vector for each row; for more rows, cuBLAS
ALIGNED = 8  # numbers of outputs for which cuBLAS has fast kernels are multiples of it
EARLY = True
KEYS_PER_TILE = 128  # of the attention kernel


@dataclass
class StepState:
    """The tensors of one decoding step. They are allocated once and changed in place, as CUDA graphs require.

    tokens     the next token of each sequence, which the step reads
    positions  the position of each of these tokens
    caches     KV caches with room for `capacity` positions: keys of block 0, values of block 0, keys of block 1, ...
    memory     keys and values of the source in each block of an encoder-decoder
    lengths    number of source tokens of each sequence
    biases     tables of relative position biases by head and distance, one for each score term that layers share
    triton     whether the Triton kernels are used
    rotations  cosines and sines of each rotary embedding
    scratch    temporary tensors, by purpose and size
    """

    tokens: Int[Tensor, "r"]
    positions: Int[Tensor, "r"]
    caches: Float[Tensor, "caches r g j c"]
    memory: list[KeysValues] = field(default_factory=list)
    lengths: Int[Tensor, "r"] | None = None
    biases: dict[Any, Tensor] = field(default_factory=dict)
    triton: bool = False
    rotations: dict[Rotary, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scratch: dict[tuple[Any, ...], tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """The number of positions of the KV cache."""
        return self.caches.shape[3]

    def keys_values(self, block: int) -> KeysValues:
        """Return the KV cache of a block."""
        return KeysValues(self.caches[2 * block], self.caches[2 * block + 1])

    def table(self, positions: nn.Module) -> Float[Tensor, "n d"]:
        """Return the position embeddings of all positions of the KV cache, 0 to capacity - 1.

        The embeddings are computed at the first call and then stored.

        positions  module without parameters that computes the embeddings, such as sinusoidal ones
        """
        if ("positions",) not in self.scratch:
            self.scratch["positions",] = (positions(torch.arange(self.capacity, device=self.tokens.device)),)
        return self.scratch["positions",][0]

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Reorder the sequences of the KV caches in place, as beam search does: sequence r becomes the old rows[r]."""
        count, every = self.caches.shape[:2]
        # whole sequences as rows of one matrix, which torch copies much faster than along another axis
        flat = self.caches.view(count * every, -1)
        places = torch.arange(0, count * every, every, device=rows.device)[:, None] + rows
        flat.copy_(flat.index_select(0, places.flatten()))


def project(
    state: StepState,
    x: Float[Tensor, "r i"],
    weight: Float[Tensor, "o i"] | Int8Weight,
    bias: Float[Tensor, "o"] | None = None,
    *,
    norm: nn.Module | None = None,
    gate: nn.Linear | Int8Linear | None = None,
    activation: Any = None,
    residual: Float[Tensor, "r o"] | None = None,
) -> Float[Tensor, "r o"]:
    """Return residual + activation(norm(x) @ weight.T + bias): a linear layer fused with norm, activation and residual.

    Arguments that are None are left out of the formula.

    gate  a second linear layer, as in SwiGLU. With it the result is
          residual + activation(gate(norm(x))) * (norm(x) @ weight.T + bias)
    """
    if state.triton and x.shape[0] <= FEW_ROWS:
        return _project_triton(x, weight, bias, norm, gate, activation, residual)
    x = x if norm is None else normalise(state, x, norm)
    unaligned = state.triton and weight.shape[0] % ALIGNED > 0
    y = unaligned_linear(x, weight, bias) if unaligned and isinstance(weight, Tensor) else linear(x, weight, bias)
    if gate is not None:
        y = activation(gate(x)) * y
    elif activation is not None:
        y = activation(y)
    return y if residual is None else residual + y


def unaligned_linear(
    x: Float[Tensor, "r i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "r o"]:
    """Return x @ weight.T + bias, for a number of outputs that is no multiple of ALIGNED, such as GPT-2's 50,257.

    cuBLAS has no fast kernel for such a number. So one matrix product computes the largest multiple of ALIGNED outputs,
    and a second one the rest. The rows of the result are aligned in memory.
    """
    outputs = weight.shape[0]
    whole = outputs - outputs % ALIGNED
    y = x.new_empty(len(x), whole + ALIGNED)[:, :outputs]
    for part in (slice(0, whole), slice(whole, outputs)):
        torch.mm(x, weight[part].mT, out=y[:, part])
    return y if bias is None else y.add_(bias)


def embed(state: StepState, embedding: TokenEmbedding, table: Float[Tensor, "n d"] | None) -> Float[Tensor, "r d"]:
    """Return the embeddings of `state.tokens`, plus the position embeddings in `table` if it is given."""
    last = 0 if table is None else len(table) - 1  # a text that has ended may be beyond it
    if not state.triton:
        x = embedding(state.tokens[:, None])[:, 0]
        return x if table is None else x + table[state.positions.clamp(max=last)].to(x.dtype)
    from regard.models import decoding_triton_kernels as kernels

    rows, width = len(state.tokens), embedding.weight.shape[1]
    y = embedding.weight.new_empty(rows, width)
    kernels.embed[(rows,)](
        state.tokens, state.positions, embedding.weight, embedding.weight if table is None else table, y,
        float(embedding.scale), last, K=width, K_ALL=_power_of_two(width), SCALED=embedding.scale != 1.0,
        PLACED=table is not None, **_launch_options(y),
    )  # fmt: skip
    return y


def normalise(state: StepState, x: Float[Tensor, "r d"], norm: nn.Module) -> Float[Tensor, "r d"]:
    """Apply the norm module `norm` to the hidden states x of the new tokens."""
    if not state.triton:
        y: Tensor = norm(x)
        return y
    from regard.models import decoding_triton_kernels as kernels

    rows, width = x.shape
    y = torch.empty_like(x)
    kind, weight, bias, eps = _norm_arguments(norm, x)
    kernels.normalise[(rows,)](
        x, weight, bias, y, eps, K=width, K_ALL=_power_of_two(width), NORM=kind, **_launch_options(x)
    )
    return y


def self_attention(
    state: StepState, x: Float[Tensor, "r qkv"], layer: Attention, block: int, mask: Mask, window: int | None
) -> Float[Tensor, "r heads"]:
    """Append new keys and values to the KV cache of a block, and return the attention of the new queries to the cache.

    The result has the heads concatenated.

    x       query, key and value heads of the new token of each sequence
    block   index of the block
    window  number of earlier tokens that each token sees, as in `mask`; None is all
    """
    keys, values = state.keys_values(block)
    if state.triton:
        return _attention_triton(state, x, layer, keys, values, state.positions, window, own=True)
    heads = split_heads(x[:, None], layer.heads + 2 * layer.kv_heads)
    q, k, v = heads.split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
    position = state.positions.clamp(max=state.capacity - 1)
    q = layer._normalise_and_rotate(q, layer.query_norm, position[:, None])
    k = layer._normalise_and_rotate(k, layer.key_norm, position[:, None])
    rows = torch.arange(len(x), device=x.device)
    keys[rows, :, position], values[rows, :, position] = k[:, :, 0], v[:, :, 0]
    where = Positions(0, offsets=position)
    out = attend(q, keys, values, mask=mask, scores=layer.term(), beta=layer.beta, positions=where)
    return merge_heads(out)[:, 0]


def cross_attention(
    state: StepState, x: Float[Tensor, "r heads"], layer: Attention, block: int
) -> Float[Tensor, "r heads"]:
    """Return the cross-attention of the new tokens to the source tokens of an encoder-decoder, with heads concatenated.

    x      query heads of the new token of each sequence
    block  index of the block
    """
    keys, values = state.memory[block]
    assert state.lengths is not None
    if state.triton:
        return _attention_triton(state, x, layer, keys, values, state.lengths, None, own=False)
    q = layer._normalise_and_rotate(split_heads(x[:, None], layer.heads), layer.query_norm, 0)
    mask = PaddingMask(state.lengths, "right", None)
    return merge_heads(attend(q, keys, values, mask=mask, scores=layer.term(), beta=layer.beta))[:, 0]


def choose_and_append(
    state: StepState,
    logits: Float[Tensor, "r w"],
    step: Int[Tensor, "1"],
    records: tuple[Tensor, ...],
    uniform: Float[Tensor, "n r"] | None = None,
    temperature: Float[Tensor, "1"] | None = None,
) -> None:
    """Choose the next token of each sequence with a Triton kernel, by greedy decoding or by sampling.

    The chosen token becomes the next input. The token and its log-probability in float64 are written into `records`.
    The log-probability is NaN if a logit of the sequence is NaN or +inf, or if all its logits are -inf.

    step         index of the row of `records` to write; the function adds 1 to it
    records      tokens (n r) and log-probabilities (n r) of n steps and r sequences
    uniform      random numbers in [0, 1) (n r), to sample from softmax(logits / temperature); None is greedy decoding
    temperature  temperature of sampling, in float64
    """
    from regard.models import decoding_triton_kernels as kernels

    rows, vocab = logits.shape
    block = 1024
    parts = -(-vocab // block)
    tops, places, sums, heated, arrived = _scratch(
        state,
        ("choose", rows, parts),
        lambda: (
            logits.new_empty(rows, parts, dtype=torch.float32),
            logits.new_empty(rows, parts, dtype=torch.int32),
            logits.new_empty(rows, parts, dtype=torch.float64),
            logits.new_empty(rows, parts, dtype=torch.float64),
            logits.new_zeros(rows + 1, dtype=torch.int32),
        ),
    )
    kernels.choose[(parts, rows)](
        logits, tops, places, sums, heated, arrived, state.tokens, state.positions, *records, step,
        sums if uniform is None else uniform, sums if temperature is None else temperature,
        vocab, logits.stride(0), rows, DRAW=uniform is not None, PARTS=parts, PARTS_ALL=_power_of_two(parts),
        BLOCK=block, **_launch_options(logits),
    )  # fmt: skip


def append(
    state: StepState, tokens: Tensor, values: Tensor, step: Int[Tensor, "1"], records: tuple[Tensor, ...]
) -> None:
    """Make `tokens` the next inputs, and write them and their log-probabilities `values` into row `step` of `records`.

    Adds 1 to `step` and to all positions.
    """
    for record, row in zip(records, (tokens, values), strict=True):
        record.index_copy_(0, step, row[None])
    step += 1
    state.tokens.copy_(tokens)
    state.positions += 1


def rotation_table(rotary: Rotary, head_width: int, capacity: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of the rotary angles, for each position and each pair of rotated coordinates.

    Both tensors are float32 and have the shape (capacity pairs).

    like  a tensor on the device of the result
    """
    from regard.core.positions import YaRN

    positions = torch.arange(capacity, device=like.device, dtype=torch.float32)
    phases = positions[:, None] * rotary.frequencies(head_width, like.device)
    factor = rotary.scaling.attention_factor if isinstance(rotary.scaling, YaRN) else 1.0
    return (phases.cos() * factor).contiguous(), (phases.sin() * factor).contiguous()


def activation_name(activation: Any) -> str | None:
    """Return the name of an activation function in ACTIVATIONS, or None if it is not there.

    `functools.partial` objects are compared by function and arguments, because a copied model has copies of them.
    """

    def contents(function: Any) -> Any:
        return (function.func, function.args, function.keywords) if isinstance(function, partial) else function

    return next((name for name in ACTIVATIONS if contents(ACTIVATIONS[name]) == contents(activation)), None)


def _project_triton(
    x: Tensor,
    weight: Tensor | Int8Weight,
    bias: Tensor | None,
    norm: nn.Module | None,
    gate: nn.Linear | Int8Linear | None,
    activation: Any,
    residual: Tensor | None,
) -> Tensor:
    from regard.models import decoding_triton_kernels as kernels

    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = x.new_empty(rows, outputs)
    kind, norm_weight, norm_bias, eps = _norm_arguments(norm, x)
    whole = _power_of_two(inputs)
    block_n = _outputs_per_program(outputs, inputs, gate is not None)
    block_k = min(whole, 4096)
    numbers, scales = _numbers_and_scales(weight, x)
    gate_numbers, gate_scales = (x, x) if gate is None else _numbers_and_scales(gate.weight, x)
    kernels.linear[(-(-outputs // block_n), rows)](
        x, numbers, scales, x if bias is None else bias, gate_numbers, gate_scales,
        x if gate is None or gate.bias is None else gate.bias, norm_weight, norm_bias,
        x if residual is None else residual, y, outputs, eps,
        K=inputs, K_ALL=whole, BLOCK_N=block_n, BLOCK_K=block_k, NORM=kind, BIAS=bias is not None,
        SCALED=isinstance(weight, Int8Weight), GATED=gate is not None, ACTIVATION=activation_name(activation) or "",
        ADD=residual is not None, **_launch_options(x),
    )  # fmt: skip
    return y


def _numbers_and_scales(weight: Tensor | Int8Weight, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix of a weight and the scales of its rows, as the Triton kernels take them.

    A weight that is not quantized has no scales. x is then returned in their place, and the kernels do not read it.
    """
    return (weight.values, weight.scales) if isinstance(weight, Int8Weight) else (weight, x)


def _outputs_per_program(outputs: int, inputs: int, gated: bool) -> int:
    """Return how many outputs of a linear layer one Triton program computes.

    The number is small, so that there are programs for all multiprocessors. With a gate it is halved, because each
    output reads two weight matrices.
    """
    size = 4 if inputs <= 1024 else 2
    size = 8 if size == 4 and outputs > 8192 else size
    return max(size // 2, 1) if gated else size


def _attention_triton(
    state: StepState,
    x: Tensor,
    layer: Attention,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    window: int | None,
    *,
    own: bool,
) -> Tensor:
    from regard.models import decoding_triton_kernels as kernels

    rows, heads, groups, c = len(x), layer.heads, layer.kv_heads, layer.head_width
    capacity, width = keys.shape[2], _power_of_two(c)
    block = max(16, min(2048 // width, KEYS_PER_TILE))
    splits = _splits(rows * heads, capacity if window is None else min(window + 1, capacity), block)
    parts, logsum, arrived = _scratch(
        state,
        ("attention", rows, heads, splits, width),
        lambda: (
            x.new_empty(rows * heads * splits, width, dtype=torch.float32),
            x.new_empty(rows * heads * splits, 2, dtype=torch.float32),
            x.new_zeros(rows * heads, dtype=torch.int32),
        ),
    )
    out = x.new_empty(rows, heads * c)
    kind, q_weight, q_bias, eps = _norm_arguments(layer.query_norm, x)
    _, k_weight, k_bias, _ = _norm_arguments(layer.key_norm, x)
    rotary = layer.rotary if own else None
    turned, cos, sin = 0, x, x
    if rotary is not None:
        cos, sin = state.rotations[rotary]
        turned = 2 * cos.shape[1]
    bias = None if layer.scores is None else state.biases[layer.scores]
    kernels.attention[(heads, rows, splits)](
        x, keys, values, out, parts, logsum, arrived, lengths, cos, sin, q_weight, q_bias, k_weight, k_bias,
        x if bias is None else bias, c**-0.5 if layer.beta is None else float(layer.beta), eps,
        0 if window is None else window, capacity, x.stride(0),
        H=heads, G=groups, C=c, WIDTH=width, SPLITS=splits, SPLITS_ALL=_power_of_two(splits), BLOCK=block,
        TURNED=turned, HALF=rotary is None or rotary.pairing == "half", NORM=kind, OWN=own,
        WINDOW=window is not None, BIASED=bias is not None, **_launch_options(x),
    )  # fmt: skip
    return out


def _splits(programs: int, keys: int, block: int) -> int:
    """Return how many Triton programs share the keys of one head, so that every multiprocessor has work.

    programs  number of programs if keys are not shared: one for each head of each sequence
    keys      maximum number of keys
    block     number of keys that a program reads at once
    """
    wanted = -(-2 * _multiprocessors() // programs)
    return max(1, min(wanted, -(-keys // block), 32))


def _launch_options(x: Tensor) -> dict[str, Any]:
    """Return the launch options of a Triton kernel.

    On GPUs that support it, the kernel may start before the previous one has ended (programmatic dependent launch).
    """
    early = EARLY and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"num_warps": 4, "EARLY": early, **({"launch_pdl": True} if early else {})}


@lru_cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1


def _norm_arguments(norm: nn.Module | None, x: Tensor) -> tuple[str, Tensor, Tensor, float]:
    """Return the kind of a norm, its weight, bias and eps, as the Triton kernels take them.

    x replaces a weight or bias that does not exist, and the kernels do not read it.
    """
    if norm is None:
        return "none", x, x, 0.0
    if isinstance(norm, nn.LayerNorm):
        kind = "layer" if norm.bias is not None else "layer-no-bias"
        return kind, norm.weight, x if norm.bias is None else norm.bias, norm.eps
    assert isinstance(norm, nn.RMSNorm)
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    return "rms", norm.weight, x, eps


def _scratch(state: StepState, key: tuple[Any, ...], make: Any) -> tuple[Tensor, ...]:
    """Return the temporary tensors for `key`, which all layers share. The first call allocates them with `make()`."""
    if key not in state.scratch:
        state.scratch[key] = make()
    return state.scratch[key]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
