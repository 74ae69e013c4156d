"""The GPT that runs in the page computes what torch computes, with edits too."""

from typing import Any

import pytest
import torch

import regard
from regard.base.errors import ConfigError
from regard.explorer.views.browser_model import export_model
from regard.models.gpt import GPT, GPTConfig, Learned
from regard.models.presets import build_from_config
from regard.see.heads import measure_heads
from regard.see.relevance import weight_gradients
from tests.explorer.node import needs_node, run_node

VOCABULARY = "abcdefghijk"
CONFIG = GPTConfig(vocab=11, context=19, width=12, depth=2, heads=3, ff_width=0, positions=Learned(), dropout=0.0,
                   attention_dropout=0.0)  # fmt: skip
TOKENS, SOURCE = [3, 7, 1, 0, 3, 7, 1, 9, 10], [2, 2, 5, 6, 1, 0, 4, 4, 8]
POSITION, TOKEN = 7, 4


@pytest.fixture(scope="module")
def model() -> GPT:
    """Weights large enough that attention is far from uniform."""
    built = build_from_config(CONFIG, seed=3).double()
    with torch.no_grad():
        for name, part in built.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            part += (0.4 * torch.randn(part.shape, generator=generator, dtype=torch.float64)).float().double()
    for part in built.parameters():
        part.data = part.data.float().double()  # what the page gets is float32
    assert isinstance(built, GPT)
    return built.eval()


def ask(model: GPT, edits: list[dict[str, Any]]) -> Any:
    request = {"model": export_model(model, "test", VOCABULARY), "tokens": TOKENS, "edits": edits, "source": SOURCE,
               "position": POSITION, "token": TOKEN}  # fmt: skip
    return run_node("gpt_golden.mjs", request)


@needs_node
def test_logits_weights_and_head_numbers_are_those_of_torch(model: GPT) -> None:
    found = ask(model, [])
    tokens = torch.tensor([TOKENS])
    with torch.no_grad(), regard.watch(model) as seen:
        logits = model(tokens)[0]
    assert torch.tensor(found["logits"]).double() == pytest.approx(logits, abs=1e-5)
    for record, weights, numbers in zip(seen.records, found["weights"], found["numbers"], strict=True):
        assert torch.tensor(weights).double() == pytest.approx(record.weights()[0], abs=1e-6)
        for summary, own in zip(measure_heads(record, tokens), numbers, strict=True):
            for name in ("spread", "previous", "first", "induction"):
                assert own[name] == pytest.approx(getattr(summary, name), abs=1e-6), name


@needs_node
def test_attribution_sums_to_the_logit(model: GPT) -> None:
    found = ask(model, [{"kind": "ablate", "layer": 0, "head": 1, "value": None}])
    total = sum(part["value"] for part in found["attribution"])
    assert total == pytest.approx(found["logits"][POSITION][TOKEN], abs=1e-9)
    assert sum("head" in part["name"] for part in found["attribution"]) == 6


@needs_node
@pytest.mark.parametrize("kind", [None, "ablate", "mean"])
def test_gradients_of_the_weights_are_those_of_autograd(model: GPT, kind: str | None) -> None:
    edits = [] if kind is None else [{"kind": kind, "layer": 1, "head": 2, "value": None}]
    found = ask(model, edits)["gradients"]
    with regard.intervene(model) as edit:
        if kind is not None:
            edit.ablate(1, heads=[2], how="zero" if kind == "ablate" else "mean")
        with regard.watch(model) as seen:
            model(torch.tensor([TOKENS]))[0, POSITION, TOKEN].backward()
    model.zero_grad()
    for at, record in enumerate(seen.records):
        wanted = weight_gradients(record)[0]
        seen_pairs = torch.ones(9, 9).tril().bool()  # hidden weights have no effect
        own = torch.tensor(found[at]).double()
        heads = [head for head in range(3) if not (edits and at == 1 and head == 2)]
        assert own[heads][:, seen_pairs] == pytest.approx(wanted[heads][:, seen_pairs], abs=1e-6)
        assert float(wanted[heads].abs().max()) > 1e-3


def edited_logits(model: GPT, edit: dict[str, Any]) -> torch.Tensor:
    """The same edit made in torch by replacing the attention of one layer."""
    attention = model.blocks[edit["layer"]].attention
    head, width = edit["head"], CONFIG.width // CONFIG.heads
    own = slice(head * width, (head + 1) * width)
    taken: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        hook = attention.out.register_forward_pre_hook(lambda _, given: taken.update(z=given[0].clone()))
        model(torch.tensor([SOURCE]))
        hook.remove()

        def replace(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            z = given[0].clone()
            if edit["kind"] == "ablate":
                z[..., own] = 0
            elif edit["kind"] == "mean":
                z[..., own] = z[..., own].mean(1, keepdim=True)
            else:
                z[..., own] = taken["z"][..., own]
            return (z,)

        hook = attention.out.register_forward_pre_hook(replace)
        logits: torch.Tensor = model(torch.tensor([TOKENS]))[0]
        hook.remove()
    return logits


@needs_node
@pytest.mark.parametrize("kind", ["ablate", "mean", "patch"])
def test_an_edited_head_is_the_same_in_torch(model: GPT, kind: str) -> None:
    edit = {"kind": kind, "layer": 1, "head": 2, "value": None}
    found = torch.tensor(ask(model, [edit])["logits"]).double()
    truth = edited_logits(model, edit)
    assert found == pytest.approx(truth, abs=1e-5)
    with torch.no_grad():
        assert (truth - model(torch.tensor([TOKENS]))[0]).abs().max() > 1e-2


@needs_node
def test_beta_and_hidden_keys_change_the_weights_of_one_head(model: GPT) -> None:
    plain = torch.tensor(ask(model, [])["weights"])
    sharp = torch.tensor(ask(model, [{"kind": "beta", "layer": 0, "head": 0, "value": 3}])["weights"])
    power = plain[0, 0].double() ** 3
    assert sharp[0, 0].double() == pytest.approx(power / power.sum(-1, keepdim=True), abs=1e-6)
    assert torch.equal(sharp[0, 1:], plain[0, 1:])
    hidden = torch.tensor(ask(model, [{"kind": "hide", "layer": 1, "head": 1, "value": 2}])["weights"])
    assert (hidden[1, 1, :, 2] == 0).all()
    assert hidden[1, 1].sum(-1) == pytest.approx(torch.ones(9), abs=1e-6)


def test_other_models_are_refused(model: GPT) -> None:
    big = build_from_config(GPTConfig(vocab=11, context=19, width=12, depth=1, heads=3), seed=0)
    assert isinstance(big, GPT)
    with pytest.raises(ConfigError, match="attention-only"):
        export_model(big, "big", VOCABULARY)
