"""Predictions beside what runs take, on one device and in pieces; and what they advise is true."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.planning import allocated
from regard.base.errors import ConfigError
from regard.models.gpt import GPTConfig
from regard.models.presets import build_from_config
from regard.recipes.language import NextToken
from regard.train.cost_model import Prediction, held, predict_memory
from regard.train.loop import _Run
from regard.train.machine_rates import MACHINES, Rates, measured
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS
from regard.train.step_cost import Counts, count_step
from tests.train.test_distributed import together
from tests.train.tiny import PLANS, Points, Tiny
from tests.train.together import HELD, written

BATCH = 48
SIMPLE = Rates(
    name="simple", source="made up", float32=2e9, bfloat16=8e9, float16=8e9, memory=1e9, reached=0.5, launch=1e-3,
    link=1e8, latency=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def text() -> tuple[Any, NextToken, TrainingPlan]:
    config = GPTConfig(vocab=301, context=33, width=96, depth=4, heads=3, dropout=0.0, attention_dropout=0.0)
    tokens = torch.randint(301, (997,), generator=torch.Generator().manual_seed(3))
    return (
        build_from_config(config),
        NextToken(tokens, tokens, 997, 33, BATCH, 5),
        TrainingPlan(steps=7, batch_size=BATCH),
    )


@pytest.fixture(scope="module")
def counts(text: tuple[Any, NextToken, TrainingPlan]) -> Counts:
    return count_step(*text)


def on(counts: Counts, devices: int = 1, parallel: str = "data", **plan: Any) -> Prediction:
    given = {"steps": 7, "batch": BATCH, **plan}
    return predict_memory(counts, TrainingPlan(**given), SIMPLE, devices=devices, parallel=parallel)


def test_memory_is_what_a_run_takes(text: tuple[Any, NextToken, TrainingPlan], counts: Counts) -> None:
    run = _Run(*text, None, SINGLE_PROCESS, print, print)
    batch = run._batch(0)
    run._one(batch, 0.0)
    taken = allocated(lambda: run._one(batch, 0.0))
    told = on(counts).memory
    assert told.passing == pytest.approx(taken, rel=0.03)
    assert told.parameters == sum(tensor.nbytes for tensor in [*run.model.parameters(), *run.model.buffers()])
    assert told.optimizer == sum(tensor.nbytes for tensor in run.optimizer.state_dict().values())
    assert told.data == batch[0][0].untyped_storage().nbytes()  # tokens and targets are views of it
    assert told.total == told.parameters + told.optimizer + told.data + told.passing


def test_a_step_takes_the_time_that_was_told_within_a_factor(
    text: tuple[Any, NextToken, TrainingPlan], counts: Counts
) -> None:
    model, task, plan = text
    run = _Run(model, task, plan, None, SINGLE_PROCESS, print, print)
    batch, taken = run._batch(0), []
    before = measured("cpu")
    for _ in range(12):
        start = time.perf_counter()
        run._one(batch, 0.0)
        taken.append(time.perf_counter() - start)
    after = measured("cpu")
    told = sorted(predict_memory(counts, plan, rates).seconds.step for rates in (before, after))
    # others may use this machine at any time
    assert 0.4 * told[0] < min(taken) < 2.5 * told[1]


@pytest.mark.parametrize("name", HELD)
def test_pieces_of_a_run_on_two_processes_are_those_told(name: str, pieces: Path) -> None:
    told = held(count_step(Tiny(), Points(), PLANS[name]), 12, PLANS[name].gradient_accumulation_steps, 2, "sharded")
    found = json.loads((pieces / f"held-{name}.json").read_text())
    assert {part: getattr(told, part) for part in found} == found
    whole = held(count_step(Tiny(), Points(), PLANS[name]), 12, PLANS[name].gradient_accumulation_steps)
    assert all(size < 0.6 * getattr(whole, part) for part, size in found.items())


@pytest.mark.parametrize("shares", [1, 2])
def test_a_step_on_two_processes_makes_what_was_told(shares: int, pieces: Path) -> None:
    told = {way: held(count_step(*written(shares)), 4 // shares, shares, 2, way) for way in ("data", "sharded")}
    taken = {way: json.loads((pieces / f"taken-{way}-{shares}.json").read_text()) for way in told}
    # buckets were there before the step
    assert told["data"].passing - told["data"].gradients == pytest.approx(taken["data"], rel=0.02)
    # how far blocks are on their way when the peak comes is a matter of luck, so the prediction is above the usual
    assert taken["sharded"] < told["sharded"].passing < 1.4 * taken["sharded"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pieces")
    together(2, "hold", out)
    return out


def test_an_operation_takes_the_longest_of_arithmetic_traffic_and_launch(counts: Counts) -> None:
    work, told = counts.work(BATCH, 1), on(counts).seconds
    assert told.arithmetic == pytest.approx(work.flops / 1e9)
    assert told.traffic == pytest.approx(work.moved / 5e8)
    assert told.launches == pytest.approx(sum(cost.calls for cost in work.costs.values()) / 1e3)
    assert max(told.arithmetic, told.traffic, told.launches) < told.compute
    assert told.compute < told.arithmetic + told.traffic + told.launches
    assert told.step == told.compute
    assert on(counts).run_seconds == 7 * told.step


def test_devices_share_the_work_and_send_gradients(counts: Counts) -> None:
    one, four = on(counts), on(counts, 4)
    size = sum(each.bytes() for each in counts.gradients)
    assert four.at_once == BATCH // 4
    assert four.flops < one.flops / 3.9
    assert four.seconds.communication == pytest.approx(2 * 3 * (size / 4 / 1e8 + 1e-2))
    # gradients lie in buckets too
    assert four.memory.passing == round(counts.alone.peak.at(counts.at_most * 12) + size)
    assert four.seconds.step == pytest.approx(
        four.seconds.compute + max(0, four.seconds.communication - four.seconds.compute * 2 / 3)
    )


def test_pieces_are_gathered_block_by_block(counts: Counts) -> None:
    four = on(counts, 4, "sharded")
    size = sum(each.bytes() for each in counts.gradients)
    # there, back, and the sum: for each of four blocks and the rest
    assert four.seconds.communication == pytest.approx(3 * 3 * (size / 4 / 1e8 + 5 * 1e-2))
    assert on(counts, 4, "sharded", gradient_accumulation_steps=3).seconds.communication == pytest.approx(
        7 * 3 * (size / 4 / 1e8 + 5e-2)
    )
    blocks = [sum(each.bytes() for each in counts.parameters if each.block == f"blocks.{n}") for n in range(4)]
    gathered = size - min(blocks)  # three blocks at once, and what is in none
    beside = counts.alone.beside.at(counts.at_most * 12)
    assert four.memory.passing == round(beside + gathered + four.memory.gradients)
    assert four.memory.gradients == pytest.approx(size / 4, rel=0.02)


def test_a_batch_in_shares_needs_less_memory_and_more_launches(counts: Counts) -> None:
    one, four = on(counts), on(counts, gradient_accumulation_steps=4)
    assert four.memory.activations < 0.3 * one.memory.activations
    assert four.memory.passing < 0.5 * one.memory.passing
    assert four.flops == pytest.approx(one.flops)
    assert four.seconds.launches > 3 * one.seconds.launches


def test_a_compiled_model_does_the_same_products_with_less_besides(counts: Counts) -> None:
    plain, compiled = on(counts), on(counts, compile=True)
    assert compiled.flops == plain.flops
    assert compiled.seconds.traffic < 0.8 * plain.seconds.traffic
    assert compiled.seconds.launches < 0.75 * plain.seconds.launches


def limited(counts: Counts, limit: int, devices: int = 1, parallel: str = "data", **plan: Any) -> Prediction:
    given = {"steps": 7, "batch": BATCH, **plan}
    return predict_memory(counts, TrainingPlan(**given), SIMPLE, devices=devices, parallel=parallel, limit=limit)


def test_the_largest_batch_fits_and_one_record_more_does_not(counts: Counts) -> None:
    limit = on(counts).memory.total * 3
    told = limited(counts, limit)
    assert told.fits
    assert told.advice == ()
    assert told.largest is not None
    assert told.largest > BATCH
    assert held(counts, told.largest).total <= limit < held(counts, told.largest + 1).total


def test_what_is_advised_fits(counts: Counts) -> None:
    limit = on(counts).memory.total // 2
    told = limited(counts, limit)
    assert not told.fits
    kinds = [each.split("=")[0].split()[0] for each in told.advice]
    assert kinds == ["accumulate", "--devices", "batch"]
    shares, devices, batch = told.advice[0][11:], told.advice[1].split()[1], told.advice[2][6:]
    assert limited(counts, limit, gradient_accumulation_steps=int(shares)).fits
    assert limited(counts, limit, devices=int(devices), parallel=told.advice[1].split()[3]).fits
    assert limited(counts, limit, batch=int(batch)).fits
    assert not limited(counts, limit, batch=int(batch) + 1).fits


def test_pieces_are_advised_where_weights_are_too_many(counts: Counts) -> None:
    both = [held(counts, 1, devices=48, parallel=way).total for way in ("data", "sharded")]
    assert both[1] < both[0]
    assert limited(counts, sum(both) // 2, devices=48).advice[0] == "--parallel sharded"


def test_where_nothing_fits_a_smaller_model_is_advised(counts: Counts) -> None:
    told = limited(counts, 1000)
    assert (told.fits, told.largest) == (False, 0)
    assert told.advice == ("a smaller model: not even one record fits beside this one",)


def test_without_a_limit_everything_fits_and_a_machine_has_its_own(counts: Counts) -> None:
    assert on(counts).fits
    assert on(counts).largest is None
    told = predict_memory(counts, TrainingPlan(steps=7, batch_size=BATCH), MACHINES["h200"])
    assert told.limit == 141 * 10**9


def test_requests_that_make_no_sense_are_refused(counts: Counts) -> None:
    with pytest.raises(ConfigError, match=r"a batch of 48 has no 5 equal shares for 5 devices and accumulate=1; .*50"):
        on(counts, 5)
    with pytest.raises(ConfigError, match="parallel is one of data, sharded, not 'model'"):
        on(counts, 2, "model")
    with pytest.raises(ConfigError, match="devices"):
        on(counts, 0)


def test_half_precision_makes_activations_smaller(text: tuple[Any, NextToken, TrainingPlan], counts: Counts) -> None:
    model, task, plan = text
    half = predict_memory(count_step(model, task, replace(plan, precision="bfloat16")), plan, SIMPLE)
    assert half.memory.activations < 0.8 * on(counts).memory.activations
    assert half.seconds.arithmetic < 0.5 * on(counts).seconds.arithmetic
