"""Convert BERT of Hugging Face: BertForPreTraining, BertForMaskedLM, BertForSequenceClassification and BertModel."""

from torch import Tensor

from regard.models.bert import BERTConfig
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightTable, concatenate
from regard.models.model import Config

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
NAMES: WeightTable = {
    "tokens": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "segments": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "blocks.*.attention.query_key_value": concatenate(
        "bert.encoder.layer.*.attention.self.{}", ("query", "key", "value")
    ),
    "blocks.*.attention.out": "bert.encoder.layer.*.attention.output.dense",
    "blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
    "blocks.*.feedforward.up": "bert.encoder.layer.*.intermediate.dense",
    "blocks.*.feedforward.down": "bert.encoder.layer.*.output.dense",
    "blocks.*.feedforward_norm": "bert.encoder.layer.*.output.LayerNorm",
    "words.dense": "cls.predictions.transform.dense",
    "words.norm": "cls.predictions.transform.LayerNorm",
    "words.bias": "cls.predictions.bias",
    "pair": "cls.seq_relationship",
    "pooler": "bert.pooler.dense",
    "classifier": "classifier",
}


class BERTFamily(Family):
    """BERT."""

    def clean_weights(self, weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Use today's names of norms."""
        gamma, beta = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
        return {name.replace(*gamma).replace(*beta): tensor for name, tensor in weights.items()}


FAMILIES = {
    "bert": BERTFamily(
        config=BERTConfig,
        architectures={
            "BertModel": {"head": "none"},
            "BertForPreTraining": {"head": "pretraining"},
            "BertForMaskedLM": {"head": "masked"},
            "BertForSequenceClassification": {"head": "classes"},
        },
        fields=FIELDS,
        names=NAMES,
        prefix="bert.",
        fixed={
            "is_decoder": False,
            "add_cross_attention": False,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
        },
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=("bert.embeddings.position_ids",),  # 0, 1, 2...
    )
}
