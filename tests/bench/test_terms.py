"""The benchmark of score terms: its peers compute the same, and a wrong term is noticed."""

import pytest
import torch

from bench.report import CorrectnessError
from bench.terms import check, main, make_cases
from regard import attend

CASES = [case.name for case in make_cases(2, "cpu")]


@pytest.mark.parametrize("name", CASES)
def test_ours_and_the_peer_mean_the_same(name: str) -> None:
    case = next(case for case in make_cases(2, "cpu") if case.name == name)
    run = lambda q, k, v: attend(q, k, v, mask=case.mask, scores=case.term)  # noqa: E731
    check(case, run, 2, 16, torch.float32, "cpu", n=70)


def test_another_term_is_an_error() -> None:
    case = next(iter(make_cases(2, "cpu")))
    with pytest.raises(CorrectnessError, match="softcap: error"):
        check(case, lambda q, k, v: attend(10 * q, k, v, mask=case.mask), 2, 16, torch.float32, "cpu", n=70)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "this machine has no GPU" in capsys.readouterr().err
