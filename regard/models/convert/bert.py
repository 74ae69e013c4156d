"""BERT of Hugging Face: BertForPreTraining, BertForMaskedLM, BertForSequenceClassification and BertModel."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.models.bert import BERTConfig
from regard.models.convert.settings import choice, classes, expect, real, whole, words
from regard.models.convert.weight_rules import Rule, joined, same, unrolled

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
CLASSES = {
    "BertForPreTraining": "pretraining",
    "BertForMaskedLM": "masked",
    "BertForSequenceClassification": "classes",
    "BertModel": "none",
}


def config(about: Mapping[str, Any]) -> BERTConfig:
    expect(
        about,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type="absolute",
        tie_word_embeddings=True,
    )
    # classifier_dropout is not asked for: where it is another than hidden_dropout_prob, only training differs
    architecture = (words(about, "architectures") or ["BertModel"])[0]
    if architecture not in CLASSES:
        raise CheckpointError(f"config.json of this bert is of a {architecture}; known are {', '.join(CLASSES)}")
    return BERTConfig(
        vocab=whole(about, "vocab_size"),
        context=whole(about, "max_position_embeddings"),
        width=whole(about, "hidden_size"),
        depth=whole(about, "num_hidden_layers"),
        heads=whole(about, "num_attention_heads"),
        ff_width=whole(about, "intermediate_size"),
        segments=whole(about, "type_vocab_size", 2),
        activation=choice(about, "hidden_act", ACTIVATIONS, "gelu"),
        eps=real(about, "layer_norm_eps", 1e-12),
        head=CLASSES[architecture],
        classes=classes(about),
        dropout=real(about, "hidden_dropout_prob", 0.1),
        attention_dropout=real(about, "attention_probs_dropout_prob", 0.1),
    )


def about(config: Any, model_type: str) -> dict[str, Any]:
    if not isinstance(config, BERTConfig):
        raise ConfigError(f"it is made from a BERTConfig, not {type(config).__name__}")
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in activations:
        raise ConfigError(f"it has no activation {config.activation!r}")
    architectures = {head: name for name, head in CLASSES.items()}
    labels = {f"LABEL_{number}": number for number in range(config.classes)}
    return {
        "model_type": model_type,
        "architectures": [architectures[config.head]],
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width if config.ff_width is None else config.ff_width,
        "type_vocab_size": config.segments,
        "hidden_act": activations[config.activation],
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(number): name for name, number in labels.items()},
        "label2id": labels,
        "pad_token_id": None,  # ours has no such token: what is padding is said at each call
    }


def rules(config: BERTConfig) -> list[Rule]:
    block, theirs = "blocks.{n}.", "bert.encoder.layer.{n}."
    once = {
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
    }
    layers = {
        "embedding_norm": "bert.embeddings.LayerNorm",
        f"{block}attention.out": f"{theirs}attention.output.dense",
        f"{block}attention_norm": f"{theirs}attention.output.LayerNorm",
        f"{block}feedforward.up": f"{theirs}intermediate.dense",
        f"{block}feedforward.down": f"{theirs}output.dense",
        f"{block}feedforward_norm": f"{theirs}output.LayerNorm",
    }
    if config.guesses_words:
        layers |= {"words.dense": f"{_WORDS}transform.dense", "words.norm": f"{_WORDS}transform.LayerNorm"}
    if config.pooled:
        layers["pooler"] = f"{_POOLER}dense"
    if config.head == "pretraining":
        layers["pair"] = _PAIR
    if config.head == "classes":
        layers["classifier"] = _CLASSIFIER
    parts = ("weight", "bias")
    attention = f"{theirs}attention.self."
    return unrolled(
        [
            *(same(f"{ours}.weight", f"{other}.weight") for ours, other in once.items()),
            *(same(f"{ours}.{part}", f"{other}.{part}") for ours, other in layers.items() for part in parts),
            *(
                joined(
                    f"{block}attention.query_key_value.{part}",
                    *(f"{attention}{name}.{part}" for name in ("query", "key", "value")),
                )
                for part in parts
            ),
            *([same("words.bias", f"{_WORDS}bias")] if config.guesses_words else []),
        ],
        config.depth,
    )


def cleaned(weights: Mapping[str, Tensor], config: BERTConfig) -> dict[str, Tensor]:
    """With the prefix and the names of today, without copies of tied weights and without heads not asked for.

    A published checkpoint often keeps the heads of its pretraining beside an architecture that has none of them.
    """
    prefixed = any(name.startswith("bert.") for name in weights)
    kept: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        today = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        kept[today if prefixed or today.startswith(("cls.", "classifier.")) else f"bert.{today}"] = tensor
    for copy, original in (("weight", "bert.embeddings.word_embeddings.weight"), ("bias", f"{_WORDS}bias")):
        name = f"{_WORDS}decoder.{copy}"
        if name in kept and not torch.equal(tensor := kept.pop(name), kept.setdefault(original, tensor)):
            raise CheckpointError(f"{name} is not {original}; only tied weights are served")
    unasked = {
        "bert.embeddings.position_ids": True,  # 0, 1, 2...
        _WORDS: not config.guesses_words,
        _POOLER: not config.pooled,
        f"{_PAIR}.": config.head != "pretraining",
        f"{_CLASSIFIER}.": config.head != "classes",
    }
    left_out = tuple(prefix for prefix, out in unasked.items() if out)
    return {name: tensor for name, tensor in kept.items() if not name.startswith(left_out)}


_WORDS, _POOLER, _PAIR, _CLASSIFIER = "cls.predictions.", "bert.pooler.", "cls.seq_relationship", "classifier"
