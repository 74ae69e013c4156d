"""Check a student's steps: each common mistake is planted and found under its name, and nothing else is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regard.base.errors import ConfigError
from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.check import check
from regard.work.common_mistakes import common_mistakes
from regard.work.exact_numbers import to_floats
from regard.work.problem import build_problem
from regard.work.review import Review
from regard.work.solution import Solution, solve
from regard.work.student_answer import parse_answer

Steps = dict[str, Any]

# correct up to the weights, which were rounded to two digits before the product
WORKSHEET: Steps = {
    "q": [[1, 3], [-1, 1], ["5/2", -2]],
    "k": [[3, "-1/2"], [2, "-3/2"], ["-5/2", "7/2"]],
    "v": [["5/2", "-3/2"], [-1, 3], [-2, -3]],
    "scores": [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]],
    "weights": [[0, 0, 1], [0, 0, 1], [0.62, 0.38, 0]],
    "output": [[-2, -3], [-2, -3], [1.17, 0.21]],
}


def named(name: str, **changes: Any) -> Solution:
    matrices, biases, own = BUILTIN_PROBLEMS[name]()
    return solve(build_problem(matrices=matrices, biases=biases, **{**own, **changes}))


def review(solution: Solution, steps: Steps) -> Review:
    return check(solution, parse_answer(steps, solution))


def test_early_rounding_is_found_in_the_worksheet() -> None:
    found = review(named("three-tokens"), WORKSHEET)
    (comment,) = found.comments
    assert (comment.mistake, comment.location, comment.found) == ("early rounding", "output[3,1]", "1.17")
    assert comment.expected == pytest.approx(1.178608, abs=5e-7)
    assert comment.also == ((3, 2),)
    assert "the weights were rounded to 2 digits" in comment.explanation
    assert found.correct == ("q", "k", "v", "scores", "weights")
    assert str(found).splitlines()[1] == "output[3,1]: expected 1.178608 (1.18 to 2 digits), found 1.17."


def test_early_rounding_is_found_when_the_weights_are_not_written_down() -> None:
    (comment,) = review(named("three-tokens"), {"output": [[None, None], [None, None], ["1.170", "0.210"]]}).comments
    assert (comment.mistake, comment.location) == ("early rounding", "output[3,1]")
    assert "the weights were rounded to 2 digits" in comment.explanation


def test_a_correct_answer_is_correct_in_any_number_of_digits() -> None:
    solution = named("udl-12-2")
    for digits in (2, 5, 9):
        steps = {
            key: [rounded(to_floats(solution.step(key, head).values), digits) for head in (1, 2)]
            for key in ("q", "k", "v", "scores", "scaled", "weights", "output")
        }
        found = review(solution, {**steps, "result": rounded(to_floats(solution.output), digits)})
        assert found.ok, str(found)
        assert "every step that is written is correct" in str(found)
        assert len(found.correct) == 15


def rounded(matrix: Any, digits: int = 6) -> list[list[str]]:
    return [[f"{float(value):.{digits}f}" for value in row] for row in matrix]


source = np.random.RandomState(7)
X = source.randint(-4, 5, size=(5, 3)) / 2
W = {role: source.randint(-4, 5, size=(3, 3)) / 2 for role in "qkv"}
B = {role: source.randint(-4, 5, size=3) / 2 for role in "qkv"}


def small(by_rows: bool = True, **changes: Any) -> Solution:
    """Five tokens and one head of width 3; all weights are square so that every product can be transposed."""

    def grid(values: Any) -> Any:
        values = values if by_rows else values.T
        return (tuple(tuple(float(value) for value in row) for row in values),)

    return solve(
        build_problem(
            "small",
            {"inputs": grid(X), **{f"w{role}": grid(W[role]) for role in "qkv"}},
            {f"b{role}": (tuple(map(float, B[role])),) for role in "qkv"},
            convention="rows" if by_rows else "columns",
            **changes,
        )
    )


def softmax(scores: Any, axis: int = 1) -> Any:
    raised = np.exp(scores - scores.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def forward(**changed: Callable[[Steps], Any]) -> Steps:
    """All steps by numpy alone, some of them changed."""
    right: dict[str, Callable[[Steps], Any]] = {
        **{role: lambda s, role=role: X @ W[role] + B[role] for role in "qkv"},  # type: ignore[misc]
        "scores": lambda s: s["q"] @ s["k"].T,
        "scaled": lambda s: s["scores"] / 3**0.5,
        "weights": lambda s: softmax(s["scaled"]),
        "output": lambda s: s["weights"] @ s["v"],
    }
    steps: Steps = {}
    for key, compute in right.items():
        steps[key] = changed.get(key, compute)(steps)
    return steps


def cosines(q: Any, k: Any) -> Any:
    return np.array([[float(a @ b) / np.sqrt((a @ a) * (b @ b)) for b in k] for a in q])


PLANTED: list[tuple[str, str, Callable[[Steps], Any]]] = [
    ("transposed product", "q", lambda s: X @ W["q"].T + B["q"]),
    ("wrong factor", "k", lambda s: X @ W["v"] + B["v"]),
    ("missing bias", "v", lambda s: X @ W["v"]),
    ("sign", "k", lambda s: X @ W["k"] - B["k"]),
    ("wrong bias", "q", lambda s: X @ W["q"] + B["k"]),
    ("rows in another order", "v", lambda s: (X @ W["v"] + B["v"])[[0, 2, 1, 3, 4]]),
    ("scaled too early", "scores", lambda s: s["q"] @ s["k"].T / 3**0.5),
    ("sign", "scores", lambda s: -(s["q"] @ s["k"].T)),
    ("transposed product", "scores", lambda s: s["k"] @ s["q"].T),
    ("wrong factor", "scores", lambda s: s["q"] @ s["q"].T),
    ("divided by the lengths", "scores", lambda s: cosines(s["q"], s["k"])),
    ("missing scale", "scaled", lambda s: s["scores"]),
    ("scale by d instead of sqrt(d)", "scaled", lambda s: s["scores"] / 3),
    ("inverted scale", "scaled", lambda s: s["scores"] * 3**0.5),
    ("scale from another width", "scaled", lambda s: s["scores"] / 5**0.5),
    ("softmax over the other axis", "weights", lambda s: softmax(s["scaled"], 0)),
    ("softmax over everything", "weights", lambda s: np.exp(s["scaled"]) / np.exp(s["scaled"]).sum()),
    ("all weight on the largest score", "weights", lambda s: np.eye(5)[s["scaled"].argmax(1)]),
    ("no softmax", "weights", lambda s: s["scaled"]),
    ("no normalisation", "weights", lambda s: np.exp(s["scaled"] - s["scaled"].max(1, keepdims=True))),
    ("no exponentials", "weights", lambda s: s["scaled"] / s["scaled"].sum(1, keepdims=True)),
    ("no softmax", "weights", lambda s: s["scores"]),
    (
        "divided by the length",
        "weights",
        lambda s: np.exp(s["scaled"]) / np.sqrt((np.exp(s["scaled"]) ** 2).sum(1))[:, None],
    ),
    ("divided by the number of keys", "weights", lambda s: np.exp(s["scaled"]) / 5),
    ("sigmoid instead of softmax", "weights", lambda s: 1 / (1 + np.exp(-s["scaled"]))),
    ("logarithm of the weights", "weights", lambda s: np.log(softmax(s["scaled"]))),
    ("percent", "weights", lambda s: 100 * softmax(s["scaled"])),
    ("another base", "weights", lambda s: softmax(s["scaled"] * np.log(2))),
    ("another base", "weights", lambda s: softmax(s["scaled"] * np.log(10))),
    ("softmax twice", "weights", lambda s: softmax(softmax(s["scaled"]))),
    ("equal weights", "weights", lambda s: np.full((5, 5), 0.2)),
    ("missing scale", "weights", lambda s: softmax(s["scores"])),
    ("scale after softmax", "weights", lambda s: softmax(s["scores"]) / np.sqrt(s["q"].shape[1])),
    ("sign", "weights", lambda s: softmax(-s["scaled"])),
    ("rows and columns exchanged", "weights", lambda s: softmax(s["scaled"]).T),
    ("columns in another order", "weights", lambda s: softmax(s["scaled"])[:, [4, 1, 2, 3, 0]]),
    ("transposed product", "output", lambda s: s["weights"].T @ s["v"]),
    ("wrong factor", "output", lambda s: s["weights"] @ s["k"]),
    ("weights ignored", "output", lambda s: np.ones((5, 5)) @ s["v"]),
    ("weights ignored", "output", lambda s: s["v"]),
]


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize(("name", "key", "wrong"), PLANTED, ids=[f"{key}: {name}" for name, key, _ in PLANTED])
def test_a_planted_mistake_is_found_under_its_name(
    name: str, key: str, wrong: Callable[[Steps], Any], by_rows: bool
) -> None:
    steps = {each: rounded(value if by_rows else value.T) for each, value in forward(**{key: wrong}).items()}
    found = review(small(by_rows), steps)
    if name.endswith("in another order") and not by_rows:
        name = {"rows": "columns", "columns": "rows"}[name.split()[0]] + " in another order"
    assert [(comment.mistake, comment.step) for comment in found.comments] == [(name, key)], str(found)
    judged = {*found.correct, *found.carried_forward}
    assert judged == {each for each in steps if each != key}, (
        "later steps are checked against the numbers of the mistake"
    )
    assert not {*list(steps)[: list(steps).index(key)]} & {*found.carried_forward}, (
        "steps before a mistake do not follow from it"
    )


LATER = [(name, key, wrong) for name, key, wrong in PLANTED if key in ("scores", "scaled", "weights")]


@pytest.mark.parametrize(("name", "key", "wrong"), LATER, ids=[f"{key}: {name}" for name, key, _ in LATER])
def test_a_mistake_is_recognised_from_the_output_alone(name: str, key: str, wrong: Callable[[Steps], Any]) -> None:
    if name == "scaled too early":
        name = "scale by d instead of sqrt(d)"  # scaled twice gives the same numbers
    if name == "columns in another order":
        name = "unexplained"  # only the sums over keys are seen
    if name == "rows and columns exchanged":
        name = "transposed product"  # both give the same numbers
    found = review(small(), {"output": rounded(forward(**{key: wrong})["output"], 8)})
    (comment,) = found.comments
    assert (comment.step, comment.mistake) == ("output", name), str(found)


MASKED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("mask forgotten", lambda s, seen: softmax(s)),
    ("mask inverted", lambda s, seen: np.nan_to_num(softmax(np.where(~seen, s, -1e9))) * (~seen)),
    ("mask transposed", lambda s, seen: softmax(np.where(seen.T, s, -1e9))),
    ("mask off by one", lambda s, seen: softmax(np.where(np.tril(np.ones((5, 5)), 1) == 1, s, -1e9))),
    ("mask off by one", lambda s, seen: softmax(np.where(np.tril(seen, -1), s, -1e9)) * np.tril(seen, -1)),
    ("mask after softmax", lambda s, seen: softmax(s) * seen),
    ("hidden scores set to zero", lambda s, seen: softmax(np.where(seen, s, 0.0))),
]


@pytest.mark.parametrize(("name", "wrong"), MASKED, ids=[name for name, _ in MASKED])
def test_mask_mistakes_are_found(name: str, wrong: Callable[[Any, Any], Any]) -> None:
    seen = np.tril(np.ones((5, 5), dtype=bool))
    weights = wrong(forward()["scaled"], seen)
    (comment,) = review(small(mask=causal()), {"weights": rounded(weights)}).comments
    assert (comment.mistake, comment.step) == (name, "weights")


def test_an_unwanted_scale_is_found() -> None:
    (comment,) = review(small(scaled=False), {"weights": rounded(forward()["weights"])}).comments
    assert comment.mistake == "unwanted scale"
    assert "not written down" in comment.explanation


def test_keys_that_were_not_transposed_are_found() -> None:
    matrices = {name: ((tuple(map(float, row))) for row in X[:3]) for name in "qkv"}
    solution = solve(build_problem("square", {name: (tuple(rows),) for name, rows in matrices.items()}))
    (comment,) = review(solution, {"scores": rounded(X[:3] @ X[:3])}).comments
    assert (comment.mistake, comment.explanation) == ("transposed product", "the keys were not transposed")


def test_every_common_mistake_is_planted_somewhere() -> None:
    planted = {name for name, _, _ in PLANTED} | {name for name, _ in MASKED} | {"unwanted scale"}
    assert {mistake.name for mistake in common_mistakes()} <= planted


def altered(**entries: Any) -> Steps:
    """Correct steps of three-tokens, except for the entries `step_row_column`."""
    solution = named("three-tokens")
    steps = {
        key: rounded(to_floats(solution.step(key).values)) for key in ("q", "k", "v", "scores", "weights", "output")
    }
    for entry, value in entries.items():
        key, row, column = entry.split("_")
        steps[key][int(row) - 1][int(column) - 1] = value
    return steps


@pytest.mark.parametrize(
    ("entry", "value", "name", "explanation"),
    [
        ("q_3_2", "2", "sign", "this entry has the wrong sign"),
        ("q_3_1", "1.5", "sign", "product 3 of the sum, 0.500000, has the wrong sign"),
        ("k_2_2", "-1/2", "missing term", "product 2 of the sum, -1.000000, is missing"),
        ("scores_1_1", "6", "copied from another entry", "this is the number that belongs at [2,3]"),
        ("scores_3_3", "-13.5", "arithmetic", "this number is wrong"),
        ("weights_3_1", "0.7", "arithmetic", "this number is wrong"),
        ("output_3_2", "-0.198933", "sign", "this entry has the wrong sign"),
    ],
)
def test_a_single_wrong_entry_is_found_and_described(entry: str, value: str, name: str, explanation: str) -> None:
    key, row, column = entry.split("_")
    found = review(named("three-tokens"), {key: altered(**{entry: value})[key]})
    (comment,) = found.comments
    assert (comment.step, comment.row, comment.column, comment.found) == (key, int(row), int(column), value)
    assert comment.mistake == name
    assert comment.explanation.startswith(explanation)
    assert comment.also == ()


def test_an_error_carried_forward_is_not_a_second_mistake() -> None:
    steps = forward(scores=lambda s: np.where(np.eye(5) == 1, -(s["q"] @ s["k"].T), s["q"] @ s["k"].T))
    found = review(small(), {key: rounded(value, 4) for key, value in steps.items()})
    assert [(comment.step, comment.mistake) for comment in found.comments] == [("scores", "sign")]
    assert found.comments[0].also == ((2, 2), (3, 3), (4, 4), (5, 5))


def test_a_copying_error_that_was_not_used_is_the_only_mistake() -> None:
    steps = altered(scores_1_1="9")
    found = review(named("three-tokens"), steps)
    assert [(comment.step, comment.row, comment.column) for comment in found.comments] == [("scores", 1, 1)]


def test_a_wrong_entry_may_be_used_with_more_digits_than_it_was_written_in() -> None:
    def off(s: Steps) -> Any:
        scaled = s["scores"] / 3**0.5
        scaled[2, 1] += 0.123456
        return scaled

    steps = {key: rounded(value, 3) for key, value in forward(scaled=off).items()}
    found = review(small(), steps)
    assert [(comment.step, comment.row, comment.column) for comment in found.comments] == [("scaled", 3, 2)], str(found)


def test_a_second_mistake_is_found_after_the_first() -> None:
    steps = forward(q=lambda s: X @ W["q"], weights=lambda s: softmax(s["scaled"], 0))
    found = review(small(), {key: rounded(value) for key, value in steps.items()})
    assert [(comment.step, comment.mistake) for comment in found.comments] == [
        ("q", "missing bias"),
        ("weights", "softmax over the other axis"),
    ]
    assert "Another mistake, given the numbers above it:" in str(found)


def test_a_transposed_matrix_is_recognised_by_its_shape() -> None:
    (comment,) = review(small(), {"q": rounded(forward()["q"].T)}).comments
    explanation = "this is 3 x 5, but should be 5 x 3: rows are where columns should be"
    assert (comment.mistake, comment.explanation) == ("rows and columns exchanged", explanation)
    broken = forward()["q"].T.copy()
    broken[0, 1] += 1
    (comment,) = review(small(), {"q": rounded(broken)}).comments
    assert "some numbers are wrong too" in comment.explanation


def test_one_entry_does_not_explain_a_matrix_that_is_wrong_as_a_whole() -> None:
    weights = np.roll(forward()["weights"], 1, 1) ** 2
    weights[0, 0] = forward()["weights"][3, 2]  # the number that belongs elsewhere
    (comment,) = review(small(), {"weights": rounded(weights)}).comments
    assert comment.mistake == "unexplained", comment
    off = forward()["q"] + np.arange(15).reshape(5, 3) + 1.5
    off[0, 0] = forward()["q"][0, 0] - X[0, 0] * W["q"][0, 0]  # one product is missing
    (comment,) = review(small(), {"q": rounded(off)}).comments
    assert comment.mistake == "unexplained", comment


def test_random_numbers_are_unexplained() -> None:
    (comment,) = review(small(), {"weights": rounded(np.arange(25).reshape(5, 5) / 7 + 2)}).comments
    assert comment.mistake == "unexplained"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda joined, output_projection: joined, "missing output projection"),
        (lambda joined, output_projection: output_projection.T @ joined, "transposed product"),
        (lambda joined, output_projection: output_projection @ np.roll(joined, 4, 0), "heads in another order"),
        (
            lambda joined, output_projection: output_projection @ joined.reshape(2, 4, 6).swapaxes(0, 1).reshape(8, 6),
            "heads interleaved",
        ),
    ],
)
def test_mistakes_in_concatenating_heads_are_found(change: Callable[[Any, Any], Any], name: str) -> None:
    solution = named("udl-12-2")
    assert solution.problem.output_projection is not None
    wrong = change(
        np.array(to_floats(solution.step("concat").values)),
        np.array(to_floats(solution.problem.output_projection.weights)),
    )
    (comment,) = review(solution, {"result": rounded(wrong)}).comments
    assert (comment.step, comment.mistake) == ("result", name)


def test_the_head_of_a_mistake_is_named() -> None:
    solution = named("udl-12-2")
    scores = [np.array(to_floats(solution.step("scores", head).values)) for head in (1, 2)]
    found = review(solution, {"scores": [rounded(scores[0]), rounded(scores[1].T)]})
    assert found.comments[0].location == "scores[1,2] of head 2"
    assert found.correct == ("scores of head 1",)
    assert found.to_dict()["mistakes"][0]["column"] == 2


def test_concatenated_heads_without_output_projection_have_a_result() -> None:
    solution = named("three-tokens", heads=2)
    joined = to_floats(solution.output)
    assert review(solution, {"result": rounded(joined)}).ok
    (comment,) = review(solution, {"result": rounded([row[::-1] for row in joined])}).comments
    assert comment.mistake == "heads in another order"


def test_early_rounding_is_rejected_when_correct_entries_contradict_it() -> None:
    scores = [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13]]
    (comment,) = review(named("three-tokens"), {"scores": scores}).comments
    assert (comment.mistake, comment.location) == ("arithmetic", "scores[3,3]")


MIXED_DIGITS = [["0.0015", "0", "0.9985"], ["0.0001", "0.0001", "0.9999"], ["0.62", "0.38", "0"]]


@pytest.mark.parametrize(
    ("weights", "first"),
    [(WORKSHEET["weights"], ["-1.99", "-3.0"]), (MIXED_DIGITS, ["-1.9932", "-2.9976"])],
    ids=["one row with more digits", "rows with different digits"],
)
def test_early_rounding_of_a_single_row_is_found(weights: Any, first: list[str]) -> None:
    rows = [first, ["-2", "-3"], ["1.17", "0.21"]]
    (comment,) = review(named("three-tokens"), {"weights": weights, "output": rows}).comments
    assert (comment.mistake, comment.location, comment.also) == ("early rounding", "output[3,1]", ((3, 2),))
    assert "the weights were rounded to 2 digits" in comment.explanation


def test_rounded_scores_are_named_in_an_unscaled_problem() -> None:
    scores = np.array([[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]])
    raised = np.exp(np.round(scores))
    weights = rounded(raised / raised.sum(1, keepdims=True))
    (comment,) = review(named("three-tokens"), {"scores": scores.tolist(), "weights": weights}).comments
    assert comment.mistake == "early rounding"
    assert comment.explanation.startswith("the scores were rounded to 0 digits")


def test_the_scale_of_all_heads_together_is_recognised() -> None:
    solution = named("three-tokens", heads=2, scaled=True)
    scores = [np.array(to_floats(solution.step("scores", head).values)) for head in (1, 2)]
    raised = [np.exp(each / 2**0.5) for each in scores]
    weights = [rounded(each / each.sum(1, keepdims=True)) for each in raised]
    found = review(solution, {"weights": weights}).comments
    assert [comment.mistake for comment in found] == ["scale from another width"] * 2
    assert "the width of all heads together" in found[0].explanation


@pytest.mark.parametrize(
    ("name", "base", "times"), [("percent", np.e, 100), ("another base", 2, 1), ("another base", 10, 1)]
)
def test_percent_and_powers_of_another_base_are_recognised(name: str, base: float, times: int) -> None:
    raised = base ** np.array([[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]])
    weights = rounded(times * raised / raised.sum(1, keepdims=True))
    (comment,) = review(named("three-tokens"), {"weights": weights}).comments
    assert comment.mistake == name


def test_exchanged_factors_are_explained_in_both_conventions() -> None:
    for by_rows in (True, False):
        scores = forward()["scores"].T
        (comment,) = review(small(by_rows), {"scores": rounded(scores if by_rows else scores.T)}).comments
        assert comment.mistake == "transposed product"
        assert comment.explanation.startswith(
            "the two factors were exchanged, so that keys are where queries should be"
        )


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_continuing_with_transposed_scores_is_not_a_second_mistake(by_rows: bool) -> None:
    steps = forward()
    for key in ("scores", "scaled", "weights"):
        steps[key] = steps[key].T
    found = review(small(by_rows), {key: rounded(each if by_rows else each.T) for key, each in steps.items()})
    assert [(comment.step, comment.mistake) for comment in found.comments] == [("scores", "transposed product")]
    assert found.correct == ("q", "k", "v", "output")
    assert found.carried_forward == ("scaled", "weights")


def test_an_answer_with_only_gaps_is_refused_and_a_step_with_only_gaps_is_skipped() -> None:
    gaps = [[None, None]] * 3
    with pytest.raises(ConfigError, match="has only gaps, so there is nothing to check; write some numbers"):
        review(named("three-tokens"), {"output": gaps})
    assert review(named("three-tokens"), {"q": WORKSHEET["q"], "output": gaps}).correct == ("q",)


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_a_transposed_matrix_is_shown_at_an_entry_that_differs(by_rows: bool) -> None:
    q = forward()["q"]
    (comment,) = review(small(by_rows), {"q": rounded(q.T if by_rows else q)}).comments
    written, right = (q.T, q) if by_rows else (q, q.T)
    at = comment.row - 1, comment.column - 1
    assert (comment.found, comment.expected) == (f"{written[at]:.6f}", right[at])
    assert written[at] != right[at]
    assert f"this is {' x '.join(map(str, written.shape))}, but should be" in comment.explanation


def test_entries_that_agree_in_the_digits_written_may_continue_as_other_numbers() -> None:
    def spoiled(s: Steps) -> Any:
        return softmax(s["scaled"]) + np.array([[0.3, 0.0004, -0.0003, 0.0002, 0.0001]] * 5)

    steps = forward(weights=spoiled)
    given = {key: rounded(value, 3 if key == "weights" else 6) for key, value in steps.items()}
    found = review(small(), given)
    assert [(comment.step, comment.column) for comment in found.comments] == [("weights", 1)], str(found)
    assert found.carried_forward == ("output",)


def test_steps_after_a_mistake_are_carried_forward() -> None:
    steps = forward(q=lambda s: X @ W["q"])
    found = review(small(), {key: rounded(value) for key, value in steps.items()})
    assert found.correct == ("k", "v")
    assert found.carried_forward == ("scores", "scaled", "weights", "output")
    assert found.to_dict()["carried_forward"] == ["scores", "scaled", "weights", "output"]
    assert "Correct: k, v.\nFollows from the mistake: scores, scaled, weights, output." in str(found)


def test_truncated_digits_are_recognised() -> None:
    true = to_floats(named("three-tokens").step("output").values)
    cut = [[float(np.trunc(value * 1e4) / 1e4) for value in row] for row in true]
    (comment,) = review(named("three-tokens"), {"output": cut}).comments
    assert comment.mistake == "digits cut off"


def test_a_long_list_of_wrong_entries_is_shortened() -> None:
    (comment,) = review(small(), {"weights": rounded(np.arange(25).reshape(5, 5) / 7 + 2)}).comments
    assert len(comment.also) == 24
    assert str(comment).endswith("[2,5] and 15 more.")


def test_one_digit_is_singular() -> None:
    (comment,) = review(named("three-tokens"), {"scores": altered(scores_3_3="-13.5")["scores"]}).comments
    assert "(-13.2 to 1 digit)" in str(comment)


def test_a_short_expected_number_is_shown_exactly() -> None:
    (comment,) = review(named("three-tokens"), {"q": altered(q_3_1="2.6")["q"]}).comments
    assert "q[3,1]: expected 2.5, found 2.6." in str(comment)
