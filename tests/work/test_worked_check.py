"""A student's steps: each slip that has a name is planted and found under it, and nothing else is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regard.base.errors import ConfigError
from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.check import check
from regard.work.common_mistakes import known_slips
from regard.work.exact_numbers import floats
from regard.work.problem import build
from regard.work.review import Review
from regard.work.solution import Solution, solve
from regard.work.student_answer import as_answer

Steps = dict[str, Any]

# written by hand on a sheet: right up to the weights, which were rounded to two digits before their product
SHEET: Steps = {
    "q": [[1, 3], [-1, 1], ["5/2", -2]],
    "k": [[3, "-1/2"], [2, "-3/2"], ["-5/2", "7/2"]],
    "v": [["5/2", "-3/2"], [-1, 3], [-2, -3]],
    "scores": [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]],
    "weights": [[0, 0, 1], [0, 0, 1], [0.62, 0.38, 0]],
    "output": [[-2, -3], [-2, -3], [1.17, 0.21]],
}


def named(name: str, **changes: Any) -> Solution:
    matrices, biases, own = BUILTIN_PROBLEMS[name]()
    return solve(build(matrices=matrices, biases=biases, **{**own, **changes}))


def review(solution: Solution, steps: Steps) -> Review:
    return check(solution, as_answer(steps, solution))


def test_the_sheet_rounded_too_early() -> None:
    found = review(named("three-tokens"), SHEET)
    (slip,) = found.findings
    assert (slip.name, slip.place, slip.found) == ("early rounding", "output[3,1]", "1.17")
    assert slip.expected == pytest.approx(1.178608, abs=5e-7)
    assert slip.also == ((3, 2),)
    assert "the weights were rounded to 2 digits" in slip.words
    assert found.right == ("q", "k", "v", "scores", "weights")
    assert str(found).splitlines()[1] == "output[3,1]: expected 1.178608 (1.18 to 2 digits), found 1.17."


def test_rounding_is_recognised_where_the_weights_are_not_written_down() -> None:
    (slip,) = review(named("three-tokens"), {"output": [[None, None], [None, None], ["1.170", "0.210"]]}).findings
    assert (slip.name, slip.place) == ("early rounding", "output[3,1]")
    assert "the weights were rounded to 2 digits" in slip.words


def test_a_right_answer_is_right_in_any_number_of_digits() -> None:
    solution = named("udl-12-2")
    for digits in (2, 5, 9):
        steps = {
            key: [rounded(floats(solution.step(key, head).values), digits) for head in (1, 2)]
            for key in ("q", "k", "v", "scores", "scaled", "weights", "output")
        }
        found = review(solution, {**steps, "result": rounded(floats(solution.output), digits)})
        assert found.ok, str(found)
        assert "every step that is written is right" in str(found)
        assert len(found.right) == 15


def rounded(matrix: Any, digits: int = 6) -> list[list[str]]:
    return [[f"{float(value):.{digits}f}" for value in row] for row in matrix]


source = np.random.RandomState(7)
X = source.randint(-4, 5, size=(5, 3)) / 2
W = {role: source.randint(-4, 5, size=(3, 3)) / 2 for role in "qkv"}
B = {role: source.randint(-4, 5, size=3) / 2 for role in "qkv"}


def small(by_rows: bool = True, **changes: Any) -> Solution:
    """Five tokens and one head of width 3, all weights square so that every product can be turned over."""

    def grid(values: Any) -> Any:
        values = values if by_rows else values.T
        return (tuple(tuple(float(value) for value in row) for row in values),)

    return solve(
        build(
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
    """All steps by numpy alone, some of them done in another way."""
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


PLANTED: list[tuple[str, str, Callable[[Steps], Any]]] = [
    ("transposed product", "q", lambda s: X @ W["q"].T + B["q"]),
    ("wrong factor", "k", lambda s: X @ W["v"] + B["v"]),
    ("missing bias", "v", lambda s: X @ W["v"]),
    ("scaled too early", "scores", lambda s: s["q"] @ s["k"].T / 3**0.5),
    ("sign", "scores", lambda s: -(s["q"] @ s["k"].T)),
    ("transposed product", "scores", lambda s: s["k"] @ s["q"].T),
    ("wrong factor", "scores", lambda s: s["q"] @ s["q"].T),
    ("missing scale", "scaled", lambda s: s["scores"]),
    ("scale by d instead of root d", "scaled", lambda s: s["scores"] / 3),
    ("scale upside down", "scaled", lambda s: s["scores"] * 3**0.5),
    ("scale from another width", "scaled", lambda s: s["scores"] / 5**0.5),
    ("softmax over the other axis", "weights", lambda s: softmax(s["scaled"], 0)),
    ("softmax over everything", "weights", lambda s: np.exp(s["scaled"]) / np.exp(s["scaled"]).sum()),
    ("all weight to the largest", "weights", lambda s: np.eye(5)[s["scaled"].argmax(1)]),
    ("no softmax", "weights", lambda s: s["scaled"]),
    ("no normalisation", "weights", lambda s: np.exp(s["scaled"] - s["scaled"].max(1, keepdims=True))),
    ("no exponentials", "weights", lambda s: s["scaled"] / s["scaled"].sum(1, keepdims=True)),
    ("percent", "weights", lambda s: 100 * softmax(s["scaled"])),
    ("another base", "weights", lambda s: softmax(s["scaled"] * np.log(2))),
    ("sign", "weights", lambda s: softmax(-s["scaled"])),
    ("rows and columns mixed up", "weights", lambda s: softmax(s["scaled"]).T),
    ("transposed product", "output", lambda s: s["weights"].T @ s["v"]),
    ("wrong factor", "output", lambda s: s["weights"] @ s["k"]),
]


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize(("name", "key", "wrong"), PLANTED, ids=[f"{key}: {name}" for name, key, _ in PLANTED])
def test_a_planted_slip_is_found_under_its_name(
    name: str, key: str, wrong: Callable[[Steps], Any], by_rows: bool
) -> None:
    steps = {each: rounded(value if by_rows else value.T) for each, value in forward(**{key: wrong}).items()}
    found = review(small(by_rows), steps)
    assert [(slip.name, slip.step) for slip in found.findings] == [(name, key)], str(found)
    judged = {*found.right, *found.follows}
    assert judged == {each for each in steps if each != key}, "what follows is judged on the slip's numbers"
    assert not {*list(steps)[: list(steps).index(key)]} & {*found.follows}, "what stands before a slip does not follow"


LATER = [(name, key, wrong) for name, key, wrong in PLANTED if key in ("scores", "scaled", "weights")]


@pytest.mark.parametrize(("name", "key", "wrong"), LATER, ids=[f"{key}: {name}" for name, key, _ in LATER])
def test_a_slip_is_recognised_from_the_output_alone(name: str, key: str, wrong: Callable[[Steps], Any]) -> None:
    if name == "scaled too early":
        name = "scale by d instead of root d"  # scaled twice over: the same numbers
    if name == "rows and columns mixed up":
        name = "transposed product"  # weights turned over by themselves, or in the product: the same numbers
    found = review(small(), {"output": rounded(forward(**{key: wrong})["output"], 8)})
    (slip,) = found.findings
    assert (slip.step, slip.name) == ("output", name), str(found)


MASKED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("mask forgotten", lambda s, seen: softmax(s)),
    ("mask the other way round", lambda s, seen: np.nan_to_num(softmax(np.where(~seen, s, -1e9))) * (~seen)),
    ("mask turned over", lambda s, seen: softmax(np.where(seen.T, s, -1e9))),
    ("mask off by one", lambda s, seen: softmax(np.where(np.tril(np.ones((5, 5)), 1) == 1, s, -1e9))),
    ("mask off by one", lambda s, seen: softmax(np.where(np.tril(seen, -1), s, -1e9)) * np.tril(seen, -1)),
    ("mask after softmax", lambda s, seen: softmax(s) * seen),
    ("hidden scores set to zero", lambda s, seen: softmax(np.where(seen, s, 0.0))),
]


@pytest.mark.parametrize(("name", "wrong"), MASKED, ids=[name for name, _ in MASKED])
def test_slips_with_masks_are_found(name: str, wrong: Callable[[Any, Any], Any]) -> None:
    seen = np.tril(np.ones((5, 5), dtype=bool))
    weights = wrong(forward()["scaled"], seen)
    (slip,) = review(small(mask=causal()), {"weights": rounded(weights)}).findings
    assert (slip.name, slip.step) == (name, "weights")


def test_a_scale_that_was_not_asked_for_is_found() -> None:
    (slip,) = review(small(scaled=False), {"weights": rounded(forward()["weights"])}).findings
    assert slip.name == "scale not asked for"
    assert "not written down" in slip.words


def test_keys_that_were_not_turned_over_are_found() -> None:
    matrices = {name: ((tuple(map(float, row))) for row in X[:3]) for name in "qkv"}
    solution = solve(build("square", {name: (tuple(rows),) for name, rows in matrices.items()}))
    (slip,) = review(solution, {"scores": rounded(X[:3] @ X[:3])}).findings
    assert (slip.name, slip.words) == ("transposed product", "the keys were not turned over")


def test_every_known_slip_is_planted_somewhere() -> None:
    planted = {name for name, _, _ in PLANTED} | {name for name, _ in MASKED} | {"scale not asked for"}
    assert {slip.name for slip in known_slips()} <= planted


def altered(**entries: Any) -> Steps:
    """Three tokens, all right, but for one entry `key_row_column`."""
    solution = named("three-tokens")
    steps = {key: rounded(floats(solution.step(key).values)) for key in ("q", "k", "v", "scores", "weights", "output")}
    for place, value in entries.items():
        key, row, column = place.split("_")
        steps[key][int(row) - 1][int(column) - 1] = value
    return steps


@pytest.mark.parametrize(
    ("place", "value", "name", "words"),
    [
        ("q_3_2", "2", "sign", "this entry has the other sign"),
        ("q_3_1", "1.5", "sign", "product 3 of the sum, 0.500000, went in with the other sign"),
        ("k_2_2", "-1/2", "missing term", "product 2 of the sum, -1.000000, is missing"),
        ("scores_1_1", "6", "copied from another entry", "this is the number that belongs at [2,3]"),
        ("scores_3_3", "-13.5", "arithmetic", "this number is off"),
        ("weights_3_1", "0.7", "arithmetic", "this number is off"),
        ("output_3_2", "-0.198933", "sign", "this entry has the other sign"),
    ],
)
def test_a_single_wrong_entry_is_found_and_described(place: str, value: str, name: str, words: str) -> None:
    key, row, column = place.split("_")
    found = review(named("three-tokens"), {key: altered(**{place: value})[key]})
    (slip,) = found.findings
    assert (slip.step, slip.row, slip.column, slip.found) == (key, int(row), int(column), value)
    assert slip.name == name
    assert slip.words.startswith(words)
    assert slip.also == ()


def test_what_follows_from_a_slip_is_no_second_slip() -> None:
    steps = forward(scores=lambda s: np.where(np.eye(5) == 1, -(s["q"] @ s["k"].T), s["q"] @ s["k"].T))
    found = review(small(), {key: rounded(value, 4) for key, value in steps.items()})
    assert [(slip.step, slip.name) for slip in found.findings] == [("scores", "sign")]
    assert found.findings[0].also == ((2, 2), (3, 3), (4, 4), (5, 5))


def test_a_slip_of_the_pen_that_was_not_used_is_the_only_one() -> None:
    steps = altered(scores_1_1="9")
    found = review(named("three-tokens"), steps)
    assert [(slip.step, slip.row, slip.column) for slip in found.findings] == [("scores", 1, 1)]


def test_a_wrong_entry_may_be_used_with_more_digits_than_it_was_written_in() -> None:
    def off(s: Steps) -> Any:
        scaled = s["scores"] / 3**0.5
        scaled[2, 1] += 0.123456
        return scaled

    steps = {key: rounded(value, 3) for key, value in forward(scaled=off).items()}
    found = review(small(), steps)
    assert [(slip.step, slip.row, slip.column) for slip in found.findings] == [("scaled", 3, 2)], str(found)


def test_a_second_slip_is_found_behind_the_first() -> None:
    steps = forward(q=lambda s: X @ W["q"], weights=lambda s: softmax(s["scaled"], 0))
    found = review(small(), {key: rounded(value) for key, value in steps.items()})
    assert [(slip.step, slip.name) for slip in found.findings] == [
        ("q", "missing bias"),
        ("weights", "softmax over the other axis"),
    ]
    assert "A further slip, judged on the numbers above it:" in str(found)


def test_a_matrix_that_lies_on_its_side_is_noticed_by_its_shape() -> None:
    (slip,) = review(small(), {"q": rounded(forward()["q"].T)}).findings
    words = "this is 3 x 5, but should be 5 x 3: rows stand where columns should"
    assert (slip.name, slip.words) == ("rows and columns mixed up", words)
    broken = forward()["q"].T.copy()
    broken[0, 1] += 1
    (slip,) = review(small(), {"q": rounded(broken)}).findings
    assert "some numbers are off besides" in slip.words


def test_nonsense_is_called_unexplained() -> None:
    (slip,) = review(small(), {"weights": rounded(np.arange(25).reshape(5, 5) / 7 + 2)}).findings
    assert slip.name == "unexplained"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda joined, mixing: joined, "missing mixing"),
        (lambda joined, mixing: mixing.T @ joined, "transposed product"),
        (lambda joined, mixing: mixing @ np.roll(joined, 4, 0), "heads in another order"),
        (lambda joined, mixing: mixing @ joined.reshape(2, 4, 6).swapaxes(0, 1).reshape(8, 6), "heads interleaved"),
    ],
)
def test_slips_in_joining_heads_are_found(change: Callable[[Any, Any], Any], name: str) -> None:
    solution = named("udl-12-2")
    assert solution.problem.mixing is not None
    wrong = change(np.array(floats(solution.step("joined").values)), np.array(floats(solution.problem.mixing.weights)))
    (slip,) = review(solution, {"result": rounded(wrong)}).findings
    assert (slip.step, slip.name) == ("result", name)


def test_the_head_of_a_slip_is_named() -> None:
    solution = named("udl-12-2")
    scores = [np.array(floats(solution.step("scores", head).values)) for head in (1, 2)]
    found = review(solution, {"scores": [rounded(scores[0]), rounded(scores[1].T)]})
    assert found.findings[0].place == "scores[1,2] of head 2"
    assert found.right == ("scores of head 1",)
    assert found.to_dict()["slips"][0]["entry"] == [1, 2]


def test_heads_that_are_only_joined_have_a_result_too() -> None:
    solution = named("three-tokens", heads=2)
    joined = floats(solution.output)
    assert review(solution, {"result": rounded(joined)}).ok
    (slip,) = review(solution, {"result": rounded([row[::-1] for row in joined])}).findings
    assert slip.name == "heads in another order"


def test_rounding_is_not_blamed_where_right_entries_speak_against_it() -> None:
    scores = [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13]]
    (slip,) = review(named("three-tokens"), {"scores": scores}).findings
    assert (slip.name, slip.place) == ("arithmetic", "scores[3,3]")


MIXED_DIGITS = [["0.0015", "0", "0.9985"], ["0.0001", "0.0001", "0.9999"], ["0.62", "0.38", "0"]]


@pytest.mark.parametrize(
    ("weights", "first"),
    [(SHEET["weights"], ["-1.99", "-3.0"]), (MIXED_DIGITS, ["-1.9932", "-2.9976"])],
    ids=["a better row beside it", "rows of unequal digits"],
)
def test_rounding_of_one_row_is_found_though_others_were_not_rounded(weights: Any, first: list[str]) -> None:
    rows = [first, ["-2", "-3"], ["1.17", "0.21"]]
    (slip,) = review(named("three-tokens"), {"weights": weights, "output": rows}).findings
    assert (slip.name, slip.place, slip.also) == ("early rounding", "output[3,1]", ((3, 2),))
    assert "the weights were rounded to 2 digits" in slip.words


def test_rounded_scores_are_called_so_where_nothing_is_scaled() -> None:
    scores = np.array([[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]])
    raised = np.exp(np.round(scores))
    weights = rounded(raised / raised.sum(1, keepdims=True))
    (slip,) = review(named("three-tokens"), {"scores": scores.tolist(), "weights": weights}).findings
    assert slip.name == "early rounding"
    assert slip.words.startswith("the scores were rounded to 0 digits")


def test_the_width_of_all_heads_is_known_as_a_wrong_scale() -> None:
    solution = named("three-tokens", heads=2, scaled=True)
    scores = [np.array(floats(solution.step("scores", head).values)) for head in (1, 2)]
    raised = [np.exp(each / 2**0.5) for each in scores]
    weights = [rounded(each / each.sum(1, keepdims=True)) for each in raised]
    found = review(solution, {"weights": weights}).findings
    assert [slip.name for slip in found] == ["scale from another width"] * 2
    assert "the width of all heads together" in found[0].words


@pytest.mark.parametrize(("name", "base", "times"), [("percent", np.e, 100), ("another base", 2.0, 1)])
def test_percent_and_powers_of_two_are_known(name: str, base: float, times: int) -> None:
    raised = base ** np.array([[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]])
    weights = rounded(times * raised / raised.sum(1, keepdims=True))
    (slip,) = review(named("three-tokens"), {"weights": weights}).findings
    assert slip.name == name


def test_exchanged_factors_are_told_in_words_that_hold_in_both_conventions() -> None:
    for by_rows in (True, False):
        scores = forward()["scores"].T
        (slip,) = review(small(by_rows), {"scores": rounded(scores if by_rows else scores.T)}).findings
        assert slip.name == "transposed product"
        assert slip.words.startswith("the two factors have changed places, so that keys stand where queries should")


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_who_goes_on_with_scores_on_their_side_makes_no_second_slip(by_rows: bool) -> None:
    steps = forward()
    for key in ("scores", "scaled", "weights"):
        steps[key] = steps[key].T
    found = review(small(by_rows), {key: rounded(each if by_rows else each.T) for key, each in steps.items()})
    assert [(slip.step, slip.name) for slip in found.findings] == [("scores", "transposed product")]
    assert found.right == ("q", "k", "v", "output")
    assert found.follows == ("scaled", "weights")


def test_an_answer_of_nothing_but_gaps_is_refused_and_a_step_of_gaps_left_out() -> None:
    gaps = [[None, None]] * 3
    with pytest.raises(ConfigError, match="holds nothing but gaps, so there is nothing to check; write some numbers"):
        review(named("three-tokens"), {"output": gaps})
    assert review(named("three-tokens"), {"q": SHEET["q"], "output": gaps}).right == ("q",)


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_a_matrix_on_its_side_is_shown_where_it_differs(by_rows: bool) -> None:
    q = forward()["q"]
    (slip,) = review(small(by_rows), {"q": rounded(q.T if by_rows else q)}).findings
    written, right = (q.T, q) if by_rows else (q, q.T)
    at = slip.row - 1, slip.column - 1
    assert (slip.found, slip.expected) == (f"{written[at]:.6f}", right[at])
    assert written[at] != right[at]
    assert f"this is {' x '.join(map(str, written.shape))}, but should be" in slip.words


def test_entries_that_agree_in_the_digits_written_may_have_gone_on_otherwise() -> None:
    def spoiled(s: Steps) -> Any:
        return softmax(s["scaled"]) + np.array([[0.3, 0.0004, -0.0003, 0.0002, 0.0001]] * 5)

    steps = forward(weights=spoiled)
    given = {key: rounded(value, 3 if key == "weights" else 6) for key, value in steps.items()}
    found = review(small(), given)
    assert [(slip.step, slip.column) for slip in found.findings] == [("weights", 1)], str(found)
    assert found.follows == ("output",)


def test_what_follows_from_a_slip_is_not_called_right() -> None:
    steps = forward(q=lambda s: X @ W["q"])
    found = review(small(), {key: rounded(value) for key, value in steps.items()})
    assert found.right == ("k", "v")
    assert found.follows == ("scores", "scaled", "weights", "output")
    assert found.to_dict()["follows"] == ["scores", "scaled", "weights", "output"]
    assert "Right: k, v.\nFollows from the slip: scores, scaled, weights, output." in str(found)


def test_digits_that_were_cut_off_are_told_from_wrong_ones() -> None:
    true = floats(named("three-tokens").step("output").values)
    cut = [[float(np.trunc(value * 1e4) / 1e4) for value in row] for row in true]
    (slip,) = review(named("three-tokens"), {"output": cut}).findings
    assert slip.name == "digits cut off"


def test_a_long_list_of_entries_is_cut_short() -> None:
    (slip,) = review(small(), {"weights": rounded(np.arange(25).reshape(5, 5) / 7 + 2)}).findings
    assert len(slip.also) == 24
    assert str(slip).endswith("[2,5] and 15 more.")


def test_one_digit_is_told_as_one() -> None:
    (slip,) = review(named("three-tokens"), {"scores": altered(scores_3_3="-13.5")["scores"]}).findings
    assert "(-13.2 to 1 digit)" in str(slip)


def test_a_short_number_is_told_whole() -> None:
    (slip,) = review(named("three-tokens"), {"q": altered(q_3_1="2.6")["q"]}).findings
    assert "q[3,1]: expected 2.5, found 2.6." in str(slip)
