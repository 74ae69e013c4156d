"""What is the feed-forward part of a block for?

Claim: It computes non-linear functions of the outputs of attention, for each token by itself. A block without it is not
    linear either, because attention weights and layer norms are not; but it computes much less: predicting the sum
    modulo V of two tokens, a block without feed-forward part, or with a linear one of the same size, makes many more
    errors than one with a ReLU between d -> 4d and 4d -> d. The part has two thirds of the parameters of a block.
Measures: One block of causal attention, trained over seeds to predict (x_i + x_{i-1}) mod V at each position: without
    feed-forward part, with a linear one, and with a ReLU. The fraction of the parameters of a block that are in the
    feed-forward part, in real models.
Finding: Sums modulo {{ n.vocab }} are predicted correctly in {{ accuracy["none"] }} without feed-forward part, in {{
    accuracy["linear"] }} with a linear one and in {{ accuracy["ReLU"] }} with a ReLU (chance {{ (1 / n.vocab)|percent
    }}; {{ n.repeats }} seeds, in brackets the 95 % confidence interval). The models with a linear part and with a ReLU
    have {{ n.parameters["linear"]|comma }} parameters each, the model without a feed-forward part {{
    n.parameters["none"]|comma }}. The feed-forward part has {% for name in n["share of a block"] %}{{ n["share of a
    block"][name]|percent(1) }} ({{ name }}){{ ", " if not loop.last }}{% endfor %} of the parameters of a block without
    cross attention.
Budget: 120 seconds
Source: 000 1.4d, 002 1.4d
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.masks import causal
from regard.core.positions import Rotary
from regard.lab.drawing import Figure, make_figure, mark_level, plot_bars, plot_shares
from regard.lab.fitting import fit_cross_entropy
from regard.lab.measure import count_parameters
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.gpt import GPT, PRESETS as GPTS
from regard.models.transformer import PRESETS as TRANSFORMERS, Transformer
from regard.models.vit import PRESETS as VITS, ViT
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.embeddings import TokenEmbedding
from regard.nn.feedforward import FeedForward
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.nn.norms import norm

MATHS = (
    r"\mathrm{FFN}(x) = W_2 \max(0, W_1 x + b_1) + b_2, \quad W_1 \in R^{4d \times d}, \quad W_2 \in R^{d \times 4d}"
)
KINDS = ("none", "linear", "ReLU")
MODELS: dict[str, tuple[Any, Any]] = {
    "transformer-base": (Transformer, TRANSFORMERS["transformer-base"]),
    "vit-b/16": (ViT, VITS["vit-b/16"]),
    "gpt2": (GPT, GPTS["gpt2"]),
}


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the task, the Transformer block and its training.

    The task is to add each token and the token before it, modulo `vocab`.

    vocab   number of different tokens
    width   width of the block
    heads   number of heads
    length  number of tokens of a sequence
    batch   number of sequences per training step
    steps   number of training steps
    rate    learning rate
    trials  number of test sequences
    """

    vocab: int = 11
    width: int = 32
    heads: int = 2
    length: int = 12
    batch: int = 32
    steps: int = 300
    rate: float = 0.01
    trials: int = 128
    repeats: int = 10
    seed: int = 5  # margins were chosen with seeds below 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("vocab", self.vocab, 3, "different tokens")


SMOKE = Setup(length=8, batch=24, steps=160, rate=0.02, repeats=3, seed=0)


def run(setup: Setup, feedforward: Any = FeedForward) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    feedforward  builds the feed-forward part with a ReLU: feedforward(width, hidden, activation="relu")
    """
    right: dict[str, list[float]] = {kind: [] for kind in KINDS}
    counts: dict[str, int] = {}
    for kind in KINDS:
        for seed in setup.seeds:
            model = _train(_Adder(setup, kind, feedforward), setup, seed)
            (tokens,), wanted = _sample_batch(setup, setup.trials, make_generator(seed + 500))
            with torch.no_grad():
                right[kind].append((model(tokens).argmax(-1) == wanted)[:, 1:].double().mean().item())
        counts[kind] = count_parameters(model)
    return {
        "vocab": setup.vocab,
        "repeats": setup.repeats,
        "parameters": counts,
        **mean_and_interval("accuracy", right),
        "share of a block": {name: _feedforward_share(name) for name in MODELS},
    }


class _Adder(nn.Module):
    """A model for the addition task: token embeddings, one pre-norm block, and a linear layer to logits.

    kind  "ReLU" or "linear" for the feed-forward layer of the block; any other name leaves it out
    """

    def __init__(self, setup: Setup, kind: str, feedforward: Any) -> None:
        super().__init__()
        width, hidden = setup.width, 4 * setup.width
        self.tokens = TokenEmbedding(setup.vocab, width)
        self.attention_norm, self.feedforward_norm = norm("layer", width), norm("layer", width)
        self.attention = AttentionLayer(width, setup.heads, rotary=Rotary(base=100.0))
        self.feedforward: Any = None
        if kind == "linear":
            self.feedforward = nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width))
        elif kind == "ReLU":
            self.feedforward = feedforward(width, hidden, activation="relu")
        self.guess = nn.Linear(width, setup.vocab)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n w"]:
        x = self.tokens(tokens)
        x = x + self.attention(self.attention_norm(x), mask=causal())
        if self.feedforward is not None:
            x = x + self.feedforward(self.feedforward_norm(x))
        logits: Tensor = self.guess(x)
        return logits


def _sample_batch(setup: Setup, batch: int, draws: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    """Sample token sequences, and as target of each token its sum with the token before it, modulo `vocab`.

    The target of the first token is -100, which the cross-entropy ignores.
    """
    tokens = torch.randint(setup.vocab, (batch, setup.length), generator=draws)
    wanted = (tokens + tokens.roll(1, 1)) % setup.vocab
    wanted[:, 0] = -100
    return (tokens,), wanted


def _train(model: _Adder, setup: Setup, seed: int) -> _Adder:
    draws = make_generator(seed)
    table = {"tokens.weight": normal(1.0), "*norm.weight": constant(1.0), "*.weight": fan_in(), "*.bias": constant(0.0)}
    init_parameters(model, table, seed)
    fit_cross_entropy(model, lambda: _sample_batch(setup, setup.batch, draws), steps=setup.steps, rate=setup.rate)
    return model


def _feedforward_share(name: str) -> float:
    """Return the fraction of a block's parameters that are in its feed-forward layer.

    name  name of a model in MODELS
    """
    kind, config = MODELS[name]
    with torch.device("meta"):  # nothing is computed
        model = kind(config)
    block = (model.encoder.blocks if hasattr(model, "encoder") else model.blocks)[0]
    return count_parameters(block.feedforward) / count_parameters(block)


def verdict(numbers: Numbers) -> Decision:
    shares, parameters = estimates(numbers, "accuracy"), numbers["parameters"]
    margins = [shares["ReLU"] - 0.9, shares["ReLU"] - shares["none"] - 0.1, shares["ReLU"] - shares["linear"] - 0.03]
    counted = parameters["linear"] == parameters["ReLU"] > parameters["none"]
    counted &= all(abs(share - 2 / 3) < 0.01 for share in numbers["share of a block"].values())
    return decide(counted, margins, accuracy=shares)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=4.8)
    plot_shares(left, numbers["accuracy"], list(numbers["interval of accuracy"].values()))
    mark_level(left, 1 / numbers["vocab"], "chance")
    left.set(xlabel="feed-forward part", ylabel="accuracy", title=f"Sums modulo {numbers['vocab']}")
    plot_bars(right, numbers["share of a block"], fmt="%.3f")
    right.set(ylim=(0, 1), ylabel="share of the parameters of a block", title="Size of the feed-forward part")
    return figure
