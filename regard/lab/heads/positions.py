"""What are positions for, and when should they be absolute or relative?

Claim: Position encodings distinguish positions, which attention alone cannot do. If a task depends on a distance,
    relative schemes that can select one distance (t5, rotary) generalise to inputs longer than those in training, a
    learned table of positions does not, and sinusoids do in part. If a task depends on a position, absolute schemes
    (learned, sinusoidal) solve it and relative ones cannot. Alibi only decays with the distance and cannot select one.
    Positions are not needed for long range: without them all distances are treated alike.
Measures: One layer trained on sequences of one length and tested on longer ones, over seeds. Each row has to predict
    the token a fixed number of positions before it (relative) or the token at a fixed position (absolute). On longer
    inputs only rows at positions beyond the training length count. The weight of a matching key nearby and far away,
    without positions and with alibi.
Finding: Accuracy at the training length {{ n["trained on"] }} and at new positions up to {{ n.lengths[-1] }} (chance {{
    n.chance|fixed }}; {{ n.repeats }} seeds, 95 % confidence intervals of at most ± {{ widest|fixed }}). {% for task in
    n.accuracy %}{{ {"relative": "Relative (predict the token " ~ n.distance ~ " positions before)", "absolute":
    "Absolute (predict the token at position " ~ n.place ~ ")"}[task] }}: {% for name, rows in n.accuracy[task].items()
    %}{{ "no positions" if name == "none" else name }} {{ rows[0]|fixed }} and {{ rows[-1]|fixed }}{{ ", " if not
    loop.last }}{% endfor %}. {% endfor %}Alibi is relative, but its scores only decay with the distance and cannot
    select one distance. Without positions the weight of a matching key is {{ n["weight at distance 1"]|fixed(3) }} next
    to the query and {{ n["weight at distance 999"]|fixed(3) }} at distance 999, so long range needs no positions. An
    input longer than {{ n.lengths[-1] }} tokens is accepted with {{ n["schemes that accept longer input"]|join(",
    ")|replace("none", "no positions") }}.
Budget: 60 seconds
Source: 000 1.3b, 002 1.3b
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import causal
from regard.core.positions import Rotary
from regard.core.scores import alibi
from regard.lab.drawing import Figure, make_figure, mark_level, plot_intervals
from regard.lab.fitting import fit_cross_entropy
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.nn.learned_scores import LearnedBuckets

MATHS = r"\mathrm{relative}: y_i = x_{i-3}, \quad \mathrm{absolute}: y_i = x_5"

SCHEMES = ("none", "learned", "sinusoidal", "alibi", "t5", "rotary")
TASKS = ("relative", "absolute")


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of this lab claim's experiment: the layer, its two tasks, and its training.

    vocab     number of different tokens
    width     width of the layer
    heads     number of heads
    distance  relative task: at each position, predict the token this number of positions earlier
    place     absolute task: at each position, predict the token at this one position; at least 1, because position 0
              is at the border and can be found without an encoding
    length    number of tokens of a training sequence, more than `distance` and `place`
    lengths   numbers of tokens of the test sequences; the first is `length`
    batch     number of sequences per training step
    steps     number of training steps
    rate      learning rate
    trials    number of test sequences per length
    """

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
    trials: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, place=1, lengths=2)  # place 0 is marked by the border, whatever the encoding
        check_at_least(self, vocab=4)  # with fewer tokens guessing is too good
        if 2 * self.distance > self.length:
            text = "distance must be at most half of length, so that it is met at several positions"
            raise setting_error(self, text, "distance", "length")
        if self.lengths[:1] != (self.length,) or self.place >= self.length or self.distance >= self.length:
            text = f"lengths must begin with the training length {self.length}, and distance and place must be smaller"
            raise setting_error(self, text, "lengths", "distance", "place")


SMOKE = Setup(vocab=5, length=12, lengths=(12, 36), batch=16, steps=50, repeats=3, trials=48)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    def measured(task: str, scheme: str) -> list[list[float]]:
        """Return the accuracies of a task with one position encoding: a list per test length, one number per seed.

        scheme  name of the position encoding, such as "learned" or "alibi"
        """
        every = [_evaluate(_train(setup, task, scheme, seed, attention), setup, task, seed) for seed in setup.seeds]
        return [list(column) for column in zip(*every, strict=True)]

    near, far = (_matching_weight(distance, attention) for distance in (1, 999))
    faded = [_matching_weight(distance, attention, alibi(heads=1)) for distance in (1, 999)]
    return {
        "lengths": list(setup.lengths),
        "trained on": setup.length,
        "chance": 1 / setup.vocab,
        "repeats": setup.repeats,
        "distance": setup.distance,
        "place": setup.place,
        **mean_and_interval(
            "accuracy", {task: {scheme: measured(task, scheme) for scheme in SCHEMES} for task in TASKS}
        ),
        "weight at distance 1": near,
        "weight at distance 999": far,
        "weight at distance 1 with alibi": faded[0],
        "weight at distance 999 with alibi": faded[1],
        "schemes that accept longer input": [
            scheme for scheme in SCHEMES if _accepts_longer_input(_PositionModel(setup, scheme, attention), setup)
        ],
    }


def _accepts_longer_input(model: nn.Module, setup: Setup) -> bool:
    """Return whether the model accepts a sequence that is one token longer than the longest test length."""
    try:
        model(torch.zeros(1, max(setup.lengths) + 1, dtype=torch.long))
    except ValueError:
        return False
    return True


class _AttentionThrough(AttentionLayer):
    """An attention layer that calls a given attention function instead of `attend`."""

    def __init__(self, attention: Attention, width: int, heads: int, **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        self.attention = attention

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Any, stream: Any) -> Tensor:
        return self.attention(q, k, v, mask=mask, scores=self.term(), beta=self.beta)


class _PositionModel(nn.Module):
    """A small model: token and position embeddings, one layer of causal attention, and logits for each position."""

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
            "t5": lambda: LearnedBuckets(heads, buckets=12, max_distance=12, bidirectional=False),
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
    """Sample tokens and targets, and return them with the index of the first position that has a target.

    task  "relative" (predict the token `setup.distance` positions earlier) or "absolute" (predict the token at
          position `setup.place`)
    """
    tokens = torch.randint(setup.vocab, (batch, n), generator=draws)
    if task == "relative":
        return tokens, tokens.roll(setup.distance, 1), setup.distance
    return tokens, tokens[:, [setup.place]].expand(-1, n), setup.place


def _train(setup: Setup, task: str, scheme: str, seed: int, attention: Attention) -> _PositionModel:
    model, draws = _PositionModel(setup, scheme, attention), make_generator(seed)
    table = {"tokens.weight": normal(0.5), "places.weight": normal(0.5), "layer.scores.weight": constant(0.0)}
    init_parameters(model, {**table, "*.weight": fan_in(), "*.bias": constant(0.0)}, seed)
    # a table of scores needs a larger learning rate: it must grow to several units
    rates = {"layer.scores.weight": 10 * setup.rate}
    groups = [{"params": [value], "lr": rates.get(name, setup.rate)} for name, value in model.named_parameters()]

    def sample() -> tuple[tuple[Tensor], Tensor]:
        tokens, wanted, first = _sample_batch(setup, task, setup.batch, setup.length, draws)
        return (tokens,), torch.cat([torch.full_like(wanted[:, :first], -100), wanted[:, first:]], 1)

    fit_cross_entropy(model, sample, steps=setup.steps, rate=setup.rate, parameters=groups)
    return model


@torch.no_grad()
def _evaluate(model: _PositionModel, setup: Setup, task: str, seed: int) -> list[float]:
    """Return the accuracy at each test length.

    On sequences longer than in training, only positions beyond the training length count.
    """
    shares, draws = [], make_generator(seed + 500)
    for n in setup.lengths:
        tokens, wanted, first = _sample_batch(setup, task, setup.trials, n, draws)
        new = first if n <= setup.length else setup.length
        shares.append((model(tokens).argmax(-1) == wanted)[:, new:].double().mean().item())
    return shares


def _matching_weight(distance: int, attention: Attention, term: Any = None) -> float:
    """Return the weight of the only key that matches the last query, among 1,000 keys.

    distance  position of the query minus position of the key
    term      a term added to the scores, such as the bias of alibi; None for none
    """
    k = torch.zeros(1, 1, 1000, 1, dtype=torch.float64)
    k[0, 0, -1 - distance] = 10.0
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), k / 10.0
    return float(attention(q, k, v, mask=causal(), scores=term, beta=1.0))


def verdict(numbers: Numbers) -> Decision:
    relative, absolute = (estimates(numbers, "accuracy")[task] for task in TASKS)
    margins = [0.6 - task["none"][0] for task in (relative, absolute)]
    margins += [relative[name][at] - least for name in ("t5", "rotary") for at, least in ((0, 0.9), (-1, 0.6))]
    margins += [relative["learned"][0] - 0.9, *(0.6 - relative[name][-1] for name in ("learned", "alibi"))]
    margins += [relative[name][-1] - relative["sinusoidal"][-1] - 0.1 for name in ("t5", "rotary")]
    margins += [absolute[name][0] - 0.9 for name in ("learned", "sinusoidal")]
    margins += [0.6 - absolute[name][0] for name in ("alibi", "t5", "rotary")]
    alike = abs(numbers["weight at distance 1"] - numbers["weight at distance 999"]) < 1e-12
    longer = set(SCHEMES) - set(numbers["schemes that accept longer input"]) == {"learned"}
    widest = max(each.half for task in (relative, absolute) for rows in task.values() for each in rows)
    return decide(alike and longer, margins, widest=widest)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2, width=4.8)
    for axes, task in zip(panels, TASKS, strict=True):
        plot_intervals(axes, numbers["lengths"], numbers["accuracy"][task], numbers["interval of accuracy"][task])
        mark_level(axes, numbers["chance"], "chance")
        axes.set(ylim=(0, 1.05), xlabel="length of input", ylabel="accuracy", title=f"Task with {task} positions")
        axes.set_xticks(numbers["lengths"])
        axes.legend().remove()
    panels[1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
