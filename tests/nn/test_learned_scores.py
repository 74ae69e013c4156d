"""Learned score terms: what each adds, and that what cannot be is refused where it is written."""

import pytest
import torch
from torch import Tensor, nn

from regard import attend, shaw, sink, t5_buckets
from regard.base.errors import ConfigError
from regard.nn.attention import Attention
from regard.nn.blocks import Block
from regard.nn.feedforward import FeedForward
from regard.nn.learned_scores import LearnedBuckets, LearnedDistances, LearnedSinks

HEADS, C, N = 3, 4, 6
TERMS = {
    "buckets": (
        lambda: LearnedBuckets(HEADS, buckets=8, max_distance=9),
        lambda weight: t5_buckets(weight, max_distance=9),
    ),
    "distances": (lambda: LearnedDistances(C, 2), shaw),
    "sinks": (lambda: LearnedSinks(HEADS), sink),
}


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def qkv() -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return tuple(torch.randn(2, HEADS, N, C, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_made_of_the_parameters_of_this_moment(name):
    make, function = TERMS[name]
    module = drawn(make())
    for _ in range(2):
        out = attend(*qkv(), scores=module())
        torch.testing.assert_close(out, attend(*qkv(), scores=function(module.weight)))
        with torch.no_grad():
            module.weight.mul_(-2.0)
        assert not torch.allclose(attend(*qkv(), scores=module()), out)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_reach_the_parameters(name):
    module = drawn(TERMS[name][0]())
    attend(*qkv(), scores=module()).square().sum().backward()
    assert module.weight.grad.abs().max() > 0
    assert list(module.state_dict()) == ["weight"]


def test_shapes():
    assert LearnedBuckets(HEADS, buckets=8, max_distance=9).weight.shape == (8, HEADS)
    assert LearnedDistances(C, 2).weight.shape == (5, C)
    assert LearnedSinks(HEADS).weight.shape == (HEADS,)


def test_one_term_may_serve_several_layers():
    shared = drawn(LearnedBuckets(HEADS, buckets=8, max_distance=9))
    blocks = nn.ModuleList(Block(6, Attention(6, HEADS, scores=shared), FeedForward(6, 5)) for _ in range(2))
    assert blocks[0].attention.scores is blocks[1].attention.scores
    assert sum("scores" in name for name, _ in blocks.named_parameters()) == 1


@pytest.mark.parametrize("name", TERMS)
def test_they_are_built_without_memory(name):
    with torch.device("meta"):
        assert TERMS[name][0]().weight.is_meta


def test_what_cannot_be_is_refused_where_it_is_written():
    with pytest.raises(ConfigError, match="needs an even number of buckets, not 7; try 8"):
        LearnedBuckets(HEADS, buckets=7)
    assert LearnedBuckets(HEADS, buckets=7, bidirectional=False).weight.shape == (7, HEADS)
    with pytest.raises(ConfigError, match="so max_distance=8 is too short; use at least 9"):
        LearnedBuckets(HEADS, buckets=32, max_distance=8)
    with pytest.raises(ConfigError, match="heads is 0, but must be at least 1"):
        LearnedSinks(0)
    with pytest.raises(ConfigError, match="max_distance is -1, but must be at least 0"):
        LearnedDistances(C, -1)
    with pytest.raises(ConfigError, match="head_width is 0, but must be at least 1"):
        LearnedDistances(0, 2)
