"""Small models of several libraries with random weights, and the weights of their eager attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers import import_timm

WORDS = 37


@dataclass(frozen=True)
class Case:
    """A model, a function that runs it and returns one tensor, and the eager weights of all its layers in order."""

    model: nn.Module
    run: Callable[[nn.Module], Tensor]
    weights: Callable[[], list[Tensor]]
    names: tuple[str, ...]


def ids(b: int = 2, n: int = 9) -> Tensor:
    return torch.arange(b * n).reshape(b, n) * 7 % WORDS


def real(b: int = 2, n: int = 9, side: str = "left") -> Tensor:
    mask = torch.ones(b, n, dtype=torch.long)
    mask[0, :2] = 0
    return mask if side == "left" else mask.flip(1)


def randomise(model: nn.Module) -> None:
    """Set large random weights and biases, so that no attention map is uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.7 / math.sqrt(parameter.shape[-1]) * 2)
            elif "bias" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def _huggingface_case(kind: str, config: str, run: Callable[..., Any], names: tuple[str, ...], **settings: Any) -> Case:
    import transformers

    implementation = settings.pop("implementation")
    built = getattr(transformers, config)(**settings, attn_implementation=implementation)
    model = getattr(transformers, kind)(built).eval()
    randomise(model)
    twin = getattr(transformers, kind)(getattr(transformers, config)(**settings, attn_implementation="eager")).eval()
    twin.load_state_dict(model.state_dict())

    def weights() -> list[Tensor]:
        with torch.no_grad():
            out = run(twin, output_attentions=True)
        if "encoder_attentions" in out:
            mixed = zip(out.decoder_attentions, out.cross_attentions, strict=True)
            return [*out.encoder_attentions, *(each for pair in mixed for each in pair)]
        return list(out.attentions)

    def first(model: nn.Module) -> Tensor:
        out = run(model)
        found: Tensor = out["logits"] if "logits" in out else out[0]
        return found

    return Case(model, first, weights, names)


def gpt2(implementation: str) -> Case:
    return _huggingface_case(
        "GPT2LMHeadModel",
        "GPT2Config",
        lambda model, **more: model(ids(), attention_mask=real(), use_cache=False, **more),
        ("transformer.h.0.attn", "transformer.h.1.attn"),
        implementation=implementation,
        vocab_size=WORDS, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def bert(implementation: str) -> Case:
    return _huggingface_case(
        "BertForMaskedLM",
        "BertConfig",
        lambda model, **more: model(ids(), attention_mask=real(side="right"), **more),
        ("bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"),
        implementation=implementation,
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
    )  # fmt: skip


def vit(implementation: str) -> Case:
    pixels = torch.linspace(-1, 1, 2 * 3 * 12 * 12).reshape(2, 3, 12, 12).sin()
    return _huggingface_case(
        "ViTForImageClassification",
        "ViTConfig",
        lambda model, **more: model(pixels, **more),
        ("vit.layers.0.attention", "vit.layers.1.attention"),
        implementation=implementation,
        image_size=12, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
    )  # fmt: skip


def llama(implementation: str) -> Case:
    return _huggingface_case(
        "LlamaForCausalLM",
        "LlamaConfig",
        lambda model, **more: model(ids(), attention_mask=real(), use_cache=False, **more),
        ("model.layers.0.self_attn", "model.layers.1.self_attn"),
        implementation=implementation,
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=20, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def t5(implementation: str) -> Case:
    return _huggingface_case(
        "T5ForConditionalGeneration",
        "T5Config",
        lambda model, **more: model(
            input_ids=ids(), attention_mask=real(side="right"), decoder_input_ids=ids()[:, :5], use_cache=False, **more
        ),
        (
            "encoder.block.0.layer.0.SelfAttention",
            "encoder.block.1.layer.0.SelfAttention",
            "decoder.block.0.layer.0.SelfAttention",
            "decoder.block.0.layer.1.EncDecAttention",
            "decoder.block.1.layer.0.SelfAttention",
            "decoder.block.1.layer.1.EncDecAttention",
        ),
        implementation=implementation,
        vocab_size=WORDS, d_model=24, d_kv=5, d_ff=20, num_layers=2, num_heads=3,
    )  # fmt: skip


def timm_vit() -> Case:
    model = import_timm().create_model(
        "vit_tiny_patch16_224", img_size=48, depth=2, embed_dim=24, num_heads=3, num_classes=5, drop_path_rate=0.0
    )
    randomise(model.eval())
    pixels = torch.linspace(-1, 1, 2 * 3 * 48 * 48).reshape(2, 3, 48, 48).sin()

    def weights() -> list[Tensor]:
        found: list[Tensor] = []
        handles = []
        for block in model.blocks:
            block.attn.fused_attn = False
            handles.append(block.attn.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0])))
        with torch.no_grad():
            model(pixels)
        for handle, block in zip(handles, model.blocks, strict=True):
            handle.remove()
            block.attn.fused_attn = True
        return found

    return Case(model, lambda model: model(pixels), weights, ("blocks.0.attn", "blocks.1.attn"))


def torch_encoder(norm_first: bool = False) -> Case:
    layer = nn.TransformerEncoderLayer(24, 4, 20, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    randomise(model)
    x = torch.linspace(-3, 3, 2 * 9 * 24).reshape(2, 9, 24).cos()
    dropped = real(side="right") == 0

    def weights() -> list[Tensor]:
        found = []
        with torch.no_grad():
            y = x
            for layer in model.layers:
                z = layer.norm1(y) if norm_first else y
                kept = layer.self_attn(z, z, z, key_padding_mask=dropped, average_attn_weights=False)[1]
                found.append(kept)
                y = layer(y, src_key_padding_mask=dropped)
        return found

    def run(model: nn.Module) -> Tensor:
        out: Tensor = model(x, src_key_padding_mask=dropped)
        return out

    return Case(model, run, weights, ("layers.0.self_attn", "layers.1.self_attn"))


class ByHand(nn.Module):
    """Attention as a textbook writes it."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(late, float("-inf")).softmax(-1)
        self.kept.append(weights.detach())
        return self.out((self.drop(weights) @ v).transpose(1, 2).flatten(2))


class ByHandModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ByHand(), ByHand()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.first(x)
        return out + self.second(out)


def by_hand() -> Case:
    model = ByHandModel().eval()
    randomise(model)
    x = torch.linspace(-3, 3, 2 * 9 * 24).reshape(2, 9, 24).cos()

    def weights() -> list[Tensor]:
        model.first.kept.clear()
        model.second.kept.clear()
        with torch.no_grad():
            model(x)
        return [model.first.kept[0], model.second.kept[0]]

    return Case(model, lambda model: model(x), weights, ("first", "second"))


CASES: dict[str, Callable[[], Case]] = {
    f"{maker.__name__} {implementation}": (lambda maker=maker, name=implementation: maker(name))
    for maker in (gpt2, bert, vit, llama, t5)
    for implementation in ("eager", "sdpa")
}
CASES |= {
    "timm vit": timm_vit,
    "torch encoder": torch_encoder,
    "torch encoder, norm first": lambda: torch_encoder(norm_first=True),
    "by hand": by_hand,
}
