"""What makes a deep Transformer trainable?

Claim: Residual sums, layer norms, scaled scores and a learning-rate warm-up. The post-norm design of 2017 needs all
    four: without norms gradients grow from block to block towards the input; without norms and sums they vanish;
    without sums all tokens become alike; without scaling one key has most of the weight of a query; and without any one
    of the four the loss after the same number of steps is higher for every seed. With pre-norm the gradients are
    smaller at the start, and no warm-up is needed.
Measures: Deep stacks of real blocks trained to reverse sequences, with each of the four removed, over seeds: at the
    start the norm of each block's gradient, the similarity of the tokens at the top and the largest attention weight of
    a row; and the loss at the end of training.
Finding: Loss of {{ n.depth }} blocks after {{ n.steps }} training steps ({{ n.repeats }} seeds; guessing has {{ n["loss
    of guessing"]|fixed }}; in brackets, how many times the loss with all four parts): {% for name in n.loss %}{{ name
    }} {{ n.loss[name]|fixed(3) if n.loss[name] < 0.1 else n.loss[name]|fixed }}{{ " (" ~ ranges[name] ~ ")" if name in
    ranges }}{{ ", " if not loop.last else ". " }}{% endfor %}At the start of {{ n.deep }} blocks the largest gradient
    of a block is {{ n.gradients["all four"]|max|fixed(1) }} with all four and {{ n.gradients["no
    norms"]|max|round|int|comma }} without norms; without norms and sums the gradient of the first block is {{
    faded|short(1) }} of that of the last. Two tokens after the last block have a cosine of {{ n["cosine between
    tokens"]["all four"]|fixed }} with all four and of {{ n["cosine between tokens"]["no residual sums"]|fixed(3) }}
    without sums, so that they are almost equal; the largest attention weight of a query is {{ n["largest weight"]["all
    four"]|fixed }}, without scaling {{ n["largest weight"]["no scale"]|fixed }}. With pre-norm the mean gradient of a
    block at the start is {{ means["pre-norm"]|fixed(1) }}, with post-norm {{ means["all four"]|fixed(1) }}.
Budget: 90 seconds
Source: 001 review 11, 002 1.4e
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_lines
from regard.lab.fitting import fit_cross_entropy
from regard.lab.seeds_interval import Estimate, RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.attention import Attention
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import LearnedPositions, TokenEmbedding
from regard.nn.feedforward import FeedForward
from regard.nn.init import constant, init_parameters, normal, xavier
from regard.nn.norms import norm
from regard.see.watch import watch

MATHS = (
    r"\mathrm{post}: x \to \mathrm{norm}(x + f(x)), \quad \mathrm{pre}: x \to x + f(\mathrm{norm}(x)), \quad "
    r"\eta_t = \eta \min(1, \frac{t}{w})(1 - \frac{t}{T})"
)


@dataclass(frozen=True)
class Design:
    """The design choices to compare in a stack of Transformer blocks and its training.

    order    "post": layer norm after the residual sum; "pre": layer norm before the attention and feed-forward
             layers
    sums     whether there are residual connections
    norms    whether there are layer norms
    scale    whether scores are divided by the square root of the head width
    warm_up  whether the learning rate warms up
    """

    order: str = "post"
    sums: bool = True
    norms: bool = True
    scale: bool = True
    warm_up: bool = True


TRAINED = {
    "all four": Design(),
    "no residual sums": Design(sums=False),
    "no norms": Design(norms=False),
    "no scale": Design(scale=False),
    "no warm-up": Design(warm_up=False),
    "pre-norm, no warm-up": Design(order="pre", warm_up=False),
}
LACKING = ("no residual sums", "no norms", "no scale", "no warm-up")
WHOLE = ("all four", "pre-norm, no warm-up")
# the learning rate has no effect on the start
AT_THE_START = {
    "all four": Design(),
    "no residual sums": Design(sums=False),
    "no norms": Design(norms=False),
    "no norms, no residual sums": Design(norms=False, sums=False),
    "no scale": Design(scale=False),
    "pre-norm": Design(order="pre"),
}


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the sequences to reverse, the stacks of blocks and their training.

    letters  number of different letters
    length   number of letters of a sequence
    width    width of the stacks
    depth    number of blocks of the stacks that are trained; at least 4, because fewer blocks train with any design
    deep     number of blocks of the stacks that are only measured at initialisation, at least 4
    batch    number of sequences per training step
    steps    number of training steps
    rate     learning rate
    warm_up  number of steps over which the learning rate rises, in the designs with warm-up
    """

    letters: int = 6
    length: int = 6
    width: int = 48
    depth: int = 8
    deep: int = 12
    batch: int = 16
    steps: int = 150
    rate: float = 0.004
    warm_up: int = 40
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depth", "deep"):
            check_integer(name, getattr(self, name), 4, "blocks; fewer train with any design")
        check_integer("length", self.length, 2, "tokens to compare")
        check_integer("warm_up", self.warm_up, 1, "steps; the claim compares with no warm-up")


SMOKE = Setup(letters=4, length=3, depth=5, deep=10, batch=8, steps=40, rate=0.007, warm_up=20, repeats=3)


def run(setup: Setup, layer: Callable[..., Any] = Attention, block: Callable[..., Any] = Block) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    layer  builds the attention: layer(width, heads, beta=beta)
    block  builds a block: block(width, attention, feedforward, order=order)
    """

    def build(depth: int, design: Design, seed: int) -> "_Stack":
        return _build_stack(setup, depth, design, layer, block, seed)

    starts = {
        name: [_measure_start(build(setup.deep, design, seed), setup, seed) for seed in setup.seeds]
        for name, design in AT_THE_START.items()
    }
    losses = {
        name: [_train(build(setup.depth, design, seed), setup, design, seed) for seed in setup.seeds]
        for name, design in TRAINED.items()
    }

    def compare(name: str, whole: str, function: Callable[[float, float], float]) -> list[float]:
        """Return function(loss of `name`, loss of `whole`) for each seed.

        name, whole  names of two trained designs
        """
        return [function(loss, best) for loss, best in zip(losses[name], losses[whole], strict=True)]

    # as a ratio, because losses differ by orders of magnitude
    ratios = {whole: {name: compare(name, whole, lambda a, b: math.log(a / b)) for name in LACKING} for whole in WHOLE}
    return {
        "depth": setup.depth,
        "deep": setup.deep,
        "steps": setup.steps,
        "repeats": setup.repeats,
        "loss of guessing": math.log(setup.letters),
        "gradients": {
            name: [fmean(column) for column in zip(*(start["gradients"] for start in several), strict=True)]
            for name, several in starts.items()
        },
        "cosine between tokens": {
            name: fmean(start["cosine"] for start in several) for name, several in starts.items()
        },
        "largest weight": {name: fmean(start["largest"] for start in several) for name, several in starts.items()},
        **mean_and_interval("loss", losses),
        **mean_and_interval("log ratio of the loss", ratios),
        "smallest increase of the loss": {name: min(compare(name, "all four", float.__sub__)) for name in LACKING},
    }


class _BlockWithoutSums(Block):
    """A Transformer block without residual connections."""

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = norm(part(x))
        return out


class _Stack(nn.Module):
    """A model of token and position embeddings, the Transformer blocks of a `Design`, and logits for each position."""

    def __init__(
        self, setup: Setup, depth: int, design: Design, layer: Callable[..., Any], block: Callable[..., Any]
    ) -> None:
        super().__init__()
        width = setup.width
        self.tokens, self.places = TokenEmbedding(setup.letters, width), LearnedPositions(setup.length, width)
        make = block if design.sums else _BlockWithoutSums
        beta = None if design.scale else 1.0
        self.blocks = nn.ModuleList(
            make(width, layer(width, 1, beta=beta), FeedForward(width, 2 * width), order=design.order)
            for _ in range(depth)
        )
        if not design.norms:
            for each in self.blocks:
                each.attention_norm, each.feedforward_norm = nn.Identity(), nn.Identity()
        self.norm = norm("layer", width) if design.order == "pre" else nn.Identity()
        self.guess = nn.Linear(width, setup.letters)

    def hidden(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        top: Tensor = self.norm(run_blocks(self.blocks, x))
        return top

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n w"]:
        guesses: Tensor = self.guess(self.hidden(tokens))
        return guesses


def _build_stack(
    setup: Setup, depth: int, design: Design, layer: Callable[..., Any], block: Callable[..., Any], seed: int
) -> _Stack:
    model = _Stack(setup, depth, design, layer, block)
    table = {"tokens.weight": normal(1.0), "places.weight": normal(1.0), "*norm.weight": constant(1.0)}
    init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": xavier()}, seed)
    return model


def _sample_batch(setup: Setup, draws: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    """Sample sequences, and the reversed sequences as targets."""
    tokens = torch.randint(setup.letters, (setup.batch, setup.length), generator=draws)
    return (tokens,), tokens.flip(1)


def _measure_start(model: _Stack, setup: Setup, seed: int) -> dict[str, Any]:
    """Measure a stack of blocks at initialisation.

    Returns by name the gradient norm of each block ("gradients"), the mean cosine similarity of two output
    tokens ("cosine"), and the mean of the largest attention weight of each query ("largest").
    """
    (tokens,), wanted = _sample_batch(setup, make_generator(seed))
    functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
    squares = [
        [float(each.grad.square().sum()) for each in block.parameters() if each.grad is not None]
        for block in model.blocks
    ]
    with torch.no_grad(), watch(model) as seen:
        top = functional.normalize(model.hidden(tokens), dim=-1)
    pairs = [float((top[:, i] * top[:, j]).sum(-1).mean()) for i, j in combinations(range(setup.length), 2)]
    return {
        "gradients": [math.sqrt(sum(several)) for several in squares],
        "cosine": fmean(pairs),
        "largest": fmean(float(record.largest.mean()) for record in seen.records),
    }


def _train(model: _Stack, setup: Setup, design: Design, seed: int) -> float:
    """Train a stack of blocks, and return the mean loss over the last tenth of the training steps."""
    draws, warm_up = make_generator(seed), setup.warm_up if design.warm_up else 0
    losses = fit_cross_entropy(
        model, lambda: _sample_batch(setup, draws), steps=setup.steps, rate=setup.rate, warm_up=warm_up
    )
    return fmean(losses[-max(setup.steps // 10, 1) :])


def verdict(numbers: Numbers) -> Decision:
    gradients, largest = numbers["gradients"], numbers["largest weight"]
    usual, vanishing = gradients["all four"], gradients["no norms, no residual sums"]
    faded, means = vanishing[0] / vanishing[-1], {name: fmean(each) for name, each in gradients.items()}
    different = {name: 1 - cosine for name, cosine in numbers["cosine between tokens"].items()}
    start = (
        max(gradients["no norms"]) > 10 * max(usual)
        and faded < 0.03
        and max(usual) / min(usual) < 10
        and different["no residual sums"] < 0.1 * different["all four"]
        and largest["no scale"] > 1.5 * largest["all four"]
        and means["pre-norm"] < 0.7 * means["all four"]
    )
    worse = all(increase > 0 for increase in numbers["smallest increase of the loss"].values())
    ratios = estimates(numbers, "log ratio of the loss")
    margins = [ratio for several in ratios.values() for ratio in several.values()]
    ranges = {name: _format_range(ratio) for name, ratio in ratios["all four"].items()}
    return decide(start and worse, margins, faded=faded, means=means, ranges=ranges)


def _format_range(logarithm: Estimate) -> str:
    low, high = (math.exp(logarithm.mean + half) for half in (-logarithm.half, logarithm.half))
    return " to ".join(f"{float(f'{end:.2g}'):,g}" for end in (low, high))


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.4)
    plot_lines(left, list(range(1, numbers["deep"] + 1)), numbers["gradients"], legend=False)
    left.set(yscale="log", xlabel="block", ylabel="norm of its gradient", title="Gradients at the start")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower left", ncols=3)
    losses, halves = numbers["loss"], list(numbers["interval of loss"].values())
    right.barh(list(losses), list(losses.values()), xerr=halves, color=COLOURS[0], capsize=3)
    right.axvline(numbers["loss of guessing"], color=COLOURS[1], linestyle="--", label="guessing")
    right.legend(frameon=False)
    right.invert_yaxis()
    right.set(xlim=(0, None), xlabel="loss", ylabel="design", title=f"Loss after {numbers['steps']} steps")
    return figure
