"""What do the positions of a Vision Transformer learn, and what happens without them?

Claim: They are a table with one row per patch, initialised at random and learned, without any knowledge that patches
    lie in a plane. After training the rows of neighbours are more similar than those of distant patches; before
    training they are not. Without positions shuffling the patches changes no output, and the accuracy is lower.
Measures: A small Vision Transformer whose patches are single pixels, trained on scikit-learn's digits with and without
    positions, over seeds: cosines between centred rows by distance of their patches, before and after training; the
    accuracy on 400 other images; and the change of the logits if patches are shuffled, in float64.
Budget: 90 seconds
Source: 000 1.5c, 002 1.5b
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.digits import CLASSES, SIDE, accuracy, load_digit_images, train_classifier
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_lines, plot_shares
from regard.lab.seeds_interval import Estimate, estimates, interval_half_width
from regard.models.vit import ViT, ViTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = r"x_i = E p_i + t_i, \quad \cos(t_i - m, t_j - m) \mathrm{by} \| r_i - r_j \|, \quad m = \frac{1}{n} \sum_i t_i"

FAR = 3  # at this distance patches are not near each other


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of classes, the model, and the training steps and seeds."""

    classes: int = CLASSES
    width: int = 24
    heads: int = 2
    depth: int = 1
    batch: int = 32
    steps: int = 400
    rate: float = 0.02
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        check_integer("classes", self.classes, 2, "digits")


SMOKE = Setup(classes=3, width=16, heads=1, batch=16, steps=100, rate=0.04, repeats=5)


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT) -> Numbers:
    """vit  builds the model: vit(config)"""
    given, others = (every.subset((every.labels < setup.classes).nonzero()[:, 0]) for every in load_digit_images())
    cosines: dict[str, list[list[float]]] = {"before": [], "after": []}
    right: dict[str, list[float]] = {positions: [] for positions in ("learned", "none")}
    moved: dict[str, list[float]] = {positions: [] for positions in right}
    shuffled: list[float] = []
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        mixed = others.shuffle_pixels(seed)
        for positions in right:
            model = _build_model(setup, vit, positions, seed)
            if positions == "learned":
                cosines["before"].append(_by_distance(model))
            train_classifier(model, given, steps=setup.steps, batch=setup.batch, rate=setup.rate, seed=seed)
            right[positions].append(accuracy(model, others))
            if positions == "learned":
                cosines["after"].append(_by_distance(model))
                shuffled.append(accuracy(model, mixed))
            with torch.no_grad():
                model.double()
                change = model(mixed.images[:16].double()) - model(others.images[:16].double())
            moved[positions].append(float(change.abs().max()))
    lead = {when: [row[0] - fmean(row[FAR - 1 :]) for row in several] for when, several in cosines.items()}
    # paired differences per seed, which vary less
    lost = {
        "lost without positions": [a - b for a, b in zip(right["learned"], right["none"], strict=True)],
        "lost when shuffled": [a - b for a, b in zip(right["learned"], shuffled, strict=True)],
    }
    return {
        "repeats": setup.repeats,
        "chance": 1 / setup.classes,
        "distances": list(range(1, SIDE)),
        "cosines": {
            when: [fmean(column) for column in zip(*several, strict=True)] for when, several in cosines.items()
        },
        "neighbours lead by": {when: fmean(several) for when, several in lead.items()},
        "interval of lead": {when: interval_half_width(several) for when, several in lead.items()},
        "right": {positions: fmean(shares) for positions, shares in right.items()},
        "interval": {positions: interval_half_width(shares) for positions, shares in right.items()},
        "right when shuffled": fmean(shuffled),
        **{name: fmean(several) for name, several in lost.items()},
        "interval of loss": {name: interval_half_width(several) for name, several in lost.items()},
        "logits moved by shuffling": {"learned": min(moved["learned"]), "none": max(moved["none"])},
    }


def _build_model(setup: Setup, vit: Callable[[ViTConfig], Any], positions: str, seed: int) -> Any:
    model = vit(
        ViTConfig(
            image=SIDE,
            patch=1,
            channels=1,
            classes=setup.classes,
            width=setup.width,
            depth=setup.depth,
            heads=setup.heads,
            ff_width=2 * setup.width,
            pool="mean",
            positions=positions,
        )
    )
    # small initial rows, so that learning dominates
    table = {"positions.weight": normal(0.02), "*norm.weight": constant(1.0)}
    init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def _by_distance(model: Any) -> list[float]:
    """Return the mean cosine of the centred rows of two patches by their distance, rounded up."""
    table: Float[Tensor, "n d"] = model.positions.weight.detach()
    rows = functional.normalize(table - table.mean(0), dim=1)
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
    apart = (places[:, None] - places).square().sum(-1).sqrt().ceil()
    return [float((rows @ rows.T)[apart == distance].mean()) for distance in range(1, SIDE)]


def verdict(numbers: Numbers) -> Verdict:
    lead = estimates(numbers["neighbours lead by"], numbers["interval of lead"])
    right = estimates(numbers["right"], numbers["interval"])
    moved, near = numbers["logits moved by shuffling"], numbers["cosines"]
    ordered = [
        0.06 - lead["before"],
        lead["before"] + 0.06,
        lead["after"],
        lead["after"] - lead["before"] - 0.08,
    ]
    bag = moved["none"] < 1e-9 and moved["learned"] > 1e-3
    needed = [Estimate(numbers[name], half) - 0.05 for name, half in numbers["interval of loss"].items()]
    return decide(
        bag,
        f"Rows of neighbours have a cosine of {near['before'][0]:.2f} before training and {near['after'][0]:.2f} "
        f"after, {lead['before'].mean:.2f} ± {lead['before'].half:.2f} and {lead['after'].mean:.2f} ± "
        f"{lead['after'].half:.2f} above those at distance {FAR} or more ({numbers['repeats']} seeds). With "
        f"positions {right['learned'].percent()} of images are classified correctly, "
        f"{numbers['right when shuffled']:.0%} with shuffled patches, and without positions {right['none'].percent()}. "
        f"Shuffling changes logits by {moved['learned']:.2g} with positions and by {moved['none']:.0g} without.",
        [*ordered, *needed],
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    curves = {f"{when} training": numbers["cosines"][when] for when in ("before", "after")}
    plot_lines(left, numbers["distances"], curves)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(xlabel="distance of two patches", ylabel="cosine of their rows", title="Learned positions")
    shown = {"learned": "learned positions", "none": "no positions"}
    plot_shares(
        right,
        {words: numbers["right"][name] for name, words in shown.items()},
        [numbers["interval"][name] for name in shown],
    )
    right.axhline(numbers["chance"], color=COLOURS[1], linestyle="--", label="chance")
    right.legend(frameon=False)
    right.set(ylabel="accuracy", title="With and without positions")
    return figure
