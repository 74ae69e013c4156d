"""Tiny randomly initialised models of Hugging Face, one for each family."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.peers import let_torchvision_load

let_torchvision_load()

# one dictionary for all: a configuration takes the names that it knows
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "sliding_window": 5,
    "image_size": 24,
    "patch_size": 8,
}
SMALL |= dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "embedding_size", "word_embed_proj_dim"), 32
)
SMALL |= dict.fromkeys(
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    2,
)
SMALL |= dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8}
SMALL |= dict.fromkeys(
    ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "d_ff"), 40
)
SMALL |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64)
SMALL |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
SMALL |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
SMALL |= dict.fromkeys(
    ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "activation_dropout"), 0.0
)

# settings that one family needs; None removes a setting of SMALL
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "first_k_dense_replace": 2,
    },
    "llama4_text": {"attention_chunk_size": 4, "moe_layers": []},
}

CAUSAL = """afmoe apertus arcee biogpt bitnet cohere cohere2 ctrl cwm deepseek_v3 diffllama doge ernie4_5
ernie4_5_moe exaone4
gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss
granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe jetmoe llama llama4_text mimo_v2_flash ministral mistral
mixtral
modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma"""
ENCODER = """albert bert camembert data2vec-text distilbert electra ernie esm eurobert layoutlm mobilebert modernbert
nomic_bert roberta roberta-prelayernorm xlm-roberta"""
SEQ2SEQ = "bart blenderbot m2m_100 marian mbart mt5 nllb-moe pegasus plbart t5 umt5"
IMAGE = "clip_vision_model deit dinov2 siglip_vision_model vit vit_msn"
FAMILIES = [
    f"{name} {kind}"
    for kind, names in (("decoder", CAUSAL), ("encoder", ENCODER), ("seq2seq", SEQ2SEQ), ("image", IMAGE))
    for name in names.split()
]


@dataclass
class TinyModel:
    """A model, its inputs, and which positions of its output are real."""

    model: Any
    inputs: dict[str, Tensor]
    real: Tensor

    def output(self, model: Any = None) -> Tensor:
        """Logits, or the last hidden states, at the real positions."""
        model = self.model if model is None else model
        inputs = {
            name: x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
            for name, x in self.inputs.items()
        }
        out = model(**inputs)
        values: Tensor = out.logits if "logits" in out else out.last_hidden_state
        return values[self.real] if self.real.shape == values.shape[:2] else values

    def gradients(self, model: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the gradient of every parameter of a random linear function of it."""
        model = self.model if model is None else model
        model.zero_grad(set_to_none=True)
        out = self.output(model)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
            out.device
        )
        (out * direction.to(out.dtype)).sum().backward()
        return out.detach(), {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }


def make(family: str, attention: str = "eager", **settings: Any) -> TinyModel:
    """A tiny model of one family, `"llama decoder"`, in eval mode. Sequence 0 is padded on the left or on the right."""
    import transformers

    name, _, kind = family.partition(" ")
    auto: Any = {
        "decoder": transformers.AutoModelForCausalLM,
        "encoder": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "image": transformers.AutoModel,
    }[kind]
    window = (
        {"sliding_window": None} if kind == "seq2seq" else {}
    )  # transformers would cut the cache of cross-attention
    chosen = {**SMALL, **window, **OWN.get(name, {}), **settings}
    config = transformers.AutoConfig.for_model(name, **{k: v for k, v in chosen.items() if v is not None})
    torch.manual_seed(1)
    # the other implementations of experts take no float64
    model = auto.from_config(config, attn_implementation=attention, experts_implementation="eager").eval()
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (2, 11), generator=draw)
    real = torch.ones_like(ids)
    if kind == "decoder":
        real[0, :3] = 0  # as generate needs it
    else:
        real[0, -3:] = 0
    if kind == "image":
        return TinyModel(model, {"pixel_values": torch.randn(2, 3, 24, 24, generator=draw)}, torch.ones(0, 0))
    inputs = {"input_ids": ids, "attention_mask": real}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = torch.randint(3, 97, (2, 7), generator=draw)
        return TinyModel(model, inputs, torch.ones(2, 7, dtype=torch.bool))
    return TinyModel(model, inputs, real.bool())


class _Exact(TorchFunctionMode):
    """Casts to float32 become casts to float64: models compute norms and softmax in float32 whatever their dtype."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def exact() -> Iterator[None]:
    with _Exact():
        yield
