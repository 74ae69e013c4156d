"""Which batches can share a CUDA graph, and, on a GPU, that captured steps give the results of steps without graphs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from regard import padding
from regard.train.averaging import ExponentialAverage
from regard.train.loop import TrainingResult, fit
from regard.train.optimizers import AdamW, CombinedOptimizer, Muon
from regard.train.process_group import single_process
from regard.train.schedule import Constant
from regard.train.step_graphs import EAGER_STEPS, batch_signature, list_tensors
from regard.train.task import Loss
from tests.train.tiny import Points, Tiny, plan


class Pair(NamedTuple):
    a: Tensor
    b: object


@dataclass(frozen=True)
class Held:
    x: Tensor
    more: dict[str, Any]


X = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, X[:2]),
        (X, X.double()),
        ([X], (X,)),
        ([X], [X, X]),
        (Pair(X, 1), Pair(X, 2)),
        (Pair(X, 1), Pair(X, 1.0)),
        (Held(X, {"k": "a"}), Held(X, {"k": "b"})),
        (Held(X, {"k": X}), Held(X, {"l": X})),
        ({"k": [X, None]}, {"k": [X, X]}),
        (padding([2, 1, 3]), padding([2, 1])),
        (padding([2, 1]), padding([2, 1], side="left", width=3)),
        (object(), object()),
        ({1}, {1}),  # not hashable: no two are taken for equal
    ],
)
def test_batches_that_need_different_graphs_have_different_signatures(one: object, other: object) -> None:
    assert batch_signature(one) != batch_signature(other)


def test_values_of_tensors_are_not_part_of_the_signature() -> None:
    one, other = (
        [Pair(torch.randn(3, 5), "k"), {"m": (padding([size, 1]), None)}, Held(torch.randn(2), {"n": [torch.ones(1)]})]
        for size in (2, 3)
    )
    assert batch_signature(one) == batch_signature(other)
    assert hash(batch_signature(one)) == hash(batch_signature(other))


def test_tensors_are_listed_in_one_order() -> None:
    a, b, c, d = torch.arange(4).unbind()
    assert [int(x) for x in list_tensors([Pair(a, 1), {"m": (b,)}, Held(c, {"n": [d]})])] == [0, 1, 2, 3]


def test_learning_rates_on_a_cpu_are_floats() -> None:
    optimizer = CombinedOptimizer(Muon(lr=0.3, adamw=AdamW(lr=0.2)), Tiny())
    optimizer.scale_lr(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.15, 0.1, 0.1]


class OnDevice(Points):
    """`Points` whose validation runs on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"score": float(model(self.x.to(next(model.parameters()).device)).mean())}


class Synchronizing(OnDevice):
    """A task whose loss reads a value on the host."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        assert found.total.item() >= 0
        return found


class Varying(OnDevice):
    """A task whose batches have another size every second step."""

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        x, y = super().batch(step, part, of)
        return (x, y) if step % 2 else (x[:-1], y[:-1])


PLANS = {
    "adamw": plan(steps=30),
    "muon": plan(steps=30, optimizer=Muon(lr=0.03, adamw=AdamW(lr=0.02))),
    "accumulated": plan(steps=30, gradient_accumulation_steps=3, averaging=ExponentialAverage(decay=0.7)),
    "bfloat16": plan(steps=30, precision="bfloat16"),
    "float16": plan(steps=30, precision="float16"),
}


def run(settings: Any, task: Points | None = None, **options: Any) -> tuple[TrainingResult, list[str]]:
    messages: list[str] = []
    group = single_process("cuda")
    model = Tiny(dropout=0.2)
    result = fit(model, task or OnDevice(), settings, group=group, on_message=messages.append, **options)
    return result, messages


def same(one: TrainingResult, other: TrainingResult) -> bool:
    weights = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return (one.losses, one.metrics) == (other.losses, other.metrics) and all(torch.equal(a, b) for a, b in weights)


@pytest.mark.cuda
@pytest.mark.parametrize("name", PLANS)
def test_captured_steps_give_the_losses_and_weights_of_steps_without_graphs(name: str) -> None:
    captured, messages = run(PLANS[name])
    plain, none = run(replace(PLANS[name], cuda_graphs=False))
    assert same(captured, plain)
    assert none == []
    assert messages == (
        [] if name == "float16" else ["training steps run as CUDA graphs; cuda_graphs=False turns this off"]
    )


@pytest.mark.cuda
def test_batches_of_different_shapes_run_without_a_graph() -> None:
    found, messages = run(PLANS["adamw"], Varying())
    assert same(found, run(replace(PLANS["adamw"], cuda_graphs=False), Varying())[0])
    assert messages == ["training steps run without CUDA graphs, because batches differ in shape"]


@pytest.mark.cuda
def test_a_run_resumed_with_graphs_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    settings = plan(steps=30, schedule=Constant(), save_every=15, evaluate_every=None)
    assert 2 * EAGER_STEPS < 15
    whole, _ = run(settings)
    run(replace(settings, steps=15), folder=tmp_path)
    resumed, messages = run(settings, folder=tmp_path, resume=True)
    assert messages
    assert resumed.losses[-1] == whole.losses[-1]
    weights = zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.cuda
def test_a_step_that_synchronizes_runs_without_a_graph_and_says_why() -> None:
    found, messages = run(PLANS["adamw"], Synchronizing())
    assert same(found, run(replace(PLANS["adamw"], cuda_graphs=False))[0])
    assert len(messages) == 1
    assert "run without CUDA graphs, because one could not be captured: " in messages[0]
