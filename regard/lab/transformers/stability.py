"""What makes a deep Transformer trainable?

Claim: Residual sums, layer norms, scaled scores and a learning-rate warm-up. The post-norm design of 2017 needs all
    four: without norms gradients grow from block to block towards the input; without norms and sums they vanish;
    without sums all tokens become alike; without scaling one key has most of the weight of a query; and without any one
    of the four the loss after the same number of steps is higher for every seed. With pre-norm the gradients are
    smaller at the start, and no warm-up is needed.
Measures: Deep stacks of real blocks trained to reverse sequences, with each of the four removed, over seeds: at the
    start the norm of each block's gradient, the similarity of the tokens at the top and the largest attention weight of
    a row; and the loss at the end of training.
Budget: 90 seconds
Source: 002 1.4e
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
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_lines
from regard.lab.fitting import fit
from regard.lab.seeds_interval import Estimate, estimates, interval_half_width
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
    """Which of the four parts a stack has."""

    order: str = "post"
    sums: bool = True
    norms: bool = True
    scale: bool = True
    warm_up: bool = True


TRAINED = {
    "all four": Design(),
    "no sums": Design(sums=False),
    "no norms": Design(norms=False),
    "no scale": Design(scale=False),
    "no warm-up": Design(warm_up=False),
    "norm first, no warm-up": Design(order="pre", warm_up=False),
}
LACKING = ("no sums", "no norms", "no scale", "no warm-up")
WHOLE = ("all four", "norm first, no warm-up")
# the learning rate has no effect on the start
AT_THE_START = {
    "all four": Design(),
    "no sums": Design(sums=False),
    "no norms": Design(norms=False),
    "no norms, no sums": Design(norms=False, sums=False),
    "no scale": Design(scale=False),
    "norm first": Design(order="pre"),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sequences to reverse, the stack, and the training steps and seeds.

    deep  blocks of the stacks that are measured at the start and not trained
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
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        for name in ("depth", "deep"):
            check_integer(name, getattr(self, name), 4, "blocks; fewer train with any design")
        check_integer("length", self.length, 2, "tokens to compare")


SMOKE = Setup(letters=4, length=3, depth=5, deep=10, batch=8, steps=40, rate=0.007, warm_up=20, repeats=3)


def run(setup: Setup, layer: Callable[..., Any] = Attention, block: Callable[..., Any] = Block) -> Numbers:
    """Run the claim.

    layer  builds the attention: layer(width, heads, beta=beta)
    block  builds a block: block(width, attention, feedforward, order=order)
    """
    seeds = [1000 * setup.seed + number for number in range(setup.repeats)]
    starts = {
        name: [
            _measure_start(_build_stack(setup, setup.deep, design, layer, block, seed), setup, seed) for seed in seeds
        ]
        for name, design in AT_THE_START.items()
    }
    losses = {name: [_train(setup, design, layer, block, seed) for seed in seeds] for name, design in TRAINED.items()}
    times = {
        whole: {
            name: [math.log(loss / least) for loss, least in zip(losses[name], losses[whole], strict=True)]
            for name in LACKING
        }
        for whole in WHOLE
    }
    return {
        "depth": setup.depth,
        "deep": setup.deep,
        "steps": setup.steps,
        "repeats": setup.repeats,
        "loss of a guess": math.log(setup.letters),
        "gradients": {
            name: [fmean(column) for column in zip(*(start["gradients"] for start in several), strict=True)]
            for name, several in starts.items()
        },
        "tokens alike": {name: fmean(start["alike"] for start in several) for name, several in starts.items()},
        "largest weight": {name: fmean(start["largest"] for start in several) for name, several in starts.items()},
        "loss": {name: fmean(several) for name, several in losses.items()},
        "interval": {name: interval_half_width(several) for name, several in losses.items()},
        # per seed, as a ratio, because losses differ by orders of magnitude
        "logarithm of times the loss": {
            whole: {name: fmean(several) for name, several in times[whole].items()} for whole in WHOLE
        },
        "interval of logarithm": {
            whole: {name: interval_half_width(several) for name, several in times[whole].items()} for whole in WHOLE
        },
        # per seed: the smallest increase over all four
        "loss added, at least": {
            name: min(loss - best for loss, best in zip(losses[name], losses["all four"], strict=True))
            for name in LACKING
        },
    }


class _BlockWithoutSums(Block):
    """A block without residual sums."""

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = norm(part(x))
        return out


class _Stack(nn.Module):
    """Token and position embeddings, blocks, and a prediction for each position."""

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


def _loss(model: _Stack, setup: Setup, draws: torch.Generator) -> Tensor:
    tokens = torch.randint(setup.letters, (setup.batch, setup.length), generator=draws)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())


def _measure_start(model: _Stack, setup: Setup, seed: int) -> dict[str, Any]:
    """Measure gradients, similarity and the largest weight before the first step."""
    _loss(model, setup, make_generator(seed)).backward()
    squares = [
        [float(each.grad.square().sum()) for each in block.parameters() if each.grad is not None]
        for block in model.blocks
    ]
    tokens = torch.randint(setup.letters, (setup.batch, setup.length), generator=make_generator(seed))
    with torch.no_grad(), watch(model) as seen:
        top = functional.normalize(model.hidden(tokens), dim=-1)
    pairs = [float((top[:, i] * top[:, j]).sum(-1).mean()) for i, j in combinations(range(setup.length), 2)]
    return {
        "gradients": [math.sqrt(sum(several)) for several in squares],
        "alike": fmean(pairs),
        "largest": fmean(float(record.largest.mean()) for record in seen.records),
    }


def _train(setup: Setup, design: Design, layer: Callable[..., Any], block: Callable[..., Any], seed: int) -> float:
    """Train, and return the mean loss of the last tenth of the steps."""
    model, draws = _build_stack(setup, setup.depth, design, layer, block, seed), make_generator(seed)
    warm_up = setup.warm_up if design.warm_up else 0
    losses = fit(
        model.parameters(), lambda: _loss(model, setup, draws), steps=setup.steps, rate=setup.rate, warm_up=warm_up
    )
    return fmean(losses[-max(setup.steps // 10, 1) :])


def verdict(numbers: Numbers) -> Verdict:
    gradients, alike, largest = numbers["gradients"], numbers["tokens alike"], numbers["largest weight"]
    grown, usual = max(gradients["no norms"]), max(gradients["all four"])
    faded = gradients["no norms, no sums"][0] / gradients["no norms, no sums"][-1]
    even = max(gradients["all four"]) / min(gradients["all four"])
    start = (
        grown > 10 * usual
        and faded < 0.03
        and even < 10
        and 1 - alike["no sums"] < 0.1 * (1 - alike["all four"])
        and largest["no scale"] > 1.5 * largest["all four"]
        and fmean(gradients["norm first"]) < 0.7 * fmean(gradients["all four"])
    )
    worse = all(numbers["loss added, at least"][name] > 0 for name in LACKING)
    times = {
        whole: estimates(numbers["logarithm of times the loss"][whole], numbers["interval of logarithm"][whole])
        for whole in WHOLE
    }
    summary = ", ".join(
        f"{name} {numbers['loss'][name]:.2f}"
        + (f" ({_format_range(times['all four'][name])})" if name in LACKING else "")
        for name in TRAINED
    )
    return decide(
        start and worse,
        f"Loss after {numbers['steps']} steps of {numbers['depth']} blocks ({numbers['repeats']} seeds; a guess has "
        f"{numbers['loss of a guess']:.2f}; in brackets the ratio to the loss with all four): {summary}. At the start "
        f"of {numbers['deep']} blocks the largest gradient of a block is {usual:.1f} with all four and {grown:.0f} "
        f"without norms; without norms and sums the gradient of the first block is {faded:.0g} of that of the last. "
        f"Tokens at the top have a cosine of {alike['all four']:.2f}, without sums {alike['no sums']:.3f}; the "
        f"largest weight of a row is {largest['all four']:.2f}, without scaling {largest['no scale']:.2f}. With "
        f"pre-norm the mean gradient of a block is {fmean(gradients['norm first']):.1f}, with post-norm "
        f"{fmean(gradients['all four']):.1f}.",
        [many for whole in WHOLE for many in times[whole].values()],
    )


def _format_range(logarithm: Estimate) -> str:
    low, high = (math.exp(logarithm.mean + half) for half in (-logarithm.half, logarithm.half))
    return f"{low:.2g} to {high:.2g}"


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.4)
    plot_lines(left, list(range(1, numbers["deep"] + 1)), numbers["gradients"], legend=False)
    left.set(yscale="log", xlabel="block", ylabel="norm of its gradient", title="Gradients at the start")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower left", ncols=3)
    names = list(numbers["loss"])
    right.barh(
        names,
        [numbers["loss"][name] for name in names],
        xerr=[numbers["interval"][name] for name in names],
        color=COLOURS[0],
        capsize=3,
    )
    right.axvline(numbers["loss of a guess"], color=COLOURS[1], linestyle="--", label="a guess")
    right.legend(frameon=False)
    right.invert_yaxis()
    right.set_xlim(left=0)
    title = f"What is left after {numbers['steps']} steps"
    right.set(xlabel="loss", ylabel="design", title=title)
    return figure
