"""One decoding step of a GPT or of the decoder of a Transformer: the next logits of each sequence.

A step computes the same result as the modules' `forward` for one new token, but with the operations of `decoding_ops`.
`step_refusals` returns the reasons why a model is not supported.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as module_file

from regard.core.masks import causal
from regard.core.masks.algebra import Mask
from regard.core.positions import DynamicNTK
from regard.models.decoding_ops import (
    StepState,
    activation_name,
    cross_attention,
    embed,
    normalise,
    project,
    self_attention,
)
from regard.models.gpt import GPT
from regard.models.transformer import Stack, Transformer
from regard.nn.attention import Attention
from regard.nn.blocks import Block, Residual
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding
from regard.nn.feedforward import FeedForward
from regard.nn.int8 import Int8Linear
from regard.nn.learned_scores import LearnedBuckets
from regard.nn.norms import RMSNorm
from regard.nn.projection import Linear

# exactly these classes: a subclass, a parametrization or a quantized layer may compute something else
KNOWN = {
    GPT, Transformer, Stack, Block, Residual, Attention, FeedForward, Linear, Int8Linear, nn.LayerNorm, RMSNorm,
    nn.ModuleList, TokenEmbedding, LearnedPositions, SinusoidalPositions, LearnedBuckets,
}  # fmt: skip


def step_refusals(model: nn.Module) -> list[str]:
    """Return every reason why `decoding_step` does not support a model. The list is empty if it does."""
    reasons = []
    if module_file._global_forward_hooks or module_file._global_forward_pre_hooks:
        reasons.append("hooks of all modules are registered, which the step would not call")
    if type(model) not in (GPT, Transformer):
        reasons.append(f"it knows GPT and Transformer, not {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module) not in KNOWN:
            reasons.append(f"{name or 'the model'} is a {type(module).__name__}, which the step does not know")
        elif module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            reasons.append(f"{name or 'the model'} has a hook or its own forward, which the step would not call")
        elif isinstance(module, FeedForward) and activation_name(module.activation) is None:
            reasons.append(f"{name} has an activation that is not registered")
        elif isinstance(module, Attention):
            if isinstance(module.rotary and module.rotary.scaling, DynamicNTK):
                reasons.append("DynamicNTK changes its frequencies with the length")
            if not (module.scores is None or isinstance(getattr(module.scores, "__self__", None), LearnedBuckets)):
                reasons.append(f"{name} has a score term that is not LearnedBuckets")
            if module.kernel is not None:
                reasons.append(f"{name} names its kernel, {module.kernel!r}")
            if module.width != module.memory_width:
                reasons.append(f"{name} has memory_width={module.memory_width}")
            if module.beta is not None and not 0 < float(module.beta) < float("inf"):
                reasons.append(f"{name} has beta={module.beta}")
    layers = [block.attention for block in decoder_blocks(model) if type(block.attention) is Attention]
    if len({(layer.kv_heads, layer.head_width, layer.rotary, layer.scores) for layer in layers}) > 1:
        reasons.append("its blocks differ in heads, rotary positions or score terms")
    kinds = {(each.dtype, each.device) for each in model.parameters()}
    if len(kinds) > 1:
        reasons.append("its parameters differ in dtype or device")
    return list(dict.fromkeys(reasons))


def decoder_blocks(model: nn.Module) -> list[Any]:
    """Return the decoder blocks: all blocks of a GPT, or those of the decoder of a Transformer."""
    if isinstance(model, GPT):
        return list(model.blocks)
    return list(model.decoder.blocks) if isinstance(model, Transformer) else []


def decoding_step(model: GPT | Transformer, state: StepState) -> Float[Tensor, "r w"]:
    """Run the model on `state.tokens` at `state.positions` and return the logits of the next tokens."""
    if isinstance(model, GPT):
        x = embed(state, model.tokens, _position_table(model.positions, state))
        for number, block in enumerate(decoder_blocks(model)):
            x = _block(state, block, number, x, model.mask, model.config.window)
        weight = model.tokens.weight if model.head is None else model.head.weight
        return project(state, x, weight, norm=model.norm)
    decoder = model.decoder
    x = embed(state, model.tokens, _position_table(decoder.positions, state))
    x = x if decoder.embedding_norm is None else normalise(state, x, decoder.embedding_norm)
    for number, block in enumerate(decoder_blocks(model)):
        x = _block(state, block, number, x, causal(), None)
    norm = decoder.norm
    if model.config.output_scale != 1.0:
        x, norm = (x if norm is None else normalise(state, x, norm)) * model.config.output_scale, None
    weight = model.tokens.weight if model.head is None else model.head.weight
    return project(state, x, weight, model.output_bias, norm=norm)


def _position_table(module: nn.Module | None, state: StepState) -> Tensor | None:
    """Return the embeddings of all positions, or None if the model adds none.

    The embeddings of a module without parameters are computed once for all steps.
    """
    if module is None or isinstance(module, LearnedPositions):
        return None if module is None else module.weight
    return state.table(module)


def _block(
    state: StepState, block: Any, number: int, x: Tensor, mask: Mask, window: int | None
) -> Float[Tensor, "r d"]:
    """Compute one Transformer block for one new token, as `Block.forward` does in eval mode."""
    layer, pre = block.attention, block.order == "pre"

    def inputs(norm: nn.Module) -> nn.Module | None:
        return norm if pre else None

    def outputs(x: Tensor, norm: nn.Module) -> Tensor:
        return x if pre else normalise(state, x, norm)

    fused = layer.query_key_value
    heads = project(state, x, fused.weight, fused.bias, norm=inputs(block.attention_norm))
    heads = self_attention(state, heads, layer, number, mask, window)
    x = outputs(project(state, heads, layer.out.weight, layer.out.bias, residual=x), block.attention_norm)
    if block.cross is not None:
        layer = block.cross
        rows = slice(layer.heads * layer.head_width)
        bias = None if layer.query_key_value.bias is None else layer.query_key_value.bias[rows]
        queries = project(state, x, layer.query_key_value.weight[rows], bias, norm=inputs(block.cross_norm))
        heads = cross_attention(state, queries, layer, number)
        x = outputs(project(state, heads, layer.out.weight, layer.out.bias, residual=x), block.cross_norm)
    if block.feedforward is None:
        return x
    part = block.feedforward
    hidden = project(
        state, x, part.up.weight, part.up.bias,
        norm=inputs(block.feedforward_norm), gate=part.gate, activation=part.activation,
    )  # fmt: skip
    return outputs(project(state, hidden, part.down.weight, part.down.bias, residual=x), block.feedforward_norm)
