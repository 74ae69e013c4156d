"""The mathematics of the page, compared with regard in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.core.scores import t5_bucket
from regard.work.attention_steps import HeadInputs
from regard.work.common_mistakes import common_mistakes
from tests.explorer.node import needs_node, run_node

pytestmark = needs_node


def to_json(value: Any) -> Any:
    """Lists with Infinity and NaN as texts."""
    if isinstance(value, torch.Tensor):
        return to_json(value.tolist())
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def call(*calls: tuple[str, str, list[Any]]) -> list[Any]:
    """The values of functions in maths.js."""
    answers = run_node("golden.mjs", [[file, name, to_json(given)] for file, name, given in calls])
    return [answer["value"] for answer in answers]


def as_tensor(value: Any) -> torch.Tensor:
    return torch.tensor([[float(x) for x in row] for row in value], dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 40.0, math.inf])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_attention_equals_attend(beta: float, size: float) -> None:
    q, k, v = torch.randn(5, 3).double() * size, torch.randn(7, 3).double(), torch.randn(7, 2).double()
    visible = torch.rand(5, 7) > 0.3
    visible[2] = False  # a row that sees nothing
    options = {"beta": to_json(beta), "visible": visible.tolist(), "bias": None}
    (found,) = call(("maths.js", "attend", [q.tolist(), k.tolist(), v.tolist(), options]))
    wanted = regard.attend(q[None, None], k[None, None], v[None, None], mask=visible, beta=beta)[0, 0]
    torch.testing.assert_close(as_tensor(found["output"]), wanted, rtol=1e-9, atol=1e-9)
    assert as_tensor(found["weights"])[2].tolist() == [0.0] * 7


def test_equal_scores_share_hard_attention() -> None:
    (found,) = call(("maths.js", "softmax", [[2.0, 5.0, 5.0], math.inf]))
    assert found == [0, 0.5, 0.5]


def test_visible_nan_gives_nan_and_hidden_nan_does_not() -> None:
    seen, hidden = call(
        ("maths.js", "softmax", [[1.0, math.nan], 1, [True, True]]),
        ("maths.js", "softmax", [[1.0, math.nan], 1, [True, False]]),
    )
    assert seen == ["NaN", "NaN"]
    assert hidden == [1, 0]


def test_positions_equal_those_of_regard() -> None:
    x = torch.randn(5, 6).double()
    table, turned, *slopes = call(
        ("maths.js", "sinusoidal", [5, 6]),
        ("maths.js", "rotary", [x.tolist(), [3, 4, 5, 6, 7]]),
        *(("maths.js", "alibiSlopes", [heads]) for heads in range(1, 9)),
    )
    torch.testing.assert_close(as_tensor(table).float(), regard.sinusoidal(5, 6), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(as_tensor(turned), regard.rotary()(x[None, None], 3)[0, 0], rtol=1e-6, atol=1e-6)
    for heads, found in enumerate(slopes, 1):
        assert found == pytest.approx(regard.core.scores.alibi_slopes(heads).tolist())


def test_t5_buckets_equal_those_of_regard() -> None:
    distances = list(range(-300, 301))
    found = call(*(("maths.js", "t5Bucket", [distance, 32, 128]) for distance in distances))
    assert found == t5_bucket(torch.tensor(distances), 32, 128, True).tolist()


def test_the_first_order_change_is_the_derivative() -> None:
    q, k, v = torch.randn(1, 2).double(), torch.randn(3, 2).double().requires_grad_(), torch.randn(3, 2).double()
    nudge = torch.randn(2).double()

    def output(keys: torch.Tensor) -> torch.Tensor:
        return regard.attend(q[None, None], keys[None, None], v[None, None], beta=1.5, kernel="eager")[0, 0, 0]

    change = torch.zeros(3, 2).double()
    change[1] = nudge
    _, wanted = torch.autograd.functional.jvp(output, k, change)
    weights = (1.5 * q @ k.T).softmax(-1)[0]
    given = [weights.tolist(), v.tolist(), output(k).tolist(), 1.5, [0, float(q[0] @ nudge), 0]]
    (found,) = call(("maths.js", "firstOrderChange", given))
    assert found == pytest.approx(wanted.tolist())


def test_draws_depend_on_the_seed_alone() -> None:
    state = {
        "query": [2.4, 0], "keys": [[1, 0], [0, 1]], "values": [[2, 0], [0, 2]], "beta": 5, "second": [0, 2.4],
        "spread": 0.01, "along": 0, "length": 0.5, "seed": 3, "nudged": None,
    }  # fmt: skip
    first, again, other = call(*(("plane.js", "compute", [{**state, "seed": seed}]) for seed in (3, 3, 4)))
    assert first["clouds"] == again["clouds"] != other["clouds"]
    assert first["clouds"][1]["deviation"] < first["clouds"][0]["deviation"] / 2  # two heads against one


def test_predicted_mistakes_are_those_of_work() -> None:
    """Every mistake in the weights of one query that `regard work --check` knows, with its name and its numbers."""
    q, k = np.array([[1.2, 0.8]]), np.array([[1, 0], [0, 1], [-0.8, -0.6], [0.3, 1.1]])
    scores = q @ k.T
    beta = 2**-0.5
    head = HeadInputs(None, {"q": q, "k": k, "v": k}, {}, {}, np.ones_like(scores, dtype=bool), True, 2, 2)
    values = {"q": q, "k": k, "v": k, "scores": scores, "scaled": scores * beta}
    [answer] = run_node("golden.mjs", [["predict.js", "mistakes", [scores[0].tolist(), beta]]])
    found = [(name, weights) for name, _, weights in answer["value"]]
    explanations = {explanation for _, explanation, _ in answer["value"]}
    compared = 0
    for mistake in common_mistakes():
        # "scale after softmax" divides by the square root of the width, which the plane does not have
        if mistake.step != "weights" or mistake.name == "scale after softmax":
            continue
        wanted = mistake.compute(head, values)
        if wanted is None or mistake.name == "softmax over everything":  # one query: it is the softmax itself
            continue
        near = [weights for name, weights in found if name == mistake.name and weights == pytest.approx(wanted[0])]
        assert near, (mistake.name, mistake.explanation)
        assert mistake.explanation in explanations
        compared += 1
    assert compared >= 9
