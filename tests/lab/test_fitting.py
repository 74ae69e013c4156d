"""How the lab trains, and the images it trains on."""

import re

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.lab.digits import accuracy, load_digit_images, train_classifier
from regard.lab.fitting import fit
from regard.models.mlp import MLP, MLPConfig


def moves(steps: int, warm_up: int, rate: float = 0.1) -> list[float]:
    """How far each step takes a parameter whose gradient is always 1: with Adam, the learning rate itself."""
    number = nn.Parameter(torch.zeros(1))
    seen: list[float] = []

    def loss() -> Tensor:
        seen.append(number.item())
        return number.sum()

    fit([number], loss, steps=steps, rate=rate, warm_up=warm_up)
    return [before - after for before, after in zip(seen, [*seen[1:], number.item()], strict=True)]


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    assert moves(5, 2) == pytest.approx([0.1 * 0.5, 0.1 * 0.8, 0.1 * 0.6, 0.1 * 0.4, 0.1 * 0.2], rel=1e-5)


def test_without_a_warm_up_the_first_step_is_the_largest() -> None:
    assert moves(4, 0) == pytest.approx([0.1, 0.075, 0.05, 0.025], rel=1e-5)


def test_a_parameter_group_may_have_its_own_learning_rate() -> None:
    slow, fast = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))
    fit([{"params": [fast], "lr": 0.5}, {"params": [slow]}], lambda: slow.sum() + fast.sum(), steps=1, rate=0.1)
    assert (slow / fast[:3]).tolist() == pytest.approx([0.2] * 3)


def test_losses_are_returned_in_order() -> None:
    number = nn.Parameter(torch.tensor(2.0))
    losses = fit([number], lambda: number.square(), steps=70, rate=0.1)
    assert len(losses) == 70
    assert losses[0] == 4.0
    assert losses[-1] < 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"steps": 3, "warm_up": -1}, "warm_up is -1, but must be at least 0"),
    ],
)
def test_invalid_steps_and_warm_up_are_refused(settings: dict[str, int], words: str) -> None:
    number = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=re.escape(words)):
        fit([number], lambda: number.sum(), rate=0.1, **settings)


def test_digits_are_split_once_and_no_image_is_on_both_sides() -> None:
    given, others = load_digit_images()
    assert (len(given.labels), len(others.labels)) == (1397, 400)
    assert (given.images.min(), given.images.max()) == (-1.0, 1.0)
    assert set(given.labels.tolist()) == set(others.labels.tolist()) == set(range(10))
    assert not {tuple(row) for row in given.images.flatten(1).tolist()} & {
        tuple(row) for row in others.images.flatten(1).tolist()
    }


def test_a_perceptron_learns_digits() -> None:
    given, others = load_digit_images()
    model = MLP(MLPConfig(image=8, channels=1, classes=10, widths=(32,)))
    before = accuracy(model, others)
    train_classifier(model, given, steps=60, batch=32, rate=0.01, seed=3)
    assert not model.training
    assert accuracy(model, others) > max(before, 0.1) + 0.5
