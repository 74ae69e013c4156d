"""What are positions for, and when should they be absolute or relative?

Claim: They distinguish positions, which attention alone cannot do. If a task depends on a distance, relative schemes
    that can select one distance (t5, rotary) generalise to inputs longer than those in training, a learned table of
    positions does not, and sinusoids do in part. If a task depends on a position, absolute schemes (learned,
    sinusoidal) solve it and relative ones cannot. Alibi only decays with the distance and cannot select one. Positions
    are not needed for long range: without them all distances are treated alike.
Measures: One layer trained on sequences of one length and tested on longer ones, over seeds. Each row has to predict
    the token three positions before it (relative) or the token at position five (absolute). On longer inputs only rows
    at positions beyond the training length count. The weight of a matching key nearby and far away, without positions
    and with alibi.
Budget: 60 seconds
Source: 000 1.3b, 002 1.3b
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.core.masks import causal
from regard.core.positions import Rotary
from regard.core.scores import alibi
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import COLOURS, MARKERS, Figure, make_figure
from regard.lab.fitting import fit
from regard.lab.seeds_interval import Estimate, interval_half_width
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.nn.learned_scores import LearnedBuckets

MATHS = r"\mathrm{relative}: y_i = x_{i-3}, \quad \mathrm{absolute}: y_i = x_5"

SCHEMES = ("none", "learned", "sinusoidal", "alibi", "t5", "rotary")
TASKS = ("relative", "absolute")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The layer, the two tasks, the training length and the test lengths, and the training steps and seeds."""

    vocab: int = 8
    width: int = 32
    heads: int = 2
    distance: int = 3
    place: int = 5
    length: int = 16
    lengths: tuple[int, ...] = (16, 32, 48)
    batch: int = 32
    steps: int = 200
    rate: float = 0.03
    repeats: int = 4
    trials: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        if self.lengths[:1] != (self.length,) or self.place >= self.length or self.distance >= self.length:
            raise ConfigError(
                f"lengths must begin with the training length {self.length}, and distance and place must be smaller: "
                f"lengths={self.lengths}, distance={self.distance}, place={self.place}"
            )


SMOKE = Setup(vocab=5, length=12, lengths=(12, 36), batch=16, steps=50, repeats=3, trials=48)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    shares: dict[str, dict[str, list[list[float]]]] = {}
    for task in TASKS:
        for scheme in SCHEMES:
            every = [
                _evaluate(_train(setup, task, scheme, number, attention), setup, task, number)
                for number in range(setup.repeats)
            ]
            shares.setdefault(task, {})[scheme] = [list(column) for column in zip(*every, strict=True)]
    return {
        "lengths": list(setup.lengths),
        "trained on": setup.length,
        "chance": 1 / setup.vocab,
        "repeats": setup.repeats,
        "right": {
            task: {scheme: [fmean(at) for at in rows] for scheme, rows in shares[task].items()} for task in TASKS
        },
        "interval": {
            task: {name: [interval_half_width(at) for at in rows] for name, rows in shares[task].items()}
            for task in TASKS
        },
        "weight near": _matching_weight(1, attention),
        "weight far": _matching_weight(999, attention),
        "weight near with alibi": _matching_weight(1, attention, alibi(heads=1)),
        "weight far with alibi": _matching_weight(999, attention, alibi(heads=1)),
    }


class _AttentionThrough(AttentionLayer):
    """The attention layer with a given attention function."""

    def __init__(self, attention: Attention, width: int, heads: int, **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        self.attention = attention

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Any, stream: Any) -> Tensor:
        return self.attention(q, k, v, mask=mask, scores=self.term(), beta=self.beta)


class _PositionModel(nn.Module):
    """Token and position embeddings, one layer of causal attention, and a prediction for each row."""

    def __init__(self, setup: Setup, scheme: str, attention: Attention) -> None:
        super().__init__()
        width, heads = setup.width, setup.heads
        places: dict[str, Callable[[], nn.Module]] = {
            "learned": lambda: LearnedPositions(max(setup.lengths), width),
            "sinusoidal": lambda: SinusoidalPositions(width),
        }
        terms: dict[str, Callable[[], Any]] = {
            "alibi": lambda: alibi(heads=heads),
            # larger distances share the last bucket
            "t5": lambda: LearnedBuckets(heads, buckets=12, reach=12, both_ways=False),
        }
        self.tokens = TokenEmbedding(setup.vocab, width)
        self.places = places[scheme]() if scheme in places else None
        self.layer = _AttentionThrough(
            attention,
            width,
            heads,
            rotary=Rotary(base=100.0) if scheme == "rotary" else None,
            scores=terms[scheme]() if scheme in terms else None,
        )
        self.guess = nn.Linear(width, setup.vocab)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n w"]:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1]))
        guesses: Tensor = self.guess(self.layer(x, mask=causal()))
        return guesses


def _sample_batch(setup: Setup, task: str, batch: int, n: int, draws: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Sample tokens and targets; also return the first row that has a target."""
    tokens = torch.randint(setup.vocab, (batch, n), generator=draws)
    if task == "relative":
        return tokens, tokens.roll(setup.distance, 1), setup.distance
    return tokens, tokens[:, [setup.place]].expand(-1, n), setup.place


def _train(setup: Setup, task: str, scheme: str, number: int, attention: Attention) -> _PositionModel:
    seed = 1000 * setup.seed + number
    model, draws = _PositionModel(setup, scheme, attention), make_generator(seed)
    table = {"tokens.weight": normal(0.5), "places.weight": normal(0.5), "layer.scores.weight": constant(0.0)}
    init_parameters(model, {**table, "*.weight": fan_in(), "*.bias": constant(0.0)}, seed)
    # a table of scores needs a larger learning rate: it must grow to several units
    biases = [value for name, value in model.named_parameters() if name == "layer.scores.weight"]
    others = [value for name, value in model.named_parameters() if name != "layer.scores.weight"]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 10 * setup.rate}, {"params": others}]

    def loss() -> Tensor:
        tokens, wanted, first = _sample_batch(setup, task, setup.batch, setup.length, draws)
        return functional.cross_entropy(model(tokens)[:, first:].flatten(0, 1), wanted[:, first:].flatten())

    fit([group for group in groups if group["params"]], loss, steps=setup.steps, rate=setup.rate)
    return model


@torch.no_grad()
def _evaluate(model: _PositionModel, setup: Setup, task: str, number: int) -> list[float]:
    """Return the accuracy at each length; on longer inputs, only for positions beyond the training length."""
    shares, draws = [], make_generator(1000 * setup.seed + number + 500)
    for n in setup.lengths:
        tokens, wanted, first = _sample_batch(setup, task, setup.trials, n, draws)
        new = first if n <= setup.length else setup.length
        shares.append((model(tokens).argmax(-1) == wanted)[:, new:].double().mean().item())
    return shares


def _matching_weight(distance: int, attention: Attention, term: Any = None) -> float:
    """Return the weight of the one matching key among 1,000, at this distance before the last query."""
    k = torch.zeros(1, 1, 1000, 1, dtype=torch.float64)
    k[0, 0, -1 - distance] = 10.0
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), k / 10.0
    return float(attention(q, k, v, mask=causal(), scores=term, beta=1.0))


def verdict(numbers: Numbers) -> Verdict:
    relative, absolute = (
        {name: [*map(Estimate, rows, numbers["interval"][task][name])] for name, rows in numbers["right"][task].items()}
        for task in TASKS
    )
    blind = [0.6 - task["none"][0] for task in (relative, absolute)]
    carried = [relative[name][at] - least for name in ("t5", "rotary") for at, least in ((0, 0.9), (-1, 0.6))]
    lost = [relative["learned"][0] - 0.9, *(0.6 - relative[name][-1] for name in ("learned", "alibi"))]
    partly = [relative[name][-1] - relative["sinusoidal"][-1] - 0.1 for name in ("t5", "rotary")]
    named = [absolute[name][0] - 0.9 for name in ("learned", "sinusoidal")]
    cannot = [0.6 - absolute[name][0] for name in ("alibi", "t5", "rotary")]
    long = numbers["lengths"][-1]
    alike = abs(numbers["weight near"] - numbers["weight far"]) < 1e-12
    accuracies = [
        f"{task}: "
        + ", ".join(f"{name} {rows[0]:.2f} and {rows[-1]:.2f}" for name, rows in numbers["right"][task].items())
        for task in TASKS
    ]
    widest = max(max(rows) for task in TASKS for rows in numbers["interval"][task].values())
    return decide(
        alike,
        f"Accuracy at the training length {numbers['trained on']} and at new positions up to {long} (chance "
        f"{numbers['chance']:.2f}, {numbers['repeats']} seeds, at most ± {widest:.2f}). {'; '.join(accuracies)}. "
        f"Without positions the weight of a matching key is {numbers['weight near']:.3f} next to the query and "
        f"{numbers['weight far']:.3f} at distance 999.",
        [*blind, *carried, *lost, *partly, *named, *cannot],
    )


@wrong_answer(
    "000 1.3b",
    says="Positions provide the long-range dependencies.",
    right="Without positions attention treats all distances alike; positions break this symmetry, so order matters.",
)
def _long_range(numbers: Numbers) -> Verdict:
    near, far = numbers["weight near"], numbers["weight far"]
    faded = numbers["weight near with alibi"], numbers["weight far with alibi"]
    return decide(
        far < 0.9 * near,
        f"Without positions the weight of a matching key is {near:.3f} at distance 1 and {far:.3f} at distance 999; "
        f"with alibi it is {faded[0]:.3f} and {faded[1]:.3f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2, width=4.8)
    for axes, task in zip(panels, TASKS, strict=True):
        for number, scheme in enumerate(SCHEMES):
            # shifted slightly, so that equal curves are all visible
            at = [n * (1 + 0.02 * (number - 2.5)) for n in numbers["lengths"]]
            right, spread = numbers["right"][task][scheme], numbers["interval"][task][scheme]
            axes.errorbar(at, right, spread, label=scheme, color=COLOURS[number], marker=MARKERS[number], capsize=2)
        axes.axhline(numbers["chance"], color="#000000", linewidth=0.8, linestyle=":")
        axes.set(ylim=(0, 1.05), xlabel="length of input", ylabel="accuracy", title=f"Task with {task} positions")
        axes.set_xticks(numbers["lengths"])
    panels[1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
