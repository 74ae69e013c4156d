"""What do the encoder and the decoder see, and how are they connected?

Claim: Every token of the encoder sees every token of the source. A token of the decoder sees the target up to itself,
    and the whole source through cross attention. After training, cross attention looks where the task requires: for
    reversing sequences, at the last position first. A decoder alone, such as GPT, has no encoder and no cross
    attention.
Measures: A small encoder-decoder trained to reverse sequences, over seeds. Its attention maps, recorded from the
    running model: the pairs in use, the mass above the diagonal, and how much of the cross attention is on the reversed
    order, before and after training. How much the outputs change if the last token of the source or of the target
    changes. The blocks with cross attention of its decoder and of a GPT.
Finding: A model was trained to reverse its source of {{ n.length }} tokens. Of {{ n.length ** 2 }} pairs of query and
    key the encoder uses {{ n["pairs with nonzero weight"]["encoder"]|join_numbers }} and the decoder {{ n["pairs with
    nonzero weight"]["decoder"]|join_numbers }} in self-attention. At least {{ n["mass above the
    diagonal"]["encoder"][0]|percent }} of the encoder's attention goes to later tokens, and at most {{ n["mass above
    the diagonal"]["decoder"][1]|percent }} of the decoder's. The last source token changes the encoder's first output
    by {{ n["change of the encoder's first row by the last source token"]|short }} or more; the last target token
    changes the logits of earlier positions by {{ n["change of earlier logits by the last target token"]|short }}. The
    source tokens that the reversed order requires have {{ n["cross attention on the reversed order before
    training"]|percent }} of the cross attention before training and {{ means["cross attention on the reversed order"]
    }} after ({{ n.repeats }} seeds, in brackets the 95 % confidence interval), and the largest weight of {{ means["rows
    at the reversed order"] }} of the queries; {{ means["accuracy"] }} of the written tokens are correct. The decoder
    has {{ n["blocks with cross attention"]["with encoder"] }} block with cross attention; a GPT of the same size, a
    decoder alone, has {{ n["blocks with cross attention"]["alone"] }}.
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
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.fitting import fit_cross_entropy
from regard.lab.measure import count_cross_attention
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.gpt import GPT, GPTConfig
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
class Setup(RepeatedSetup):
    """Settings of the claim: the sequences to reverse, the encoder-decoder Transformer and its training.

    letters  number of different letters
    length   number of letters of a sequence; at least 3, because a shorter sequence hardly changes when it is
             reversed
    width    width of the model
    batch    number of sequences per training step
    steps    number of training steps
    rate     learning rate
    trials   number of test sequences
    """

    letters: int = 9
    length: int = 9
    width: int = 24
    batch: int = 32
    steps: int = 400
    rate: float = 0.01
    repeats: int = 5
    trials: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("length", self.length, 3, "tokens; shorter sequences hardly change when reversed")
        check_integer("letters", self.letters, 2, "different tokens")


SMOKE = Setup(letters=6, length=5, width=16, steps=160, rate=0.02, repeats=3, trials=16)


def run(
    setup: Setup,
    transformer: Callable[[TransformerConfig], Any] = Transformer,
    gpt: Callable[[GPTConfig], Any] = GPT,
) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    transformer, gpt  build the models: transformer(config), gpt(config)
    """
    before, after = [], []
    for seed in setup.seeds:
        model = _build_model(setup, transformer, seed)
        before.append(_measure_maps(model, setup, seed + 500))
        _train(model, setup, seed)
        after.append(_measure_maps(model, setup, seed + 500))
    order, every = "cross attention on the reversed order", before + after
    measured = {name: [each[name] for each in after] for name in (order, "rows at the reversed order", "accuracy")}
    measured["gain by training"] = [late[order] - early[order] for early, late in zip(before, after, strict=True)]
    numbers: Numbers = {"length": setup.length, "repeats": setup.repeats}
    # over all runs, the value that is worst for the claim
    for name, combine in (("pairs with nonzero weight", sorted), ("mass above the diagonal", _least_and_most)):
        numbers[name] = {part: combine({each[name][part] for each in every}) for part in ("encoder", "decoder")}
    for name in ("change of the encoder's first row by the last source token", "change of the logits by the source"):
        numbers[name] = min(each[name] for each in after)
    later = "change of earlier logits by the last target token"
    numbers |= {later: max(each[later] for each in every), f"{order} before training": fmean(e[order] for e in before)}
    for name, values in measured.items():
        numbers |= mean_and_interval(name, values)
    alone = gpt(GPTConfig(vocab=setup.letters + 1, context=setup.length, width=setup.width, depth=1, heads=1))
    blocks = {"with encoder": model.decoder, "alone": alone}
    crossing = {name: count_cross_attention(each) for name, each in blocks.items()}
    return numbers | {"blocks with cross attention": crossing, "maps": after[0]["maps"]}


def _least_and_most(values: set[float]) -> list[float]:
    return [min(values), max(values)]


def _build_model(setup: Setup, transformer: Callable[[TransformerConfig], Any], seed: int) -> Any:
    sizes = {"vocab": setup.letters + 1, "context": setup.length, "width": setup.width}  # and the start token
    model = transformer(TransformerConfig(depth=1, heads=1, order="pre", dropout=0.0, **sizes))  # type: ignore[arg-type]  # the config checks
    model.init_weights(seed)
    return model


def _sample_batch(
    setup: Setup, batch: int, draws: torch.Generator
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Sample random sources, decoder inputs and targets.

    A target is the reversed source. A decoder input is the start token and the target without its last letter.
    """
    source = torch.randint(setup.letters, (batch, setup.length), generator=draws)
    wanted = source.flip(1)
    return source, functional.pad(wanted[:, :-1], (1, 0), value=setup.letters), wanted


def _train(model: Any, setup: Setup, seed: int) -> None:
    draws = make_generator(seed)

    def sample() -> tuple[tuple[Tensor, Tensor], Tensor]:
        source, target, wanted = _sample_batch(setup, setup.batch, draws)
        return (source, target), wanted

    fit_cross_entropy(model, sample, steps=setup.steps, rate=setup.rate)


@torch.no_grad()
def _measure_maps(model: Any, setup: Setup, seed: int) -> dict[str, Any]:
    source, target, wanted = _sample_batch(setup, setup.trials, make_generator(seed))
    with watch(model) as seen:
        logits = model(source, target)
    maps: dict[str, Float[Tensor, "b n n"]] = {name: seen[layer].weights()[:, 0] for name, layer in MAPS.items()}
    other_source, other_target = source.clone(), target.clone()
    other_source[:, -1] = (source[:, -1] + 1) % setup.letters
    other_target[:, -1] = (target[:, -1] + 1) % setup.letters
    by_source, by_target = (model(*pair) - logits for pair in ((other_source, target), (source, other_target)))
    encoded = model.encode(other_source) - model.encode(source)
    reversed_rows = maps["cross"].argmax(-1) == torch.arange(setup.length).flip(0)
    return {
        "accuracy": (logits.argmax(-1) == wanted).double().mean().item(),
        "pairs with nonzero weight": {name: int((each > 0).all(0).sum()) for name, each in maps.items()},
        "mass above the diagonal": {name: float(each.triu(1).sum(-1).mean()) for name, each in maps.items()},
        "change of the encoder's first row by the last source token": float(encoded[:, 0].abs().max()),
        "change of the logits by the source": float(by_source.abs().amax((0, 2)).min()),
        "change of earlier logits by the last target token": float(by_target[:, :-1].abs().max()),
        "cross attention on the reversed order": float(maps["cross"].flip(2).diagonal(dim1=1, dim2=2).mean()),
        "rows at the reversed order": float(reversed_rows.double().mean()),
        "maps": {name: each.mean(0).tolist() for name, each in maps.items()},
    }


def verdict(numbers: Numbers) -> Decision:
    n, pairs, above = numbers["length"], numbers["pairs with nonzero weight"], numbers["mass above the diagonal"]
    all_seen = pairs["encoder"] == [n * n] and above["encoder"][0] > 0.05
    reached = numbers["change of the encoder's first row by the last source token"] > 1e-4
    reached &= numbers["change of the logits by the source"] > 1e-4
    masked = pairs["decoder"] == [n * (n + 1) // 2] and above["decoder"] == [0.0, 0.0]
    masked &= numbers["change of earlier logits by the last target token"] == 0.0
    least = {
        "gain by training": 0.2,
        "cross attention on the reversed order": 0.5,
        "rows at the reversed order": 0.9,
        "accuracy": 0.95,
    }
    means = {name: estimates(numbers, name) for name in least}
    crossing = numbers["blocks with cross attention"]
    masked &= crossing["with encoder"] > 0 == crossing["alone"]
    return decide(all_seen and reached and masked, [means[name] - low for name, low in least.items()], means=means)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(3)
    axes_of = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("source", "target")}
    for axes, (name, (keys, queries)) in zip(panels, axes_of.items(), strict=True):
        plot_heatmap(axes, numbers["maps"][name], high=1.0)
        axes.set(
            xlabel=f"key position in the {keys}", ylabel=f"query position in the {queries}", title=name.capitalize()
        )
    return figure
