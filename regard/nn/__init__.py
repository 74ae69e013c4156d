"""Layers with parameters, from which models are built. All attention in them is computed by `regard.attend`."""

from regard.nn.attention import Attention as Attention
from regard.nn.blocks import Block as Block
from regard.nn.channel_attention import ChannelAttention as ChannelAttention
from regard.nn.embeddings import (
    LearnedPositions as LearnedPositions,
    PatchEmbedding as PatchEmbedding,
    SinusoidalPositions as SinusoidalPositions,
    TokenEmbedding as TokenEmbedding,
)
from regard.nn.feedforward import FeedForward as FeedForward
from regard.nn.int8 import quantize_int8 as quantize_int8
from regard.nn.learned_scores import (
    LearnedBuckets as LearnedBuckets,
    LearnedDistances as LearnedDistances,
    LearnedSinks as LearnedSinks,
)
from regard.nn.linear_attention import LinearAttention as LinearAttention, LinearCache as LinearCache
from regard.nn.multihead_attention import MultiheadAttention as MultiheadAttention
from regard.nn.norms import RMSNorm as RMSNorm
from regard.nn.synthesizer import Synthesizer as Synthesizer
