"""The benchmark of training: it runs, and wrong losses are not timed."""

import json
from collections.abc import Iterator

import pytest
import torch

from bench import training
from bench.plain_gpt import PlainGPT
from bench.report import CorrectnessError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Compiled functions run eagerly: compilers take longer than the rest."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_model_is_compared_with_its_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main(["--quick", "--json", "--only", "no biases"]) in (0, 1)
    out = capsys.readouterr()
    (row,) = json.loads(out.out)["results"]
    assert (row["name"], row["peer"], row["target"]) == ("GPT-2 124M, no biases, vocabulary padded", "plain GPT", 1.2)
    assert "losses 4." in out.err


def test_a_peer_with_other_losses_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PlainGPT.forward
    monkeypatch.setattr(PlainGPT, "forward", lambda self, *batch: 1.02 * forward(self, *batch))
    with pytest.raises(CorrectnessError, match="losses differ from those of plain GPT"):
        training.measure_gpt("GPT", True, 97, training.QUICK, CPU)


@pytest.mark.parametrize("name", training.RECIPES)
def test_every_recipe_has_batches_and_a_loss(name: str) -> None:
    with training.RecipeSteps(name, True, CPU, graphs=True).batches as batches:
        assert len(batches.next()) == 1


def test_without_a_gpu_the_benchmark_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 2
    assert "needs a GPU; --quick runs tiny models on a CPU" in capsys.readouterr().err
