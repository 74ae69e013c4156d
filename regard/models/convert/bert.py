"""Convert BERT of Hugging Face: BertForPreTraining, BertForMaskedLM, BertForSequenceClassification and BertModel."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import CheckpointError
from regard.models.bert import BERTConfig
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.weight_rules import (
    WeightRule,
    concatenate,
    expand_blocks,
    rename,
    rename_all,
    with_prefix,
)

CONFIG = BERTConfig
# classifier_dropout is not read: where it differs from hidden_dropout_prob, only training does
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    "width": Field("hidden_size"),
    "depth": Field("num_hidden_layers"),
    "heads": Field("num_attention_heads"),
    "ff_width": Field("intermediate_size"),
    "segments": Field("type_vocab_size", default=2),
    "activation": Field("hidden_act", fields.ACTIVATION, "gelu"),
    "eps": Field("layer_norm_eps", fields.get_float, 1e-12),
    "dropout": Field("hidden_dropout_prob", fields.get_float, 0.1),
    "attention_dropout": Field("attention_probs_dropout_prob", fields.get_float, 0.1),
}
ARCHITECTURES = {
    "BertModel": "none",
    "BertForPreTraining": "pretraining",
    "BertForMaskedLM": "masked",
    "BertForSequenceClassification": "classes",
}
WORDS, POOLER, PAIR, CLASSIFIER = "cls.predictions.", "bert.pooler.", "cls.seq_relationship", "classifier"


def read_config(hf: HFConfig) -> BERTConfig:
    """Our configuration from their config.json."""
    fields.expect(
        hf, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute", tie_word_embeddings=True
    )
    head = ARCHITECTURES[fields.get_architecture(hf, *ARCHITECTURES)]
    return BERTConfig(**fields.read_fields(FIELDS, hf), head=head, classes=fields.get_num_labels(hf))


def write_config(config: BERTConfig, model_type: str) -> dict[str, Any]:
    """Their config.json from our configuration."""
    architectures = {head: name for name, head in ARCHITECTURES.items()}
    return {
        "model_type": model_type,
        "architectures": [architectures[config.head]],
        **fields.write_fields(FIELDS, config),
        **fields.label_names(config.classes),
        "pad_token_id": None,  # ours has no such token: padding is an argument of every call
    }


def rules(config: BERTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    block, theirs = "blocks.{n}.", "bert.encoder.layer.{n}."
    tables = {
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
    }
    names = {
        "embedding_norm": "bert.embeddings.LayerNorm",
        f"{block}attention.out": f"{theirs}attention.output.dense",
        f"{block}attention_norm": f"{theirs}attention.output.LayerNorm",
        f"{block}feedforward.up": f"{theirs}intermediate.dense",
        f"{block}feedforward.down": f"{theirs}output.dense",
        f"{block}feedforward_norm": f"{theirs}output.LayerNorm",
    }
    if config.predicts_words:
        names |= {"words.dense": f"{WORDS}transform.dense", "words.norm": f"{WORDS}transform.LayerNorm"}
    if config.pools:
        names["pooler"] = f"{POOLER}dense"
    names |= {"pretraining": {"pair": PAIR}, "classes": {"classifier": CLASSIFIER}}.get(config.head, {})
    inner = [f"{theirs}attention.self.{name}" for name in ("query", "key", "value")]
    return expand_blocks(
        [
            *rename_all(tables, ["weight"]),
            *rename_all(names),
            *concatenate(f"{block}attention.query_key_value", inner),
            *([rename("words.bias", f"{WORDS}bias")] if config.predicts_words else []),
        ],
        config.depth,
    )


def clean_weights(weights: Mapping[str, Tensor], config: BERTConfig) -> dict[str, Tensor]:
    """Use today's names and prefix; drop copies of tied weights and the heads that the architecture does not have.

    A published checkpoint often contains the heads of its pretraining although its architecture has none of them.
    """
    gamma, beta = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
    renamed = {name.replace(*gamma).replace(*beta): tensor for name, tensor in weights.items()}
    kept = with_prefix(renamed, "bert.", ("cls.", "classifier."))
    for copy, original in (("weight", "bert.embeddings.word_embeddings.weight"), ("bias", f"{WORDS}bias")):
        name = f"{WORDS}decoder.{copy}"
        if name in kept and not torch.equal(tensor := kept.pop(name), kept.setdefault(original, tensor)):
            raise CheckpointError(f"{name} is not {original}; only tied weights are supported")
    unused = {
        "bert.embeddings.position_ids": True,  # 0, 1, 2...
        WORDS: not config.predicts_words,
        POOLER: not config.pools,
        f"{PAIR}.": config.head != "pretraining",
        f"{CLASSIFIER}.": config.head != "classes",
    }
    dropped = tuple(prefix for prefix, drop in unused.items() if drop)
    return {name: tensor for name, tensor in kept.items() if not name.startswith(dropped)}
