"""The memory tracker compared with sums by hand and with torch's allocator."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.base.counting import saved_tensor_bytes
from regard.train.memory_tracker import IgnoreAttentionDropout, MemoryTracker
from tests.train.allocator import peak_allocated_bytes
from tests.train.tiny import Tiny

FLOAT = 4


def track(act: Callable[[], object], model: nn.Module | None = None) -> MemoryTracker:
    with MemoryTracker(model or nn.Identity()) as tracker:
        act()
    return tracker


def test_freed_tensors_are_not_counted() -> None:
    def act() -> None:
        one = torch.zeros(100)
        two = one + 1
        del one
        three = torch.zeros(30)
        del two, three
        torch.zeros(120)

    tracker = track(act)
    assert tracker.alive == [FLOAT * size for size in (100, 200, 130, 120)]
    assert tracker.peak == FLOAT * 200


def test_views_and_in_place_operations_allocate_nothing() -> None:
    x, y = torch.randn(3, 11), torch.randn(11)
    assert track(lambda: x.T[1:].detach()).peak == 0
    assert track(lambda: x.add_(y)).peak == 0


def test_tensors_from_outside_are_inputs_but_those_of_the_model_are_not() -> None:
    model, x = nn.Linear(5, 3), torch.randn(7, 5)
    assert track(lambda: model(x), model).input_bytes == FLOAT * 7 * 5
    assert track(lambda: model(x)).input_bytes == FLOAT * (7 * 5 + 5 * 3 + 3)


def test_complete_gradients_are_counted_separately() -> None:
    model, x = Tiny(), torch.randn(3, 7)
    tracker = track(lambda: model(x).sum().backward(), model)
    gradients = FLOAT * sum(p.numel() for p in model.parameters())
    first_layer = FLOAT * 13 * (7 + 1)  # its gradients come last
    assert max(tracker.alive_activations) < tracker.peak
    assert tracker.alive[-1] - tracker.alive_activations[-1] == gradients - first_layer


@pytest.mark.parametrize("batch", [3, 301])
def test_the_peak_is_that_of_the_allocator(batch: int) -> None:
    model, x = Tiny(dropout=0.1), torch.randn(batch, 7)

    def act() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    act()
    # the allocator hands out at least 64 bytes
    assert track(act, model).peak == pytest.approx(peak_allocated_bytes(act), rel=0.02, abs=64 * 40)


@pytest.mark.parametrize("positional", [True, False])
def test_attention_dropout_as_on_a_gpu_saves_no_matrix(positional: bool) -> None:
    q, k, v = (torch.randn(1, 2, 33, 8, requires_grad=True) for _ in range(3))

    def attention() -> Tensor:
        if positional:
            return scaled_dot_product_attention(q, k, v, None, 0.5)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with saved_tensor_bytes([q, k, v]) as on_cpu:
        attention()
    with IgnoreAttentionDropout(), saved_tensor_bytes([q, k, v]) as on_gpu:
        attention()
    matrix = FLOAT * 2 * 33 * 33
    assert sum(on_cpu.values()) > matrix > sum(on_gpu.values())
