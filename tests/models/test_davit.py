"""DaViT: its sizes, what its two kinds of attention see, and a task."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.flop_counter import FlopCounterMode

from regard.base.errors import ConfigError
from regard.models.davit import DaViT, DaViTConfig
from regard.models.presets import build, build_from_config
from tests.models.images import DAVIT, enlarged, images, stripes, trained
from tests.models.weights import weights_of


def davit(**changes: Any) -> DaViT:
    model = build_from_config(replace(DAVIT, **changes))
    assert isinstance(model, DaViT)
    return enlarged(model).eval()


@pytest.mark.parametrize(("name", "multiplications"), [("davit-tiny", 4.5), ("davit-small", 8.8), ("davit-base", 15.5)])
def test_presets_have_the_cost_of_the_paper(name: str, multiplications: float) -> None:
    model = build(name, device="meta")
    with FlopCounterMode(display=False) as counted:
        model(torch.zeros(1, 3, 224, 224, device="meta"))
    assert round(counted.get_total_flops() / 2e9, 1) == multiplications


def test_the_names_of_weights_stay() -> None:
    def block(width: int, attention: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        both = {
            "attention_positions": (width, 1, 3, 3),
            "attention_norm": (width,),
            **attention,
            "attention.out": (width, width),
            "feedforward_positions": (width, 1, 3, 3),
            "feedforward_norm": (width,),
            "feedforward.up": (3 * width, width),
            "feedforward.down": (width, 3 * width),
        }
        return {f"{name}.{part}": shape[:end] for name, shape in both.items() for part, end in PARTS.items()}

    PARTS = {"weight": None, "bias": 1}
    expected: dict[str, tuple[int, ...]] = {
        "stem.projection.weight": (12, 2, 7, 7),
        "stem.projection.bias": (12,),
        "stem.norm.weight": (12,),
        "stem.norm.bias": (12,),
        "stages.1.downsample.norm.weight": (12,),
        "stages.1.downsample.norm.bias": (12,),
        "stages.1.downsample.projection.weight": (18, 12, 2, 2),
        "stages.1.downsample.projection.bias": (18,),
        "norm.weight": (18,),
        "norm.bias": (18,),
        "head.weight": (5, 18),
        "head.bias": (5,),
    }
    for stage, width in enumerate((12, 18)):
        attention = {"attention.query_key_value": (3 * width, width)}
        for kind in ("window", "channel"):
            expected |= {f"stages.{stage}.blocks.0.{kind}.{name}": x for name, x in block(width, attention).items()}
    assert {name: tuple(tensor.shape) for name, tensor in davit().state_dict().items()} == expected


def reached(part: torch.nn.Module, rows: int, columns: int) -> list[list[int]]:
    """Which positions of a grid the one in the corner depends on."""
    x = torch.randn(1, rows, columns, 12).requires_grad_()
    part(x)[0, 0, 0].sum().backward()
    return (x.grad[0].abs().amax(-1) > 0).int().tolist()


def test_windows_see_themselves_and_channels_see_the_whole_image() -> None:
    pair = davit().stages[0].blocks[0]
    with torch.no_grad():
        for block in (pair.window, pair.channel):  # without what the convolutions carry across edges
            block.attention_positions.weight.zero_()
            block.feedforward_positions.weight.zero_()
    assert reached(pair.window, 3, 4) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert reached(pair.channel, 3, 4) == [[1] * 4] * 3


def test_convolutions_add_position_information() -> None:
    block = davit().stages[0].blocks[0].window
    same = block(torch.randn(12).expand(1, 4, 4, 12))  # the same everywhere
    assert (same[0, 0, 0] - same[0, 1, 1]).abs().max() > 1e-2


@pytest.mark.parametrize(("rows", "columns"), [(32, 24), (13, 9), (1, 1)])
def test_images_of_any_size_are_accepted(rows: int, columns: int) -> None:
    model = davit()
    grid = model.hidden(images(rows=rows, columns=columns))
    coarse = [math.ceil(math.ceil(size / 4) / 2) for size in (rows, columns)]
    assert grid.shape == (3, *coarse, 18)
    torch.testing.assert_close(model.head(model.norm(grid.mean((1, 2)))), model(images(rows=rows, columns=columns)))


def test_under_autocast_the_residual_stream_stays_float32() -> None:
    model = davit()
    with torch.autocast("cpu", torch.bfloat16):
        downsample = model.stages[1].downsample(torch.randn(1, 3, 3, 12))
    assert downsample.dtype == torch.float32


def test_without_classes_it_returns_features() -> None:
    whole, features = davit(), davit(classes=0)
    features.load_state_dict({name: x for name, x in whole.state_dict().items() if not name.startswith("head.")})
    torch.testing.assert_close(whole.head(features(images())), whole(images()))


def test_branches_are_dropped_in_training_alone_and_more_of_the_later_ones() -> None:
    model = davit(drop_path=0.4, depths=(2, 3))
    shares = [
        (pair.window.residual.drop_path, pair.channel.residual.drop_path) for s in model.stages for pair in s.blocks
    ]
    assert shares == [pytest.approx((share, share)) for share in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert torch.equal(model(images()), model(images()))
    model.train()
    assert not torch.equal(model(images()), model(images()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"depths": (1,)}, "widths, depths and heads have one number for each stage: widths=(12, 18), depths=(1,)"),
        ({"widths": (), "depths": (), "heads": ()}, "one number for each stage"),
        ({"depths": (1, 0)}, "depths is 0, but must be at least 1"),
        ({"heads": (2, 4)}, "width must be a multiple of heads: width=18, heads=4; try heads=3"),
        ({"window": 0}, "window is 0, but must be at least 1"),
        ({"classes": 2.5}, "classes takes a whole number, not 2.5"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(DAVIT, **changes)
    assert text in str(caught.value)


def test_it_learns_which_way_stripes_run() -> None:
    config = DaViTConfig(channels=1, classes=3, widths=(12,), depths=(1,), heads=(3,), window=2, ff_factor=2)
    model = build_from_config(config)
    assert trained(model, stripes, steps=100, rate=1e-2) > 0.98


def test_windows_learn_to_look_at_the_marked_patch() -> None:
    """Every patch is to name the colour that is marked in its own window: only attention brings it there."""

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        colour = torch.randint(0, 5, (32, 6, 6), generator=draws)
        spot = one_hot(torch.randint(0, 9, (32, 2, 2), generator=draws), 9)
        marked = spot.view(32, 2, 2, 3, 3).transpose(2, 3).reshape(32, 6, 6)
        planes = torch.cat([one_hot(colour, 5), marked[..., None]], -1).permute(0, 3, 1, 2).float()
        answer = (colour * marked).unflatten(1, (2, 3)).unflatten(3, (2, 3)).sum((2, 4))
        spread = [
            x.repeat_interleave(times, -1).repeat_interleave(times, -2) for x, times in ((planes, 4), (answer, 3))
        ]
        return spread[0], spread[1], spot.flatten(0, 2)

    draws = torch.Generator().manual_seed(2)
    model = build_from_config(
        DaViTConfig(channels=6, classes=5, widths=(24,), depths=(1,), heads=(2,), window=3, ff_factor=2)
    )
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        image, answer, _ = batch()
        optimiser.zero_grad()
        cross_entropy(model.head(model.norm(model.hidden(image))).flatten(0, 2), answer.flatten()).backward()
        optimiser.step()
    image, answer, spot = batch()
    windows, channels = weights_of(lambda: model.eval().hidden(image))
    assert (model.head(model.norm(model.hidden(image))).argmax(-1) == answer).float().mean() > 0.99
    assert windows.shape == (32 * 4, 2, 9, 9)  # patches of a window
    assert channels.shape == (32, 2, 12, 12)  # channels of a group
    assert ((windows * spot[:, None, None, :]).sum(-1).mean((0, 2)) > 0.9).all()  # one in nine by chance
