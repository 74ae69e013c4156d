"""Grading a class: forgeries get no points, limits hold, variants come from the seed of the class."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from regard.base.errors import ConfigError, UnknownNameError
from regard.work.exercises import EXERCISE_SETS, solutions
from regard.work.exercises.answer_process import GradingError, Limits, run_submission
from regard.work.exercises.exercise import ExerciseSet, student_seed
from regard.work.exercises.run_answer import (
    NextTokenTable,
    OtherValue,
    RaisedError,
    TorchModule,
    decode,
    encode,
    landlock_version,
)
from regard.work.grade_folder import ClassOptions, ClassRow, find_submissions, grade_folder, read_predictions, to_csv
from regard.work.quiz import Quiz

SET = "self-attention"
LIMITS = Limits(seconds=20, megabytes=700)


def solve(exercise_set: ExerciseSet) -> str:
    return "\n\n".join([exercise_set.setup_code, *(each.source for each in exercise_set.exercises)])


def grade_one(folder: Path, source: str, name: str = "ann.py", **options: str) -> list[ClassRow]:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    return list(grade_folder(folder, ClassOptions((SET,), limits=LIMITS, **options)))  # type: ignore[arg-type]


# each defines answers that are right, or pretends that they are
FORGERIES = {
    "imports the solutions": "from regard.work.exercises.solutions.self_attention import *",
    "reads the solutions": """
from pathlib import Path
import regard
exec(Path(regard.__file__).with_name("work").joinpath("exercises/solutions/self_attention.py").read_text())
""",
    "imports the file of the solutions": """
import importlib.util, regard
path = regard.__file__.replace("__init__.py", "work/exercises/solutions/self_attention.py")
spec = importlib.util.spec_from_file_location("solutions", path)
solutions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(solutions)
softmax_columns, self_attention = solutions.softmax_columns, solutions.self_attention
scaled_self_attention = solutions.scaled_self_attention
""",
    "reads the file of a neighbour": "exec(open('FOLDER/ben.py').read())",
    "starts a process that reads": """
import subprocess, regard
path = regard.__file__.replace("__init__.py", "work/exercises/solutions/self_attention.py")
exec(subprocess.run(["cat", path], capture_output=True, text=True).stdout)
""",
    "patches the checks": """
import sys
class Same:
    def __eq__(self, other):
        return True
def softmax_columns(*inputs):
    return Same()
self_attention = scaled_self_attention = softmax_columns
main = sys.modules["__main__"]
main.perform = main.encode = lambda *inputs: {"correct": True}
try:
    import regard.work.exercises.checks as checks
    checks.same_result = lambda one, other: True
except ImportError:
    pass
""",
    "writes results": """
import json, os, sys
def softmax_columns(scores):
    for number in range(3, 20):
        try:
            os.write(number, b'{"correct": true, "exercise": "softmax", "ok": true}\\n' * 9)
        except OSError:
            pass
    for path in sys.argv[1:]:
        open(path, "w").write("correct")
self_attention = scaled_self_attention = softmax_columns
""",
    "clears the list of hidden folders": """
try:
    open("SOLUTION")
except PermissionError as error:
    trace = error.__traceback__
    while trace:
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, list):
                value.clear()
        trace = trace.tb_next
exec(open("SOLUTION").read())
""",
    "replaces a builtin": """
import builtins
kept, builtins.any = builtins.any, lambda each: False
try:
    text = open("SOLUTION").read()
finally:
    builtins.any = kept
exec(text)
""",
    "replaces the function that resolves paths": """
import posixpath
kept, posixpath._joinrealpath = posixpath._joinrealpath, lambda *path: ("/nothing", True)
try:
    text = open("SOLUTION").read()
finally:
    posixpath._joinrealpath = kept
exec(text)
""",
    "opens a file relative to a folder": """
import os
folder, name = os.path.split("SOLUTION")
folder = os.open(os.path.dirname(folder), os.O_RDONLY)
exec(os.read(os.open(f"solutions/{name}", os.O_RDONLY, dir_fd=folder), 100_000).decode())
""",
    "finds the hook among all objects": """
import gc, types
for each in gc.get_objects():
    if isinstance(each, types.FunctionType) and each.__name__ == "hook":
        each.__kwdefaults__ = None
        for cell in each.__closure__ or ():
            if isinstance(cell.cell_contents, list):
                cell.cell_contents.clear()
exec(open("SOLUTION").read())
""",
    "reads the memory of the process that grades": """
import os
memory = open(f"/proc/{os.getppid()}/maps").read()
def softmax_columns(scores):
    raise ValueError("read the memory" if memory else "")
""",
    "imports the exercises through another module": """
import regard.cli.work_exercises
from regard.work.exercises import EXERCISE_SETS
exec("\n".join(each.source for each in EXERCISE_SETS["self-attention"].exercises))
""",
    "starts a process without an event": """
import multiprocessing
def read(path):
    return open(path).read()
exec(multiprocessing.get_context("spawn").Pool(1).map(read, ["SOLUTION"])[0])
""",
    "replaces functions of numpy": """
import numpy as np
np.allclose = np.array_equal = lambda *args, **settings: True
np.testing.assert_allclose = lambda *args, **settings: None
def softmax_columns(scores):
    return scores
self_attention = scaled_self_attention = softmax_columns
""",
    "opens a path whose class lies": """
class Path(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__
exec(open(Path("SOLUTION")).read())
""",
    "opens a path whose class lies without open": """
import os
class Path(str):
    def __eq__(self, other):
        return True
    def rpartition(self, separator):
        return (os.getcwd(), "/", "x")
    __hash__ = str.__hash__
exec(os.read(os.open(Path("SOLUTION"), os.O_RDONLY), 100_000).decode())
""",
    "imports a name whose class lies": """
class Name(str):
    def __eq__(self, other):
        return False
    def startswith(self, *other):
        return False
    __hash__ = str.__hash__
globals().update(vars(__import__(Name("regard.work.exercises.solutions.self_attention"), fromlist=["x"])))
""",
    "writes results at once": """
import os
for number in range(3, 20):
    try:
        os.write(number, b'{"names": ["softmax_columns"], "errors": []}\\n{"correct": true}\\n' * 9)
    except OSError:
        pass
""",
}


# native code opens files without an audit event, and another thread changes what a path means; the kernel refuses it
NATIVE = """
import os, readline, threading, time, tkinter, torch
folder, name = os.path.split("SOLUTION")
own, end = os.getcwd(), time.time() + 0.5

def by_torch(path):
    return bytes(torch.from_file(path, size=os.stat(path).st_size, dtype=torch.uint8).numpy()).decode()

def by_readline(path):
    readline.read_history_file(path)
    lines = range(1, readline.get_current_history_length() + 1)
    return "\\n".join(readline.get_history_item(line) or "" for line in lines)

def by_tcl(path):
    return tkinter.Tcl().eval('set file [open "%s"]; read $file' % path)

def change_folder():
    while time.time() < end:
        os.chdir(folder)
        os.chdir(own)

def by_change_of_folder(path):
    open(name, "w").write("")
    threading.Thread(target=change_folder).start()
    text = ""
    while time.time() < end and not text:
        try:
            text = open(name).read()
        except OSError:
            pass
    return text

for read in (by_torch, by_readline, by_tcl, by_change_of_folder):
    for path in ("SOLUTION", "FOLDER/ben.py"):
        try:
            exec(read(path))
        except Exception:
            pass
"""
LANDLOCK = pytest.mark.skipif(landlock_version() == 0, reason="this system has no Landlock")


@pytest.mark.parametrize("name", [*FORGERIES, pytest.param("reads by native code", marks=LANDLOCK)])
def test_a_forgery_gets_no_points(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    if "FOLDER" in FORGERIES.get(name, NATIVE):
        (folder / "ben.py").write_text(solve(EXERCISE_SETS[SET]))
    solution = str(Path(solutions.__file__).with_name("self_attention.py"))
    source = FORGERIES.get(name, NATIVE).replace("FOLDER", str(folder)).replace("SOLUTION", solution)
    rows = [row for row in grade_one(folder, source) if row.student == "ann"]
    assert "read the memory" not in str(rows)
    assert [(row.points, row.max_points) for row in rows] == [(0, 1)] * 3
    assert all(row.status != "correct" for row in rows)


def test_an_honest_solution_gets_all_points(tmp_path: Path) -> None:
    rows = grade_one(tmp_path, "from regard.work import grade\n" + solve(EXERCISE_SETS[SET]))
    assert [(row.student, row.question, row.points, row.status) for row in rows] == [
        ("ann", "softmax", 1, "correct"),
        ("ann", "attention", 1, "correct"),
        ("ann", "scaled", 1, "correct"),
    ]


def test_a_relative_folder_is_graded_as_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "link.txt").symlink_to("nothing")  # a link to a missing file stops nobody's grading
    monkeypatch.chdir(tmp_path)
    rows = grade_one(Path("class"), solve(EXERCISE_SETS[SET]))
    assert [row.points for row in rows] == [1, 1, 1], rows


def test_an_error_of_the_grading_is_not_one_of_the_submission(tmp_path: Path) -> None:
    with (
        pytest.raises(
            GradingError, match=r"exit code 1 before it ran this one, .*: FileNotFoundError: .*no_such_folder"
        ),
        run_submission([("ann.py", "x = 1")], LIMITS, hidden=[tmp_path / "no_such_folder"]),
    ):
        pass


def test_another_copy_of_the_solutions_on_the_path_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy" / "regard" / "work" / "answers.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(solve(EXERCISE_SETS[SET]))
    monkeypatch.syspath_prepend(tmp_path / "copy")
    (tmp_path / "class").mkdir()
    rows = grade_one(tmp_path / "class", f"exec(open({str(copy)!r}).read())")
    assert [row.points for row in rows] == [0, 0, 0], rows


def test_torch_modules_are_graded_in_the_other_process(tmp_path: Path) -> None:
    exercise_set = EXERCISE_SETS["vit"]
    source = solve(exercise_set).replace("self.blocks(x))[:, 0]", "self.blocks(x)).mean(1)")
    (tmp_path / "ann.py").write_text(source)
    rows = list(grade_folder(tmp_path, ClassOptions(("vit",), limits=LIMITS)))
    assert [row.points for row in rows] == [1, 1, 1, 0, 1]
    assert rows[3].message.startswith("mean instead of class token: you read the class from the mean")


def test_limits_and_forbidden_calls_are_reported(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "class").mkdir()
    rows = grade_one(
        tmp_path / "class",
        f"""
import os
def softmax_columns(scores):
    return bytearray(3 * 10**9)
def self_attention(*inputs):
    os.system("touch {marker}")
def scaled_self_attention(*inputs):
    open("{marker}", "w")
""",
    )
    assert "MemoryError" in rows[0].message
    assert "os.system is not allowed while answers are graded" in rows[1].message
    assert "marker' cannot be written while answers are graded" in rows[2].message
    assert not marker.exists()


def test_a_submission_changes_neither_the_grading_process_nor_files_of_others(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "class").mkdir()
    rows = grade_one(
        tmp_path / "class",
        f"""
import os
class Name(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__
def softmax_columns(scores):
    open(Name("{marker}"), "w")
def self_attention(*inputs):
    import resource
    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))
def scaled_self_attention(*inputs):
    import mmap
    mmap.mmap(-1, 3 * 10**9)
""",
    )
    assert "cannot be written while answers are graded" in rows[0].message
    assert "resource.prlimit is not allowed while answers are graded" in rows[1].message
    assert "mmap.__new__ is not allowed while answers are graded" in rows[2].message
    assert not marker.exists()


@LANDLOCK
def test_native_code_of_a_submission_writes_nowhere_else_and_signals_nobody(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    rows = grade_one(
        tmp_path / "class",
        f"""
import os, signal, torch
def softmax_columns(scores):
    with open("own.txt", "w") as file:
        file.write("written")
    return open("own.txt").read()
def self_attention(*inputs):
    torch.from_file("{tmp_path / "marker"}", shared=True, size=9, dtype=torch.uint8)
def scaled_self_attention(*inputs):
    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)
""",
    )
    assert "'written'" in rows[0].message
    assert "unable to open file" in rows[1].message
    assert landlock_version() < 6 or "Operation not permitted" in rows[2].message
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["ann.py", "ann/answer.py"])
def test_a_link_to_a_file_of_somebody_else_is_not_graded(name: str, tmp_path: Path) -> None:
    (tmp_path / "ben.py").write_text(solve(EXERCISE_SETS[SET]))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "ben.py")
    rows = grade_folder(tmp_path, ClassOptions((SET,), limits=LIMITS))
    found = {row.student: row for row in rows}
    assert (found["ann"].points, found["ann"].status) == (0, "error")
    assert "is a link to" in found["ann"].message
    assert found["ben"].points == 1


def test_a_link_in_a_folder_of_a_student_does_not_show_the_solutions(tmp_path: Path) -> None:
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "notes.txt").symlink_to(Path(solutions.__file__).with_name("self_attention.py"))
    rows = grade_one(tmp_path, f"exec(open({str(tmp_path / 'ann' / 'notes.txt')!r}).read())", "ann/answer.py")
    assert [row.points for row in rows] == [0, 0, 0], rows


def test_a_message_that_no_file_can_hold_is_escaped(tmp_path: Path) -> None:
    rows = grade_one(tmp_path, "raise ValueError('\\ud800')")
    (tmp_path / "points.csv").write_text(to_csv(rows), encoding="utf-8")
    assert "\\ud800" in rows[0].message


def test_variants_come_from_the_seed_of_the_class(tmp_path: Path) -> None:
    varied = EXERCISE_SETS[SET].for_student("ann", "secret")
    assert varied.variant not in ("000", EXERCISE_SETS[SET].for_student("ann", "other").variant)
    source = solve(varied) + "\nvariant = '000'\nclass_seed = 'other'\n"
    assert sum(row.points for row in grade_one(tmp_path, source, class_seed="secret")) == 3
    assert sum(row.points for row in grade_one(tmp_path, source, class_seed="other")) < 3
    # the same file under another name has other tasks
    (tmp_path / "ann.py").unlink()
    names = [f"student{number}" for number in range(9)]
    first = {name: EXERCISE_SETS[SET].for_student(name, "secret").variant[0] for name in names}
    other = next(name for name in names if first[name] != varied.variant[0])
    assert sum(row.points for row in grade_one(tmp_path, source, f"{other}/answer.py", class_seed="secret")) < 3


def test_a_quiz_is_graded_without_running_code(tmp_path: Path) -> None:
    quiz = Quiz.for_student("ann", count=2, seed=student_seed("ann", "secret"))
    lines = [f"prediction_{each.number} = {each.correct_answer!r}  # mine" for each in quiz.questions]
    (tmp_path / "ann.py").write_text("\n".join([*lines, "raise SystemExit"]))
    (tmp_path / "ben.json").write_text(json.dumps({"seed": 7, "answers": {"1": "zz"}}))
    rows = list(grade_folder(tmp_path, ClassOptions(quiz=2, class_seed="secret")))
    assert [(row.student, row.exercise, row.question, row.points, row.status) for row in rows] == [
        ("ann", "quiz", "1", 1, "correct"),
        ("ann", "quiz", "2", 1, "correct"),
        ("ben", "quiz", "1", 0, "wrong"),
        ("ben", "quiz", "2", 0, "missing"),
    ]
    assert read_predictions([("a", "prediction_1 = ...\nprediction_2 = b")]) == {"2": "b"}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"answers": ' + "9" * 5000 + "}", '{"answers": 7}', "[]", "\udcff"])
def test_damaged_answers_of_one_student_do_not_stop_the_others(tmp_path: Path, text: str) -> None:
    (tmp_path / "ann.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "ben.json").write_text('{"answers": {"1": "zz"}}')
    rows = list(grade_folder(tmp_path, ClassOptions(quiz=1, class_seed="secret")))
    assert [(row.student, row.status) for row in rows] == [("ann", "error"), ("ben", "wrong")]
    assert "ann.json" in rows[0].message


@pytest.mark.parametrize("value", ["-" * 100_000 + "1", "1+" * 50_000 + "1", "[" * 1000])
def test_a_prediction_that_is_nested_too_deep_is_text(value: str) -> None:
    assert read_predictions([("a", f"prediction_1 = {value}")]) == {"1": value}


def test_submissions_are_found_by_file_and_by_folder(tmp_path: Path) -> None:
    for name in ("ann.py", "ben/first.ipynb", "ben/more/second.py", ".hidden/x.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = find_submissions(tmp_path)
    assert {student: [file.name for file in files] for student, files in found.items()} == {
        "ann": ["ann.py"],
        "ben": ["first.ipynb", "second.py"],
    }
    rows = list(grade_folder(tmp_path, ClassOptions(limits=LIMITS)))
    assert [(row.student, row.status) for row in rows] == [("ann", "missing"), ("ben", "error")]
    assert "is not JSON" in rows[1].message
    # a file that cannot be read counts in the total of what was asked
    (tmp_path / "ann.py").unlink()
    rows = list(grade_folder(tmp_path, ClassOptions((SET,), quiz=1, limits=LIMITS)))
    assert [(row.exercise, row.question, row.points, row.max_points, row.status) for row in rows] == [
        (SET, "softmax", 0, 1, "error"),
        (SET, "attention", 0, 1, "error"),
        (SET, "scaled", 0, 1, "error"),
        ("quiz", "1", 0, 1, "error"),
    ]


def test_wrong_options_are_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; give the folder of the submissions"):
        list(grade_folder(tmp_path / "missing", ClassOptions()))
    with pytest.raises(ConfigError, match="has no submissions"):
        list(grade_folder(tmp_path, ClassOptions()))
    with pytest.raises(UnknownNameError, match="unknown exercise set 'vits'"):
        list(grade_folder(tmp_path, ClassOptions(("vits",))))


def test_csv_has_the_columns_of_the_rows_and_no_formulas() -> None:
    rows = [ClassRow("=1+1", SET, "softmax", 1, 1, "correct", ""), ClassRow("b", SET, "scaled", 0, 1, "wrong", "x, y")]
    found = list(csv.reader(io.StringIO(to_csv(rows))))
    assert found[0] == ["student", "exercise", "question", "points", "max_points", "status", "message"]
    assert found[1][0] == "'=1+1"
    assert found[2] == ["b", SET, "scaled", "0", "1", "wrong", "x, y"]


def test_values_survive_the_way_between_processes() -> None:
    import numpy as np
    import torch

    table = NextTokenTable(np.array([[0.25, 0.75], [1.0, 0.0]]))
    value = (1, [2.5, None], {("a", "b"): "x"}, np.arange(6).reshape(2, 3), torch.ones(2, dtype=torch.float64), table)
    found = decode(json.loads(json.dumps(encode(value))))
    assert found[:3] == value[:3]
    np.testing.assert_array_equal(found[3], value[3])
    assert torch.equal(found[4], value[4])
    np.testing.assert_array_equal(found[5]([0, 1]), [1.0, 0.0])
    assert decode(encode(RaisedError("A", "", "b"))) == RaisedError("A", "", "b")
    assert decode(encode(TorchModule("Flatten", {"start_dim": 2}))) == TorchModule("Flatten", {"start_dim": 2})
    assert isinstance(decode(encode(os)), OtherValue)
