"""`regard explain`: the answers of all kernels to a call that is never made."""

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import causal, softcap, window
from regard.cli import app
from regard.cli.explain import blank, sizes, term
from regard.core.scores import TERMS

run = CliRunner()


def numbers(*words: str) -> Any:
    result = run.invoke(app, ["explain", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_answers_are_those_of_regard_explain() -> None:
    q, k, v = torch.zeros(2, 6, 70, 8), torch.zeros(2, 3, 90, 8), torch.zeros(2, 3, 90, 5)
    mask = causal() & window(before=7)
    truth = regard.explain(q, k, v, mask=mask, scores=softcap(5), beta=0.5, dropout=0.1)
    words = ["--shape", "2,6,70,8", "--kv", "3,90,5", "--mask", repr(mask), "--scores", "softcap:5"]
    told = numbers(*words, "--beta", "0.5", "--dropout", "0.1")
    assert told["call"] == truth.call
    assert (told["chosen"], told["visible"], told["pairs"]) == (truth.chosen, truth.visible, truth.pairs)
    assert told["share"] == truth.visible / truth.pairs
    for mine, theirs in zip(told["answers"], truth.answers, strict=True):
        assert (mine["kernel"], tuple(mine["reasons"])) == (theirs.kernel, theirs.reasons)
        assert (mine["work"], mine["memory"]) == ((theirs.work, theirs.memory) if theirs.able else (None, None))


def test_every_kernel_has_a_row_and_the_chosen_one_is_marked() -> None:
    result = run.invoke(app, ["explain", "--beta", "inf"], env={"COLUMNS": "80"})
    truth = regard.explain(*[blank((1, 8, 1024, 64))] * 3, beta=math.inf)
    assert result.exit_code == 0
    for answer in truth.answers:
        assert f" {answer.kernel} " in result.stdout
    (marked,) = [line for line in result.stdout.splitlines() if line.startswith("->")]
    assert marked.split()[1:3] == [truth.chosen, "runs"]
    assert "beta=inf is hard attention" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_call_that_would_not_fit_in_memory_is_explained_all_the_same() -> None:
    told = numbers("--shape", "64,64,16384,128", "--mask", "causal()", "--dtype", "bfloat16")
    assert told["pairs"] == 64 * 64 * 16384**2
    assert "torch.bfloat16" in told["call"]


@pytest.mark.parametrize("name", list(TERMS))
def test_every_term_can_be_spelled(name: str) -> None:
    q, k, v = blank((2, 6, 7, 8)), blank((2, 6, 9, 8)), blank((2, 6, 9, 5))
    made = term(name, 6, 7, 9, 8)
    assert made.name == name
    assert regard.explain(q, k, v, scores=made).chosen
    assert numbers("--scores", name, "--scores", "alibi")["chosen"]


def test_the_terms_are_those_of_the_package() -> None:
    made = {name for name in regard.__all__ if getattr(getattr(regard, name), "__module__", "") == "regard.core.scores"}
    assert made == set(TERMS), "export the term in regard/__init__.py"
    shown = run.invoke(app, ["explain", "--help"]).stdout
    missing = [name for name in TERMS if name not in shown]
    assert not missing, f"add {missing} to the help of --scores in regard/cli/explain.py"


def test_a_number_follows_the_colon() -> None:
    assert repr(term("softcap:12.5", 6, 7, 9, 8)) == repr(softcap(12.5))
    (keys,) = term("shaw:3", 6, 7, 9, 8).tensors()
    assert keys.shape == (7, 8)
    (table,) = term("t5_buckets:16", 6, 7, 9, 8).tensors()
    assert table.shape == (16, 6)


def test_sizes_are_read() -> None:
    assert sizes("--shape", "1, 2,3,4", "b h i c") == (1, 2, 3, 4)
    assert blank((3, 5)).shape == (3, 5)
    assert blank((3, 5), "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--shape", "1,2,3"], "--shape takes 4 whole numbers b,h,i,c (b batch, h query heads,"),
        (["--shape", "1,2,3,x"], "not '1,2,3,x'"),
        (["--shape", "1,2,3,-4"], "not '1,2,3,-4'"),
        (["--kv", "2"], "--kv takes 3 whole numbers g,j,e (g key/value heads,"),
        (["--kv", "3,1024,64"], "which is not a multiple of k's g=3"),
        (["--mask", "windw(3)"], "unknown mask 'windw'; did you mean 'window'?"),
        (["--scores", "alibbi"], "unknown score term 'alibbi'; did you mean 'alibi'?"),
        (["--scores", "alibi:3"], "alibi takes no number: write alibi, not alibi:3"),
        (
            ["--scores", "softcap:x"],
            "a number above zero after its colon, for instance softcap:30, not 'x'",
        ),
        (["--scores", "softcap:-1"], "takes a number above zero"),
        (["--scores", "softcap:nan"], "takes a number above zero"),
        (["--beta", "nan"], "beta is nan"),
        (["--dropout", "1"], "dropout is the probability of dropping a weight"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(words: list[str], error: str) -> None:
    result = run.invoke(app, ["explain", *words])
    assert result.exit_code == 2
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
