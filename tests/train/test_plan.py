"""A plan is checked where it is made."""

from typing import Any

import pytest

from regard.base.config import from_json, override, to_json
from regard.base.errors import ConfigError
from regard.train.averaging import LastKAverage
from regard.train.optimizers import AdamW, Muon, Rule
from regard.train.plan import TrainingPlan
from regard.train.schedule import InverseRoot


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, r"Plan\(steps\) is 0, but must be at least 1"),
        ({"batch": 2.5}, r"Plan\(batch\) takes a whole number, not 2.5"),
        ({"accumulate": 5}, r"a batch of 24 has no 5 equal shares; see Plan\(accumulate\)"),
        ({"evaluate_every": 0}, r"Plan\(evaluate_every\) is 0"),
        ({"patience": 0}, r"Plan\(patience\) is 0"),
        ({"keep": 0}, r"Plan\(keep\) is 0"),
        ({"seed": -1}, r"Plan\(seed\) is -1"),
        ({"precision": "float8"}, r"Plan\(precision\) is one of float32, bfloat16, float16, not 'float8'"),
        ({"choose": "first"}, r"Plan\(choose\) is 'best' or 'last', not 'first'"),
        ({"clip": 0.0}, r"Plan\(clip\) is above 0 or None, not 0.0"),
        ({"clip": float("nan")}, r"Plan\(clip\) is nan, but takes one real number"),
    ],
)
def test_what_is_no_plan_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingPlan(**{"steps": 12, "batch": 24, **settings})


def test_a_plan_goes_through_json_and_is_changed_by_name() -> None:
    plan = TrainingPlan(
        steps=7, batch=6, accumulate=3, averaging=LastKAverage(count=3), schedule=InverseRoot(warmup=5),
        optimiser=Muon(rest=AdamW(betas=(0.8, 0.9), rules=(Rule(names="head", rate=2.0),))),
    )  # fmt: skip
    assert from_json("plan.json", TrainingPlan, to_json(plan)) == plan
    assert override(plan, {"optimiser.rest.rate": 0.5}).optimiser.rest.rate == 0.5  # type: ignore[union-attr]
