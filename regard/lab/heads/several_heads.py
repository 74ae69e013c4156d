"""What are several heads good for?

Claim: Each head has its own weights, so that a token can read several others at once and keep them apart. One head can
    spread its weight over two tokens, but returns their mixture, which at equal weights does not show which value came
    from where. At equal numbers of parameters, two heads solve a task with two relations at once, and one head does
    not. On a real task, the digits, more heads give a few percentage points. This gain, and the accuracy that is lost
    if noise is added to the images, are reported but do not decide.
Measures: One layer of causal attention with rotary positions and 1, 2 or 4 heads, trained over seeds to predict at each
    position both the token before it and the token three before it, in this order. Small Vision Transformers with 1, 2
    or 4 heads on scikit-learn's digits, and the gain over one head with the same seed. The accuracy of the same models
    on the same images with normal noise added to each pixel. The numbers of parameters, which are equal.
Finding: With {{ n.heads|join_numbers }} heads, all with {{ n.parameters["two relations"][0]|comma }} parameters, the
    token before and the token three before are both predicted correctly at {% for count in n.heads %}{{ accuracy["two
    relations"][count|string] }}{{ ", " if not loop.last }}{% endfor %} of the positions (chance {{ n.chance|percent(1)
    }}; {{ n.repeats }} seeds; in brackets the 95 % confidence interval). Small Vision Transformers with the same
    numbers of heads, all with {{ n.parameters["digits"][0]|comma }} parameters, classify {% for count in n.heads %}{{
    accuracy["digits"][count|string] }}{{ ", " if not loop.last }}{% endfor %} of images of handwritten digits
    correctly. The gain over one head with the same seed is {% for count in gain %}{{ (100 * gain[count].mean)|fixed(1)
    }} ± {{ (100 * gain[count].half)|fixed(1) }} percentage points with {{ count }}{{ ", " if not loop.last else "."
    }}{% endfor %} If noise of standard deviation {{ n.noise|short }} is added to the pixels, which are between -1 and
    1, the accuracy falls by {{ (100 * lost["1"].mean)|fixed(1) }} ± {{ (100 * lost["1"].half)|fixed(1) }} percentage
    points with one head. The difference to one head with the same seed is {% for count in more %}{{ (100 *
    more[count].mean)|fixed(1) }} ± {{ (100 * more[count].half)|fixed(1) }} points with {{ count }}{{ ", " if not
    loop.last }}{% endfor %}; if an interval contains 0, the runs do not show whether there is a difference.
Budget: 60 seconds
Source: 000 1.4c, 001 review 7, 002 1.4c, 004 2c
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.core.masks import causal
from regard.core.positions import Rotary
from regard.lab.digits import CLASSES, Digits, accuracy, build_digit_vit, load_digit_images, train_classifier
from regard.lab.drawing import Figure, make_figure, mark_level, plot_shares
from regard.lab.fitting import fit_cross_entropy
from regard.lab.measure import count_parameters
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import check_at_least
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.vit import ViT
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.embeddings import TokenEmbedding
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = r"y_i = (x_{i-1}, x_{i-3}), \quad H = W_o [H^1; \dots; H^h]"
OFFSETS = (1, 3)


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the numbers of heads, the attention layer, and its training on two tasks.

    The tasks are "two relations" (predict two earlier tokens at once) and "digits" (classify images of digits).

    heads        numbers of heads to compare; the first must be 1
    vocab        two relations: number of different tokens
    width        width of the layer in both tasks
    length       two relations: number of tokens of a sequence; at least 4, because one of the targets is three
                 tokens before
    batch        two relations: number of sequences per training step
    steps        two relations: number of training steps
    digit_steps  digits: number of training steps
    rate         two relations: learning rate
    trials       two relations: number of test sequences
    noise        digits: standard deviation of the noise that is added to the test images
    """

    heads: tuple[int, ...] = (1, 2, 4)
    vocab: int = 8
    width: int = 32
    length: int = 16
    batch: int = 32
    steps: int = 300
    digit_steps: int = 160
    rate: float = 0.03
    trials: int = 128
    noise: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, vocab=2, length=max(OFFSETS) + 1)
        if not 0 <= self.noise < math.inf:
            raise ConfigError(f"noise must be at least 0 and finite: noise={self.noise}")
        if self.heads[:1] != (1,) or len(self.heads) < 2:
            raise ConfigError(f"heads must begin with 1 and have another number: heads={self.heads}")


SMOKE = Setup(heads=(1, 2), vocab=5, length=10, batch=16, steps=80, digit_steps=20, repeats=3)


def run(setup: Setup, layer: Any = AttentionLayer, vit: Any = ViT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    layer  builds the attention layer: layer(width, heads, rotary=...)
    vit    builds the model of the digits: vit(config)
    """
    right: dict[str, dict[str, list[float]]] = {task: {str(heads): [] for heads in setup.heads} for task in TASKS}
    lost: dict[str, list[float]] = {str(heads): [] for heads in setup.heads}
    counts: dict[str, list[int]] = {task: [] for task in TASKS}
    given, others = load_digit_images()
    noise = torch.randn(others.images.shape, generator=make_generator(setup.seed))
    noisy = Digits(others.images + setup.noise * noise, others.labels)
    sizes = {"patch": 2, "classes": CLASSES, "width": setup.width, "depth": 1}
    for heads in setup.heads:
        for seed in setup.seeds:
            model = _train(setup, heads, layer, seed)
            right["two relations"][str(heads)].append(_evaluate(model, setup, seed + 500))
            classifier = build_digit_vit(vit, seed, positions_std=0.3, heads=heads, **sizes)
            train_classifier(classifier, given, steps=setup.digit_steps, batch=32, rate=0.01, seed=seed)
            right["digits"][str(heads)].append(accuracy(classifier, others))
            lost[str(heads)].append(right["digits"][str(heads)][-1] - accuracy(classifier, noisy))
        counts["two relations"].append(count_parameters(model))
        counts["digits"].append(count_parameters(classifier))
    # paired differences per seed, which vary less
    gain, more_lost = _differences(right["digits"]), _differences(lost)
    return {
        "heads": list(setup.heads),
        "parameters": counts,
        "chance": setup.vocab ** -len(OFFSETS),
        "repeats": setup.repeats,
        **mean_and_interval("accuracy", right),
        **mean_and_interval("gain on digits", gain),
        "noise": setup.noise,
        **mean_and_interval("lost by noise", lost),
        **mean_and_interval("more lost by noise than with one head", more_lost),
    }


TASKS = ("two relations", "digits")


def _differences(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return for each number of heads above 1 its values minus the values of one head, seed by seed.

    values  for each number of heads a list with one value per seed; the first list is of one head
    """
    (_, one), *several = values.items()
    return {heads: [many - single for many, single in zip(each, one, strict=True)] for heads, each in several}


class _TwoRelations(nn.Module):
    """A model that predicts two earlier tokens at each position.

    The model has token embeddings, one layer of causal attention, and a linear layer to logits. The logits have the
    shape (b, n, 2, vocab).
    """

    def __init__(self, setup: Setup, heads: int, layer: Any) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(setup.vocab, setup.width)
        self.layer = layer(setup.width, heads, rotary=Rotary(base=100.0))
        self.guess = nn.Linear(setup.width, len(OFFSETS) * setup.vocab)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n 2 w"]:
        logits: Tensor = self.guess(self.layer(self.tokens(tokens), mask=causal()))
        return logits.unflatten(-1, (len(OFFSETS), -1))  # type: ignore[no-any-return]


def _sample_batch(setup: Setup, batch: int, draws: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    """Sample token sequences and their targets: for each position the tokens one and three positions earlier.

    The target is -100 (ignored by the cross-entropy) at the first positions, which have no such earlier tokens.
    """
    tokens = torch.randint(setup.vocab, (batch, setup.length), generator=draws)
    wanted = torch.stack([tokens.roll(offset, 1) for offset in OFFSETS], -1)
    wanted[:, : max(OFFSETS)] = -100
    return (tokens,), wanted


def _train(setup: Setup, heads: int, layer: Any, seed: int) -> _TwoRelations:
    model, draws = _TwoRelations(setup, heads, layer), make_generator(seed)
    table = {"tokens.weight": normal(0.5), "*.weight": fan_in(), "*.bias": constant(0.0)}
    init_parameters(model, table, seed)
    fit_cross_entropy(model, lambda: _sample_batch(setup, setup.batch, draws), steps=setup.steps, rate=setup.rate)
    return model


@torch.no_grad()
def _evaluate(model: _TwoRelations, setup: Setup, seed: int) -> float:
    """Return the fraction of positions where both tokens are predicted correctly."""
    (tokens,), wanted = _sample_batch(setup, setup.trials, make_generator(seed))
    right = (model(tokens).argmax(-1) == wanted).all(-1)
    return right[:, max(OFFSETS) :].double().mean().item()  # type: ignore[no-any-return]


def verdict(numbers: Numbers) -> Decision:
    shares = estimates(numbers, "accuracy")
    one, *several = shares["two relations"].values()
    margins = [0.6 - one, *(each - one - 0.3 for each in several)]
    gain, lost = estimates(numbers, "gain on digits"), estimates(numbers, "lost by noise")
    more = estimates(numbers, "more lost by noise than with one head")
    equal = all(len(set(counts)) == 1 for counts in numbers["parameters"].values())
    return decide(equal, margins, accuracy=shares, gain=gain, lost=lost, more=more)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2)
    for axes, task in zip(panels, TASKS, strict=True):
        plot_shares(axes, numbers["accuracy"][task], list(numbers["interval of accuracy"][task].values()))
        axes.set(xlabel="heads, at equal parameters", ylabel="accuracy", title=task.capitalize())
    mark_level(panels[0], numbers["chance"], "chance")
    return figure
