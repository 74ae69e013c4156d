"""Tokens and patches as vectors, and positions: values, ranges, and the words when something does not fit."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.nn.embeddings import (
    LearnedPositions,
    PatchEmbedding,
    SinusoidalPositions,
    TokenEmbedding,
    check_context,
    check_image,
    check_tokens,
    convolve_patches,
    interpolate_positions,
)
from regard.nn.init import init_parameters, normal

TOKENS = torch.tensor([[0, 3, 6], [2, 2, 5]])


def drawn(module: nn.Module) -> nn.Module:
    init_parameters(module, {"*": normal(1.0)})
    return module


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_token_is_its_row_times_the_scale(dtype):
    embedding = drawn(TokenEmbedding(7, 5, scale=3.0))
    out = embedding(TOKENS.to(dtype))
    assert torch.equal(out, embedding.weight[TOKENS] * 3.0)
    assert torch.equal(drawn(TokenEmbedding(7, 5))(TOKENS.to(dtype)), embedding.weight[TOKENS])


def test_unembedding_uses_the_same_vectors():
    embedding, x = drawn(TokenEmbedding(7, 5, scale=3.0)), torch.randn(2, 3, 5)
    torch.testing.assert_close(embedding.unembed(x), x @ embedding.weight.T)
    assert list(embedding.state_dict()) == ["weight"]


def test_learned_positions_are_rows_of_a_table():
    positions = drawn(LearnedPositions(9, 5))
    assert torch.equal(positions(torch.tensor([4, 0])), positions.weight[[4, 0]])
    batched = torch.tensor([[1, 2, 3], [4, 4, 8]])
    assert torch.equal(positions(batched), positions.weight[batched])


def test_sinusoids_are_those_of_the_paper():
    positions = SinusoidalPositions(6)
    out = positions(torch.tensor([[0, 5, 2], [7, 1, 1]]))
    assert out.shape == (2, 3, 6)
    for k in range(3):
        angle = 7 / 10000 ** (2 * k / 6)
        assert out[1, 0, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert out[1, 0, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not list(positions.parameters())
    with pytest.raises(ConfigError, match="sinusoidal positions need an even width, a sin and a cos"):
        SinusoidalPositions(5)


def test_a_patch_is_the_product_with_its_square():
    patches, image = drawn(PatchEmbedding(5, 2, channels=3)), torch.randn(2, 3, 6, 4)
    out = patches(image)
    assert out.shape == (2, 3, 2, 5)
    square = image[1, :, 4:6, 2:4]
    truth = torch.einsum("dcyx,cyx->d", patches.projection.weight, square) + patches.projection.bias
    torch.testing.assert_close(out[1, 2, 1], truth)


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_of_patches_is_a_linear_layer_of_their_pixels(bias):
    image, weight = torch.randn(2, 3, 6, 12), torch.randn(5, 3, 2, 4)
    found = convolve_patches(image, weight, torch.arange(5.0) if bias else None)
    expected = functional.conv2d(image, weight, torch.arange(5.0) if bias else None, stride=(2, 4))
    torch.testing.assert_close(found, expected)


@pytest.mark.cuda
def test_patches_on_a_gpu_are_those_of_the_cpu():
    patches, image = PatchEmbedding(16, 4).double(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    expected = patches(image)
    torch.testing.assert_close(patches.cuda()(image.cuda()).cpu(), expected)


def test_patches_refuse_what_they_do_not_fit():
    patches = PatchEmbedding(5, 2)
    with pytest.raises(ShapeError, match="image is 6 x 5, which is not a multiple of the patch, 2; resize or pad it"):
        patches(torch.zeros(1, 3, 6, 5))
    with pytest.raises(ShapeError, match=r"image is \(1, 4, 6, 6\), but is read as \(b channels y x\) with 3 channels"):
        patches(torch.zeros(1, 4, 6, 6))
    with pytest.raises(DtypeError, match=r"floating-point tensor read as \(b channels y x\), not torch\.uint8"):
        patches(torch.zeros(1, 3, 6, 6, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="not str"):
        check_image("cat", 3)
    with pytest.raises(ShapeError, match="at least one"):
        patches(torch.zeros(0, 3, 6, 6))
    with pytest.raises(ConfigError, match="patch is 0, but must be at least 1"):
        PatchEmbedding(5, 0)


def test_interpolation_keeps_its_own_grid_and_what_is_constant():
    table = torch.randn(12, 5)
    assert interpolate_positions(table, (3, 4), (3, 4)) is table
    constant = torch.ones(12, 5, dtype=torch.bfloat16) * 2
    wider = interpolate_positions(constant, (3, 4), (7, 6))
    assert wider.shape == (42, 5)
    assert wider.dtype == torch.bfloat16
    torch.testing.assert_close(wider, torch.full_like(wider, 2.0))


def test_interpolation_goes_by_rows_and_columns():
    rows = torch.arange(4.0)[:, None].expand(4, 6).reshape(24, 1)
    wider = interpolate_positions(rows, (4, 6), (8, 6)).reshape(8, 6)
    torch.testing.assert_close(wider, wider[:, :1].expand(8, 6))
    assert (wider[:, 0].diff() > 0).all()


@pytest.mark.parametrize(
    ("tokens", "kind", "words"),
    [
        (TOKENS.float(), DtypeError, r"tokens must be a tensor of whole numbers read as \(b n\), not torch\.float32"),
        (TOKENS.bool(), DtypeError, r"not torch\.bool"),
        ([[1, 2]], DtypeError, "not list"),
        (TOKENS[0], ShapeError, r"tokens is \(3,\), but is read as \(b n\); for one text write tokens\[None\]"),
        (TOKENS[:, :0], ShapeError, r"tokens is \(2, 0\) read as \(b n\), but there must be at least one token"),
        (TOKENS + 1, ShapeError, "tokens holds 7, but the vocabulary has tokens 0 to 6"),
        (TOKENS - 1, ShapeError, "tokens holds -1, but the vocabulary has tokens 0 to 6"),
    ],
)
def test_bad_tokens_are_refused(tokens, kind, words):
    with pytest.raises(kind, match=words):
        check_tokens(tokens, 7)
    with pytest.raises(kind, match=words):
        TokenEmbedding(7, 5)(tokens)


def test_a_context_that_is_too_short_says_so():
    check_context(9, 9)
    with pytest.raises(ShapeError, match="the input has 10 positions, but the context has 9; shorten it or"):
        check_context(10, 9)
    with pytest.raises(ConfigError, match="context is 0, but must be at least 1"):
        LearnedPositions(0, 5)
    with pytest.raises(ConfigError, match="vocab is 0, but must be at least 1"):
        TokenEmbedding(0, 5)


def test_they_compile_and_export():
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.learned, self.waves = TokenEmbedding(7, 6), LearnedPositions(9, 6), SinusoidalPositions(6)

        def forward(self, tokens: Tensor) -> Tensor:
            where = torch.arange(tokens.shape[1])
            return self.tokens(tokens) + self.learned(where) + self.waves(where)

    model = drawn(All())
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS), model(TOKENS))
    assert torch.allclose(torch.export.export(model, (TOKENS,)).module()(TOKENS), model(TOKENS))
