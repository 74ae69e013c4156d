"""Convert Marian of Hugging Face, read only: MarianMTModel, the network of the OPUS-MT translators."""

from regard.models.convert.bart import clean_weights, rules, shared_settings
from regard.models.convert.config_fields import HFConfig, expect, get_architecture
from regard.models.transformer import TransformerConfig

__all__ = ["clean_weights", "read_config", "rules"]


def read_config(hf: HFConfig) -> TransformerConfig:
    """Our configuration from their config.json."""
    get_architecture(hf, "MarianMTModel", "MarianModel")
    # their sinusoids have all sines before all cosines
    settings = shared_settings(hf) | {"positions": "sinusoidal-half"}
    if hf.get("decoder_vocab_size") is not None:
        expect(hf, decoder_vocab_size=settings["vocab"])
    expect(hf, share_encoder_decoder_embeddings=True)
    return TransformerConfig(**settings)
