"""The Vision Transformer: its sizes, what it sees, and a task whose attention is known beforehand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.masks.algebra import Mask
from regard.models.presets import build_from_config
from regard.models.vit import LocalPatches, ViT, ViTConfig
from tests.models.images import VIT, enlarged, images, trained


def vit(**changes: Any) -> ViT:
    model = build_from_config(replace(VIT, **changes))
    assert isinstance(model, ViT)
    return enlarged(model).eval()


def test_the_names_of_weights_stay() -> None:
    block = {
        "attention.query_key_value.weight": (72, 24),
        "attention.query_key_value.bias": (72,),
        "attention.out.weight": (24, 24),
        "attention.out.bias": (24,),
        "attention_norm.weight": (24,),
        "attention_norm.bias": (24,),
        "feedforward.up.weight": (40, 24),
        "feedforward.up.bias": (40,),
        "feedforward.down.weight": (24, 40),
        "feedforward.down.bias": (24,),
        "feedforward_norm.weight": (24,),
        "feedforward_norm.bias": (24,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in vit(head="mlp-tanh").state_dict().items()} == {
        "class_token": (24,),
        "patches.projection.weight": (24, 2, 4, 4),
        "patches.projection.bias": (24,),
        "positions.weight": (10, 24),
        **{f"blocks.{number}.{name}": shape for number in range(2) for name, shape in block.items()},
        "norm.weight": (24,),
        "norm.bias": (24,),
        "head_hidden.weight": (24, 24),
        "head_hidden.bias": (24,),
        "head.weight": (5, 24),
        "head.bias": (5,),
    }


def test_without_classes_it_returns_the_inputs_of_the_head() -> None:
    for changes in ({}, {"pool": "mean"}, {"head": "mlp-tanh"}):
        whole, features = vit(**changes), vit(**changes, classes=0)
        features.load_state_dict({name: x for name, x in whole.state_dict().items() if not name.startswith("head.")})
        assert features(images()).shape == (3, 24)
        torch.testing.assert_close(whole.head(features(images())), whole(images()))


def test_the_class_token_comes_first_and_patches_row_by_row() -> None:
    model = vit()
    hidden = model.hidden(images())
    assert hidden.shape == (3, 10, 24)
    torch.testing.assert_close(model.head(hidden[:, 0]), model(images()))
    changed = images()
    changed[:, :, 4:8, 8:12] += 1  # the patch in the second row and third column
    differs = (model.embed(changed) - model.embed(images())).abs().amax((0, 2)) > 1e-6
    assert differs.tolist() == [token == 1 + 1 * 3 + 2 for token in range(10)]


def test_the_head_of_pre_training_has_a_layer_with_tanh() -> None:
    model = vit(head="mlp-tanh")
    inner = torch.tanh(model.head_hidden(model.hidden(images())[:, 0]))
    torch.testing.assert_close(model.head(inner), model(images()))


def test_the_mean_is_that_of_normalised_patches() -> None:
    model = vit(pool="mean")
    assert model.hidden(images()).shape == (3, 9, 24)
    torch.testing.assert_close(model.head(model.hidden(images()).mean(1)), model(images()))


def test_without_positions_the_order_of_patches_does_not_matter() -> None:
    def shuffled(image: Tensor) -> Tensor:
        patches = image.unflatten(3, (3, 4)).unflatten(2, (3, 4)).transpose(3, 4).flatten(2, 3)
        patches = patches[:, :, [4, 2, 8, 0, 6, 1, 3, 7, 5]]
        return patches.unflatten(2, (3, 3)).transpose(3, 4).flatten(4, 5).flatten(2, 3)

    assert not torch.equal(shuffled(images()), images())
    blind, sighted = vit(positions="none"), vit()
    torch.testing.assert_close(blind(shuffled(images())), blind(images()))
    assert (sighted(shuffled(images())) - sighted(images())).abs().max() > 1e-2


def test_at_its_own_resolution_positions_are_the_table_itself() -> None:
    model, without = vit(), vit()
    with torch.no_grad():
        without.positions.weight.zero_()
        where = without.embed(images()) + model.positions.weight
    assert torch.equal(model.embed(images()), where)


def test_at_another_resolution_positions_are_interpolated() -> None:
    model = vit()
    with torch.no_grad():
        model.positions.weight[1:] = torch.arange(3.0).repeat_interleave(3)[:, None]  # the number of the row
        model.patches.projection.weight.zero_()
        model.patches.projection.bias.zero_()
        model.class_token.zero_()
    embedded = model.embed(images(rows=20, columns=24))  # 5 x 6 patches
    assert torch.equal(embedded[:, 0], model.positions.weight[:1].expand(3, -1))
    rows = embedded[0, 1:, 0].unflatten(0, (5, 6))
    assert (rows - rows[:, :1]).abs().max() < 1e-6
    assert (rows[1:] - rows[:-1] > 0.3).all()
    assert model(images(rows=20, columns=24)).shape == (3, 5)
    assert model(images(rows=4, columns=8)).shape == (3, 5)


def test_local_attention_at_another_resolution_counts_the_columns_of_that_image() -> None:
    image = images(rows=8, columns=20).requires_grad_()
    vit(attention="local", reach=1, depth=1).hidden(image)[:, 1].sum().backward()  # the first patch of 2 x 5
    seen = image.grad.abs().amax((0, 1)).unflatten(1, (5, 4)).unflatten(0, (2, 4)).amax((1, 3)) > 0
    assert seen.tolist() == [[True, True, False, False, False]] * 2


@pytest.mark.parametrize("attention", ["local", "global-local"])
def test_local_patches_are_those_within_reach_rows_and_columns(attention: str) -> None:
    mask = vit(attention=attention, reach=1).mask(4).dense(1 + 3 * 4)
    patches = [(row, column) for row in range(3) for column in range(4)]
    near = torch.tensor([[abs(r - s) <= 1 and abs(c - t) <= 1 for s, t in patches] for r, c in patches])
    assert torch.equal(mask[1:, 1:], near)
    assert mask[0].all()  # the class token sees all
    assert mask[1:, 0].all() if attention == "global-local" else not mask[1:, 0].any()


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [1, 3, 5])
@pytest.mark.parametrize("first", [0, 1])
def test_the_bounds_of_a_box_are_correct(reach: int, columns: int, first: int) -> None:
    mask, n = LocalPatches(reach, columns, first), first + 4 * columns
    dense = mask.dense(n)
    sure = 0
    for low in range(n):
        for high in range(low, n):
            for start in range(0, n, 2):
                for stop in range(start, n, 3):
                    none, everything = mask.box(low, high, start, stop)
                    part = dense[low : high + 1, start : stop + 1]
                    assert not (none and part.any())
                    assert not (everything and not part.all())
                    sure += bool(none) + bool(everything)
    assert sure or 3 <= reach < columns - 1  # it tells something, unless every row sees parts of every row
    assert mask.count(n) == int(dense.sum())


def test_local_masks_work_in_every_kernel() -> None:
    q, k, v = torch.randn(3, 2, 2, 101, 8, dtype=torch.float64).unbind()
    mask: Mask = LocalPatches(2, 10, 1) | LocalPatches(0, 7)
    first, *others = (attend(q, k, v, mask=mask, kernel=kernel) for kernel in ("reference", "eager", "sdpa", "blocked"))
    for other in others:
        torch.testing.assert_close(other, first)


def test_local_attention_that_reaches_everything_is_full_attention() -> None:
    for attention, pool in (("local", "mean"), ("global-local", "class")):
        full, local = vit(pool=pool), vit(pool=pool, attention=attention, reach=2)
        assert torch.equal(local(images()), full(images()))
        near = vit(pool=pool, attention=attention, reach=1)
        assert (near(images()) - full(images())).abs().max() > 1e-3


def test_with_local_attention_the_class_token_sees_all_and_is_not_seen() -> None:
    local, full = vit(attention="local", reach=2), vit()
    assert (local(images()) - full(images())).abs().max() > 1e-3
    far = images().requires_grad_()
    vit(attention="local", reach=1, depth=1)(far).sum().backward()
    assert (far.grad.unflatten(3, (3, 4)).unflatten(2, (3, 4)).abs().amax((0, 1, 3, 5)) > 0).all()


def test_linear_attention_is_another_function_of_the_same_weights() -> None:
    linear, full = vit(attention="linear"), vit()
    assert linear.state_dict().keys() == full.state_dict().keys()
    assert (linear(images()) - full(images())).abs().max() > 1e-3


def test_under_autocast_the_residual_stream_stays_float32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for changes in ({}, {"pool": "mean"}, {"pool": "mean", "positions": "none"}):
            assert vit(**changes).embed(images()).dtype == torch.float32


def test_dropout_acts_in_training_alone_and_drop_path_grows_with_depth() -> None:
    model = vit(dropout=0.2, attention_dropout=0.2, drop_path=0.3, depth=4)
    assert [round(block.residual.drop_path, 6) for block in model.blocks] == [0.0, 0.1, 0.2, 0.3]
    assert torch.equal(model(images()), model(images()))
    model.train()
    assert not torch.equal(model(images()), model(images()))


def test_an_image_that_patches_do_not_cover_is_refused() -> None:
    with pytest.raises(ShapeError, match="image is 12 x 14, which is not a multiple of the patch, 4; resize or pad it"):
        vit()(images(columns=14))
    with pytest.raises(ShapeError, match="image is 13 x 12, which is not a multiple of the patch, 4"):
        vit(attention="local", reach=1)(images(rows=13))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image": 30}, "image must be a multiple of patch: image=30, patch=4; try image=32"),
        ({"image": 1}, "image must be a multiple of patch: image=1, patch=4; try image=4"),
        ({"heads": 5}, "width must be a multiple of heads: width=24, heads=5; try heads=4"),
        ({"pool": "max"}, "pool is one of class, mean, class-mean, class-distilled, not 'max'"),
        ({"head": "mlp"}, "head is one of linear, mlp-tanh, not 'mlp'"),
        ({"positions": "rotary"}, "positions is one of learned, none, not 'rotary'"),
        ({"attention": "sparse"}, "attention is one of full, local, global-local, linear, not 'sparse'"),
        ({"attention": "local"}, "reach is for local and global-local attention"),
        ({"reach": 2}, "attention='full', reach=2"),
        ({"attention": "global-local", "reach": 1, "pool": "mean"}, "global-local attention needs the class token"),
        ({"attention": "linear", "attention_dropout": 0.1}, "linear attention has no weights to drop"),
        ({"classes": -1}, "classes is -1, but must be at least 0"),
        ({"depth": 0}, "depth is 0, but must be at least 1"),
        ({"drop_path": 1.0}, "drop_path is a share, at least 0 and less than 1: drop_path=1.0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(VIT, **changes)
    assert text in str(caught.value)


def marked(draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """64 images of 3 x 3 patches, each one of four pictures; the class is the picture that is marked, anywhere."""
    halves = torch.zeros(4, 4, 4)
    halves[0, :2], halves[1, 2:], halves[2, :, :2], halves[3, :, 2:] = 1, 1, 1, 1
    pictures = torch.randint(0, 4, (64, 9), generator=draws)
    place = torch.randint(0, 9, (64,), generator=draws)
    mark = torch.nn.functional.one_hot(place, 9).float()[..., None, None].expand(-1, -1, 4, 4)
    patches = torch.stack([halves[pictures], mark], 1)  # b, channel, patch, 4, 4
    image = patches.unflatten(2, (3, 3)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return image, pictures[torch.arange(64), place], place


def test_the_class_token_learns_to_look_at_the_marked_patch() -> None:
    model = build_from_config(ViTConfig(image=12, patch=4, channels=2, classes=4, width=32, depth=1, heads=1))
    assert isinstance(model, ViT)
    image, _, place = marked(torch.Generator().manual_seed(9))

    def looks_at() -> Tensor:
        """The weights of the class token on the nine patches: attention whose values are the places themselves."""
        with torch.no_grad():
            attention, x = model.blocks[0].attention, model.blocks[0].attention_norm(model.embed(image))
            q, k = attention.queries(x), attention.keys_values(x).k
            places = torch.eye(10).expand(64, 1, 10, 10)
            return attend(q[:, :, :1], k, places, positions=Positions(queries=0))[:, 0, 0, 1:]

    before = looks_at()
    assert (before.argmax(-1) == place).float().mean() < 0.6
    assert trained(model, lambda draws: marked(draws)[:2], steps=150, rate=3e-3) > 0.99
    after = looks_at()
    assert (after.argmax(-1) == place).all()
    assert after[torch.arange(64), place].mean() > 0.8
