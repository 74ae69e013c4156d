"""The claims about whole Transformers: what they find, what the sheets said, and that a fault turns them over."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import causal
from regard.data.digits import digits
from regard.lab.results import make_result
from regard.lab.transformers import image_augmentation, vit_on_digits, vit_or_cnn
from regard.lab.transformers.stability import LACKING
from regard.lab.verdict import UNCLEAR
from regard.models.cnn import CNN
from regard.models.gpt import GPT, GPTConfig
from regard.models.mlp import MLP
from regard.models.rnn import RNN, RNNConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import ViT, ViTConfig
from regard.nn.attention import Attention
from regard.nn.blocks import Block
from regard.nn.embeddings import PatchEmbedding
from regard.nn.feedforward import FeedForward
from regard.nn.init import constant
from regard.nn.norms import norm
from regard.train.loop import TrainingResult
from regard.work.exercises.solutions import vit as solution
from regard.work.exercises.vit import VIT
from tests.lab.quick import Fault, claim, outcome

# faults that attention could have


def only_itself(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention that returns the values unchanged."""
    return v


def all_alike(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention with beta = 0: every key has the same weight."""
    return attend(q, k, v, beta=0.0)


def of_the_last_few(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention to the last 16 keys only."""
    return attend(q, k[:, :, -16:], v[:, :, -16:], **rest)


def twice(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Attention that is computed twice."""
    attend(q, k, v, **rest)
    return attend(q, k, v, **rest)


# faults that a module could have


class WithNeighbours(FeedForward):
    """A feed-forward part after a mean over neighbouring tokens."""

    def forward(self, x: Tensor) -> Tensor:
        near = nn.functional.pad(x, (0, 0, 1, 1))
        return super().forward((near[:, :-2] + near[:, 1:-1] + near[:, 2:]) / 3)


class OverTokens(nn.Module):
    """A norm over the tokens of each feature, as in batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return self.weight * (x - mean) * (variance + 1e-5).rsqrt() + self.bias


def without_mean(width: int) -> nn.Module:
    """A norm that does not subtract the mean."""
    return norm("rms", width)


def without_gain(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


class Turned(PatchEmbedding):
    """A patch embedding with a flipped kernel."""

    def forward(self, image: Tensor) -> Tensor:
        weight, bias = self.projection.weight, self.projection.bias
        return nn.functional.conv2d(image, weight.flip(2, 3), bias, stride=self.patch).permute(0, 2, 3, 1)


class Blurred(PatchEmbedding):
    """A patch embedding of a blurred image."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward((image + image.roll(-1, 3)) / 2)


def half_as_wide(config: ViTConfig) -> ViT:
    return ViT(replace(config, ff_width=2 * config.width))


def without_class_token(config: ViTConfig) -> ViT:
    return ViT(replace(config, pool="mean"))


def normed_before(config: TransformerConfig) -> Transformer:
    return Transformer(replace(config, order="pre"))


class Untied(Transformer):
    """A Transformer with a separate output embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.unembedding = nn.Parameter(torch.zeros(config.vocab, config.width))

    def initializers(self) -> Any:
        return {**super().initializers(), "unembedding": constant(0.0)}

    def init_weights(self, seed: int = 0) -> None:
        if hasattr(self, "unembedding"):
            super().init_weights(seed)


def with_positions(config: ViTConfig) -> ViT:
    """A Vision Transformer with learned positions, whatever the config says."""
    return ViT(replace(config, positions="learned"))


def mixing_neighbours(config: ViTConfig) -> ViT:
    made = ViT(config)
    for block in made.blocks:
        block.feedforward = WithNeighbours(config.width, 4 * config.width)
    return made


class AnySize(MLP):
    """A perceptron that resizes images silently."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(nn.functional.interpolate(image, self.config.image))


def head_logits(model: ViT, pooled: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits of a model's head for a pooled hidden state."""
    assert model.head is not None
    logits: Tensor = model.head(pooled if model.head_hidden is None else activation(model.head_hidden(pooled)))
    return logits


class OfAllTokens(ViT):
    """A Vision Transformer whose head reads the mean of all tokens."""

    def forward(self, image: Tensor) -> Tensor:
        pooled = self.hidden(image).mean(1)
        return head_logits(self, pooled, torch.tanh)


class OfTheLastToken(ViT):
    """A Vision Transformer whose head reads the last token."""

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.hidden(image)
        pooled = hidden[:, -1] if self.prefix_tokens else hidden.mean(1)
        return head_logits(self, pooled, torch.tanh)


class WithoutTanh(ViT):
    """A head without tanh between its two linear layers."""

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.hidden(image)
        pooled = hidden[:, 0] if self.prefix_tokens else hidden.mean(1)
        return head_logits(self, pooled, nn.Identity())


class OfTheEnd(Transformer):
    """An encoder that sees the last 8 tokens of the source only."""

    def encode(self, source: Tensor, padding: Any = None) -> Tensor:
        return super().encode(source[:, -8:], padding)


class IgnoredAttention(RNN):
    """A recurrent network whose attention output is not used."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        if self.combine is not None:
            self.combine.register_forward_pre_hook(_without_context)


def _without_context(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    context, rows = inputs[0].chunk(2, -1)
    return (torch.cat([torch.zeros_like(context), rows], -1),)


class SeesAhead(Transformer):
    """A decoder without a causal mask."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for block in self.decoder.blocks:
            block.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(block: nn.Module, given: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return given, settings | {"mask": None}


class OneWay(Transformer):
    """An encoder with a causal mask."""

    def encode(self, source: Tensor, padding: Any = None) -> Tensor:
        return super().encode(source, causal())


class Backwards(Transformer):
    """A Transformer that reads the source in reverse order."""

    def encode(self, source: Tensor, padding: Any = None) -> Tensor:
        return super().encode(source.flip(1), padding)


class Crossing(GPT):
    """A GPT whose first block has cross attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.blocks[0].cross = Attention(config.width, config.heads)


class Forgetful(Block):
    """A block without residual sums."""

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = norm(part(x)) if self.order == "post" else part(norm(x))
        return out


def always_scaled(width: int, heads: int, *, beta: float | None) -> Attention:
    return Attention(width, heads)


class Placeless(ViT):
    """A Vision Transformer that does not add its positions."""

    def embed(self, image: Tensor) -> Tensor:
        return self.patches(image).flatten(1, 2)


class OfTheFirstPatch(ViT):
    """A Vision Transformer that sees the first patch only."""

    def embed(self, image: Tensor) -> Tensor:
        return super().embed(image)[:, :1]


class PooledFirst(CNN):
    """A convolutional network that averages the pixels before its convolutions."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.mean((2, 3), keepdim=True).expand_as(image))


class NoFeedForward(FeedForward):
    """A feed-forward part that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * super().forward(x)


class WithoutBlocks(ViT):
    """A Vision Transformer without blocks: its class token is the same for every image."""

    def hidden(self, image: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(image))
        return hidden


FAULTS: list[Fault] = [
    ("feed-forward-purpose", {"feedforward": NoFeedForward}),
    ("feed-forward", {"layer": WithNeighbours}),
    ("feed-forward", {"attention": only_itself}),
    ("layer-norm", {"layer": OverTokens}),
    ("layer-norm", {"layer": without_mean}),
    ("layer-norm", {"layer": without_gain}),
    ("vit-is-convolution", {"patches": Turned}),
    ("vit-is-convolution", {"patches": Blurred}),
    ("vit-against-transformer", {"vit": half_as_wide}),
    ("vit-against-transformer", {"vit": without_class_token}),
    ("vit-against-transformer", {"transformer": normed_before}),
    ("vit-against-transformer", {"transformer": Untied}),
    ("against-mlp", {"attention": all_alike}),
    ("against-mlp", {"vit": with_positions}),
    ("against-mlp", {"vit": mixing_neighbours}),
    ("against-mlp", {"mlp": AnySize}),
    ("self-attention-why", {"attention": of_the_last_few}),
    ("self-attention-why", {"attention": twice}),
    ("vit-head", {"vit": OfAllTokens}),
    ("vit-head", {"vit": OfTheLastToken}),
    ("vit-head", {"vit": WithoutTanh}),
    ("against-rnn", {"attention": of_the_last_few}),
    ("against-rnn", {"transformer": OfTheEnd}),
    ("against-rnn", {"rnn": IgnoredAttention}),
    ("encoder-decoder", {"transformer": SeesAhead}),
    ("encoder-decoder", {"transformer": OneWay}),
    ("encoder-decoder", {"transformer": Backwards}),
    ("encoder-decoder", {"gpt": Crossing}),
    ("stability", {"block": Forgetful}),
    ("stability", {"layer": always_scaled}),
    ("vit-positions", {"vit": Placeless}),
    ("vit-positions", {"vit": with_positions}),
    ("vit-on-digits", {"vit": WithoutBlocks}),
    ("vit-or-cnn", {"cnn": PooledFirst}),
    ("vit-or-cnn", {"vit": OfTheFirstPatch}),
    ("image-augmentation", {"vit": OfTheFirstPatch}),
]


def test_replacing_token_3_leaves_every_other_output_the_same_to_the_bit() -> None:
    changes = outcome("feed-forward").numbers["changes"]
    assert [at for at, change in enumerate(changes) if change != 0.0] == [3]


def test_a_norm_has_a_gain_and_a_bias_for_each_feature_and_keeps_gradients_through_32_layers() -> None:
    numbers = outcome("layer-norm").numbers
    assert (numbers["width"], numbers["parameters"]) == (64, 128)
    assert numbers["depths"][-1] == 32
    small, large = (row[-1] for row in numbers["gradients without norms"])
    assert small < 1e-8
    assert large > 1e8
    assert all(
        0.4 < row[-1] / gain < 1.6 for gain, row in zip((0.5, 2.0), numbers["gradients with norms"], strict=True)
    )


def test_the_patch_projection_is_a_convolution_exactly() -> None:
    numbers = outcome("vit-is-convolution").numbers
    assert numbers["error of the matrix on whole numbers"] == 0.0
    assert numbers["error of the convolution on whole numbers"] == 0.0
    assert numbers["convolution against matrix on random numbers"] < 1e-12


def test_published_counts_are_near_what_real_modules_have_and_not_equal_to_it() -> None:
    numbers = outcome("vit-against-transformer").numbers
    counted = {name: round(count, 1) for name, count in numbers["millions"].items()}
    assert counted == {
        "vit-b/16": 86.6,
        "vit-l/16": 304.3,  # published: 307, which is what patches of 32 come to
        "vit-l/32": 306.5,
        "vit-h/14": 632.0,
        "transformer-base": 63.1,  # published: 65
        "transformer-big": 214.2,  # published: 213
    }
    assert numbers["feed-forward widths"]["vit-b/16"] == 3072
    assert numbers["feed-forward widths"]["transformer-base"] == 2048


def test_a_perceptron_grows_by_its_hidden_layer_with_each_pixel_and_a_transformer_by_nothing() -> None:
    numbers = outcome("against-mlp").numbers
    assert numbers["pixels"] == [64, 144, 400, 1024]
    assert numbers["parameters of perceptron"] == [96 * n + 96 + 5 * 96 + 5 for n in numbers["pixels"]]
    assert len(set(numbers["parameters of transformer"])) == 1


def test_attention_crosses_a_recurrent_layer_at_n_equal_to_d_and_its_projections_at_twice_that() -> None:
    numbers = outcome("self-attention-why").numbers
    assert numbers["width"] == 96
    assert numbers["crossings"]["recurrent"] == pytest.approx(96)
    assert numbers["crossings"]["projections"] == pytest.approx(192)


def test_the_head_reads_only_the_class_token_and_mean_pooling_all_patches_equally() -> None:
    gradients = outcome("vit-head").numbers["gradients"]
    assert [at for at, size in enumerate(gradients["linear"]) if size] == [0]
    assert len(gradients["mean"]) == 9
    assert gradients["mean"] == pytest.approx([gradients["mean"][0]] * 9)


def test_the_head_of_pre_training_has_one_more_layer() -> None:
    assert outcome("vit-head").numbers["head parameters"] == [24 * 24 + 24 + 24 * 17 + 17, 24 * 5 + 5]


def test_the_path_to_the_first_token_is_constant_with_attention_and_grows_by_two_per_token_without() -> None:
    numbers = outcome("against-rnn").numbers
    (near, far), (n, m) = numbers["shortest path"]["recurrent"], numbers["lengths"]
    assert len(set(numbers["shortest path"]["attention"])) == 1
    assert far - near == 2 * (m - n)  # h to h through a product and the sigmoid of a gate
    assert numbers["attention calls"] == {"recurrent": 0, "recurrent with attention": 1, "transformer": 3}
    assert set(numbers["difference after exchanging encodings"].values()) == {0.0}


def test_five_tokens_have_25_pairs_in_the_encoder_and_15_in_the_decoder() -> None:
    numbers = outcome("encoder-decoder").numbers
    assert numbers["pairs with nonzero weight"] == {"encoder": [25], "decoder": [15]}
    assert numbers["mass above the diagonal"]["decoder"] == [0.0, 0.0]
    assert numbers["blocks with cross attention"] == {"with encoder": 1, "alone": 0}
    cross = numbers["maps"]["cross"]
    assert [row.index(max(row)) for row in cross] == [4, 3, 2, 1, 0]
    assert [sum(row) for row in cross] == pytest.approx([1.0] * 5, abs=1e-5)


def test_a_stack_without_one_of_the_four_is_worse_for_every_seed() -> None:
    added = outcome("stability").numbers["smallest increase of the loss"]
    assert set(added) == set(LACKING)
    assert min(added.values()) > 0


def test_without_positions_logits_of_shuffled_patches_agree_to_rounding() -> None:
    assert 0 < outcome("vit-positions").numbers["change of the logits by shuffling"]["none"] < 1e-12


def test_the_model_of_the_exercise_has_the_outputs_of_its_reference_solution() -> None:
    """With the same weights, which are those of the initialisation and random positions."""
    setup = vit_on_digits.Setup()
    ours = vit_on_digits.build_model(setup, 3).double()
    assert not ours.class_token.any()
    assert not ours.positions.weight.any()
    nn.init.normal_(ours.positions.weight)
    nn.init.normal_(ours.class_token)
    blocks = [
        solution.TransformerBlock(setup.width, setup.ff_width, solution.SelfAttention(setup.width, setup.heads))
        for _ in range(setup.depth)
    ]
    patches = solution.ImagePatches(1, setup.patch, setup.width)
    tokens = (8 // setup.patch) ** 2
    theirs = solution.VisionTransformer(patches, nn.Sequential(*blocks), tokens, setup.width, 10).double()
    with torch.no_grad():
        theirs.class_token.copy_(ours.class_token)
        theirs.positions.copy_(ours.positions.weight)
        theirs.norm.load_state_dict(ours.norm.state_dict())
        theirs.head.load_state_dict(ours.head.state_dict())
        patches.project.weight.copy_(ours.patches.projection.weight.flatten(1))
        patches.project.bias.copy_(ours.patches.projection.bias)
        for mine, block in zip(ours.blocks, blocks, strict=True):
            weights, biases = (
                part.chunk(3) for part in (mine.attention.query_key_value.weight, mine.attention.query_key_value.bias)
            )
            for layer, weight, bias in zip(
                (block.attention.query, block.attention.key, block.attention.value), weights, biases, strict=True
            ):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            pairs = ((block.attention.out, mine.attention.out), (block.up, mine.feedforward.up))
            pairs += ((block.down, mine.feedforward.down), (block.attention_norm, mine.attention_norm))
            for layer, known in (*pairs, (block.feedforward_norm, mine.feedforward_norm)):
                layer.load_state_dict(known.state_dict())
        images = torch.rand(5, 1, 8, 8, dtype=torch.float64)
        assert torch.allclose(ours(images), theirs(images), atol=1e-12)
    assert len(digits().labels) - vit_on_digits.TRAIN_IMAGES == 360


def test_the_exercise_is_trained_as_in_its_last_cell() -> None:
    cell = VIT.closing_code
    setup = vit_on_digits.Setup()
    assert f"TransformerBlock({setup.width}, {setup.ff_width}, SelfAttention({setup.width}, {setup.heads}))" in cell
    assert f"for _ in range({setup.depth})" in cell
    assert f"ImagePatches(1, {setup.patch}, {setup.width})" in cell
    assert f"torch.randperm({vit_on_digits.TRAIN_IMAGES}).split({setup.batch})" in cell
    epochs = int(re.findall(r"range\(1, (\d+)\)", cell)[0]) - 1
    assert setup.steps == epochs * math.ceil(vit_on_digits.TRAIN_IMAGES / setup.batch)
    assert "AdamW(model.parameters(), lr=3e-3)" in cell
    assert setup.rate == 3e-3


def test_both_kinds_of_network_have_about_as_many_parameters() -> None:
    counts = outcome("vit-or-cnn").numbers["parameters"]
    assert counts["cnn"] == 9 * (12 + 12 * 24 + 24 * 32) + 2 * (12 + 24 + 32) + 32 * 10 + 10
    attention, feedforward, norms = 4 * 32 * 32 + 4 * 32, 2 * 32 * 64 + 64 + 32, 3 * 2 * 32
    assert counts["vit"] == 4 * 32 + 32 + 16 * 32 + attention + feedforward + norms + 32 * 10 + 10


def test_stripes_agree_with_the_class_in_the_given_share_of_images() -> None:
    images, labels = vit_or_cnn.sample_distant_patches(2000, make_generator(3))
    striped, same_labels = vit_or_cnn.sample_stripes(2000, make_generator(3), 0.8)
    assert torch.equal(labels, same_labels)
    stripes = (striped - images)[:, 0].round()
    assert torch.equal(stripes[:, :, 4:12].abs().sum((1, 2)), torch.full((2000,), 32.0))  # 4 x 4 pixels of +-2
    assert not stripes[:, :, :4].any()
    assert not stripes[:, :, 12:].any()
    vertical = stripes.sum(1).any(1).long()  # columns of horizontal stripes sum to 0
    assert (vertical == labels).double().mean().item() == pytest.approx(0.8, abs=0.03)


def test_small_changes_turn_an_image_and_change_nothing_at_magnitude_0() -> None:
    x = torch.rand(3, 1, 8, 8, generator=make_generator(1))
    none = image_augmentation.Setup().digits.augmentation("plain")
    assert torch.equal(none(x, torch.rand(3, none.draws, generator=make_generator(2)))[0], x)
    largest = torch.full((3, none.draws), 0.5)
    largest[:, 0] = 1.0  # only the rotation, by the largest angle
    turned, own = replace(none, turn=90.0)(x, largest)
    torch.testing.assert_close(turned, x.rot90(-1, (2, 3)))
    assert own.tolist() == [1.0, 1.0, 1.0]
    moved = replace(none, move=1.0)(x, torch.full((3, none.draws), 0.5).index_fill(1, torch.tensor([3]), 1.0))[0]
    torch.testing.assert_close(moved[:, :, :, 1:], x[:, :, :, :-1])


def write_cifar(folder: Path) -> str:
    """Write 60 images of random pixels as CIFAR-100 does, all of class 7 and as bright as their number."""
    pixels = torch.arange(60)[:, None].expand(60, 3072) * 4
    records = torch.cat([torch.tensor([[0, 7]]).expand(60, 2), pixels], 1).to(torch.uint8)
    (folder / "train.bin").write_bytes(records.numpy().tobytes())
    return str(folder)


SMALL = {"sizes": (6, 20), "patch": 16, "width": 6, "heads": 2, "depth": 1, "widths": (5, 7), "batch": 4, "steps": 3}


def photo_setup(folder: Path, **more: Any) -> Any:
    changes = {f"photos.{name}": value for name, value in (SMALL | {"validation": 9, "test": 11} | more).items()}
    return claim("image-augmentation").setup({"data": write_cifar(folder), "repeats": 2, **changes})


def test_photographs_are_read_from_a_path(tmp_path: Path) -> None:
    found = claim("image-augmentation").run(photo_setup(tmp_path))
    numbers = found.numbers
    assert (numbers["images"], numbers["classes"], numbers["test images"]) == ("Photographs", 100, 11)
    assert found.verdict.word == UNCLEAR
    assert "it needs at least" in make_result(found).verdict.sentence, "three steps refute nothing"
    with pytest.raises(ConfigError, match=re.escape("there are 40 training images, but sizes=(6, 41)")):
        claim("image-augmentation").run(photo_setup(tmp_path, sizes=(6, 41)))


def test_the_learning_rate_is_chosen_on_validation_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows the validation images and nothing else keeps the rate with which it knows them."""
    known = {0.001: 0.2, 0.002: 0.7, 0.004: 0.5}  # the test images would choose the smallest rate
    tried: list[float] = []

    def train(model: Any, task: Any, plan: Any, **rest: Any) -> Any:
        tried.append(plan.optimizer.adamw.lr)
        return TrainingResult(model, 1, [], [(1, {"accuracy": known[tried[-1]]})], 0.0)

    monkeypatch.setattr(image_augmentation, "fit", train)
    monkeypatch.setattr(image_augmentation, "accuracy", lambda model, images: 1 - known[tried[-1]])
    numbers = claim("image-augmentation").run(photo_setup(tmp_path, rates=tuple(known))).numbers
    assert numbers["learning rates"]["cnn"] == {"plain": [0.002, 0.002], "augmented": [0.002, 0.002]}
    assert numbers["accuracy"]["vit"]["plain"] == pytest.approx([0.3, 0.3])
    assert tried[:4] == [*known, 0.002], "the other seeds use the chosen rate"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("feed-forward", {"token": 9}, "token must be between 0 and 8: token=9"),
        ("feed-forward", {"length": 1, "token": 0}, "length is 1, but must be at least 2"),
        ("layer-norm", {"gains": (0.5, 1.0)}, "gains must be above 0 and not 1"),
        ("layer-norm", {"length": 1}, "length is 1, but must be at least 2"),
        ("vit-is-convolution", {"patch": 1}, "patch is 1, but must be at least 2"),
        ("vit-is-convolution", {"columns": 1}, "columns is 1, but must be at least 2"),
        ("self-attention-why", {"lengths": (24, 96)}, "end above twice the width"),
        ("self-attention-why", {"lengths": (72, 24, 240)}, "lengths must grow: lengths=(72, 24, 240)"),
        ("against-mlp", {"sides": (3, 3)}, "sides must be at least two, all different: sides=(3, 3)"),
        ("against-rnn", {"repeats": 1}, "an interval needs two"),
        ("against-rnn", {"distances": (8, 2)}, "distances must grow: distances=(8, 2)"),
        ("against-rnn", {"lengths": (8, 256)}, "lengths must not exceed the width of the layers"),
        ("encoder-decoder", {"length": 2}, "length is 2, but must be at least 3"),
        ("stability", {"depth": 3}, "depth is 3, but must be at least 4"),
        ("vit-positions", {"repeats": 1}, "an interval needs two"),
        ("vit-or-cnn", {"sizes": (60,)}, "sizes must be two or more growing numbers of images: sizes=(60,)"),
        ("vit-or-cnn", {"sizes": (60, 1500)}, "there are 1397 training images, but sizes=(60, 1500)"),
        ("vit-or-cnn", {"agree": 1.0}, "agree must be between 0.6 and 0.95"),
        ("image-augmentation", {"photos.sizes": (60,)}, "sizes must have at least 2 values: sizes=(60,)"),
        ("image-augmentation", {"digits.sizes": (60, 30)}, "sizes must grow: sizes=(60, 30)"),
    ],
)
def test_invalid_settings_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        claim(name).setup(settings, smoke=True)
