"""Counts of a step on a few records hold for the whole batch: for every kind of model, beside what a step takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bench.planning import allocated
from regard.base.config import override
from regard.base.counting import saved_tensor_bytes
from regard.recipes.recipe import Phase, RunLocation, Start, get_recipe
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.loop import _Run
from regard.train.op_counter import Tally
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS
from regard.train.step_cost import Counts, Held, Line, Peak, _few, count_step, steps_over
from tests.train.tiny import PLANS, Points, Tiny, plan

KINDS: dict[str, dict[str, Any]] = {
    "birthplaces": {"people": 16, "held": 3, "model.depth": 2, "pretraining.batch_size": 48, "pretraining.steps": 3},
    "vision": {"plan.batch_size": 48, "plan.steps": 3},
    "translation": {"plan.batch_size": 96, "plan.gradient_accumulation_steps": 2, "plan.steps": 3},
}


def begun(name: str) -> tuple[Start, Phase]:
    chosen = get_recipe(name)
    start = chosen.module.start(override(chosen.settings(real=False), KINDS[name]), RunLocation())
    return start, start.phases[0]


def running(model: nn.Module, task: Any, plan: TrainingPlan) -> _Run:
    run = _Run(model, task, plan, None, SINGLE_PROCESS, print, print)
    run.model.train()
    return run


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[_Run, Counts, float]:
    """A run of a GPT, a ViT or an encoder-decoder; what was counted, and the size of one of its shares."""
    start, phase = begun(request.param)
    counts = count_step(start.model, phase.task, phase.plan)
    run = running(start.model, phase.task, phase.plan)
    run._one(run._batch(0), 0.0)
    return run, counts, counts.at_most * phase.plan.batch_size / phase.plan.gradient_accumulation_steps


def test_activations_are_what_autograd_keeps(both: tuple[_Run, Counts, float]) -> None:
    run, counts, size = both
    with saved_tensor_bytes([*run.model.parameters(), *run.model.buffers()]) as kept:
        run.task.loss(run.called, run._batch(0)[0])
    assert counts.kept.at(size) == pytest.approx(sum(kept.values()), rel=0.05)


def test_the_peak_of_a_step_is_the_allocators(both: tuple[_Run, Counts, float]) -> None:
    run, counts, size = both
    made = counts.alone if run.plan.gradient_accumulation_steps == 1 else counts.several
    batch = run._batch(0)
    assert made.peak.at(size) == pytest.approx(allocated(lambda: run._one(batch, 0.0)), rel=0.05)


def test_work_is_that_of_a_step(both: tuple[_Run, Counts, float]) -> None:
    run, counts, _ = both
    batches = [run._batch(step) for step in steps_over(run.plan)]
    told = counts.work(
        run.plan.batch_size // run.plan.gradient_accumulation_steps, run.plan.gradient_accumulation_steps
    )
    with Tally(run.model, run.optimizer.state_dict().values()) as tally:
        for batch in batches:
            run._one(batch, 0.0)
    # the few sentences that are counted on are filled up less than a batch is, and only some work is spared by that
    assert told.flops == pytest.approx(tally.work.flops / len(batches), rel=0.06)
    assert told.moved == pytest.approx(tally.work.moved / len(batches), rel=0.06)
    calls = sum(cost.calls for cost in told.costs.values())
    assert calls == pytest.approx(sum(cost.calls for cost in tally.work.costs.values()) / len(batches), rel=0.02)


@pytest.mark.parametrize("name", PLANS)
def test_tensors_that_are_held_are_those_of_a_run(name: str) -> None:
    model, chosen = Tiny(), PLANS[name]
    model.embed.bias.requires_grad_(False)
    counts = count_step(model, Points(), chosen)
    run = running(model, Points(), chosen)
    run.to_the_end()
    run.task.loss(run.called, run._batch(0)[0]).total.backward()
    told = [sum(each.bytes() for each in part) for part in (counts.parameters, counts.gradients, counts.remembered)]
    parts = [run.model.parameters(), run.optimizer.gradients(), run.optimizer.state_dict().values()]
    assert told == [sum(tensor.nbytes for tensor in part) for part in parts]
    assert told[0] == told[1] + 4 * 13
    assert counts.buffers == 8
    averaged = {} if run.averager is None else run.averager.tensors()
    assert counts.copies * told[0] == sum(tensor.nbytes for tensor in averaged.values())


@pytest.mark.parametrize(
    ("averaging", "copies"),
    [(None, 0), (ExponentialAverage(), 1), (LastKAverage(count=3, every=2), 3), (LastKAverage(count=30, every=5), 2)],
)
def test_means_are_of_as_many_states_as_there_will_be(averaging: Any, copies: int) -> None:
    assert count_step(Tiny(), Points(), plan(averaging=averaging)).copies == copies


def test_muon_remembers_half_of_what_adam_does() -> None:
    sizes = [
        sum(each.bytes() for each in count_step(Tiny(), Points(), plan(optimizer=optimizer)).remembered if each.shape)
        for optimizer in (AdamW(), Muon())
    ]
    # matrices of the two blocks alone are Muon's
    assert sizes[0] - sizes[1] == 4 * 2 * 13 * 13


def test_counting_leaves_model_and_generators_alone() -> None:
    model = Tiny(dropout=0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    count_step(model, Points(), plan())
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("batch", [1, 3, 7, 12])
def test_any_batch_can_be_counted(batch: int) -> None:
    task = Points(batch_size=batch)
    run = running(Tiny(), task, replace(plan(), batch_size=batch))
    records = run._batch(0)
    run._one(records, 0.0)
    counts = count_step(Tiny(), task, replace(plan(), batch_size=batch))
    with Tally(run.model, run.optimizer.state_dict().values()) as tally:
        run._one(records, 0.0)
    assert counts.work(batch, 1).flops == tally.work.flops
    assert counts.alone.peak.at(counts.at_most * batch) == tally.peak


@pytest.mark.parametrize(("batch", "few"), [(1, (1, 1)), (7, (7, 7)), (15, (3, 15)), (18, (2, 18)), (1024, (2, 8))])
def test_shares_that_are_counted_divide_the_batch_and_are_even_where_it_is(batch: int, few: tuple[int, int]) -> None:
    assert _few(batch) == few


def test_precision_is_that_of_the_plan() -> None:
    counts = count_step(Tiny(), Points(), plan(precision="bfloat16"))
    products = [dtype for (name, dtype), cost in counts.share.costs.items() if cost.flops]
    assert set(products) == {torch.bfloat16}


def test_blocks_are_members_of_lists() -> None:
    counts = count_step(Tiny(), Points(), plan())
    assert [each.block for each in counts.parameters] == [None] * 2 + ["blocks.0"] * 2 + ["blocks.1"] * 2 + [None]


def test_pieces_are_cut_along_the_first_axis_and_the_first_is_the_largest() -> None:
    assert [Held((13, 5), 4).bytes(pieces) for pieces in (1, 2, 4, 20)] == [260, 140, 80, 20]
    assert Held((), 8).bytes(4) == 8


def test_a_peak_changes_its_place_with_the_size() -> None:
    peak = Peak.over((2, 4), [100, 30, 20], [100, 50, 30])
    assert peak == Peak((Line(10, 10), Line(100, 0)))
    assert [peak.at(size) for size in (2, 9, 30)] == [100, 100, 310]
    assert Peak.over((2, 4), [10, 20], [40]) == Peak((Line(0, 10),))


def test_sizes_are_those_of_whole_batches_with_their_padding(both: tuple[_Run, Counts, float]) -> None:
    run, counts, _ = both
    batches = [run.task.batch(step, 0, 1) for step in steps_over(run.plan)]
    sizes = [sum(x.numel() for x in batch if isinstance(x, torch.Tensor)) / run.plan.batch_size for batch in batches]
    assert (counts.per_record, counts.at_most) == (pytest.approx(sum(sizes) / len(sizes)), max(sizes))
