"""Convert Llama-like decoders of Hugging Face: llama, mistral, qwen2, qwen3 and phi3.

Their networks differ in few settings: llama may have biases; mistral and phi3 have a sliding window; qwen2 has biases
on queries, keys and values; qwen3 normalises queries and keys; phi3 stores some matrices as one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.core.positions import DynamicNTK, Interpolate, Llama3, RopeScaling, Rotary, YaRN
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightTable, concatenate
from regard.models.gpt import DotProductAttention, GPTConfig

ACTIVATION = fields.NameTable(
    {"silu": "gated-silu", "gelu": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu-tanh", "relu": "gated-relu"}
)
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    **fields.SIZES,
    "eps": Field("rms_norm_eps", fields.get_float, 1e-6),
    "activation": fields.name_field("hidden_act", ACTIVATION, "silu"),
    "tied": Field("tie_word_embeddings", fields.get_bool, False),
    "attention_dropout": Field("attention_dropout", fields.get_float, 0.0),
}
NAMES: WeightTable = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks.*.attention.query_key_value": concatenate("model.layers.*.self_attn.{}_proj", "qkv"),
    "blocks.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
    "blocks.*.feedforward.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.feedforward.up": "model.layers.*.mlp.up_proj",
    "blocks.*.feedforward.down": "model.layers.*.mlp.down_proj",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.feedforward_norm": "model.layers.*.post_attention_layernorm",
}
PHI3_NAMES = {**NAMES, "blocks.*.attention.query_key_value": "model.layers.*.self_attn.qkv_proj"}
BIASES = ("attention_bias", "mlp_bias")
_ORIGINAL = {"factor": "factor", "original": "original_max_position_embeddings"}
# each rope_type with our class, and their names of its settings
ROPE_SCALINGS: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (Interpolate, {"factor": "factor"}),
    "dynamic": (DynamicNTK, {"factor": "factor"}),
    "llama3": (Llama3, {**_ORIGINAL, "low": "low_freq_factor", "high": "high_freq_factor"}),
    "yarn": (YaRN, {**_ORIGINAL, "fast": "beta_fast", "slow": "beta_slow", "attention_factor": "attention_factor"}),
}


@dataclass(frozen=True, kw_only=True)
class LlamaFamily(Family):
    """The converter of Llama, and of model types that differ from it in few settings.

    kv_heads, head_width, window
             transformers' defaults of the corresponding settings, for a config.json that lacks them
    windows  whether config.json has the setting sliding_window
    biases   whether config.json has attention_bias and mlp_bias; if only one is true, regard's model has zeros
             for the other
    mixer    attention settings of regard that are the same for all models of this model type
    """

    kv_heads: int | None = None
    head_width: int | None = None
    window: int | None = None
    windows: bool = False
    biases: bool = False
    mixer: dict[str, Any]

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        settings = super().read_settings(hf)
        kv_heads = fields.get_optional_int(hf, "num_key_value_heads", self.kv_heads)
        head_width = fields.get_optional_int(hf, "head_dim", self.head_width)
        same = head_width is None or head_width * settings["heads"] == settings["width"]
        mixer = DotProductAttention(
            kv_heads=None if kv_heads == settings["heads"] else kv_heads,
            head_width=None if same else head_width,
            **self.mixer,
        )
        positions, window = _read_rotary(hf, settings["context"]), self._read_window(hf)
        if isinstance(positions.scaling, DynamicNTK):
            settings["context"] = int(settings["context"] * positions.scaling.factor)
        bias = [fields.get_bool(hf, name, False) for name in BIASES] if self.biases else []
        network = {"positions": positions, "mixer": mixer, "window": window, "norm": "rms", "bias": any(bias)}
        return {**settings, **network, "dropout": 0.0}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        mixer, rotary = config.mixer, config.positions
        if not isinstance(mixer, DotProductAttention) or not isinstance(rotary, Rotary):
            raise ConfigError(f"this has mixer={mixer!r} and positions={rotary!r} where it has attention and Rotary")
        window = {"sliding_window": None if config.window is None else config.window + 1}
        original = {"max_position_embeddings": getattr(rotary.scaling, "original", None)}
        return {
            **super().write_settings(config),
            "num_key_value_heads": mixer.kv_heads,
            "head_dim": mixer.head_width,
            "rope_parameters": {"rope_theta": rotary.base, **_write_scaling(rotary.scaling)},
            "rope_theta": rotary.base,  # older releases read it here
            **(window if self.windows else {}),
            **(dict.fromkeys(BIASES, config.bias) if self.biases else {}),
            **(original if isinstance(rotary.scaling, DynamicNTK) else {}),
        }

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Add zeros for biases that regard's model has and the checkpoint does not."""
        for name in [name for name in weights if config.bias and name.endswith("_proj.weight")]:
            weights.setdefault(name.replace("weight", "bias"), weights[name].new_zeros(len(weights[name])))
        return weights

    def _read_window(self, hf: HFConfig) -> int | None:
        """Return the number of earlier tokens that each token sees, or None for all.

        sliding_window in config.json counts the token itself, regard's setting does not.
        """
        size = fields.get_optional_int(hf, "sliding_window", self.window) if self.windows else None
        kind = f"config.json of this {hf['model_type']} says"
        if size is not None and size < 2:
            raise CheckpointError(
                f"{kind} sliding_window={size}, so that no token sees another; "
                "supported are 2 and more, and null for all"
            )
        layer = "full_attention" if size is None else "sliding_attention"
        layers = set(fields.get_strings(hf, "layer_types"))
        if layers - {layer}:
            raise CheckpointError(f"{kind} layer_types of {', '.join(sorted(layers))}; only {layer} is supported")
        return None if size is None else size - 1


class Phi3Family(LlamaFamily):
    """The converter of Phi-3, whose gate and up projections are stored as one matrix.

    Abdin et al. 2024, arXiv:2404.14219.
    """

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        for name in [name for name in weights if name.endswith("gate_up_proj.weight")]:
            halves = weights.pop(name).chunk(2)
            weights |= zip((name.replace("gate_up", part) for part in ("gate", "up")), halves, strict=True)
        return weights

    def write_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        theirs = super().write_weights(weights, config)
        for name in [name for name in theirs if name.endswith("gate_proj.weight")]:
            both = [theirs.pop(name), theirs.pop(name.replace("gate", "up"))]
            theirs[name.replace("gate", "gate_up")] = torch.cat(both)
        return theirs


def _read_rotary(hf: HFConfig, context: int) -> Rotary:
    """Read the rotary settings (RoPE) of a config.json. Formats of older releases of transformers are supported.

    context  max_position_embeddings, to which the factor of dynamic scaling refers
    """
    section = "rope_parameters" if hf.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.get_section(hf, section)
    base = fields.get_float(rope, f"{section}.rope_theta", fields.get_float(hf, "rope_theta", 10000.0))
    for where, name in ((hf, "partial_rotary_factor"), (rope, f"{section}.partial_rotary_factor")):
        if fields.get_float(where, name, 1.0) != 1:
            fields.expect(where, **{name: 1.0})
    key = f"{section}.rope_type" if rope.get(f"{section}.rope_type") is not None else f"{section}.type"
    kind = "default" if rope.get(key) is None else rope[key]
    if not isinstance(kind, str):
        raise fields.wrong_type(rope, key, "a word")
    if kind == "default":
        return Rotary(base=base)
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(f"config.json of this {hf['model_type']} scales positions by {kind!r}: not supported")
    if kind == "dynamic":  # relative to max_position_embeddings
        return Rotary(base=base, scaling=DynamicNTK(fields.get_float(rope, f"{section}.factor"), context))
    scaling, names = ROPE_SCALINGS[kind]
    if kind == "yarn":
        rope = {**_yarn_defaults(rope, section), **{name: value for name, value in rope.items() if value is not None}}
    settings: dict[str, Any] = {}
    for ours, theirs in names.items():
        settings[ours] = (fields.get_int if ours == "original" else fields.get_float)(rope, f"{section}.{theirs}")
    if "original" in settings and hf.get(names["original"]) is not None:  # transformers would prefer the saved value
        fields.expect(hf, **{names["original"]: settings["original"]})
    return Rotary(base=base, scaling=scaling(**settings))


def _yarn_defaults(rope: HFConfig, section: str) -> dict[str, float]:
    """Return defaults for YaRN settings that may be missing. attention_factor is computed from the other settings.

    rope     the RoPE settings, by full names such as rope_parameters.factor
    section  name of the nested object of the config.json that has them, such as rope_parameters
    """
    fields.expect(rope, **{f"{section}.truncate": True})
    factor = fields.get_float(rope, f"{section}.factor")
    one, all_dim = (fields.get_float(rope, f"{section}.{each}", 0.0) for each in ("mscale", "mscale_all_dim"))
    scales = (one, all_dim) if one and all_dim else (1.0, 0.0)
    above, below = (1.0 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in scales)
    return {f"{section}.beta_fast": 32.0, f"{section}.beta_slow": 1.0, f"{section}.attention_factor": above / below}


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """Convert regard's RoPE scaling to the settings of a config.json."""
    if scaling is None:
        return {"rope_type": "default"}
    for kind, (ours, names) in ROPE_SCALINGS.items():
        if type(scaling) is ours:
            return {"rope_type": kind, **{theirs: getattr(scaling, name) for name, theirs in names.items()}}
    known = ", ".join(ours.__name__ for ours, _ in ROPE_SCALINGS.values())
    raise ConfigError(f"this has scaling={scaling!r} where it has one of {known}")


def _family(name: str, family: type[LlamaFamily] = LlamaFamily, **settings: Any) -> LlamaFamily:
    settings = {"mixer": {}, "names": NAMES, **settings}
    unbiased = {} if settings.get("biases") else dict.fromkeys(BIASES, False)
    return family(
        config=GPTConfig,
        architectures={name: {}},
        fields=FIELDS,
        prefix="model.",
        fixed={"pretraining_tp": 1, "use_sliding_window": False, **unbiased},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("*rotary_emb.inv_freq",),
        **settings,
    )


FAMILIES = {
    "llama": _family("LlamaForCausalLM", biases=True),
    "mistral": _family("MistralForCausalLM", kv_heads=8, window=4096, windows=True),
    "qwen2": _family("Qwen2ForCausalLM", kv_heads=32, mixer={"query_key_value_bias": True}),
    "qwen3": _family("Qwen3ForCausalLM", kv_heads=32, head_width=128, mixer={"qk_norm": "rms"}),
    "phi3": _family("Phi3ForCausalLM", Phi3Family, windows=True, names=PHI3_NAMES),
}
