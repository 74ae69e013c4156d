"""Sinusoidal and rotary positions, against complex numbers and against loops written out."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.core import positions as module
from regard.core.positions import (
    NTK,
    Interpolate,
    Llama3,
    RopeScaling,
    Rotary,
    YaRN,
    grid_positions,
    inverse_frequencies,
    rotary,
    sinusoidal,
)

B, H, N, C = 2, 3, 7, 10
FAR = 100003


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    size = shape or (B, H, N, C)
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned_as_complex(x: Tensor, where: Tensor, pairing: str, base: float = 10000.0) -> Tensor:
    """Rotary by its other definition: pairs are complex numbers, times exp(i position frequency)."""
    half = x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    frequency = (1 / base ** (torch.arange(half).float() * 2 / x.shape[-1])).float()
    phase = (where.float()[..., None] * frequency).double()
    phase = phase[:, None] if where.ndim == 2 else phase
    z = torch.complex(a.double(), b.double()) * torch.polar(torch.ones_like(phase), phase)
    return torch.cat((z.real, z.imag), -1) if pairing == "half" else torch.stack((z.real, z.imag), -1).flatten(-2)


def test_sinusoidal_is_the_2017_table_sin_in_even_and_cos_in_odd_columns() -> None:
    table = sinusoidal(13, 6, base=100.0)
    assert table.shape == (13, 6)
    assert table.dtype == torch.float32
    for n in range(13):
        for k in range(3):
            phase = n / 100.0 ** (2 * k / 6)
            assert table[n, 2 * k].item() == pytest.approx(math.sin(phase), abs=2e-6)
            assert table[n, 2 * k + 1].item() == pytest.approx(math.cos(phase), abs=2e-6)


def test_sinusoidal_takes_positions_of_any_integer_or_float_type() -> None:
    table = sinusoidal(13, 6)
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float64):
        assert torch.equal(sinusoidal(torch.tensor([12, 0, 5], dtype=dtype), 6), table[[12, 0, 5]])
    assert sinusoidal(0, 6).shape == (0, 6)


def test_sinusoidal_phases_are_float32_under_autocast() -> None:
    where = torch.tensor([FAR, FAR + 1])
    expected = (where[:, None].float() * inverse_frequencies(10000.0, 8)).double().sin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (sinusoidal(where, 8)[:, 0::2].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotary_multiplies_pairs_as_complex_numbers(pairing: str) -> None:
    x, rope = heads(), rotary(pairing=pairing, base=500.0)
    torch.testing.assert_close(rope(x), turned_as_complex(x, torch.arange(N), pairing, 500.0), rtol=0, atol=1e-13)
    where = torch.tensor([[5, 3, 90, 0, 7, 2, 1], [4, 4, 1, 30, 0, 9, 8]])
    torch.testing.assert_close(rope(x, where), turned_as_complex(x, where, pairing, 500.0), rtol=0, atol=1e-13)


def test_a_permutation_of_coordinates_relates_the_two_pairings() -> None:
    x = heads()
    order = torch.arange(C).reshape(2, C // 2).T.flatten()  # 0, 5, 1, 6, ...: pairs become neighbours
    assert torch.equal(rotary(pairing="interleaved")(x[..., order], 3), rotary()(x, 3)[..., order])
    assert not torch.allclose(rotary(pairing="interleaved")(x, 3), rotary()(x, 3))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, NTK(3.0), YaRN(4.0, original=50)])
def test_rotary_scores_depend_on_the_distance_alone(pairing: str, scaling: RopeScaling | None) -> None:
    q, k, rope = heads(seed=1), heads(seed=2), rotary(pairing=pairing, scaling=scaling)
    near, far = (torch.einsum("bhic,bhjc->bhij", rope(q, s), rope(k, s)) for s in (0, 1024))
    torch.testing.assert_close(near, far, rtol=0, atol=2e-3)  # float32 phases near 1000 are good to 6e-5
    shifted = torch.einsum("bhic,bhjc->bhij", rope(q, 1), rope(k, 0))
    assert (near - shifted).abs().max() > 0.1


def test_rotary_keeps_lengths_and_leaves_position_zero_as_it_is() -> None:
    x = heads()
    torch.testing.assert_close(rotary()(x, FAR).norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(rotary()(x)[:, :, 0], x[:, :, 0])


@given(first=st.integers(0, 60), second=st.integers(0, 60), pairing=st.sampled_from(["half", "interleaved"]))
@settings(max_examples=30, deadline=None)
def test_turning_twice_turns_by_the_sum(first: int, second: int, pairing: str) -> None:
    x, rope = heads(1, 2, 1, 6), rotary(pairing=pairing)
    torch.testing.assert_close(rope(rope(x, first), second), rope(x, first + second), rtol=0, atol=5e-5)


def test_a_start_an_explicit_list_and_a_slice_of_one_pass_agree_exactly() -> None:
    x, rope = heads(dtype=torch.float32), rotary()
    whole = rope(x)
    assert torch.equal(whole, rope(x, torch.arange(N)))
    assert torch.equal(whole, rope(x, torch.arange(N).expand(B, N)))
    for split in range(N + 1):
        assert torch.equal(torch.cat((rope(x[:, :, :split]), rope(x[:, :, split:], split)), 2), whole)


def test_sequences_may_stand_at_different_positions() -> None:
    x, rope = heads(), rotary()
    where = torch.stack((torch.arange(N) + 5, torch.arange(N) * 3))
    for sequence in range(B):
        alone = rope(x[sequence : sequence + 1], where[sequence])
        assert torch.equal(rope(x, where)[sequence : sequence + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_partial_rotary_leaves_the_rest_bitwise_untouched(pairing: str, dtype: torch.dtype) -> None:
    x = heads(dtype=dtype)
    x[..., 6], x[..., 7], x[..., 9] = -0.0, math.nan, math.inf
    out = rotary(width=6, pairing=pairing)(x, 11)
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(out[..., 6:].contiguous().view(integers), x[..., 6:].contiguous().view(integers))
    assert torch.equal(out[..., :6], rotary(pairing=pairing)(x[..., :6], 11))
    assert (out[..., :6] != x[..., :6]).any()


def assert_phases_are_exact_far_out(rope: Rotary) -> None:
    """In half types only x and the result are rounded: the turn itself is that of float32."""
    for dtype in (torch.bfloat16, torch.float16):
        x = heads(dtype=dtype)
        assert torch.equal(rope(x, FAR), rope(x.float(), FAR).to(dtype))
        truth = turned_as_complex(x, torch.arange(N) + FAR, "half")
        rounding = torch.finfo(dtype).eps * truth.abs() + 1e-5
        assert ((rope(x, FAR).double() - truth).abs() <= rounding).all()


def test_half_types_turn_by_float32_phases_at_position_100003() -> None:
    assert_phases_are_exact_far_out(rotary())


def test_phases_in_bfloat16_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = module.inverse_frequencies
    monkeypatch.setattr(module, "inverse_frequencies", lambda *args: exact(*args).bfloat16().float())
    with pytest.raises(AssertionError):
        assert_phases_are_exact_far_out(rotary())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = heads(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rotary(scaling=YaRN(4.0, original=64))(x, FAR)
    assert inside.dtype == dtype
    assert torch.equal(inside, rotary(scaling=YaRN(4.0, original=64))(x, FAR))


def test_float64_stays_float64_and_frequencies_are_float32() -> None:
    assert rotary()(heads()).dtype == torch.float64
    assert rotary().frequencies(C).dtype == torch.float32
    expected = torch.tensor([10000.0 ** (-2 * k / C) for k in range(C // 2)])
    torch.testing.assert_close(rotary().frequencies(C), expected, rtol=4e-7, atol=0)
    assert rotary(width=4).frequencies(C).shape == (2,)


@pytest.mark.parametrize("rope", [rotary(), rotary(pairing="interleaved", width=4)])
def test_gradients_are_right_and_turn_back(rope: Rotary) -> None:
    x = heads(1, 2, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope(x, 5), x)
    up = heads(1, 2, 3, 6, seed=3)
    (down,) = torch.autograd.grad(rope(x, 5), x, up)
    torch.testing.assert_close(rope(down, 5), up, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rope", [rotary(scaling=Llama3()), rotary(pairing="interleaved", width=4)])
def test_it_compiles_without_a_break_and_with_a_moving_start(rope: Rotary) -> None:
    compiled = torch.compile(lambda x, start: rope(x, start), fullgraph=True, backend="aot_eager")
    x = heads(dtype=torch.float32)
    for start in (0, 5, 6):
        torch.testing.assert_close(compiled(x, start), rope(x, start))


def test_vmap_maps_over_an_extra_axis_of_heads_and_of_positions() -> None:
    x, where = heads(5, B, H, N, C), torch.arange(5 * N).reshape(5, N)
    expected = torch.stack([rotary()(a, p) for a, p in zip(x, where, strict=True)])
    assert torch.equal(torch.vmap(rotary())(x, where), expected)


def test_no_positions_and_strided_heads_are_fine() -> None:
    rope = rotary()
    assert rope(heads(B, H, 0, C)).shape == (B, H, 0, C)
    x = heads(B, N, H, C)
    assert torch.equal(rope(x.transpose(1, 2), 3), rope(x.transpose(1, 2).contiguous(), 3))
    assert torch.equal(rope(x.mT.contiguous().mT.transpose(1, 2), 3), rope(x.transpose(1, 2).contiguous(), 3))


def test_grid_positions_count_rows_and_columns_row_by_row() -> None:
    assert grid_positions(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_positions(0, 3).shape == (0, 2)
    assert grid_positions(2, 3).dtype == torch.int64


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_two_axes_turn_one_half_by_the_row_and_the_other_by_the_column(pairing: str) -> None:
    x, where = heads(B, H, 15, 14), grid_positions(3, 5)
    out = rotary(axes=2, width=12, pairing=pairing)(x, where)
    line = rotary(pairing=pairing)
    assert torch.equal(out[..., :6], line(x[..., :6], where[:, 0]))
    assert torch.equal(out[..., 6:12], line(x[..., 6:12], where[:, 1]))
    assert torch.equal(out[..., 12:], x[..., 12:])
    both = torch.stack((where, where.flip(0)))
    assert torch.equal(
        rotary(axes=2, width=12, pairing=pairing)(x, both)[1:],
        rotary(axes=2, width=12, pairing=pairing)(x[1:], where.flip(0)),
    )


def test_interpolation_puts_position_4p_where_p_was() -> None:
    x = heads()
    scaled = rotary(scaling=Interpolate(4))(x, torch.arange(N) * 4)
    torch.testing.assert_close(scaled, rotary()(x), rtol=0, atol=1e-14)


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor() -> None:
    plain, scaled = rotary().frequencies(C), rotary(scaling=NTK(8)).frequencies(C)
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[-1].item() == pytest.approx(8, rel=1e-6)
    torch.testing.assert_close(ratio, 8 ** (torch.arange(5) / 4), rtol=1e-6, atol=0)


def test_llama3_keeps_divides_or_blends_by_turns() -> None:
    scaling = Llama3(factor=8, low=1, high=4, original=8192)
    plain, out = rotary(base=5e5).frequencies(128), rotary(base=5e5, scaling=scaling).frequencies(128)
    bands = set()
    for before, after in zip(plain.tolist(), out.tolist(), strict=True):
        turns = 8192 * before / (2 * math.pi)
        if turns >= 4:
            band, expected = "kept", before
        elif turns <= 1:
            band, expected = "divided", before / 8
        else:
            share = (turns - 1) / 3
            band, expected = "blended", share * before + (1 - share) * before / 8
        bands.add(band)
        assert after == pytest.approx(expected, rel=1e-6)
    assert bands == {"kept", "divided", "blended"}
    # as Llama 3.1 has them: base 500000, width 128
    for index, value in {0: 1.0, 20: 0.0165604409, 30: 0.00137189368, 33: 0.00031269365, 63: 3.06892588e-07}.items():
        assert out[index].item() == pytest.approx(value, rel=1e-6)


def test_yarn_keeps_divides_or_blends_by_index() -> None:
    # the released formula at factor 16, original 4096, base 10000, width 128
    out = rotary(scaling=YaRN(16, original=4096)).frequencies(128)
    known = {0: 1.0, 20: 0.0562341288, 25: 0.0224471409, 33: 0.0046004355, 40: 0.000881788961, 63: 7.21738706e-06}
    for index, value in known.items():
        assert out[index].item() == pytest.approx(value, rel=1e-6)
    plain = rotary().frequencies(128)
    assert torch.equal(out[:21], plain[:21])
    torch.testing.assert_close(out[46:], plain[46:] / 16, rtol=1e-6, atol=0)


def test_yarn_starts_its_ramp_at_the_first_frequency_where_none_turns_fast() -> None:
    # original 64: even the highest frequency turns 10 times only, so the released formula clips the ramp to start at 0
    out = rotary(scaling=YaRN(4, original=64)).frequencies(16)
    for index, value in enumerate([1.0, 0.237170815, 0.05, 0.00790569466]):
        assert out[index].item() == pytest.approx(value, rel=1e-6)


def test_yarn_keeps_all_where_even_the_lowest_frequency_turns_fast() -> None:
    scaling = YaRN(2, original=51200)  # base 10: the slower of two frequencies still turns 2577 times
    assert torch.equal(scaling.frequencies(10.0, 4), inverse_frequencies(10.0, 4))


def test_the_attention_factor_of_yarn_multiplies_rotated_heads() -> None:
    x = heads()
    plain, scaled = (rotary(scaling=YaRN(16, original=4096, attention_factor=f))(x, 100) for f in (1.0, 1.25))
    torch.testing.assert_close(plain.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    torch.testing.assert_close(scaled, 1.25 * plain, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("scaling", [Interpolate(1), NTK(1), Llama3(factor=1), YaRN(1, original=64)])
def test_a_factor_of_one_changes_nothing(scaling: RopeScaling) -> None:
    torch.testing.assert_close(rotary(scaling=scaling).frequencies(C), rotary().frequencies(C), rtol=2e-7, atol=0)


def test_several_axes_scaling_the_width_of_one() -> None:
    assert torch.equal(rotary(axes=2, scaling=NTK(3)).frequencies(12), rotary(scaling=NTK(3)).frequencies(6))


def test_a_rotary_is_a_frozen_hashable_value() -> None:
    assert rotary(scaling=YaRN(4, original=64)) == rotary(scaling=YaRN(4, original=64))
    assert len({rotary(), rotary(), rotary(base=500.0), rotary(pairing="interleaved")}) == 3
    with pytest.raises(FrozenInstanceError):
        rotary().base = 3.0  # type: ignore[misc]


REFUSALS: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    r"even width.*width=5": (ConfigError, lambda: sinusoidal(4, 5)),
    r"positions is -1, but must be at least 0": (ConfigError, lambda: sinusoidal(-1, 4)),
    r"positions is \(1, 3\).*\(n\)": (ShapeError, lambda: sinusoidal(torch.zeros(1, 3), 4)),
    r"base must be greater than 1.*base=1": (ConfigError, lambda: rotary(base=1.0)),
    r"unknown pairing 'halves'; did you mean 'half'\? \(there are: half, interleaved\)": (
        ConfigError,
        lambda: rotary(pairing="halves"),
    ),
    r"unknown pairing 'zzz' \(there are": (ConfigError, lambda: rotary(pairing="zzz")),
    r"axes is 0, but must be at least 1": (ConfigError, lambda: rotary(axes=0)),
    r"positive multiple of 2 \* axes = 4: width=6": (ConfigError, lambda: rotary(axes=2, width=6)),
    r"width is 0, but must be at least 1": (ConfigError, lambda: rotary(width=0)),
    r"not 2\.0; to divide positions by 2 write Interpolate\(2\)": (ConfigError, lambda: rotary(scaling=2.0)),  # type: ignore[arg-type]
    r"width=12 coordinates, but x has c=10 \(width per head of q and k\); use width <= 10": (
        ShapeError,
        lambda: rotary(width=12)(heads()),
    ),
    r"2 axes rotates a multiple of 4 coordinates, but x has c=10": (ShapeError, lambda: rotary(axes=2)(heads())),
    r"x is \(3, 7, 10\).*\(b h n c\)": (ShapeError, lambda: rotary()(heads(H, N, C))),
    r"x is torch.int64; call x.float\(\)": (DtypeError, lambda: rotary()(heads().long())),
    r"positions is \(6,\), but x has b=2 \(batch\) and n=7 \(positions\); give \(7,\) or \(2, 7\)": (
        ShapeError,
        lambda: rotary()(heads(), torch.arange(6)),
    ),
    r"positions is \(7,\).*give \(7, 2\) or \(2, 7, 2\)": (
        ShapeError,
        lambda: rotary(axes=2, width=8)(heads(), torch.arange(7)),
    ),
    r"2 axes needs positions of shape \(n, 2\), not None; see grid_positions": (
        ConfigError,
        lambda: rotary(axes=2, width=8)(heads()),
    ),
    r"Interpolate scales by a factor of at least 1.*factor=0.5": (ConfigError, lambda: Interpolate(0.5)),
    r"NTK scales between two frequencies or more, but width=2": (ConfigError, lambda: NTK(2).frequencies(9.0, 2)),
    r"Llama3 needs 0 < low < high turns: low=4, high=4": (ConfigError, lambda: Llama3(low=4, high=4)),
    r"YaRN needs a positive attention_factor.*=0": (ConfigError, lambda: YaRN(2, 4096, attention_factor=0)),
    r"YaRN needs 0 < slow < fast turns.*: slow=40": (ConfigError, lambda: YaRN(2, original=4096, slow=40)),
    r"NTK scales by a factor.*at most 1e\+30: factor=1e\+308": (ConfigError, lambda: NTK(1e308)),
    r"YaRN needs 0 < slow < fast turns, from 1e-30 .*: slow=1e-320": (ConfigError, lambda: YaRN(2, 4096, slow=1e-320)),
    r"Llama3\(original\) is 1000.*too large": (ConfigError, lambda: Llama3(original=10**400)),
    r"YaRN needs an original context.*original=6, at least 8": (ConfigError, lambda: YaRN(2, original=6)),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_says_what_came_and_what_to_do(text: str) -> None:
    error, call = REFUSALS[text]
    with pytest.raises(error, match=text):
        call()


def test_compiled_code_works_rotations_out_once_and_an_exported_program_has_no_operators_of_ours() -> None:
    class Turned(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = rotary()(x) + rotary()(2 * x)
            return x

    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x = torch.randn(2, 3, 5, 8)
    compiled = torch.compile(Turned(), fullgraph=True, backend=kept)(x)
    assert torch.equal(compiled, Turned()(x))
    assert any("regard" in str(node.target) for node in graphs[0].graph.nodes)
    exported = torch.export.export(Turned(), (x,), strict=True)
    assert not any("regard" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(x), compiled)
