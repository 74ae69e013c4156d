"""Channel attention: c x c weights for every group of channels, against the sum written out in float64."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from regard import attend, channel_attend, recording
from regard.base.errors import ConfigError, KernelRefusedError, ShapeError, UnknownNameError
from tests.tolerance import GRADIENT, OUTPUT, too_far

B, H, N, C = 2, 3, 11, 5


def draw(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, H, n, C, dtype=torch.float64).to(dtype) for _ in range(3))
    return q, k, v


def written_out(q: Tensor, k: Tensor, v: Tensor, beta: float | None = None) -> Tensor:
    """Channel x of the output is the mean of all channels y of v, weighted by softmax_y(beta q_x . k_y)."""
    scores = torch.einsum("bhnx,bhny->bhxy", q, k) * (q.shape[-1] ** -0.5 if beta is None else beta)
    return torch.einsum("bhxy,bhny->bhnx", scores.softmax(-1), v)


@pytest.mark.parametrize("kernel", [None, "reference", "eager", "sdpa"])
@pytest.mark.parametrize("beta", [None, 0.0, 0.2, -0.1])
def test_it_is_the_sum_written_out(kernel, beta):
    inputs = draw()
    out = channel_attend(*inputs, beta=beta, kernel=kernel)
    assert out.shape == (B, H, N, C)
    assert not too_far(out, out, written_out(*inputs, beta), OUTPUT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_near_the_truth_in_every_precision(dtype):
    inputs, upstream = draw(dtype), torch.randn(B, H, N, C, dtype=torch.float64).to(dtype)

    def results(attention, exact):
        leaves = [(x.double() if exact else x).clone().requires_grad_() for x in inputs]
        out = attention(*leaves)
        return out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))

    for factor, actual, naive, truth in zip(
        [OUTPUT, GRADIENT, GRADIENT, GRADIENT],
        results(channel_attend, False),
        results(written_out, False),
        results(written_out, True),
        strict=True,
    ):
        assert not too_far(actual, naive, truth, factor)


def test_gradients_are_those_of_finite_differences():
    leaves = [x[:1, :2, :3].contiguous().requires_grad_() for x in draw()]
    assert torch.autograd.gradcheck(channel_attend, leaves)
    assert torch.autograd.gradgradcheck(lambda *x: channel_attend(*x, kernel="eager"), leaves)


def test_beta_comes_from_the_channels_of_a_group_not_from_the_length():
    inputs = draw()
    assert torch.equal(channel_attend(*inputs), channel_attend(*inputs, beta=C**-0.5))
    assert not torch.allclose(channel_attend(*inputs), channel_attend(*inputs, beta=N**-0.5))


def test_beta_infinity_copies_the_channel_that_fits_best():
    q, k, v = draw()
    best = torch.einsum("bhnx,bhny->bhxy", q, k).argmax(-1)
    expected = v.gather(3, best[:, :, None].expand(-1, -1, N, -1))
    assert torch.equal(channel_attend(q, k, v, beta=math.inf), expected)


def test_the_order_of_positions_does_not_matter():
    """Positions are summed over, so shuffled ones give the same weights: the output is shuffled alike."""
    q, k, v = draw()
    order = torch.randperm(N)
    out = channel_attend(q[:, :, order], k[:, :, order], v[:, :, order])
    assert torch.allclose(out, channel_attend(q, k, v)[:, :, order], rtol=1e-13, atol=1e-13)


def test_the_order_of_channels_moves_with_its_tensor():
    q, k, v = draw()
    order = torch.tensor([3, 0, 4, 1, 2])
    same = channel_attend(q, k[..., order], v[..., order])
    assert torch.allclose(same, channel_attend(q, k, v), rtol=1e-13, atol=1e-13)
    turned = channel_attend(q[..., order], k, v)
    assert torch.allclose(turned, channel_attend(q, k, v)[..., order], rtol=1e-13, atol=1e-13)


def test_groups_and_sequences_do_not_mix():
    q, k, v = draw()
    together = channel_attend(q, k, v)
    for b, h in itertools.product(range(B), range(H)):
        alone = channel_attend(*(x[b : b + 1, h : h + 1] for x in (q, k, v)))
        assert torch.allclose(together[b, h], alone[0, 0], rtol=1e-13, atol=1e-13)


def test_it_is_attend_with_its_axes_exchanged():
    q, k, v = draw()
    assert torch.equal(channel_attend(q, k, v), attend(q.mT, k.mT, v.mT, beta=C**-0.5).mT)


def test_a_single_position_is_no_error():
    inputs = draw(n=1)
    out = channel_attend(*inputs)
    assert not too_far(out, out, written_out(*inputs), OUTPUT)


def test_no_positions_give_no_positions():
    assert channel_attend(*draw(n=0)).shape == (B, H, 0, C)


def test_the_kernel_is_the_one_named():
    with recording() as ran:
        channel_attend(*draw(), kernel="eager")
        channel_attend(*draw(), kernel="sdpa")
    assert ran == ["eager", "sdpa"]
    with pytest.raises(KernelRefusedError, match="no block can be skipped"):
        channel_attend(*draw(), kernel="blocked")
    with pytest.raises(UnknownNameError, match="unknown kernel 'channels'"):
        channel_attend(*draw(), kernel="channels")


def test_dropout_drops_weights_between_channels():
    q, k, _ = draw(torch.float32, n=C)
    eye = torch.eye(C).expand(B, H, C, C)
    weights = channel_attend(0 * q, k, eye, dropout=0.5)  # V = identity reads them out, transposed
    assert weights.unique().tolist() == pytest.approx([0, 2 / C])
    with pytest.raises(ConfigError, match="dropout is the probability"):
        channel_attend(*draw(), dropout=1.0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k", (B, H, N + 1, C)), ("v", (B, H, N, C + 2)), ("k", (B, 1, N, C)), ("v", (1, H, N, C))],
    ids=str,
)
def test_tensors_of_another_shape_are_explained(name, shape):
    inputs = dict(zip("qkv", draw(), strict=True)) | {name: torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(ShapeError) as caught:
        channel_attend(**inputs)
    assert str(caught.value) == (
        f"{name} is {shape} read as (b h n c), but q is {(B, H, N, C)}; channel attention mixes channels of the "
        "same positions, so q, k and v have one shape"
    )
