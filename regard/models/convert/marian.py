"""Marian of Hugging Face, read only: MarianMTModel, the network of the OPUS-MT translators."""

from collections.abc import Mapping
from typing import Any

from regard.models.convert import bart
from regard.models.convert.bart import cleaned, ends, rules
from regard.models.convert.settings import expect, whole
from regard.models.transformer import TransformerConfig

__all__ = ["cleaned", "config", "ends", "rules"]


def config(about: Mapping[str, Any]) -> TransformerConfig:
    bart.check_architecture(about, "MarianMTModel", "MarianModel")
    vocab = whole(about, "vocab_size")
    if about.get("decoder_vocab_size") is not None:
        expect(about, decoder_vocab_size=vocab)
    expect(about, share_encoder_decoder_embeddings=True)
    # their sinusoids stand in two halves, sines then cosines
    return TransformerConfig(**bart.settings(about), positions="sinusoidal-half")
