"""Validation of a training plan, and its JSON form."""

from typing import Any

import pytest

from regard.base.config import from_json, override, to_json
from regard.base.errors import ConfigError
from regard.train.averaging import LastKAverage
from regard.train.optimizers import AdamW, Muon, ParamGroup
from regard.train.plan import TrainingPlan
from regard.train.schedule import InverseSquareRoot


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, r"TrainingPlan\(steps\) is 0, but must be at least 1"),
        ({"batch_size": 2.5}, r"TrainingPlan\(batch_size\) takes a whole number, not 2.5"),
        (
            {"gradient_accumulation_steps": 5},
            r"batch_size=24 cannot be divided evenly by world size 1 x gradient_accumulation_steps=5; .* such as 25",
        ),
        ({"evaluate_every": 0}, r"TrainingPlan\(evaluate_every\) is 0"),
        ({"patience": 0}, r"TrainingPlan\(patience\) is 0"),
        ({"keep_checkpoints": 0}, r"TrainingPlan\(keep_checkpoints\) is 0"),
        ({"seed": -1}, r"TrainingPlan\(seed\) is -1"),
        ({"precision": "float8"}, r"TrainingPlan\(precision\) must be one of float32, bfloat16, float16, not 'float8'"),
        ({"max_grad_norm": 0.0}, r"TrainingPlan\(max_grad_norm\) must be above 0, not 0"),
        ({"max_grad_norm": float("nan")}, r"TrainingPlan\(max_grad_norm\) is nan, but takes one real number"),
    ],
)
def test_invalid_settings_raise_an_error(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingPlan(**{"steps": 12, "batch_size": 24, **settings})


def test_a_plan_is_read_back_from_json_and_changed_by_dotted_name() -> None:
    plan = TrainingPlan(
        steps=7, batch_size=6, gradient_accumulation_steps=3, averaging=LastKAverage(count=3),
        schedule=InverseSquareRoot(warmup=5),
        optimizer=Muon(adamw=AdamW(betas=(0.8, 0.9), param_groups=(ParamGroup(pattern="head", lr_scale=2.0),))),
    )  # fmt: skip
    assert from_json("plan.json", TrainingPlan, to_json(plan)) == plan
    assert override(plan, {"optimizer.adamw.lr": 0.5}).optimizer.adamw.lr == 0.5  # type: ignore[union-attr]
