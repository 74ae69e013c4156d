"""What do the encoder and the decoder see, and how are they connected?

Claim: Every token of the encoder sees every token of the source. A token of the decoder sees the target up to itself,
    and the whole source through cross attention. After training, cross attention looks where the task requires: for
    reversing sequences, at the last position first.
Measures: A small encoder-decoder trained to reverse sequences, over seeds. Its attention maps, recorded from the
    running model: the pairs in use, the mass above the diagonal, and the share of the cross attention on the reversed
    order, before and after training. How much the outputs change if the last token of the source or of the target
    changes.
Budget: 30 seconds
Source: 004 2d
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.fitting import fit
from regard.lab.seeds_interval import Estimate, interval_half_width
from regard.models.transformer import Transformer, TransformerConfig
from regard.see.watch import watch

MATHS = (
    r"\mathrm{encoder}: a_{ij} > 0, \quad \mathrm{decoder}: a_{ij} = 0 \mathrm{for} j > i, \quad "
    r"\mathrm{cross}: a_{ij} \to 1 \mathrm{at} j = n - 1 - i"
)

MAPS = {
    "encoder": "encoder.blocks.0.attention",
    "decoder": "decoder.blocks.0.attention",
    "cross": "decoder.blocks.0.cross",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sequences, the model, the training steps and seeds, and the number of test sequences."""

    letters: int = 9
    length: int = 9
    width: int = 24
    batch: int = 32
    steps: int = 400
    rate: float = 0.01
    repeats: int = 5
    trials: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        check_integer("length", self.length, 3, "tokens; shorter sequences hardly change when reversed")
        check_integer("letters", self.letters, 2, "different tokens")


SMOKE = Setup(letters=6, length=5, width=16, steps=160, rate=0.02, repeats=3, trials=16)


def run(setup: Setup, transformer: Callable[[TransformerConfig], Any] = Transformer) -> Numbers:
    """transformer  builds the model: transformer(config)"""
    before, after = [], []
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        model = _build_model(setup, transformer, seed)
        before.append(_measure_maps(model, setup, seed + 500))
        _train(model, setup, seed)
        after.append(_measure_maps(model, setup, seed + 500))
    order = "cross mass on the reversed order"
    reversed_mass = [each[order] for each in after]
    gained = [late[order] - early[order] for early, late in zip(before, after, strict=True)]
    return {
        "length": setup.length,
        "repeats": setup.repeats,
        "right": fmean(each["right"] for each in after),
        # the worst of all runs
        "pairs in use": {
            name: sorted({each["pairs in use"][name] for each in before + after}) for name in ("encoder", "decoder")
        },
        "mass above the diagonal": {
            name: [pick(each["mass above the diagonal"][name] for each in before + after) for pick in (min, max)]
            for name in ("encoder", "decoder")
        },
        "encoder's first row moved by the last source token": min(each["encoder moved"] for each in after),
        "logits moved by the source": min(each["logits moved by the source"] for each in after),
        "earlier logits moved by the last target token": max(each["earlier logits moved"] for each in before + after),
        "cross mass on the reversed order before": fmean(each[order] for each in before),
        "cross mass on the reversed order": fmean(reversed_mass),
        "interval": interval_half_width(reversed_mass),
        "gained by training": fmean(gained),
        "interval of gain": interval_half_width(gained),
        "rows whose largest cross weight is there": fmean(each["rows at the reversed order"] for each in after),
        "interval of rows": interval_half_width([each["rows at the reversed order"] for each in after]),
        "interval of right": interval_half_width([each["right"] for each in after]),
        "maps": after[0]["maps"],
    }


def _build_model(setup: Setup, transformer: Callable[[TransformerConfig], Any], seed: int) -> Any:
    model = transformer(
        TransformerConfig(
            vocab=setup.letters + 1,  # and the start token
            context=setup.length,
            width=setup.width,
            depth=1,
            heads=1,
            order="pre",
            dropout=0.0,
        )
    )
    model.init_weights(seed)
    return model


def _sample_batch(
    setup: Setup, batch: int, draws: torch.Generator
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Sample sources, decoder inputs, and targets: the reversed sources."""
    source = torch.randint(setup.letters, (batch, setup.length), generator=draws)
    wanted = source.flip(1)
    return source, functional.pad(wanted[:, :-1], (1, 0), value=setup.letters), wanted


def _train(model: Any, setup: Setup, seed: int) -> None:
    draws = make_generator(seed)

    def loss() -> Tensor:
        source, target, wanted = _sample_batch(setup, setup.batch, draws)
        return functional.cross_entropy(model(source, target).flatten(0, 1), wanted.flatten())

    fit(model.parameters(), loss, steps=setup.steps, rate=setup.rate)


@torch.no_grad()
def _measure_maps(model: Any, setup: Setup, seed: int) -> dict[str, Any]:
    source, target, wanted = _sample_batch(setup, setup.trials, make_generator(seed))
    with watch(model) as seen:
        logits = model(source, target)
    maps: dict[str, Float[Tensor, "b n n"]] = {name: seen[layer].weights()[:, 0] for name, layer in MAPS.items()}
    other_source, other_target = source.clone(), target.clone()
    other_source[:, -1] = (source[:, -1] + 1) % setup.letters
    other_target[:, -1] = (target[:, -1] + 1) % setup.letters
    moved = (model(source, other_target) - logits).abs()
    return {
        "right": (logits.argmax(-1) == wanted).double().mean().item(),
        "pairs in use": {name: int((each > 0).all(0).sum()) for name, each in maps.items()},
        "mass above the diagonal": {name: float(each.triu(1).sum(-1).mean()) for name, each in maps.items()},
        "encoder moved": float((model.encode(other_source) - model.encode(source))[:, 0].abs().max()),
        "logits moved by the source": float((model(other_source, target) - logits).abs().amax((0, 2)).min()),
        "earlier logits moved": float(moved[:, :-1].max()),
        "cross mass on the reversed order": float(maps["cross"].flip(2).diagonal(dim1=1, dim2=2).mean()),
        "rows at the reversed order": float(
            (maps["cross"].argmax(-1) == torch.arange(setup.length).flip(0)).double().mean()
        ),
        "maps": {name: each.mean(0).tolist() for name, each in maps.items()},
    }


def verdict(numbers: Numbers) -> Verdict:
    n, pairs, above = numbers["length"], numbers["pairs in use"], numbers["mass above the diagonal"]
    all_seen = pairs["encoder"] == [n * n] and above["encoder"][0] > 0.05
    moved = numbers["encoder's first row moved by the last source token"]
    reached = min(moved, numbers["logits moved by the source"]) > 1e-4
    later = numbers["earlier logits moved by the last target token"]
    masked = pairs["decoder"] == [n * (n + 1) // 2] and above["decoder"] == [0.0, 0.0] and later == 0.0
    first = numbers["cross mass on the reversed order before"]
    mass = Estimate(numbers["cross mass on the reversed order"], numbers["interval"])
    gained = Estimate(numbers["gained by training"], numbers["interval of gain"])
    rows = Estimate(numbers["rows whose largest cross weight is there"], numbers["interval of rows"])
    right = Estimate(numbers["right"], numbers["interval of right"])
    shown = {name: " or ".join(map(str, found)) for name, found in pairs.items()}
    return decide(
        all_seen and reached and masked,
        f"Of {n * n} pairs the encoder uses {shown['encoder']} and the decoder {shown['decoder']}. At least "
        f"{above['encoder'][0]:.2f} of the encoder's attention is above the diagonal and at most "
        f"{above['decoder'][1]:g} of the decoder's. The last source token changes the encoder's first row by "
        f"{moved:.2g} or more; the last target token changes earlier logits by {later:g}. The reversed order has "
        f"{first:.0%} of the cross attention before training and {mass.percent()} after ({numbers['repeats']} seeds), "
        f"and the largest weight in {rows.percent()} of rows; {right.percent()} of tokens are correct.",
        [gained - 0.2, mass - 0.5, rows - 0.9, right - 0.95],
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(3)
    axes_of = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("source", "target")}
    for axes, (name, (keys, queries)) in zip(panels, axes_of.items(), strict=True):
        plot_heatmap(axes, numbers["maps"][name], high=1.0)
        axes.set(
            xlabel=f"key position in the {keys}", ylabel=f"query position in the {queries}", title=name.capitalize()
        )
    return figure
