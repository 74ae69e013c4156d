"""Initial values: every parameter has a rule, and its draws are its own."""

import math

import pytest
import torch
from torch import nn

from regard.base.errors import ConfigError
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build_from_config
from regard.nn.init import Initializer, constant, fan_in, init_parameters, normal, uniform, xavier


class Small(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.rest = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(depth))


TABLE = {"*.bias": constant(0.5), "first.weight": normal(0.1), "rest.*": uniform(0.3)}


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_a_missing_entry_is_an_error_that_names_the_parameter():
    with pytest.raises(ConfigError, match=r"rest\.0\.weight \(5, 5\) has no initial value; add a pattern") as caught:
        init_parameters(Small(), {"*.bias": constant(0.0), "first.weight": normal(0.1)})
    assert "(it has: *.bias, first.weight)" in str(caught.value)


def test_nothing_changes_if_an_entry_is_missing():
    small = Small()
    before = values(small)
    with pytest.raises(ConfigError):
        init_parameters(small, {"first.*": constant(0.0)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(small).items())


def test_one_seed_is_one_model_and_another_seed_another():
    models = [Small() for _ in range(3)]
    for model, seed in zip(models, (4, 4, 5), strict=True):
        torch.rand(seed)  # what was drawn elsewhere does not count
        init_parameters(model, TABLE, seed)
    first, again, other = (values(model) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == name.endswith("bias") for name in first)


def test_the_generator_of_the_caller_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    init_parameters(Small(0), TABLE)  # after the module: its constructor draws by torch's own rules
    torch.manual_seed(3)
    small = Small()
    torch.manual_seed(3)
    init_parameters(small, TABLE)
    assert torch.equal(torch.rand(4), expected)


def test_adding_a_layer_changes_no_other_value():
    short, long = Small(1), Small(3)
    init_parameters(short, TABLE)
    init_parameters(long, TABLE)
    common = values(short)
    assert all(torch.equal(values(long)[name], tensor) for name, tensor in common.items())
    rows = list(long.rest.parameters())
    assert not torch.equal(rows[0], rows[1])


def test_adding_a_block_to_a_model_changes_no_other_value():
    short, long = (
        build_from_config(GPTConfig(vocab=11, context=7, width=12, depth=depth, heads=3)) for depth in (1, 2)
    )
    kept = values(long)
    for name, tensor in values(short).items():
        # what flows into the residual is scaled by depth: the same draws all the same
        scale = math.sqrt(2) if name.endswith(("out.weight", "down.weight")) else 1.0
        torch.testing.assert_close(kept[name] * scale, tensor)


def test_the_first_pattern_that_fits_counts():
    small = Small()
    init_parameters(small, {"first.bias": constant(2.0), "*.bias": constant(1.0), "*": constant(3.0)})
    assert small.first.bias.unique().tolist() == [2.0]
    assert small.first.weight.unique().tolist() == [3.0]


def drawn(rule: Initializer, *shape: int) -> torch.Tensor:
    tensor = torch.empty(shape)
    rule.fill(tensor, torch.Generator().manual_seed(0))
    return tensor


def test_spreads_are_as_promised():
    assert drawn(constant(0.25), 7, 5).unique().tolist() == [0.25]
    plain = drawn(normal(0.02), 301, 203)
    assert abs(plain.std().item() / 0.02 - 1) < 0.01
    assert abs(plain.mean().item()) < 0.0005
    assert plain.abs().max() > 3 * 0.02
    cut = drawn(normal(0.02, cut=2.0), 301, 203)
    assert 0.0399 < cut.abs().max() <= 0.04
    flat = drawn(uniform(0.3), 301, 203)
    assert 0.2999 < flat.abs().max() <= 0.3
    assert abs(flat.std().item() / (0.3 / math.sqrt(3)) - 1) < 0.01
    glorot = drawn(xavier(), 301, 203)
    assert abs(glorot.var().item() / (2 / (301 + 203)) - 1) < 0.02
    lecun, he = drawn(fan_in(), 301, 203), drawn(fan_in(math.sqrt(2)), 31, 23, 3, 5)
    assert abs(lecun.var().item() * 203 - 1) < 0.02
    assert abs(he.var().item() * 23 * 3 * 5 / 2 - 1) < 0.05


def test_draws_lie_around_the_value():
    assert abs(drawn(Initializer(value=3.0, bound=0.5), 99, 99).mean().item() - 3) < 0.01
    assert abs(drawn(Initializer(value=3.0, std=0.5), 99, 99).mean().item() - 3) < 0.02
    assert abs(drawn(Initializer(value=3.0, std=0.5, cut=1.0), 99, 99).mean().item() - 3) < 0.02


def test_a_vector_has_no_inputs_and_outputs():
    with pytest.raises(ConfigError, match=r"shape \(5,\) has no inputs and outputs; use normal or constant"):
        drawn(xavier(), 5)


def test_dtypes_share_their_draws():
    wide, narrow = Small(), Small().bfloat16()
    init_parameters(wide, TABLE)
    init_parameters(narrow, TABLE)
    for name, tensor in values(wide).items():
        assert torch.equal(values(narrow)[name], tensor.bfloat16())


def test_buffers_need_an_entry_too_and_may_be_whole_numbers():
    norm = nn.Sequential(nn.BatchNorm1d(3))
    norm[0].running_mean.fill_(9.0)
    with pytest.raises(ConfigError, match=r"0\.running_mean \(3,\) has no initial value"):
        init_parameters(norm, {"*.weight": constant(1.0), "*.bias": constant(0.0)})
    table = {"*.num_batches_tracked": constant(0), "*.running_mean": constant(0.0), "*": constant(1.0)}
    init_parameters(norm, table)
    assert norm[0].running_mean.tolist() == [0, 0, 0]
    assert norm[0].num_batches_tracked.dtype == torch.int64


def test_on_the_meta_device_names_are_checked_and_nothing_is_drawn(monkeypatch):
    with torch.device("meta"):
        small = Small()
    monkeypatch.setattr(Initializer, "fill", lambda *_: pytest.fail("a large model would take its time"))
    init_parameters(small, TABLE)
    assert all(parameter.is_meta for parameter in small.parameters())
    with pytest.raises(ConfigError, match=r"first\.weight \(5, 3\) has no initial value"):
        init_parameters(small, {"*.bias": constant(0.0)})


def test_seeds_are_whole_numbers_that_fit():
    for seed in (-1, 1.5, 2**32):
        with pytest.raises(ConfigError, match="seed"):
            init_parameters(Small(), TABLE, seed)
    init_parameters(Small(), TABLE, 2**32 - 1)


def test_a_model_on_the_meta_device_costs_nothing():
    model = build_from_config(GPTConfig(vocab=50257), device="meta")
    assert isinstance(model, GPT)
    assert model.parameter_count == 124_439_808
