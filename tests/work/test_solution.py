"""Worked solutions: known results, exact where possible, and always equal to attend."""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.base.errors import ConfigError, ShapeError
from regard.base.formulas import text
from regard.core.attend import attend
from regard.core.masks import causal, documents, full, padding, window
from regard.core.masks.algebra import Mask
from regard.work import solution as module
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.exact_numbers import (
    Matrix,
    Surd,
    divide_by_sqrt,
    format_value,
    simplify_sqrt,
    subtract,
    to_floats,
    transpose,
)
from regard.work.problem import Problem, build_problem, mask_from_rows
from regard.work.solution import DisagreementError, Solution, solve


def named(name: str, **changes: Any) -> Problem:
    matrices, biases, own = BUILTIN_PROBLEMS[name]()
    return build_problem(matrices=matrices, biases=biases, **{**own, **changes})


def grid(*rows: str) -> Matrix:
    return tuple(tuple(Fraction(cell) for cell in row.split()) for row in rows)


def test_three_tokens_are_exact() -> None:
    solved = solve(named("three-tokens"))
    assert solved.step("q").values == grid("1 3", "-1 1", "5/2 -2")
    assert solved.step("k").values == grid("3 -1/2", "2 -3/2", "-5/2 7/2")
    assert solved.step("v").values == grid("5/2 -3/2", "-1 3", "-2 -3")
    assert solved.step("scores").values == grid("3/2 -5/2 8", "-7/2 -7/2 6", "17/2 8 -53/4")
    rounded = [[round(float(value), 6) for value in row] for row in solved.output]
    assert rounded == [[-1.993217, -2.997583], [-1.999588, -2.999439], [1.178608, 0.198933]]
    assert [step.key for step in solved.steps] == [
        *("q", "k", "v", "scores", "largest", "exponentials", "sums", "weights", "output")
    ]


def test_scaled_three_tokens_have_square_roots_in_their_scores() -> None:
    solved = solve(named("three-tokens", scaled=True))
    assert solved.step("scaled").values[0][0] == Surd(Fraction(3, 4), 2)
    rounded = [[round(float(value), 6) for value in row] for row in solved.output]
    assert rounded == [[-1.954484, -2.981484], [-1.993364, -2.990950], [1.056176, 0.356344]]


def test_the_first_notebook_is_reproduced_unscaled_and_scaled() -> None:
    plain, scaled = solve(named("udl-12-1")), solve(named("udl-12-1", scaled=True))
    first = [float(row[0]) for row in plain.output]
    assert first == pytest.approx([0.94744244, -0.24348429, -0.91310441, -0.44522983], abs=5e-9)
    expected = [
        [0.97411966, 1.59622051, 1.32638014],
        [-0.23738409, -0.09516106, 0.13062402],
        [-0.72333202, 3.70194096, 3.02371664],
        [-0.34413007, 2.01339538, 1.69024190],
    ]
    assert np.array(to_floats(scaled.output)) == pytest.approx(np.array(expected), abs=5e-9)
    assert np.array(to_floats(plain.step("weights").values)).sum(0) == pytest.approx(np.ones(3)), "columns add up to 1"


def test_the_second_notebook_equals_numpy() -> None:
    x = np.random.RandomState(3).normal(size=(8, 6))
    source = np.random.RandomState(0)
    parts = []
    for _ in range(2):
        weights = [source.normal(size=(4, 8)) for _ in range(3)]
        biases = [source.normal(size=(4, 1)) for _ in range(3)]
        q, k, v = (w @ x + b for w, b in zip(weights, biases, strict=True))
        raised = np.exp(k.T @ q / 2)
        parts.append(v @ (raised / raised.sum(0)))
    expected = source.normal(size=(8, 8)) @ np.concatenate(parts)
    solved = solve(named("udl-12-2"))
    assert np.array(to_floats(solved.output)) == pytest.approx(expected, rel=1e-12)
    assert solved.output[0][0] == pytest.approx(-21.207, abs=5e-4)
    assert [step.key for step in solved.steps][-2:] == ["concat", "result"]


FRACTIONS = st.fractions(min_value=-3, max_value=3, max_denominator=4)
MASKS = [full(), causal(), window(before=1), ~causal()]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small rational problems of every kind: given or projected, any convention, mask and number of heads."""
    i, c, e, d, heads = (draw(st.integers(1, 3)) for _ in range(5))
    by_rows = draw(st.booleans())

    def matrix(rows: int, columns: int) -> Matrix:
        made = tuple(tuple(draw(FRACTIONS) for _ in range(columns)) for _ in range(rows))
        return made if by_rows else transpose(made)

    widths = {"q": c * heads, "k": c * heads, "v": e * heads}
    biases = {}
    if draw(st.booleans()):
        j = i
        matrices = {"inputs": (matrix(i, d),), **{f"w{role}": (matrix(d, width),) for role, width in widths.items()}}
        if draw(st.booleans()):
            biases = {"bq": (tuple(draw(FRACTIONS) for _ in range(widths["q"])),)}
    else:
        j = i + draw(st.integers(0, 2))
        matrices = {role: (matrix(i if role == "q" else j, width),) for role, width in widths.items()}
    if draw(st.booleans()):
        matrices["wo"] = (matrix(widths["v"], 2),)
    return build_problem(
        "drawn",
        matrices,
        biases,
        convention="rows" if by_rows else "columns",
        scaled=draw(st.booleans()),
        mask=draw(st.sampled_from(MASKS)),
        heads=heads,
    )


def attend_all_heads(problem: Problem, solved: Solution) -> np.ndarray:
    """The result by attention alone, all heads in one call; rows are tokens."""
    vectors = [module.head_vectors(solved, number) for number in range(len(problem.heads))]
    q, k, v = (
        torch.tensor([to_floats(each[role]) for each in vectors], dtype=torch.float64)[None] for role in ("q", "k", "v")
    )
    out = attend(q, k, v, mask=problem.mask, beta=None if problem.scaled else 1.0, kernel="reference")[0]
    joined = out.transpose(0, 1).flatten(1).numpy()
    if problem.output_projection is None:
        return joined
    weights = np.array(to_floats(problem.output_projection.weights))
    return joined @ (weights if problem.by_rows else weights.T)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_any_solution_equals_attend(problem: Problem) -> None:
    solved = solve(problem)
    found = np.array(to_floats(solved.output))
    assert (found if problem.by_rows else found.T) == pytest.approx(
        attend_all_heads(problem, solved), rel=1e-9, abs=1e-9
    )
    for step in solved.steps:
        if step.key in ("q", "k", "v", "scores"):
            assert all(isinstance(value, Fraction) for row in step.values for value in row)


@settings(max_examples=12, deadline=None)
@given(problems())
def test_scores_are_the_dot_products_of_fractions(problem: Problem) -> None:
    solved = solve(problem)
    vectors = module.head_vectors(solved, 0)
    scores = solved.step("scores", 1).values
    for r, query in enumerate(vectors["q"]):
        for c, key in enumerate(vectors["k"]):
            entry = scores[r][c] if problem.by_rows else scores[c][r]
            assert entry == sum((a * b for a, b in zip(query, key, strict=True)), Fraction(0))  # type: ignore[operator]


def test_columns_are_the_transpose_of_rows() -> None:
    matrices, _, own = BUILTIN_PROBLEMS["three-tokens"]()
    turned = {name: tuple(map(transpose, several)) for name, several in matrices.items()}
    rows, columns = (
        solve(named("three-tokens")),
        solve(build_problem(matrices=turned, **{**own, "convention": "columns"})),
    )
    for left, right in zip(rows.steps, columns.steps, strict=True):
        assert left.key == right.key
        assert pytest.approx(np.array(to_floats(right.values))) == np.array(to_floats(left.values)).T


def test_a_causal_first_row_is_exact() -> None:
    solved = solve(named("three-tokens", scaled=True, mask=causal()))
    assert solved.step("weights").values[0] == (1, 0, 0)
    assert solved.step("weights").values[1] == (Fraction(1, 2), Fraction(1, 2), 0)
    assert solved.output[:2] == grid("5/2 -3/2", "3/4 3/4")


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    hidden = mask_from_rows(((False, False, False), (True, True, True), (True, False, False)))
    solved = solve(named("three-tokens", mask=hidden))
    assert solved.step("weights").values[0] == (0, 0, 0)
    assert solved.output[0] == (0, 0)


def test_heads_share_the_width() -> None:
    solved = solve(named("three-tokens", heads=2))
    assert [step.head for step in solved.steps if step.key == "scores"] == [1, 2]
    assert solved.step("q", 2).values == grid("3", "1", "-2")
    assert solved.output == tuple(
        left + right for left, right in zip(*(solved.step("output", head).values for head in (1, 2)), strict=True)
    )


def test_a_solution_that_differs_from_attend_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    true = module.attend
    monkeypatch.setattr(module, "attend", lambda q, k, v, **more: true(q, k, v, **more) * 1.001)
    with pytest.raises(DisagreementError, match="differ by"):
        solve(named("three-tokens"))


@pytest.mark.parametrize(("width", "parts"), [(1, (1, 1)), (2, (1, 2)), (8, (2, 2)), (9, (3, 1)), (12, (2, 3))])
def test_square_roots_are_simplified(width: int, parts: tuple[int, int]) -> None:
    assert simplify_sqrt(width) == parts


def test_surds_stay_exact_under_subtraction() -> None:
    three, half = divide_by_sqrt(Fraction(3), 8), divide_by_sqrt(Fraction(1, 2), 8)
    assert subtract(three, half) == divide_by_sqrt(Fraction(5, 2), 8)
    assert subtract(three, three) == Fraction(0)
    assert divide_by_sqrt(Fraction(3), 4) == Fraction(3, 2)
    assert float(three) == pytest.approx(3 / 8**0.5)


def test_large_scores_do_not_overflow() -> None:
    solved = solve(
        build_problem("large", {"q": (grid("900 0"),), "k": (grid("900 0", "899 0"),), "v": (grid("1", "2"),)})
    )
    assert float(solved.output[0][0]) == pytest.approx(1.0)


ROWS = {"q": (grid("1 2", "3 4"),), "k": (grid("1 0", "0 1", "1 1"),), "v": (grid("1", "2", "3"),)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": (grid("1", "2", "3"),)}, ShapeError, "k has width 1, but q has width 2"),
        ({"v": (grid("1", "2"),)}, ShapeError, "v has 2 tokens, but k has 3"),
        ({"wo": (grid("1", "2"),)}, ShapeError, "wo needs 1 rows for the concatenated heads, but has 2"),
        ({"wq": (grid("1"),)}, ConfigError, "q and wq are both given"),
        ({"inputs": (grid("1"),)}, ConfigError, "no weights use them"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_problem("wrong", {**ROWS, **changes})


@pytest.mark.parametrize(
    ("settings_", "error", "message"),
    [
        ({"heads": 2}, ConfigError, "v has width 1, which cannot be split into 2 heads"),
        ({"convention": "diagonal"}, ConfigError, "convention is 'rows'"),
        ({"tokens": ("a", "b")}, ShapeError, "names 2 tokens, but there are 3"),
        ({"mask": padding([2, 3])}, ConfigError, "differs between sequences or heads"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings_: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_problem("wrong", ROWS, **settings_)


def test_missing_matrices_are_named() -> None:
    with pytest.raises(ConfigError, match="k is missing"):
        build_problem("wrong", {"q": ROWS["q"], "v": ROWS["v"]})
    with pytest.raises(ConfigError, match="wv is missing"):
        build_problem("wrong", {"inputs": ROWS["q"], "wq": (grid("1", "2"),), "wk": (grid("1", "2"),)})
    with pytest.raises(ConfigError, match="no matrices are given"):
        build_problem("wrong", {})
    with pytest.raises(ConfigError, match="bq is given without wq"):
        build_problem("wrong", ROWS, {"bq": ((Fraction(1),),)})


@pytest.mark.parametrize("mask", [causal(), documents([0, 0, 1])])
def test_queries_are_the_last_rows(mask: Mask) -> None:
    problem = build_problem("late", ROWS, mask=mask)
    assert problem.visible == tuple(map(tuple, mask.dense(2, 3).tolist()))
    assert problem.query_labels == ("1", "2")
    assert dataclasses.replace(problem, tokens=("a", "b", "c")).query_labels == ("b", "c")


def test_the_output_projection_may_have_a_bias() -> None:
    output_projection = {"wo": (grid("1 0", "1/2 2"),)}
    matrices, _, own = BUILTIN_PROBLEMS["three-tokens"]()
    plain = solve(build_problem(matrices={**matrices, **output_projection}, **own))
    shifted = solve(
        build_problem(matrices={**matrices, **output_projection}, biases={"bo": ((Fraction(3), Fraction(-1)),)}, **own)
    )
    for before, after in zip(plain.output, shifted.output, strict=True):
        assert [float(b) - float(a) for a, b in zip(before, after, strict=True)] == pytest.approx([3, -1])


def test_heads_and_biases_of_other_sizes_are_refused() -> None:
    two, three = (grid("1", "2"),) * 2, (grid("1", "2"),) * 3
    with pytest.raises(ShapeError, match="matrices are given for 2 and 3 heads"):
        build_problem("wrong", {"q": two, "k": three, "v": two})
    with pytest.raises(ConfigError, match="heads=3, but matrices are given for 2 heads; leave heads out"):
        build_problem("wrong", {"q": two, "k": two, "v": two}, heads=3)
    weights = {f"w{role}": (grid("1"),) for role in "qkv"}
    with pytest.raises(ShapeError, match="bq has 2 numbers, but is added to vectors of width 1"):
        build_problem("wrong", {"inputs": (grid("1", "2"),), **weights}, {"bq": ((Fraction(1), Fraction(2)),)})
    with pytest.raises(ShapeError, match="wk needs inputs of width 2, but they have width 1"):
        build_problem("wrong", {"inputs": (grid("1"),), **weights, "wk": (grid("1", "2"),)})


def test_an_error_names_the_matrices_that_were_split_into_heads() -> None:
    wide, pair = ((1.0, 2.0), (3.0, 4.0)), ((1.0, 2.0),)
    with pytest.raises(
        ShapeError, match=r"k has width 1, but q has width 2.*; k and v came once and were split into 2"
    ):
        build_problem("cut", {"q": (pair, pair), "k": (wide,), "v": (wide,)})


@pytest.mark.parametrize(
    ("value", "width", "shown"),
    [
        (2, 2, "√2"),
        (8, 2, "4√2"),
        (3, 2, "3/√2"),
        (Fraction(3, 2), 2, "3/(2√2)"),
        (3, 6, "√6/2"),
        (-2, 2, "-√2"),
        (6, 8, "3/√2"),
    ],
)
def test_scaled_scores_are_simplified(value: Fraction | int, width: int, shown: str) -> None:
    assert text(format_value(divide_by_sqrt(Fraction(value), width))) == shown
