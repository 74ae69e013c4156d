"""Image augmentation: each operation, random erasing, mixup and cutmix."""

from math import pi

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.seeds import make_generator
from regard.recipes import image_augment
from regard.recipes.image_augment import BLENDS, GEOMETRY, OPERATIONS, ImageAugmentation

ALL = ImageAugmentation(shift=2, flip=0.4, operations=2, erase=0.5, mixup=0.3, cutmix=0.4)


def images(count: int = 6, channels: int = 3, rows: int = 11, columns: int = 11, seed: int = 1) -> Tensor:
    return torch.rand(count, channels, rows, columns, generator=make_generator(seed))


def drawn(augmentation: ImageAugmentation, count: int = 6, seed: int = 2) -> Tensor:
    return torch.rand(count, augmentation.draws, generator=make_generator(seed))


def placed(count: int, **changes: float) -> Tensor:
    names = ("angle", "shear_x", "shear_y", "translate_x", "translate_y")
    return image_augment.affine_matrix(*(torch.full((count,), changes.get(name, 0.0)) for name in names))


def test_a_shift_moves_whole_pixels_and_mirrors_at_the_edge() -> None:
    x = images(3, 2, 5, 7)
    found = image_augment.shift_images(x, torch.tensor([0, 2, -1]), torch.tensor([0, -3, 6]))
    assert torch.equal(found[0], x[0])
    for image, down, across in ((1, 2, -3), (2, -1, 6)):
        for row in range(5):
            for column in range(7):
                source, beside = abs(row - down), abs(column - across)
                source, beside = 4 - abs(4 - source), 6 - abs(6 - beside)
                assert torch.equal(found[image, :, row, column], x[image, :, source, beside])


def test_only_chosen_images_are_flipped() -> None:
    x = images(3, 2, 5, 7)
    found = image_augment.flip_images(x, torch.tensor([True, False, True]))
    assert torch.equal(found[1], x[1])
    assert torch.equal(found[::2], x[::2, :, :, [6, 5, 4, 3, 2, 1, 0]])


@pytest.mark.parametrize("size", [(11, 11), (5, 7)])
def test_no_turn_shear_or_move_leaves_images_as_they_are(size: tuple[int, int]) -> None:
    x = images(3, 2, *size)
    torch.testing.assert_close(image_augment.affine(x, placed(3)), x, atol=2e-6, rtol=0)


def test_a_quarter_turn_is_clockwise_and_exact() -> None:
    x = images(3, 2)
    turned = image_augment.affine(x, placed(3, angle=pi / 2))
    torch.testing.assert_close(turned, x.rot90(-1, (2, 3)), atol=2e-6, rtol=0)


def test_moves_go_right_and_down_by_shares_of_the_side() -> None:
    x = images(3, 2)
    moved = image_augment.affine(x, placed(3, translate_x=2 / 11, translate_y=3 / 11))
    torch.testing.assert_close(moved[:, :, 3:, 2:], x[:, :, :-3, :-2], atol=5e-6, rtol=0)


def test_a_shear_moves_the_edges_by_its_share_and_the_middle_not_at_all() -> None:
    x = torch.zeros(1, 1, 11, 11)
    x[..., 5] = 1  # a line down the middle
    sheared = image_augment.affine(x, placed(1, shear_x=0.4))[0, 0]
    columns = torch.arange(11.0)
    line = (sheared * columns).sum(1)
    torch.testing.assert_close(line, 5 + 0.4 * (torch.arange(11.0) - 5), atol=1e-5, rtol=0)
    assert torch.equal(image_augment.affine(x.mT, placed(1, shear_y=0.4))[0, 0].mT, sheared)


def test_a_blend_goes_from_the_base_through_the_image_and_stays_between_0_and_1() -> None:
    x, base = images(3), images(3, seed=4)
    found = image_augment.blend(x, base, torch.tensor([0.0, 1.0, 1.7]))
    assert torch.equal(found[0], base[0])
    torch.testing.assert_close(found[1], x[1])
    torch.testing.assert_close(found[2], (1.7 * x[2] - 0.7 * base[2]).clamp(0, 1))


def test_grey_is_how_bright_colours_look() -> None:
    x = torch.eye(3).view(3, 3, 1, 1)
    assert image_augment.grey(x).flatten().tolist() == pytest.approx([0.299, 0.587, 0.114])
    assert torch.equal(image_augment.grey(images(2, 1)), images(2, 1))


def test_smooth_weighs_a_pixel_five_times_and_keeps_what_is_even() -> None:
    x = torch.zeros(1, 1, 5, 7)
    x[0, 0, 2, 3] = 13
    expected = torch.zeros(5, 7)
    expected[1:4, 2:5] = 1
    expected[2, 3] = 5
    torch.testing.assert_close(image_augment.smooth(x)[0, 0], expected)
    torch.testing.assert_close(image_augment.smooth(torch.full((1, 2, 5, 7), 0.3)), torch.full((1, 2, 5, 7), 0.3))


def test_posterise_leaves_so_many_bits() -> None:
    x = torch.arange(256.0).view(1, 1, 16, 16).expand(3, 1, 16, 16) / 255
    found = image_augment.posterize(x, torch.tensor([8, 5, 1])) * 255
    torch.testing.assert_close(found[0], x[0] * 255)
    kept = torch.arange(256).view(1, 16, 16)
    assert torch.equal(found[1].round().long(), kept & 0b11111000)
    assert torch.equal(found[2].round().long(), kept & 0b10000000)


def test_solarise_inverts_what_is_brighter() -> None:
    x = torch.tensor([0.2, 0.6, 1.0]).expand(2, 1, 1, 3)
    found = image_augment.solarize(x, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(found[:, 0, 0], torch.tensor([[0.2, 0.6, 1.0], [0.2, 0.4, 0.0]]))


def test_stretch_takes_each_channel_from_0_to_1() -> None:
    x = 0.2 + 0.3 * images(2)
    x[1, 2] = 0.7  # one value: nothing to stretch
    found = image_augment.autocontrast(x)
    assert torch.equal(found[1, 2], x[1, 2])
    assert torch.equal(found[0].amin((1, 2)), torch.zeros(3))
    torch.testing.assert_close(found[0].amax((1, 2)), torch.ones(3))
    ranks, before = found[0, 0].flatten().argsort(), x[0, 0].flatten().argsort()
    assert torch.equal(ranks, before)


def test_equalise_makes_every_value_as_frequent_and_keeps_their_order() -> None:
    x = torch.arange(121.0).view(1, 1, 11, 11) / 255
    torch.testing.assert_close(image_augment.equalize(x), torch.arange(121.0).view(1, 1, 11, 11) / 120)
    same = torch.full((1, 2, 5, 7), 0.3)
    assert torch.equal(image_augment.equalize(same), same)
    two = torch.tensor([0.1, 0.1, 0.1, 0.4]).view(1, 1, 1, 4)
    assert image_augment.equalize(two).flatten().tolist() == [0.0, 0.0, 0.0, 1.0]


def test_an_image_that_is_no_block_of_memory_is_equalised_alike() -> None:
    x = images(2).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(image_augment.equalize(x), image_augment.equalize(images(2)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_changes_the_images_it_is_chosen_for_and_no_other(name: str) -> None:
    x = 0.1 + 0.7 * images(2)
    which = torch.tensor([OPERATIONS.index(name), 0])
    found = image_augment.apply_operation(x, which, torch.tensor([0.9, 0.9]))
    assert torch.equal(found[1], x[1])
    assert torch.equal(found[0], x[0]) == (name == "identity")
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize("name", [*GEOMETRY, *BLENDS, "posterize", "solarize"])
def test_an_operation_without_magnitude_changes_nothing(name: str) -> None:
    x = (images(2) * 255).round() / 255
    found = image_augment.apply_operation(x, torch.full((2,), OPERATIONS.index(name)), torch.zeros(2))
    torch.testing.assert_close(found, x, atol=2e-6, rtol=0)


def test_operations_do_what_their_names_say() -> None:
    x = images(1)

    def done(name: str, magnitude: float = 1.0) -> Tensor:
        return image_augment.apply_operation(x, torch.tensor([OPERATIONS.index(name)]), torch.tensor([magnitude]))

    torch.testing.assert_close(done("brightness", -1.0), 0.1 * x)
    torch.testing.assert_close(done("rotate"), image_augment.affine(x, placed(1, angle=pi / 6)))
    torch.testing.assert_close(done("shear_x"), image_augment.affine(x, placed(1, shear_x=0.3)))
    torch.testing.assert_close(done("shear_y"), image_augment.affine(x, placed(1, shear_y=0.3)))
    torch.testing.assert_close(done("translate_x", -1.0), image_augment.affine(x, placed(1, translate_x=-0.3)))
    torch.testing.assert_close(done("translate_y"), image_augment.affine(x, placed(1, translate_y=0.3)))
    torch.testing.assert_close(done("color", -1.0), image_augment.grey(x) + 0.1 * (x - image_augment.grey(x)))
    mean = image_augment.grey(x).mean()
    torch.testing.assert_close(done("contrast", -1.0), mean + 0.1 * (x - mean))
    torch.testing.assert_close(done("sharpness", -1.0), image_augment.smooth(x) + 0.1 * (x - image_augment.smooth(x)))
    torch.testing.assert_close(done("posterize"), image_augment.posterize(x, torch.tensor([4])))
    torch.testing.assert_close(done("solarize", -0.5), image_augment.solarize(x, torch.tensor([0.5])))
    torch.testing.assert_close(done("autocontrast"), image_augment.autocontrast(x))
    torch.testing.assert_close(done("equalize"), image_augment.equalize(x))


def test_a_square_has_its_middle_and_its_side_and_is_cut_at_the_edge() -> None:
    x = torch.zeros(3, 2, 10, 20)
    found = image_augment.square_mask(
        x, torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0.5, 1.0, 0.5]), torch.tensor([0.4, 0.4, 0])
    )
    rows, columns = found[0, 0].any(1).nonzero().flatten(), found[0, 0].any(0).nonzero().flatten()
    assert rows.tolist() == [3, 4, 5, 6]
    assert columns.tolist() == list(range(6, 14))
    assert found.sum((1, 2, 3)).tolist() == [4 * 8, 2 * 4, 0]


def test_partners_are_swapped_pairs() -> None:
    x = torch.arange(6.0)
    assert image_augment.partner_images(x).tolist() == [1, 0, 3, 2, 5, 4]
    with pytest.raises(ShapeError, match="need pairs of images, but there are 5; use an even number"):
        image_augment.partner_images(x[:5])


def test_mixup_blends_images_as_it_blends_labels() -> None:
    x, share = images(4), torch.tensor([1.0, 0.0, 0.25, 0.5])
    found, own = image_augment.mixup(x, image_augment.partner_images(x), share)
    assert torch.equal(own, share)
    torch.testing.assert_close(found[0], x[0])
    torch.testing.assert_close(found[1], x[0])
    torch.testing.assert_close(found[2], 0.25 * x[2] + 0.75 * x[3])
    labels = image_augment.mix_labels(torch.tensor([2, 0, 1, 4]), own, 5)
    torch.testing.assert_close(labels[2], torch.tensor([0, 0.25, 0, 0, 0.75]))
    torch.testing.assert_close(labels[1], torch.tensor([0, 0, 1.0, 0, 0]))


def test_labels_mix_as_areas_do() -> None:
    x = torch.stack([torch.full((1, 10, 10), float(label)) for label in (1, 0, 0, 1)])  # pixels tell the class
    inside = image_augment.square_mask(x, torch.rand(4), torch.rand(4), torch.tensor([0.3, 0.7, 1.0, 0.0]))
    found, own = image_augment.cutmix(x, image_augment.partner_images(x), inside)
    labels = image_augment.mix_labels(torch.tensor([1, 0, 0, 1]), own, 2)
    torch.testing.assert_close(found.mean((1, 2, 3)), labels[:, 1])
    assert own[3] == 1
    assert own[2] < 1


def test_the_whole_augmentation_mixes_labels_as_areas() -> None:
    mixing = ImageAugmentation(shift=2, operations=0, mixup=0.4, cutmix=0.4)
    classes = torch.randint(2, (60,), generator=make_generator(3))
    x = classes.float().view(60, 1, 1, 1).expand(60, 1, 11, 11)
    found, own = mixing(x, drawn(mixing, 60))
    labels = image_augment.mix_labels(classes, own, 2)
    torch.testing.assert_close(found.mean((1, 2, 3)), labels[:, 1], atol=1e-5, rtol=0)
    changed = (own < 1).float().mean()
    assert 0.6 < changed < 0.95


def test_augmentation_with_everything_off_is_the_identity() -> None:
    nothing = ImageAugmentation(shift=0, flip=0.0, operations=0)
    found, own = nothing(images(5), drawn(nothing, 5))
    assert torch.equal(found, images(5))
    assert torch.equal(own, torch.ones(5))


def test_augmentation_is_a_function_of_its_random_numbers() -> None:
    first, again = ALL(images(), drawn(ALL)), ALL(images(), drawn(ALL))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    other, own = ALL(images(), drawn(ALL, seed=5))
    assert not torch.equal(first[0], other)
    assert not torch.equal(first[1], own)
    assert other.min() >= 0
    assert other.max() <= 1


def test_a_pair_is_augmented_alike_in_the_batch_and_alone() -> None:
    whole = ALL(images(), drawn(ALL))
    parts = [ALL(images()[at : at + 2], drawn(ALL)[at : at + 2]) for at in (0, 2, 4)]
    for together, shares in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(shares), together)


def test_each_augmentation_has_its_share_of_the_images() -> None:
    erasing = ImageAugmentation(shift=0, flip=0.0, operations=0, erase=0.25)
    found, _ = erasing(torch.zeros(400, 1, 9, 9), drawn(erasing, 400))
    assert 0.18 < found.flatten(1).any(1).float().mean() < 0.32
    assert set(found.unique().tolist()) == {0.0, 0.5}
    flipping = ImageAugmentation(shift=0, flip=0.7, operations=0)
    found, _ = flipping(torch.arange(9.0).expand(400, 1, 9, 9) / 9, drawn(flipping, 400))
    assert 0.63 < (found[:, 0, 0, 0] > 0).float().mean() < 0.77
    shifting = ImageAugmentation(shift=2, flip=0.0, operations=0)
    found, _ = shifting(torch.arange(9.0).expand(400, 1, 9, 9).mT, drawn(shifting, 400))
    assert set(found[:, 0, 4, 0].tolist()) == {2.0, 3.0, 4.0, 5.0, 6.0}


def test_autocast_does_not_make_augmentation_coarse() -> None:
    plain = ALL(images(), drawn(ALL))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = ALL(images(), drawn(ALL))
    assert all(torch.equal(*pair) for pair in zip(plain, lowered, strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shift": -1}, r"Augmentation\(shift\) is -1, but must be at least 0: it counts pixels"),
        ({"flip": 1.5}, r"Augmentation\(flip\) must be at least 0 and at most 1, not 1.5"),
        ({"operations": 0.5}, r"Augmentation\(operations\) takes a whole number, not 0.5"),
        ({"mixup": 0.7, "cutmix": 0.6}, r"mixup \+ cutmix, which are shares of images, must be .* at most 1, not 1.3"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ImageAugmentation(**settings)  # type: ignore[arg-type]


def test_a_shift_larger_than_the_image_is_refused() -> None:
    far = ImageAugmentation(shift=7)
    with pytest.raises(ConfigError, match=r"Augmentation\(shift=7\) is too large for images of 9 x 7"):
        far(images(2, 1, 9, 7), drawn(far, 2))
