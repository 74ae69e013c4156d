"""Windows of an image: cut and put together again, whatever its size."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.base.errors import ConfigError, ShapeError
from regard.nn.windows import merge, partition


@settings(max_examples=60, deadline=None)
@given(sizes=st.tuples(*(st.integers(1, most) for most in (3, 11, 11, 3))), size=st.integers(1, 7))
def test_merge_undoes_partition(sizes, size):
    image, (b, rows, columns, d) = torch.randn(sizes), sizes
    windows = partition(image, size)
    count = -(-rows // size) * -(-columns // size)
    assert windows.shape == (b * count, size * size, d)
    assert torch.equal(merge(windows, size, rows, columns), image)
    assert windows.sum().item() == pytest.approx(image.sum().item(), abs=1e-3)  # what is filled in is zero


def test_windows_come_row_by_row():
    image = torch.arange(24.0).reshape(1, 4, 6, 1)
    windows = partition(image, 2)[..., 0]
    assert windows[0].tolist() == [0, 1, 6, 7]
    assert windows[1].tolist() == [2, 3, 8, 9]
    assert windows[3].tolist() == [12, 13, 18, 19]


def test_what_does_not_fit_is_filled_at_the_far_edges():
    windows = partition(torch.ones(1, 3, 3, 1), 2)[..., 0]
    assert windows.tolist() == [[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_images_of_a_batch_stay_apart():
    image = torch.stack([torch.zeros(3, 5, 2), torch.ones(3, 5, 2)])
    windows = partition(image, 3)
    assert windows[:2].abs().max() == 0
    assert windows[2:].sum() == 30


def test_it_compiles_and_exports():
    image = torch.randn(2, 5, 7, 3)

    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return merge(partition(x, 3) * 2, 3, x.shape[1], x.shape[2])

    torch._dynamo.reset()
    assert torch.equal(torch.compile(Both(), fullgraph=True, backend="aot_eager")(image), image * 2)
    assert torch.equal(torch.export.export(Both(), (image,)).module()(image), image * 2)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"x is \(2, 5, 3\), but windows are cut from images, \(batch, rows, columns"):
        partition(torch.zeros(2, 5, 3), 2)
    with pytest.raises(ShapeError, match=r"windows is \(5, 4, 3\), but an image of 3 x 3 has 4 windows of 4 positions"):
        merge(torch.zeros(5, 4, 3), 2, 3, 3)
    with pytest.raises(ShapeError, match="of 9 positions"):
        merge(torch.zeros(4, 4, 3), 3, 4, 4)
    with pytest.raises(ConfigError, match="size is 0, but must be at least 1"):
        partition(torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(ConfigError, match="size is 0, but must be at least 1"):
        merge(torch.zeros(1, 2, 3), 0, 1, 1)
