"""How does the Vision Transformer differ from the Transformer of 2017?

Claim: It has only an encoder, in which every token sees all others. It uses pre-norm instead of post-norm, GELU instead
    of ReLU, a class token, and learned positions instead of sinusoids. The feed-forward part is four times as wide as
    the tokens in both, 3072 against 2048. Published sizes are 86, 307 and 632 million parameters against 65 and 213.
Measures: Small models of both kinds in float64: which token changes which output, the outputs of the blocks, and
    additional tokens. For the published sizes, the parameters and widths of real modules with 1000 classes and a
    vocabulary of 37,000 (the paper says "about"). The counts agree with the published ones within 3 %, not exactly.
Budget: 1 second
Source: 000 1.5b
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.lab.claim import Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import COLOURS, Figure, make_figure
from regard.models.transformer import PRESETS as TRANSFORMERS, Transformer, TransformerConfig
from regard.models.vit import PRESETS as VITS, ViT, ViTConfig

MATHS = (
    r"x_{l+1} = x_l + f(\mathrm{norm}(x_l)) \mathrm{against} x_{l+1} = \mathrm{norm}(x_l + f(x_l)), \quad "
    r"\frac{3072}{768} = \frac{2048}{512} = 4"
)
# millions of parameters, from the papers
PUBLISHED = {"vit-b/16": 86, "vit-l/16": 307, "vit-h/14": 632, "transformer-base": 65, "transformer-big": 213}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The small models, and the classes and vocabulary of the large ones."""

    width: int = 24
    heads: int = 3
    depth: int = 2
    patch: int = 4
    side: int = 3
    length: int = 7
    classes: int = 1000
    vocab: int = 37_000
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT, transformer: Callable[..., Any] = Transformer) -> Numbers:
    """vit, transformer  build the models: vit(config), transformer(config)"""
    images = ViTConfig(
        image=setup.patch * setup.side,
        patch=setup.patch,
        classes=5,
        width=setup.width,
        depth=setup.depth,
        heads=setup.heads,
    )
    words = TransformerConfig(vocab=31, width=setup.width, depth=setup.depth, heads=setup.heads)
    return (
        _measure_vit(setup, vit(images))
        | _measure_transformer(setup, transformer(words))
        | _count_published(setup, vit, transformer)
    )


def _measure_vit(setup: Setup, model: Any) -> Numbers:
    model.init_weights(setup.seed)
    model.double().eval()
    side = setup.patch * setup.side
    image = torch.randn(1, 3, side, side, generator=make_generator(setup.seed), dtype=torch.float64)
    other = image.clone()
    other[:, :, -setup.patch :, -setup.patch :] += 1  # the last patch
    with torch.no_grad():
        tokens, moved = model.hidden(image), model.hidden(other)
        given = _output_variance_error(model.blocks, lambda: model(image))
    return {
        "tokens added by vit": tokens.shape[1] - setup.side**2,
        "first moved by last in vit": float((moved - tokens)[:, 0].abs().max()),
        "distance to variance 1 after blocks of vit": given,
        "activation at -1 of vit": _activation_at_minus_one(model.blocks[0]),
        "position parameters of vit": _position_parameters(model),
        "crossings of vit": _count_cross_attention(model),
    }


def _measure_transformer(setup: Setup, model: Any) -> Numbers:
    model.init_weights(setup.seed)
    model.double().eval()
    source, target = torch.randint(30, (2, 1, setup.length), generator=make_generator(setup.seed))
    later, elsewhere = target.clone(), source.clone()
    later[:, -1], elsewhere[:, -1] = 30, 30  # a token that does not occur
    with torch.no_grad():
        logits = model(source, target)
        given = _output_variance_error(model.encoder.blocks, lambda: model(source, target))
        return {
            "tokens added by transformer": model.encode(source).shape[1] - setup.length,
            "first moved by last in transformer": float((model(source, later) - logits)[:, 0].abs().max()),
            "first moved by source in transformer": float((model(elsewhere, target) - logits)[:, 0].abs().max()),
            "distance to variance 1 after blocks of transformer": given,
            "activation at -1 of transformer": _activation_at_minus_one(model.encoder.blocks[0]),
            "position parameters of transformer": _position_parameters(model),
            "crossings of transformer": _count_cross_attention(model),
        }


def _output_variance_error(blocks: Any, call: Callable[[], Tensor]) -> float:
    """Return the largest difference from 1 of the variance of a block's output tokens."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda block, inputs, out: seen.append(out)) for block in blocks]
    call()
    for hook in hooks:
        hook.remove()
    return max(float((out.var(-1, correction=0) - 1).abs().max()) for out in seen)


def _activation_at_minus_one(block: Any) -> float:
    return float(block.feedforward.activation(torch.tensor(-1.0, dtype=torch.float64)))


def _position_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "positions" in name)


def _count_cross_attention(model: nn.Module) -> int:
    """Count the blocks with cross attention."""
    return sum(getattr(module, "cross", None) is not None for module in model.modules())


def _count_published(setup: Setup, vit: Callable[..., Any], transformer: Callable[..., Any]) -> Numbers:
    configs: dict[str, ViTConfig | TransformerConfig] = {}
    for name in PUBLISHED:
        if name in VITS:
            configs[name] = replace(VITS[name], classes=setup.classes)
        else:
            configs[name] = replace(TRANSFORMERS[name], vocab=setup.vocab)
    configs["vit-l/32"] = replace(VITS["vit-l/16"], classes=setup.classes, patch=32)
    millions, widths, hidden = {}, {}, {}
    for name, config in configs.items():
        with torch.device("meta"):  # on the meta device: the largest would need 2.5 GB
            model = vit(config) if isinstance(config, ViTConfig) else transformer(config)
        block = (model.blocks if isinstance(config, ViTConfig) else model.encoder.blocks)[0]
        millions[name] = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        hidden[name], widths[name] = block.feedforward.up.weight.shape
    return {"millions": millions, "widths": widths, "feed-forward widths": hidden}


def verdict(numbers: Numbers) -> Verdict:
    millions, hidden = numbers["millions"], numbers["feed-forward widths"]
    pair = ("vit", "transformer")
    tokens = [numbers[f"tokens added by {kind}"] for kind in pair]
    first = [numbers[f"first moved by last in {kind}"] for kind in pair]
    given = [numbers[f"distance to variance 1 after blocks of {kind}"] for kind in pair]
    active = [numbers[f"activation at -1 of {kind}"] for kind in pair]
    learned = [numbers[f"position parameters of {kind}"] for kind in pair]
    crossings = [numbers[f"crossings of {kind}"] for kind in pair]
    alone = crossings[0] == 0 < crossings[1] and numbers["first moved by source in transformer"] > 1e-6
    seen = first[0] > 1e-9 and first[1] == 0
    order = given[0] > 0.1 and given[1] < 0.01
    gelu = abs(active[0] + 0.158655) < 1e-5 and active[1] == 0
    extras = tokens == [1, 0] and learned[0] > 0 == learned[1]
    ratio = all(hidden[name] == 4 * width for name, width in numbers["widths"].items())
    near = all(abs(millions[name] / published - 1) < 0.03 for name, published in PUBLISHED.items())
    shown = ", ".join(f"{millions[name]:.1f} ({published})" for name, published in PUBLISHED.items())
    return decide(
        alone and seen and order and gelu and extras and ratio and near,
        f"ViT (the Transformer in brackets) has {crossings[0]} blocks with cross attention ({crossings[1]}), "
        f"{tokens[0]} token more than patches, {learned[0]} parameters for positions ({learned[1]}), and an "
        f"activation of {active[0]:.3f} at -1 ({active[1]:g}). The last token changes the first by {first[0]:.0g} "
        f"({first[1]:g}), and the variances after a block differ from 1 by up to {given[0]:.2f} ({given[1]:.0g}). "
        f"Feed-forward widths are {hidden['vit-b/16']} and {hidden['transformer-base']}. Millions of parameters, "
        f"published in brackets: {shown}; ViT-L with patches of 32 has {millions['vit-l/32']:.1f}.",
    )


@wrong_answer(
    "000 1.5b",
    says="ViT has smaller feed-forward networks than the original Transformer.",
    right="They are four times as wide as the tokens in both, so they are larger in ViT: 3072 against 2048.",
)
def _smaller_feed_forward(numbers: Numbers) -> Verdict:
    hidden, widths = numbers["feed-forward widths"], numbers["widths"]
    ours, theirs = "vit-b/16", "transformer-base"
    ratios = [hidden[name] / widths[name] for name in (ours, theirs)]
    return decide(
        hidden[ours] < hidden[theirs] or ratios[0] < ratios[1],
        f"ViT-B has {hidden[ours]} for tokens of {widths[ours]}, the Transformer {hidden[theirs]} for {widths[theirs]}"
        f": {ratios[0]:g} and {ratios[1]:g} times as wide.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.6)
    names = {name: name.replace("transformer-", "transformer\n") for name in PUBLISHED}
    counted = left.bar(list(names.values()), [numbers["millions"][name] for name in names], color=COLOURS[0])
    left.bar_label(counted, fmt="%.0f", label_type="center", color="white")
    left.set(ylabel="million parameters", title="Parameters, counted")
    left.scatter(
        list(names.values()),
        list(PUBLISHED.values()),
        s=60,
        facecolors="none",
        edgecolors=COLOURS[1],
        linewidths=2,
        zorder=3,
        label="published",
    )
    left.legend(frameon=False)
    drawn = right.bar(list(names.values()), [numbers["feed-forward widths"][name] for name in names], color=COLOURS[0])
    right.bar_label(drawn, fmt="%d")  # exact widths
    right.margins(y=0.1)
    right.set(ylabel="width of the feed-forward part", title="Four times the width of the tokens")
    return figure
