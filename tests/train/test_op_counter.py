"""The tally counts what torch does: against sums by hand and against torch's own allocator."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from bench.planning import allocated
from regard.base.counting import saved_tensor_bytes
from regard.train.op_counter import Cost, Tally, Undropped, Work
from tests.train.tiny import Tiny

FLOAT = 4


def tallied(act: object, model: nn.Module | None = None) -> Tally:
    with Tally(model or nn.Identity()) as tally:
        act()  # type: ignore[operator]
    return tally


def test_a_product_costs_two_operations_for_each_entry_and_moves_what_it_reads_and_writes() -> None:
    x, y = torch.randn(3, 5), torch.randn(5, 7)
    work = tallied(lambda: x @ y).work
    assert work.costs == {("mm", torch.float32): Cost(1, 2 * 3 * 5 * 7, FLOAT * (3 * 5 + 5 * 7 + 3 * 7))}
    assert (work.flops, work.moved) == (210, FLOAT * 71)


def test_views_cost_nothing_and_expanded_axes_are_read_once() -> None:
    x = torch.randn(3, 1, 5)
    assert tallied(lambda: x.transpose(0, 2)[1:].detach()).work == Work()
    assert tallied(lambda: x.expand(3, 7, 5) + 1).work.moved == FLOAT * (3 * 5 + 3 * 7 * 5)


def test_what_is_changed_in_place_is_read_and_written() -> None:
    x, y = torch.randn(11), torch.randn(11)
    tally = tallied(lambda: x.add_(y))
    assert tally.work.moved == FLOAT * 3 * 11
    assert tally.peak == 0


def test_of_a_table_only_the_rows_that_come_out_are_read() -> None:
    table, rows = torch.randn(1000, 3), torch.tensor([5, 900])
    assert tallied(lambda: table[rows]).work.moved == 2 * FLOAT * 2 * 3 + 2 * 8


def test_memory_is_what_lives_at_once() -> None:
    def act() -> None:
        one = torch.zeros(100)
        two = one + 1
        del one
        three = torch.zeros(30)
        del two, three
        torch.zeros(120)

    tally = tallied(act)
    assert tally.alive == [FLOAT * size for size in (100, 200, 130, 120)]
    assert tally.peak == 4 * 200


def test_what_was_there_before_is_given_but_not_the_model() -> None:
    model, x = nn.Linear(5, 3), torch.randn(7, 5)
    assert tallied(lambda: model(x), model).given == FLOAT * 7 * 5
    assert tallied(lambda: model(x)).given == FLOAT * (7 * 5 + 5 * 3 + 3)


def test_gradients_that_are_done_are_told_apart() -> None:
    model, x = Tiny(), torch.randn(3, 7)
    tally = tallied(lambda: model(x).sum().backward(), model)
    size = FLOAT * sum(p.numel() for p in model.parameters())
    assert max(tally.beside) < tally.peak
    assert tally.alive[-1] - tally.beside[-1] == size - FLOAT * 13 * (
        7 + 1
    )  # all but the first layer's, which come last


@pytest.mark.parametrize("batch", [3, 301])
def test_the_peak_is_that_of_the_allocator(batch: int) -> None:
    model, x = Tiny(dropout=0.1), torch.randn(batch, 7)

    def act() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    act()
    # which hands out 64 bytes at least
    assert tallied(act, model).peak == pytest.approx(allocated(act), rel=0.02, abs=64 * 40)


def test_operations_are_those_of_the_usual_counter() -> None:
    model, x = Tiny(), torch.randn(3, 7)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert tallied(lambda: model(x).sum().backward(), model).work.flops == counter.get_total_flops()


def test_fused_attention_is_counted_there_and_back() -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    pairs = 2 * 3 * 5 * 5 * 8
    assert tallied(lambda: scaled_dot_product_attention(q, k, v)).work.flops == 2 * 2 * pairs
    there_and_back = tallied(lambda: scaled_dot_product_attention(q, k, v).sum().backward())
    assert there_and_back.work.flops == (2 + 5) * 2 * pairs  # torch counts scores once more on the way back


def test_what_autograd_keeps_is_counted_once_and_without_the_model() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    with saved_tensor_bytes([x]) as found:
        y = x.exp()  # keeps its output
        y.sin() * y  # keeps y twice more, and the sine
    assert sum(found.values()) == 2 * FLOAT * 15


@pytest.mark.parametrize("positional", [True, False])
def test_attention_as_on_a_gpu_has_no_matrix_for_dropout(positional: bool) -> None:
    q, k, v = (torch.randn(1, 2, 33, 8, requires_grad=True) for _ in range(3))

    def attended() -> Tensor:
        if positional:
            return scaled_dot_product_attention(q, k, v, None, 0.5)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with saved_tensor_bytes([q, k, v]) as plain:
        attended()
    with Undropped(), saved_tensor_bytes([q, k, v]) as fused:
        attended()
    matrix = FLOAT * 2 * 33 * 33
    assert sum(plain.values()) > matrix > sum(fused.values())


def test_work_adds_up() -> None:
    one = Work({("mm", torch.float32): Cost(1, 10, 5)})
    other = Work({("mm", torch.float32): Cost(2, 4, 1), ("add", torch.float32): Cost(1, 0, 3)})
    assert one.plus(other, 2).costs == {("mm", torch.float32): Cost(5, 18, 7), ("add", torch.float32): Cost(2, 0, 6)}
