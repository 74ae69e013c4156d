"""ViT and DaViT of timm, read into our models: the same logits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert import timm as reader
from regard.models.convert.timm import DAVIT_NAMES, VIT_NAMES, from_timm, read_davit, read_vit
from regard.models.convert.weight_rules import write_weights
from regard.models.davit import PRESETS as DAVITS
from regard.models.vit import PRESETS as VITS
from tests.models.images import enlarged, images
from tests.peers import import_timm

pytest.importorskip("timm", reason="timm is compared with where it is installed")
timm = import_timm()

VIT = {"img_size": 12, "patch_size": 4, "in_chans": 2, "num_classes": 5, "embed_dim": 24, "depth": 2, "num_heads": 3}
DAVIT = {
    "in_chans": 2,
    "num_classes": 5,
    "embed_dims": (12, 18),
    "depths": (1, 2),
    "num_heads": (2, 3),
    "window_size": 3,
}


def vit(**changes: Any) -> nn.Module:
    return enlarged(timm.models.VisionTransformer(**{**VIT, **changes})).eval()


def davit(**changes: Any) -> nn.Module:
    return enlarged(timm.models.DaVit(**{**DAVIT, **changes})).eval()


def alike(ours: nn.Module, theirs: nn.Module, image: Tensor) -> None:
    """Ours may be off by twice what theirs is in the same precision, and a little."""
    with torch.no_grad():
        actual, single, exact = ours(image), theirs(image), theirs.double()(image.double())
    assert exact.std() > 0.01
    assert (actual - exact).abs().max() <= 2 * (single - exact).abs().max() + 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_classes": 0},
        {"qkv_bias": False, "mlp_ratio": 3.0},
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ],
    ids=["usual", "features", "without bias", "mean"],
)
def test_a_vit_gives_the_same_logits(changes: dict[str, Any]) -> None:
    theirs = vit(**changes)
    ours = from_timm(theirs.state_dict(), "vit", heads=3)
    assert not ours.training
    alike(ours, theirs, images())


def test_a_vit_with_another_number_of_heads_is_another_function() -> None:
    theirs = vit()
    with pytest.raises(AssertionError):
        alike(from_timm(theirs.state_dict(), "vit", heads=4), theirs, images())


def test_a_vit_takes_images_of_another_size_as_timm_does() -> None:
    theirs = vit(dynamic_img_size=True)
    alike(from_timm(theirs.state_dict(), "vit", heads=3), theirs, images(rows=20, columns=16))


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_classes": 0}, {"qkv_bias": False, "mlp_ratio": 2}],
    ids=["usual", "features", "without bias"],
)
@pytest.mark.parametrize(("rows", "columns"), [(48, 24), (37, 19)])
def test_a_davit_gives_the_same_logits(changes: dict[str, Any], rows: int, columns: int) -> None:
    theirs = davit(**changes)
    ours = from_timm(theirs.state_dict(), "davit", heads=(2, 3), window=3)
    alike(ours, theirs, images(rows=rows, columns=columns))


def test_the_tiny_davit_is_recognised_and_gives_the_same_logits() -> None:
    theirs = timm.create_model("davit_tiny").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # fresh biases are zero, which would hide them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    config, _ = read_davit(theirs.state_dict())
    assert config == DAVITS["davit-tiny"]
    alike(from_timm(theirs.state_dict(), "davit"), theirs, images(1, 64, 40, channels=3))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("vit_tiny_patch16_224", "vit-ti/16"),
        ("vit_base_patch32_224", "vit-b/32"),
        ("vit_huge_patch14_224", "vit-h/14"),
        ("davit_small", "davit-small"),
        ("davit_base", "davit-base"),
    ],
)
def test_models_of_timm_are_recognised_by_their_shapes(theirs: str, ours: str) -> None:
    with torch.device("meta"):
        weights = timm.create_model(theirs, num_classes=1000).state_dict()
    if ours in DAVITS:
        assert read_davit(weights)[0] == DAVITS[ours]
    else:
        config, wanted = read_vit(weights)[0], VITS[ours]
        assert config.ff_width == 4 * wanted.width
        assert [getattr(config, x) for x in ("image", "patch", "width", "depth", "heads", "classes")] == [
            getattr(wanted, x) for x in ("image", "patch", "width", "depth", "heads", "classes")
        ]


def test_loading_and_exporting_is_exact() -> None:
    weights = vit().state_dict()
    config, ours = read_vit(weights, heads=3)
    back = write_weights(VIT_NAMES, ours, config)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    weights = davit().state_dict()
    davit_config, ours = read_davit(weights, heads=(2, 3))
    back = write_weights(DAVIT_NAMES, ours, davit_config)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("weights", "kind", "text"),
    [
        (
            lambda: vit().state_dict(),
            "vit",
            "timm's vit is 24 wide, from which its heads cannot be inferred; pass heads=",
        ),
        (
            lambda: davit().state_dict(),
            "davit",
            "timm's davit has widths (12, 18), from which its heads cannot be inferred",
        ),
        (dict, "vit", "timm's vit lacks patch_embed.proj.weight, from which its sizes are read"),
        (dict, "davit", "timm's davit lacks stem.conv.weight, from which its sizes are read"),
        (
            lambda: vit(embed_dim=192, init_values=0.1).state_dict(),
            "vit",
            "timm's vit has 4 tensors that the model does not have: blocks.0.ls1.gamma",
        ),
        (
            lambda: vit(embed_dim=192, img_size=(12, 8)).state_dict(),
            "vit",
            "timm's vit has positions for 6 patches, which is not a square",
        ),
        (
            lambda: vit(embed_dim=192, global_pool="avg", class_token=False).state_dict(),
            "vit",
            "timm's vit has fc_norm, which normalises after the mean over patches; ours normalises before it",
        ),
    ],
)
def test_unsupported_weights_are_refused(weights: Any, kind: str, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_timm(weights(), kind)
    assert text in str(caught.value)


def test_hints_set_what_a_state_dict_does_not_show() -> None:
    theirs = vit(norm_layer=partial(nn.LayerNorm, eps=0.1))
    told, untold = (from_timm(theirs.state_dict(), "vit", heads=3, **hints) for hints in ({"eps": 0.1}, {}))
    alike(told, theirs, images())
    with pytest.raises(AssertionError):
        alike(untold, theirs.float(), images())
    other = davit(norm_eps=0.1)
    ours = from_timm(other.state_dict(), "davit", heads=(2, 3), window=3, eps=0.1)
    alike(ours, other, images(rows=48, columns=24))


def test_a_pool_that_does_not_fit_the_weights_is_refused() -> None:
    token = vit(embed_dim=192, global_pool="avg", fc_norm=False).state_dict()
    with pytest.raises(CheckpointError, match="timm's vit has 1 tensors that the model does not have: cls_token"):
        from_timm(token, "vit", pool="mean")
    mean = vit(embed_dim=192, global_pool="avg", fc_norm=False, class_token=False).state_dict()
    with pytest.raises(CheckpointError, match="timm's vit lacks cls_token, needed for class_token"):
        from_timm(mean, "vit", pool="class")


def test_assumptions_are_documented() -> None:
    said = str(reader.__doc__)
    for word in ("act_layer", "global_pool", "cpe_act=False", "channel_attn_v2=False", "eps=1e-6"):
        assert word in said


def test_unknown_kinds_and_hints_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind is one of vit, davit, not 'swin'"):
        from_timm({}, "swin")
    with pytest.raises(ConfigError, match="ViTConfig has no setting 'hads'; did you mean 'heads'"):
        from_timm(vit(embed_dim=192).state_dict(), "vit", hads=3)
