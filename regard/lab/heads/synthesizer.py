"""What is impossible if weights depend on each token alone?

Claim: Matching by content. A synthesizer computes the weights of row i from x_i (dense) or from nothing (random), so
    they cannot depend on the position of a matching token. One layer of dot-product attention finds the matching token;
    a synthesizer is no better than guessing the most common value. A synthesizer computes as many weights as
    dot-product attention, N x N.
Measures: Sequences with pairs of tokens that share a name: each token has to predict its partner's value. One layer of
    each kind, trained over seeds, and the guess of the most common value. How much the weights of a row change if the
    other tokens change. How many weights a layer computes.
Finding: Each token has to predict the value of the token with the same name. Accuracy: {% for part in accuracy %}{{
    part }} {{ accuracy[part] }}, {% endfor %}always the most common value {{ n["accuracy of the most common
    value"]|percent }} ({{ n.repeats }} seeds, chance {{ n.chance|percent }}). If the other tokens change, the weights
    of a row change by {{ n["change of weights by other tokens"]["dot"]|fixed }} (dot), {{ n["change of weights by other
    tokens"]["dense"]|short }} (dense) and {{ n["change of weights by other tokens"]["random"]|short }} (random); each
    computes {{ n["number of weights"]["dense"] }} weights for {{ n.length }} tokens.
Budget: 60 seconds
Source: 001 2 ii
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
from regard.core.attend import attend
from regard.core.kernels import observe_requests
from regard.core.kernels.request import Request
from regard.core.masks import window
from regard.lab.drawing import Figure, make_figure, mark_level, plot_shares
from regard.lab.fitting import fit_cross_entropy
from regard.lab.measure import largest_difference
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.embeddings import TokenEmbedding
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.nn.synthesizer import Synthesizer

MATHS = (
    r"\mathrm{dot}: s_{ij} = \beta q_i \cdot k_j, \quad "
    r"\mathrm{dense}: s_{ij} = w_j \cdot f(x_i), \quad \mathrm{random}: s_{ij} = R_{ij}"
)

PARTS = ("dot", "dense", "random")


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the task, the Synthesizer layer and its training.

    Each token is a name with a value. Every name occurs twice in a sequence, with two random values. The task
    is to predict, for each token, the value of the other token with the same name.

    pairs   number of names in a sequence, each used twice
    names   number of different names
    values  number of different values
    width   width of the layer
    batch   number of sequences per training step
    steps   number of training steps
    rate    learning rate
    trials  number of test sequences
    """

    pairs: int = 6
    names: int = 12
    values: int = 16
    width: int = 32
    batch: int = 32
    steps: int = 300
    rate: float = 0.02
    repeats: int = 5
    trials: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, pairs=2, values=2)
        if self.names < self.pairs:
            raise ConfigError(f"{self.pairs} pairs need one name each, but names={self.names}; raise names")

    @property
    def length(self) -> int:
        return 2 * self.pairs


SMOKE = Setup(pairs=4, names=8, steps=80, batch=16, repeats=3)


def run(setup: Setup, attention: Attention = attend, mixer: Callable[..., Any] = Synthesizer) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    mixer      builds the layer: mixer(width, heads, context, parts=(part,)), where `part` is "dot", "dense"
               or "random"
    attention  computes the attention weights from the layer's queries, keys and scores
    """
    right: dict[str, list[float]] = {part: [] for part in PARTS}
    moved: dict[str, float] = {}
    made: dict[str, int] = {}
    commonest: list[float] = []
    for seed in setup.seeds:
        trial = _sample_batch(setup, setup.trials, make_generator(seed + 500))
        commonest.append(_most_common_accuracy(*trial[1:]))
        for part in PARTS:
            model = _train(setup, part, seed, mixer)
            with torch.no_grad():
                right[part].append((model(*trial[:2]).argmax(-1) == trial[2]).double().mean().item())
            change, made[part] = _weights(model, setup, attention)
            moved[part] = max(change, moved.get(part, 0.0))
    return {
        "length": setup.length,
        "repeats": setup.repeats,
        "chance": 1 / setup.values,
        **mean_and_interval("accuracy", right),
        "accuracy of the most common value": fmean(commonest),
        "change of weights by other tokens": moved,
        "number of weights": made,
    }


class _Matcher(nn.Module):
    """A model that predicts, for each token, the value of the other token with the same name.

    The model adds embeddings of names and values, mixes the tokens in one layer where a token sees all tokens but
    itself, and returns logits of the value.
    """

    def __init__(self, setup: Setup, part: str, mixer: Callable[..., Any]) -> None:
        super().__init__()
        self.names, self.values = TokenEmbedding(setup.names, setup.width), TokenEmbedding(setup.values, setup.width)
        self.layer = mixer(setup.width, 1, setup.length, parts=(part,))
        self.guess = nn.Linear(setup.width, setup.values)

    def forward(self, names: Int[Tensor, "b n"], values: Int[Tensor, "b n"]) -> Float[Tensor, "b n w"]:
        # a token sees all but itself; otherwise it would match itself
        guesses: Tensor = self.guess(self.layer(self.names(names) + self.values(values), mask=~window()))
        return guesses


def _sample_batch(setup: Setup, batch: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sequences; return the name, the value and the target of each token.

    Every name occurs twice in a sequence. The target of a token is the value of the other token with the same
    name.
    """
    chosen = torch.rand(batch, setup.names, generator=draws).argsort(1)[:, : setup.pairs].repeat(1, 2)
    names = chosen.gather(1, torch.rand(batch, setup.length, generator=draws).argsort(1))
    values = torch.randint(setup.values, (batch, setup.length), generator=draws)
    partner = (names[:, :, None] == names[:, None]) & ~torch.eye(setup.length, dtype=torch.bool)
    return names, values, values.gather(1, partner.int().argmax(-1))


def _train(setup: Setup, part: str, seed: int, mixer: Callable[..., Any]) -> _Matcher:
    model, draws = _Matcher(setup, part, mixer), make_generator(seed)
    tables = {"names.weight": normal(1.0), "values.weight": normal(1.0), "layer.dense_keys": normal(0.3)}
    init_parameters(model, {**tables, "*.bias": constant(0.0), "*.weight": fan_in(), "*": constant(0.0)}, seed)

    def sample() -> tuple[tuple[Tensor, Tensor], Tensor]:
        names, values, wanted = _sample_batch(setup, setup.batch, draws)
        return (names, values), wanted

    fit_cross_entropy(model, sample, steps=setup.steps, rate=setup.rate)
    return model


def _most_common_accuracy(values: Int[Tensor, "b n"], wanted: Int[Tensor, "b n"]) -> float:
    """Return the accuracy of always predicting the most common value among the other tokens of the sequence.

    This is the best prediction without comparing names.
    """
    seen = functional.one_hot(values)
    others = seen.sum(1, keepdim=True) - seen
    return (others.argmax(-1) == wanted).double().mean().item()


@torch.no_grad()
def _weights(model: _Matcher, setup: Setup, attention: Attention) -> tuple[float, int]:
    """Compare the attention weights before and after all tokens except the first are replaced.

    Returns the largest change of a weight in the first row, and the number of weights in the attention matrix.
    """
    names, values, _ = _sample_batch(setup, 1, make_generator(setup.seed))
    others, other_values, _ = _sample_batch(setup, 1, make_generator(setup.seed + 1))
    calls: list[Request] = []
    with observe_requests(lambda name, call, out: calls.append(call)):
        model(names, values)
        model(torch.cat([names[:, :1], others[:, 1:]], 1), torch.cat([values[:, :1], other_values[:, 1:]], 1))
    eye = torch.eye(setup.length)[None, None]
    before, after = (attention(x.q, x.k, eye, mask=x.mask, scores=x.terms, beta=x.beta) for x in calls)
    return largest_difference(before[0, 0, 0], after[0, 0, 0]), before[0, 0].numel()


def verdict(numbers: Numbers) -> Decision:
    accuracy, moved = estimates(numbers, "accuracy"), numbers["change of weights by other tokens"]
    guess, n = numbers["accuracy of the most common value"], numbers["length"]
    blind = moved["dense"] == moved["random"] == 0 and moved["dot"] > 0.01
    cannot = [guess + 0.1 - accuracy[part] for part in ("dense", "random")]
    square = all(count == n * n for count in numbers["number of weights"].values())
    return decide(blind and square, [*cannot, accuracy["dot"] - 0.9], accuracy=accuracy)


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_shares(axes, numbers["accuracy"], list(numbers["interval of accuracy"].values()))
    mark_level(axes, numbers["accuracy of the most common value"], "most common value")
    axes.set(xlabel="source of the weights", ylabel="accuracy", title="Matching by content")
    return figure
