"""What do the positions of a Vision Transformer learn, and what happens without them?

Claim: Position embeddings are a table with one row per patch, initialised at random and learned, without any knowledge
    that patches lie in a plane. After training the rows of neighbours are more similar than those of distant patches;
    before training they are not. Without positions shuffling the patches changes no output, and the accuracy is lower.
Measures: A small Vision Transformer whose patches are single pixels, trained on scikit-learn's digits with and without
    positions, over seeds: cosines between centred rows by distance of their patches, before and after training; the
    accuracy on 400 other images; and the change of the logits if patches are shuffled, in float64.
Finding: Rows of the position table that belong to neighbouring patches have a mean cosine of {{
    n.cosines["before"][0]|fixed }} before training and {{ n.cosines["after"][0]|fixed }} after. Their lead over rows of
    patches 3 or more apart is {{ lead["before"].mean|abs|fixed }} ± {{ lead["before"].half|fixed }} before and {{
    lead["after"].mean|fixed }} ± {{ lead["after"].half|fixed }} after ({{ n.repeats }} seeds; 95 % confidence
    intervals). Other images are classified correctly in {{ accuracy["learned"] }} with learned positions, in {{
    accuracy["sinusoidal"] }} with sinusoidal ones and in {{ accuracy["none"] }} without positions (chance {{
    n.chance|percent }}). If the patches of the test images are shuffled, the model with learned positions is right in
    {{ n["accuracy with shuffled patches"]|percent }}. Shuffling changes the logits by {{ n["change of the logits by
    shuffling"]["learned"]|short }} with learned positions and by at most {{ n["change of the logits by
    shuffling"]["none"]|at_most }} without positions.
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
from regard.core.positions import sinusoidal
from regard.lab.digits import CLASSES, SIDE, accuracy, build_digit_vit, load_digit_images, train_classifier
from regard.lab.drawing import Figure, make_figure, mark_level, plot_lines, plot_shares
from regard.lab.measure import largest_difference
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.vit import ViT, ViTConfig

MATHS = r"x_i = E p_i + t_i, \quad \cos(t_i - m, t_j - m) \mathrm{by} \| r_i - r_j \|, \quad m = \frac{1}{n} \sum_i t_i"

TABLES = {"learned": "learned", "sinusoidal": "learned", "none": "none"}  # sinusoids fill the table and stay fixed
FAR = 3  # at this distance patches are not near each other


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: the images of digits, the Vision Transformer and its training.

    classes  number of digits to classify, from 0 upwards
    width    width of the model
    heads    number of heads
    depth    number of blocks
    batch    number of images per training step
    steps    number of training steps
    rate     learning rate
    """

    classes: int = CLASSES
    width: int = 24
    heads: int = 2
    depth: int = 1
    batch: int = 32
    steps: int = 400
    rate: float = 0.02
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("classes", self.classes, 2, "digits")


SMOKE = Setup(classes=3, width=16, heads=1, batch=16, steps=100, rate=0.04, repeats=5)


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit  builds the model: vit(config)
    """
    given, others = (every.subset((every.labels < setup.classes).nonzero()[:, 0]) for every in load_digit_images())
    cosines: dict[str, list[list[float]]] = {"before": [], "after": []}
    right: dict[str, list[float]] = {positions: [] for positions in TABLES}
    moved: dict[str, list[float]] = {positions: [] for positions in TABLES}
    shuffled: list[float] = []
    sizes = {"patch": 1, "classes": setup.classes, "width": setup.width, "depth": setup.depth, "heads": setup.heads}
    for seed in setup.seeds:
        mixed = others.shuffle_pixels(seed)
        for positions in TABLES:
            # small initial rows, so that learning dominates
            model = build_digit_vit(vit, seed, positions_std=0.02, positions=TABLES[positions], **sizes)
            if positions == "sinusoidal" and model.positions is not None:
                model.positions.requires_grad_(False).weight.copy_(sinusoidal(SIDE * SIDE, setup.width))
            if positions == "learned":
                cosines["before"].append(_by_distance(model))
            train_classifier(model, given, steps=setup.steps, batch=setup.batch, rate=setup.rate, seed=seed)
            right[positions].append(accuracy(model, others))
            if positions == "learned":
                cosines["after"].append(_by_distance(model))
                shuffled.append(accuracy(model, mixed))
            with torch.no_grad():
                model.double()
                logits = [model(images[:16].double()) for images in (mixed.images, others.images)]
            moved[positions].append(largest_difference(*logits))
    # paired differences per seed, which vary less
    lost = {
        "without positions": [a - b for a, b in zip(right["learned"], right["none"], strict=True)],
        "with shuffled patches": [a - b for a, b in zip(right["learned"], shuffled, strict=True)],
    }
    return {
        "repeats": setup.repeats,
        "chance": 1 / setup.classes,
        "distances": list(range(1, SIDE)),
        "cosines": {
            when: [fmean(column) for column in zip(*several, strict=True)] for when, several in cosines.items()
        },
        **mean_and_interval(
            "cosine lead of neighbours",
            {when: [row[0] - fmean(row[FAR - 1 :]) for row in several] for when, several in cosines.items()},
        ),
        **mean_and_interval("accuracy", right),
        "accuracy with shuffled patches": fmean(shuffled),
        **mean_and_interval("accuracy lost", lost),
        "change of the logits by shuffling": {"learned": min(moved["learned"]), "none": max(moved["none"])},
    }


def _by_distance(model: Any) -> list[float]:
    """Return the mean cosine similarity of two patches' position embeddings, by the distance between the patches.

    The mean embedding is subtracted first. Entry 0 is for a distance of up to 1 patch, entry 1 for up to 2 patches, and
    so on; distances above 7 patches are left out.
    """
    table: Float[Tensor, "n d"] = model.positions.weight.detach()
    rows = functional.normalize(table - table.mean(0), dim=1)
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
    apart = (places[:, None] - places).square().sum(-1).sqrt().ceil()
    return [float((rows @ rows.T)[apart == distance].mean()) for distance in range(1, SIDE)]


def verdict(numbers: Numbers) -> Decision:
    lead, moved = estimates(numbers, "cosine lead of neighbours"), numbers["change of the logits by shuffling"]
    shares = estimates(numbers, "accuracy")
    ordered = [0.06 - lead["before"], lead["before"] + 0.06, lead["after"], lead["after"] - lead["before"] - 0.08]
    needed = [lost - 0.05 for lost in estimates(numbers, "accuracy lost").values()]
    bag = moved["none"] < 1e-9 and moved["learned"] > 1e-3
    return decide(bag, [*ordered, *needed], lead=lead, accuracy=shares)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    curves = {f"{when} training": numbers["cosines"][when] for when in ("before", "after")}
    plot_lines(left, numbers["distances"], curves)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(xlabel="distance of two patches", ylabel="cosine of their rows", title="Learned positions")
    plot_shares(right, numbers["accuracy"], list(numbers["interval of accuracy"].values()))
    mark_level(right, numbers["chance"], "chance")
    right.set(xlabel="positions", ylabel="accuracy", title="With and without positions")
    return figure
