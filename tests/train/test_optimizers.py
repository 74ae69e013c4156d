"""Which parameters get which rate and decay, Muon against its formula, and what optimisers remember."""

import re

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.models.bert import BERT, BERTConfig
from regard.models.gpt import GPT, GPTConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import ViT, ViTConfig
from regard.train.muon import BatchedMuon as BatchedMuon
from regard.train.optimizers import AdamW, Muon, Optimisers, Rule, Stepper
from tests.train.tiny import Tiny


def groups(plan: Optimisers, model: nn.Module) -> dict[str, tuple[str, float, float]]:
    """The optimiser, rate and decay of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (type(each).__name__, group["lr"], group["weight_decay"])
        for each in plan.made([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        for group in each.param_groups
        for p in group["params"]
    }


def test_the_first_rule_that_finds_a_name_counts_and_vectors_never_decay() -> None:
    first, second = Rule(names=r"^blocks\.0", rate=0.5, decay=2.0), Rule(names="blocks", rate=0.25)
    rules = (first, second, Rule(names="head", decay=0))
    found = groups(AdamW(rate=0.1, decay=0.3, rules=rules), Tiny())
    assert found == {
        "embed.weight": ("AdamW", 0.1, 0.3),
        "embed.bias": ("AdamW", 0.1, 0.0),
        "blocks.0.0.weight": ("AdamW", 0.05, 0.6),
        "blocks.0.0.bias": ("AdamW", 0.05, 0.0),
        "blocks.1.0.weight": ("AdamW", 0.025, 0.3),
        "blocks.1.0.bias": ("AdamW", 0.025, 0.0),
        "head.weight": ("AdamW", 0.1, 0.0),
    }


def test_muon_takes_the_matrices_between_the_first_and_the_last() -> None:
    found = groups(Muon(rate=0.2, decay=0.1, rest=AdamW(rate=0.01, decay=0.3)), Tiny())
    assert {name for name, (kind, *_) in found.items() if kind == "BatchedMuon"} == {
        "blocks.0.0.weight",
        "blocks.1.0.weight",
    }
    assert found["blocks.1.0.weight"] == ("BatchedMuon", 0.2, 0.1)
    assert found["embed.weight"] == ("AdamW", 0.01, 0.3)
    assert {kind for kind, *_ in groups(Muon(besides="."), Tiny()).values()} == {"AdamW"}


def test_a_step_of_muon_is_orthogonal_whatever_the_gradient() -> None:
    model = nn.Linear(9, 9, bias=False)
    before = model.weight.detach().clone()
    stepper = Stepper(Muon(rate=1.0), model)
    (model.weight * torch.randn(9, 9)).sum().backward()
    stepper.at(0.5)
    stepper.step()
    values = torch.linalg.svdvals((before - model.weight.detach()) / 0.5)
    assert values.max() < 1.3
    assert values[:-1].min() > 0.5, "the last one may be near to none, and stays so"


def test_a_frozen_parameter_is_left_alone_and_a_frozen_model_refused() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    assert not [name for name in groups(AdamW(), model) if name.startswith("embed")]
    with pytest.raises(ConfigError, match="the model has no parameter that learns: requires_grad is False for all"):
        Stepper(AdamW(), model.requires_grad_(False))


def stepped(stepper: Stepper, model: Tiny, count: int) -> None:
    for number in range(count):
        model(torch.linspace(-1, 1, 35).reshape(5, 7) * (number + 1)).square().sum().backward()
        stepper.at(1 / (number + 1))
        stepper.step()
        stepper.forget_gradients()


def test_muon_leaves_tables_and_last_layers_of_our_models_alone() -> None:
    sizes = {"width": 8, "depth": 1, "heads": 2}
    models = [
        GPT(GPTConfig(vocab=11, context=5, tied=False, **sizes)),
        BERT(BERTConfig(vocab=11, context=5, **sizes)),
        Transformer(TransformerConfig(vocab=11, context=5, **sizes)),
        ViT(ViTConfig(image=4, patch=2, classes=3, **sizes)),
    ]
    for model in models:
        turned = {name for name, (kind, *_) in groups(Muon(), model).items() if kind == "BatchedMuon"}
        inner = re.compile(r"(^|\.)blocks\.|^pooler|^words\.dense")
        assert turned == {name for name, p in model.named_parameters() if p.ndim == 2 and inner.search(name)}


def test_matrices_that_are_turned_together_end_as_those_turned_one_by_one() -> None:
    draws = torch.Generator().manual_seed(3)
    shapes = [(9, 5), (5, 9), (9, 5), (7, 7), (5, 9), (3, 3)]
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    rules = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}
    together, apart = BatchedMuon(ours, **rules), torch.optim.Muon(theirs, **rules)
    for turn in range(3):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = None if number == turn else torch.randn(one.shape, generator=draws)
            other.grad = None if one.grad is None else one.grad.clone()
        together.step()
        apart.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=0.01)  # bfloat16
        assert not torch.equal(one, torch.ones_like(one))
    assert {p.shape for p in together.state} == {p.shape for p in ours}


@pytest.mark.parametrize("plan", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_what_is_remembered_is_written_down_by_name_and_taken_up_again(plan: Optimisers) -> None:
    first = Tiny()
    stepper = Stepper(plan, first)
    stepped(stepper, first, 3)
    kept: dict[str, Tensor] = {name: tensor.clone() for name, tensor in stepper.tensors().items()}
    assert {name.split("/")[0] for name in kept} == {name for name, _ in first.named_parameters()}
    second = Tiny()
    second.load_state_dict(first.state_dict())
    again = Stepper(plan, second)
    again.load(kept)
    for each, model in ((stepper, first), (again, second)):
        stepped(each, model, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_rate_follows_the_share() -> None:
    stepper = Stepper(AdamW(rate=0.25, rules=(Rule(names="head", rate=4),)), Tiny())
    stepper.at(0.5)
    assert {group["lr"] for group in stepper.param_groups} == {0.125, 0.5}
    assert stepper.rate(0.5) == 0.125


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule(names="("), r"Rule\(names\) is '\(', which is not a regular expression: "),
        (lambda: Rule(names="a", rate=-1), r"Rule\(rate\) is a share from 0 upwards, not -1"),
        (lambda: AdamW(rate=0), r"AdamW\(rate\) must be above 0, not 0"),
        (lambda: AdamW(decay=-0.1), r"AdamW\(decay\) must be 0 or above, not -0.1"),
        (lambda: AdamW(betas=(0.9, 1.0)), r"AdamW\(betas\) are from 0 to below 1, not \(0.9, 1.0\)"),
        (lambda: Muon(besides="["), r"Muon\(besides\) is '\[', which is not a regular expression: "),
        (lambda: Muon(rate=-1), r"Muon\(rate\) must be above 0, not -1"),
        (lambda: Muon(momentum=1), r"Muon\(momentum\) is from 0 to below 1, not 1"),
        (lambda: Muon(decay=-1), r"Muon\(decay\) must be 0 or above, not -1"),
        (
            lambda: groups(AdamW(rules=(Rule(names="haed"),)), Tiny()),
            r"Rule\(names='haed'\) finds no parameter; there are embed.weight, embed.bias, ",
        ),
    ],
)
def test_what_is_no_optimiser_is_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
