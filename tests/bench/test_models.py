"""The benchmark of models: it runs and checks correctness."""

import json

import pytest
import torch

from bench import models
from bench.report import CorrectnessError


def test_every_model_is_compared_with_its_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = models.time_alternating
    short = {"rounds": 1, "min_seconds": 0.0, "device": "cpu"}
    monkeypatch.setattr(models, "time_alternating", lambda functions, **settings: usual(functions, **short))
    assert models.main(["--quick", "--json", "--only", "transformer"]) in (0, 1)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["name"], each["peer"]) for each in results] == [
        ("Transformer, forward", "torch.nn.Transformer"), ("Transformer, training step", "torch.nn.Transformer"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", list(models.make_cases(models.Sizes(1, 9, 32))), ids=lambda case: case.name)
def test_peers_are_networks_of_the_same_size(case: models.ModelCase) -> None:
    model = models.build_from_config(case.config)
    models.check_model(case, model)
    for peer, build in case.peers.items():
        other = build(models.Sizes(1, 9, 32))
        models._check_size(case.name, peer, model, other)
        assert models._logits(other(*case.inputs)).isfinite().all()


def test_a_wrong_model_is_not_timed() -> None:
    case = next(models.make_cases(models.Sizes(1, 9, 32)))
    model = models.build_from_config(case.config)
    model.register_forward_hook(lambda module, args, out: out + 0.1 * torch.ones(()))
    with pytest.raises(CorrectnessError, match="GPT-2: the error is"):
        models.check_model(case, model)
