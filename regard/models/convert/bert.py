"""Convert BERT, RoBERTa and DistilBERT of Hugging Face.

RoBERTa (Liu et al. 2019, arXiv:1907.11692) has no next-sentence prediction, and its classifier contains the pooler.
DistilBERT (Sanh et al. 2019, arXiv:1910.01108) has no segment embeddings and no pooler. Of its classes, only
DistilBertForMaskedLM is supported.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.models.bert import BERTConfig
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightRule, concatenate, skip_rows

# classifier_dropout is not read: where it differs from hidden_dropout_prob, only training does
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    **fields.SIZES,
    "segments": Field("type_vocab_size", default=2),
    "activation": fields.name_field("hidden_act", fields.ACTIVATION, "gelu"),
    "eps": Field("layer_norm_eps", fields.get_float, 1e-12),
    "dropout": Field("hidden_dropout_prob", fields.get_float, 0.1),
    "attention_dropout": Field("attention_probs_dropout_prob", fields.get_float, 0.1),
    "classes": Field("num_labels", fields.get_num_labels, 2, fields.write_labels),
}
# positions are counted from the id of the padding token, 1, plus 1
ROBERTA_CONTEXT = Field(
    "max_position_embeddings",
    lambda hf, name, default: fields.get_int(hf, name) - 2,
    write=lambda name, context: {name: context + 2},
)
DISTILBERT_FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    "width": Field("dim"),
    "depth": Field("n_layers"),
    "heads": Field("n_heads"),
    "ff_width": Field("hidden_dim"),
    "activation": fields.name_field("activation", fields.ACTIVATION, "gelu"),
    "dropout": Field("dropout", fields.get_float, 0.1),
    "attention_dropout": Field("attention_dropout", fields.get_float, 0.1),
}
EMBEDDINGS = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
BLOCK = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
DISTILBERT_BLOCK = {
    "attention.out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "feedforward_norm": "output_layer_norm",
}
DISTILBERT_ATTENTION = concatenate("distilbert.transformer.layer.*.attention.{}_lin", "qkv")


def encoder_names(prefix: str, layer: str, block: Mapping[str, str], projections: WeightRule) -> dict[str, Any]:
    """Return a table that maps regard's names of the weights of embeddings and blocks to Hugging Face's names.

    prefix       start of all Hugging Face names
    layer        Hugging Face's name of the list of blocks
    block        table from regard's names inside a block to Hugging Face's
    projections  `WeightRule` for the query, key and value projections
    """
    return {
        **{ours: f"{prefix}{theirs}" for ours, theirs in EMBEDDINGS.items()},
        **{f"blocks.*.{ours}": f"{prefix}{layer}.*.{theirs}" for ours, theirs in block.items()},
        "blocks.*.attention.query_key_value": projections,
    }


def _attention(prefix: str) -> WeightRule:
    return concatenate(f"{prefix}encoder.layer.*.attention.self.{{}}", ("query", "key", "value"))


class BERTFamily(Family):
    """The converter of BERT between Hugging Face and regard."""

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Rename the parameters of norms in old checkpoints from gamma and beta to weight and bias."""
        gamma, beta = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
        return {name.replace(*gamma).replace(*beta): tensor for name, tensor in weights.items()}


class RoBERTaFamily(Family):
    """The converter of RoBERTa between Hugging Face and regard."""

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        return {name.replace("classifier.dense", "roberta.pooler.dense"): x for name, x in weights.items()}

    def write_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        theirs = super().write_weights(weights, config)
        pooler = "classifier.dense" if config.head == "classes" else "roberta.pooler.dense"
        return {name.replace("roberta.pooler.dense", pooler): tensor for name, tensor in theirs.items()}


class DistilBERTFamily(Family):
    """The converter of DistilBERT, which has no segment embedding.

    On import, regard's segment embedding is set to zero. On export, it is added to every position embedding.
    """

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Add a segment embedding of zeros, which DistilBERT does not have."""
        positions = weights.get("distilbert.embeddings.position_embeddings.weight")
        if positions is None:
            return weights
        return {"distilbert.embeddings.token_type_embeddings.weight": torch.zeros_like(positions[:1]), **weights}

    def write_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        segment = weights["segments.weight"]
        theirs = super().write_weights({**weights, "positions.weight": weights["positions.weight"] + segment}, config)
        del theirs["distilbert.embeddings.token_type_embeddings.weight"]
        return theirs


HEADS = {
    "Model": "none",
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classes",
}


def _family(family: type[Family], kind: str, name: str, without: str, words: str, **more: Any) -> Family:
    """Return the converter for one model type, BERT or RoBERTa.

    family   class of the converter
    kind     start of Hugging Face's names of weights, such as "bert"
    name     start of Hugging Face's class names, such as "Bert"
    without  name of a model head, such as "pretraining", that this model type does not have
    words    Hugging Face's name of the module that has the bias of the MLM head
    """
    return family(
        config=BERTConfig,
        architectures={f"{name}{suffix}": {"head": head} for suffix, head in HEADS.items() if head != without},
        prefix=f"{kind}.",
        tied={
            f"{words}.decoder.weight": f"{kind}.embeddings.word_embeddings.weight",
            f"{words}.decoder.bias": f"{words}.bias",
        },
        ignored=(f"{kind}.embeddings.position_ids",),  # 0, 1, 2...
        **more,
    )


ENCODER_ONLY = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}
FAMILIES = {
    "bert": _family(
        BERTFamily,
        "bert",
        "Bert",
        without="",
        words="cls.predictions",
        fields=FIELDS,
        names={
            **encoder_names("bert.", "encoder.layer", BLOCK, _attention("bert.")),
            "words.dense": "cls.predictions.transform.dense",
            "words.norm": "cls.predictions.transform.LayerNorm",
            "words.bias": "cls.predictions.bias",
            "pair": "cls.seq_relationship",
            "classifier": "classifier",
        },
        fixed={**ENCODER_ONLY, "position_embedding_type": "absolute"},
    ),
    "roberta": _family(
        RoBERTaFamily,
        "roberta",
        "Roberta",
        without="pretraining",
        words="lm_head",
        fields={**FIELDS, "context": ROBERTA_CONTEXT},
        names={
            **encoder_names("roberta.", "encoder.layer", BLOCK, _attention("roberta.")),
            "positions": skip_rows("roberta.embeddings.position_embeddings", 2),
            "words.dense": "lm_head.dense",
            "words.norm": "lm_head.layer_norm",
            "words.bias": "lm_head.bias",
            "classifier": "classifier.out_proj",
        },
        fixed={**ENCODER_ONLY, "pad_token_id": 1, "hidden_act": "gelu"},  # their word head has gelu in any case
    ),
    "distilbert": DistilBERTFamily(
        config=BERTConfig,
        architectures={"DistilBertForMaskedLM": {"head": "masked", "segments": 1}},
        fields=DISTILBERT_FIELDS,
        names={
            **encoder_names("distilbert.", "transformer.layer", DISTILBERT_BLOCK, DISTILBERT_ATTENTION),
            "words.dense": "vocab_transform",
            "words.norm": "vocab_layer_norm",
            "words.bias": "vocab_projector.bias",
        },
        prefix="distilbert.",
        fixed={"tie_word_embeddings": True},
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ),
}
