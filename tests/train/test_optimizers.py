"""Parameter groups, Muon compared with torch.optim.Muon, and the state dict of the optimizers."""

import re

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.models.bert import BERT, BERTConfig
from regard.models.gpt import GPT, GPTConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import ViT, ViTConfig
from regard.train.muon import BatchedMuon
from regard.train.optimizers import AdamW, CombinedOptimizer, Muon, OptimizerConfig, ParamGroup
from tests.train.tiny import Tiny


def groups(plan: OptimizerConfig, model: nn.Module) -> dict[str, tuple[str, float, float]]:
    """Return the optimizer, learning rate and weight decay of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (type(each).__name__, group["lr"], group["weight_decay"])
        for each in plan.build([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        for group in each.param_groups
        for p in group["params"]
    }


def test_the_first_matching_param_group_is_used_and_vectors_have_no_weight_decay() -> None:
    first, second = (
        ParamGroup(pattern=r"^blocks\.0", lr_scale=0.5, weight_decay_scale=2.0),
        ParamGroup(pattern="blocks", lr_scale=0.25),
    )
    rules = (first, second, ParamGroup(pattern="head", weight_decay_scale=0))
    found = groups(AdamW(lr=0.1, weight_decay=0.3, param_groups=rules), Tiny())
    assert found == {
        "embed.weight": ("AdamW", 0.1, 0.3),
        "embed.bias": ("AdamW", 0.1, 0.0),
        "blocks.0.0.weight": ("AdamW", 0.05, 0.6),
        "blocks.0.0.bias": ("AdamW", 0.05, 0.0),
        "blocks.1.0.weight": ("AdamW", 0.025, 0.3),
        "blocks.1.0.bias": ("AdamW", 0.025, 0.0),
        "head.weight": ("AdamW", 0.1, 0.0),
    }


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    found = groups(Muon(lr=0.2, weight_decay=0.1, adamw=AdamW(lr=0.01, weight_decay=0.3)), Tiny())
    assert {name for name, (kind, *_) in found.items() if kind == "BatchedMuon"} == {
        "blocks.0.0.weight",
        "blocks.1.0.weight",
    }
    assert found["blocks.1.0.weight"] == ("BatchedMuon", 0.2, 0.1)
    assert found["embed.weight"] == ("AdamW", 0.01, 0.3)
    assert {kind for kind, *_ in groups(Muon(exclude="."), Tiny()).values()} == {"AdamW"}


def test_an_update_of_muon_is_orthogonal() -> None:
    model = nn.Linear(9, 9, bias=False)
    before = model.weight.detach().clone()
    optimizer = CombinedOptimizer(Muon(lr=1.0), model)
    (model.weight * torch.randn(9, 9)).sum().backward()
    optimizer.scale_lr(0.5)
    optimizer.step()
    values = torch.linalg.svdvals((before - model.weight.detach()) / 0.5)
    assert values.max() < 1.3
    assert values[:-1].min() > 0.5, "only the smallest singular value may stay near 0"


def test_frozen_parameters_are_skipped_and_a_frozen_model_raises_an_error() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    assert not [name for name in groups(AdamW(), model) if name.startswith("embed")]
    with pytest.raises(ConfigError, match="the model has no parameter to train: requires_grad is False for all"):
        CombinedOptimizer(AdamW(), model.requires_grad_(False))


def take_steps(optimizer: CombinedOptimizer, model: Tiny, count: int) -> None:
    for number in range(count):
        model(torch.linspace(-1, 1, 35).reshape(5, 7) * (number + 1)).square().sum().backward()
        optimizer.scale_lr(1 / (number + 1))
        optimizer.step()
        optimizer.zero_grad()


def test_muon_does_not_update_embeddings_and_output_layers_of_our_models() -> None:
    sizes = {"width": 8, "depth": 1, "heads": 2}
    models = [
        GPT(GPTConfig(vocab=11, context=5, tied=False, **sizes)),
        BERT(BERTConfig(vocab=11, context=5, **sizes)),
        Transformer(TransformerConfig(vocab=11, context=5, **sizes)),
        ViT(ViTConfig(image=4, patch=2, classes=3, **sizes)),
    ]
    for model in models:
        updated = {name for name, (kind, *_) in groups(Muon(), model).items() if kind == "BatchedMuon"}
        inner = re.compile(r"(^|\.)blocks\.|^pooler|^words\.dense")
        assert updated == {name for name, p in model.named_parameters() if p.ndim == 2 and inner.search(name)}


def test_batched_muon_gives_the_same_weights_as_torch_muon() -> None:
    draws = torch.Generator().manual_seed(3)
    shapes = [(9, 5), (5, 9), (9, 5), (7, 7), (5, 9), (3, 3)]
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}
    batched, single = BatchedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for turn in range(3):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = None if number == turn else torch.randn(one.shape, generator=draws)
            other.grad = None if one.grad is None else one.grad.clone()
        batched.step()
        single.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=0.01)  # bfloat16
        assert not torch.equal(one, torch.ones_like(one))
    assert {p.shape for p in batched.state} == {p.shape for p in ours}


@pytest.mark.parametrize("plan", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_the_state_dict_is_keyed_by_parameter_name_and_restores_the_optimizer(plan: OptimizerConfig) -> None:
    first = Tiny()
    optimizer = CombinedOptimizer(plan, first)
    take_steps(optimizer, first, 3)
    kept: dict[str, Tensor] = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert {name.split("/")[0] for name in kept} == {name for name, _ in first.named_parameters()}
    second = Tiny()
    second.load_state_dict(first.state_dict())
    again = CombinedOptimizer(plan, second)
    again.load_state_dict(kept)
    for each, model in ((optimizer, first), (again, second)):
        take_steps(each, model, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scale_lr_multiplies_every_learning_rate() -> None:
    optimizer = CombinedOptimizer(AdamW(lr=0.25, param_groups=(ParamGroup(pattern="head", lr_scale=4),)), Tiny())
    optimizer.scale_lr(0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125, 0.5}
    assert optimizer.lr == 0.125


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParamGroup(pattern="("), r"ParamGroup\(pattern\) is '\(', which is not a regular expression: "),
        (lambda: ParamGroup(pattern="a", lr_scale=-1), r"ParamGroup\(lr_scale\) must be at least 0, not -1"),
        (lambda: AdamW(lr=0), r"AdamW\(lr\) must be above 0, not 0"),
        (lambda: AdamW(weight_decay=-0.1), r"AdamW\(weight_decay\) must be at least 0, not -0.1"),
        (lambda: AdamW(betas=(0.9, 1.0)), r"AdamW\(betas\) must be at least 0 and below 1, not 1"),
        (lambda: Muon(exclude="["), r"Muon\(exclude\) is '\[', which is not a regular expression: "),
        (lambda: Muon(lr=-1), r"Muon\(lr\) must be above 0, not -1"),
        (lambda: Muon(momentum=1), r"Muon\(momentum\) must be at least 0 and below 1, not 1"),
        (lambda: Muon(weight_decay=-1), r"Muon\(weight_decay\) must be at least 0, not -1"),
        (
            lambda: groups(AdamW(param_groups=(ParamGroup(pattern="haed"),)), Tiny()),
            r"ParamGroup\(pattern='haed'\) matches no parameter; there are embed.weight, embed.bias, ",
        ),
    ],
)
def test_invalid_settings_raise_an_error(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
