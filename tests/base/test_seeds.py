"""Generators and the hash of integers: reproducible and uniform."""

import pytest
import torch

from regard.base.seeds import hash_integers, make_generator


def by_hand(x: int, seed: int) -> int:
    """The same three steps in Python's whole numbers, which cannot overflow."""
    word = 0xFFFFFFFF
    x = (x ^ (seed * 0x9E3779B1)) & word
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & word
    return x ^ (x >> 16)


PLACES = [0, 1, 2, 1000003, 2**31 - 1, 2**32 - 1, 2**40 + 5]


def test_a_generator_depends_on_its_seed_only():
    first = torch.rand(5, generator=make_generator(3))
    torch.rand(7)
    torch.manual_seed(99)
    assert torch.equal(torch.rand(5, generator=make_generator(3)), first)
    assert not torch.equal(torch.rand(5, generator=make_generator(4)), first)


def test_a_generator_does_not_change_the_global_rng_state():
    before = torch.random.get_rng_state()
    torch.rand(5, generator=make_generator(3))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert make_generator(3).device == torch.device("cpu")


def test_hashes_are_the_known_values():
    """Random links of a trained model depend on them."""
    x = torch.tensor([0, 1, 2, 1000003, 2**31 - 1, 2**32 - 1])
    assert hash_integers(x, 0).tolist() == [0, 1198589870, 2397179740, 713738302, 1194461413, 121542800]
    assert hash_integers(x, 7).tolist() == [54424673, 4028835823, 325640114, 79023618, 2006778757, 2763018881]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1, 2**70 + 3])
def test_large_numbers_do_not_overflow(seed):
    """The products stay below 2^63 at the largest words too."""
    x = torch.tensor([*PLACES, *range(500)])
    assert hash_integers(x, seed).tolist() == [by_hand(each, seed) for each in x.tolist()]


def test_int32_has_the_same_hashes_as_int64():
    """A compiled kernel counts positions in 32 bits."""
    x = torch.arange(3000)
    for dtype in (torch.int32, torch.int16):
        narrow = hash_integers(x.to(dtype), 5)
        assert narrow.dtype == torch.int64
        assert torch.equal(narrow, hash_integers(x, 5))


def test_hashes_have_32_bits_and_the_shape_of_the_input():
    x = torch.arange(2 * 3 * 500).view(2, 3, 500)
    out = hash_integers(x, 1)
    assert out.shape == x.shape
    assert 0 <= out.min() < 2**22
    assert 2**32 - 2**22 < out.max() < 2**32
    assert torch.equal(out[1, 2], hash_integers(x[1, 2], 1)), "each number is scrambled alone"


def test_hashes_are_unique():
    """Every step can be undone, so different numbers stay different."""
    for seed in (0, 3):
        assert len(hash_integers(torch.arange(1 << 17), seed).unique()) == 1 << 17


def test_another_seed_gives_other_hashes():
    x = torch.arange(1000)
    drawn = [hash_integers(x, seed) for seed in range(6)]
    for which, one in enumerate(drawn):
        for other in drawn[:which]:
            assert (one == other).sum() <= 1
            together = torch.corrcoef(torch.stack([one, other]).double())[0, 1]
            assert together.abs() < 0.15  # five times what chance gives


@pytest.mark.parametrize("sides", [2, 3, 7, 10, 64, 1000])
def test_remainders_are_uniform(sides):
    """As a die of so many sides: chi square within five deviations of its mean."""
    for seed in (0, 3):
        counts = torch.bincount(hash_integers(torch.arange(100_000), seed) % sides, minlength=sides).double()
        expected = 100_000 / sides
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (sides - 1)) < 5 * (2 * (sides - 1)) ** 0.5


def test_one_flipped_bit_flips_half_of_the_bits():
    x = torch.arange(10_000)
    for seed in (0, 7):
        for bit in range(32):
            flipped = hash_integers(x ^ (1 << bit), seed) ^ hash_integers(x, seed)
            shares = torch.stack([(flipped >> place & 1).double().mean() for place in range(32)])
            assert (shares - 0.5).abs().max() < 0.03


def test_hashes_of_neighbours_are_uncorrelated():
    words = hash_integers(torch.arange(100_000), 0).double()
    for distance in (1, 2, 3, 16):
        together = torch.corrcoef(torch.stack([words[:-distance], words[distance:]]))[0, 1]
        assert together.abs() < 0.016  # five times what chance gives
