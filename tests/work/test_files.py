"""Problems and answers from files: what is parsed, and the errors for files that are wrong."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.base.errors import ConfigError, RegardError
from regard.core.masks import causal
from regard.work.builtin_problems import BUILTIN_PROBLEMS
from regard.work.files import MaskReader, parse_matrix, parse_number, read_fields, read_matrix
from regard.work.problem import Problem, build_problem
from regard.work.solution import Solution, solve
from regard.work.student_answer import parse_answer, read_answer

HALF = Fraction(1, 2)


def three_tokens(**changes: Any) -> Solution:
    matrices, biases, own = BUILTIN_PROBLEMS["three-tokens"]()
    return solve(build_problem(matrices=matrices, biases=biases, **{**own, **changes}))


def read_problem(path: Path, read_mask: MaskReader | None = None) -> Problem:
    matrices, biases, settings = read_fields(path, read_mask)
    return build_problem(matrices=matrices, biases=biases, **{"name": path.stem, **settings})


@pytest.mark.parametrize(
    ("written", "value"),
    [("3", 3), ("-0.5", -HALF), ("-1/2", -HALF), ("\u22121/2", -HALF), ("1e-3", Fraction(1, 1000)), (".5", HALF)],
)
def test_short_numbers_stay_exact(written: str, value: Fraction) -> None:
    found = parse_number(written, "x")
    assert isinstance(found, Fraction)
    assert found == value


def test_long_numbers_become_floats() -> None:
    assert isinstance(parse_number("0.1234567891234", "x"), float)


@pytest.mark.parametrize("written", ["x", "1/0", "nan", "inf", "", "1,2,3", "True"])
def test_text_that_is_not_a_number_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"w, row 1 is .* but should be a number such as 3, -0.5 or -1/2"):
        parse_number(written, "w, row 1")


def test_a_number_above_the_largest_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"w, row 1 is '1e999', which is too large; the largest number is 1.8e\+308"):
        parse_number("1e999", "w, row 1")


def test_matrices_are_typed_with_commas_or_spaces() -> None:
    assert parse_matrix("1,-1/2; 0 1", "q") == ((1, -HALF), (0, 1))
    with pytest.raises(ConfigError, match="q, row 2 has 1 number, but row 1 has 2"):
        parse_matrix("1,2;3", "q")
    assert parse_matrix("0,5 -1,25; 2 3", "q") == ((HALF, Fraction(-5, 4)), (2, 3)), "decimal commas"
    assert parse_matrix("1,2; 3,4", "q") == ((1, 2), (3, 4))


def test_decimal_commas_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("q;\n0,5;-1,25\nk;\n1;2\nv;\n3;4\n")
    assert read_fields(path)[0]["q"] == (((HALF, Fraction(-5, 4)),),)
    path = tmp_path / "mine.json"
    path.write_text('{"q": [["0,5", "-1,25"]]}')
    assert read_fields(path)[0]["q"] == (((HALF, Fraction(-5, 4)),),)
    with pytest.raises(ConfigError, match="q is empty; type a matrix such as"):
        parse_matrix(" ; ", "q")


def test_json_numbers_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"q": [[0.1, "1/3"]], "k": [[1, 2], [3, 4]], "v": [[1], [2]], "scaled": False, "tokens": ["a", "b"]})
    )
    problem = read_problem(path)
    assert (problem.name, problem.scaled, problem.tokens) == ("mine", False, ("a", "b"))
    assert problem.heads[0].q == ((Fraction(1, 10), Fraction(1, 3)),)


def test_json_has_a_matrix_per_head_and_a_mask(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    given = {name: [[[1], [2]], [[3], [4]]] for name in "qkv"}
    path.write_text(json.dumps({**given, "mask": [[1, 0], [True, 1]]}))
    problem = read_problem(path)
    assert len(problem.heads) == 2
    assert problem.visible == ((True, False), (True, True))
    path.write_text(json.dumps({**given, "mask": "causal()"}))
    assert read_problem(path, lambda message: causal()).visible == problem.visible
    with pytest.raises(ConfigError, match="pass the mask itself"):
        read_problem(path)


def test_csv_has_a_name_above_each_matrix(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("inputs\n1,2\n0,1\n\nwq,\n1\n1/2\n# wk\n1\n0\nwv\n2\n-1\nbq\n5\n")
    problem = read_problem(path)
    assert problem.inputs == ((1, 2), (0, 1))
    assert solve(problem).step("q").values == ((7,), (Fraction(11, 2),))


def test_numpy_files_are_read(tmp_path: Path) -> None:
    x = np.array([[0.5, 1.0], [0.1, 2.0]])
    np.savez(tmp_path / "all.npz", q=x, k=x, v=x, scaled=np.array(False), convention=np.array("columns"))
    problem = read_problem(tmp_path / "all.npz")
    assert (problem.scaled, problem.convention) == (False, "columns")
    assert problem.heads[0].q == ((HALF, 1), (0.1, 2))
    assert isinstance(problem.heads[0].q[1][0], float), "0.1 is no short binary fraction"  # type: ignore[index]
    np.save(tmp_path / "q.npy", x)
    assert read_matrix(str(tmp_path / "q.npy"), "--q") == (problem.heads[0].q,)
    with pytest.raises(ConfigError, match="has one matrix; say which one it is, for example --q"):
        read_problem(tmp_path / "q.npy")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"q": [[1, 1/2]]}', r"a.json, line 1, column \d+ is not JSON.*fractions are in quotes"),
        ("a.json", '{"queries": [[1]]}', "has queries, which is unknown; the names are: inputs, q, k, v, wq"),
        ("a.json", '{"q": [[1], [2, 3]]}', "q, row 2 has 2 numbers, but row 1 has 1"),
        ("a.json", '{"q": [[1, "x"]]}', "q, row 1, column 2 is 'x'"),
        ("a.json", '{"q": [[1, NaN]]}', "q, row 1, column 2 is 'NaN'"),
        ("a.json", '{"q": 3}', "q should be a matrix, a list of rows"),
        ("a.json", "[1]", "should hold an object"),
        ("a.json", '{"q": [[1]], "scaled": "yes"}', "scaled is true or false"),
        ("a.csv", "q\n1\nscaled\n0\n", "a.csv has scaled, but a .csv file has matrices only; use a .json file"),
        ("a.json", '{"q": [[1]], "heads": 1.5}', "heads is a whole number"),
        ("a.json", '{"q": [[1]], "mask": [[2]]}', "mask is a matrix of 0"),
        ("a.json", '{"q": [[1]], "tokens": "ab"}', "tokens is a list of words"),
        ("a.csv", "q\n1,2\n1,2,3\n", "a.csv, line 3 has 3 numbers, but the rows above it have 2"),
        ("a.csv", "q\n1,2\n1,two\n", "a.csv, line 3, column 2 is 'two'"),
        ("a.csv", "q\n1\nq\n2\n", "line 3 starts 'q' a second time"),
        ("a.csv", "q\nk\n1\n", "names 'q', but no row of numbers follows"),
        ("a.csv", "", "is empty; write a name such as q"),
        ("a.txt", "1", "should be a .json, .csv or .npz file"),
        ("a.npz", "no archive", "a.npz cannot be read as arrays"),
    ],
)
def test_an_error_in_a_file_names_its_location(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RegardError, match=message):
        read_problem(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.json cannot be read: No such file"):
        read_problem(tmp_path / "gone.json")


def test_digits_of_an_answer_are_kept(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text('{"output": [[-2, "-3.0"], [1.50, null], ["5/2", 1e-3]]}')
    answer = read_answer(tmp_path / "answer.json", three_tokens())
    cells = [cell for row in answer["output", None].cells for cell in row]
    assert [cell and cell.digits for cell in cells] == [0, 1, 2, None, None, 3]
    assert cells[3] is None
    exact, whole = cells[4], cells[0]
    assert exact is not None
    assert whole is not None
    assert exact.matches(2.5)
    assert not exact.matches(2.5001)
    assert whole.matches(-1.993)
    assert not whole.matches(-1.94)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"weight": [[1]]},
            "has weight, which is not a step; the steps are: q, k, v, scores, scaled, weights, output",
        ),
        ({}, "is empty; give some of q"),
        ({"scaled": [[1]]}, "scaled is not a step here: the scores are not scaled"),
        ({"result": [[1]]}, "with one head and no output projection, write output"),
        ({"output": [[1, 2]]}, "output has 1 row of 2 numbers, but should have 3 rows of 2"),
        ({"output": [[1, 2], [1], [2, 3]]}, "output has 3 rows of 1 and 2 numbers"),
        ({"output": [["a", 2], [1, 2], [2, 3]]}, "output, row 1, column 1 is 'a'"),
        ({"output": 3}, "output should be a matrix"),
    ],
)
def test_a_malformed_answer_is_refused(found: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        parse_answer(found, three_tokens())


def test_an_answer_with_heads_has_a_matrix_for_each() -> None:
    with pytest.raises(RegardError, match="q should be a list of 2 matrices, one for each head"):
        parse_answer({"q": [[1]]}, three_tokens(heads=2))
