"""How does the Vision Transformer differ from the Transformer of 2017?

Claim: The Vision Transformer has only an encoder, in which every token sees all others. It uses pre-norm instead of
    post-norm, GELU instead of ReLU, a class token, and learned positions instead of sinusoids. The feed-forward part is
    four times as wide as the tokens in both, 3072 against 2048. Published sizes are 86, 307 and 632 million parameters
    against 65 and 213.
Measures: Small models of both kinds in float64: which token changes which output, the outputs of the blocks, and
    additional tokens. For the published sizes, the parameters and widths of real modules with 1000 classes and a
    vocabulary of 37,000 (the paper says "about"). The counts agree with the published ones within 3 %, not exactly.
Finding: Small models of ViT and of the Transformer have {{ n["blocks with cross attention of vit"] }} and {{ n["blocks
    with cross attention of transformer"] }} blocks with cross attention, {{ n["tokens added by vit"] }} and {{
    n["tokens added by transformer"] }} additional tokens (the class token), {{ n["position parameters of vit"] }} and
    {{ n["position parameters of transformer"] }} parameters for positions (learned, fixed), and an activation of {{
    n["activation at -1 of vit"]|fixed(3) }} and {{ n["activation at -1 of transformer"]|short }} at -1 (GELU, ReLU).
    The last token changes the first output by {{ n["change of the first by the last token in vit"]|short(1) }} and {{
    n["change of the first by the last token in transformer"]|short }} (no mask, causal mask), and the variance of a
    token after a block differs from 1 by up to {{ n["distance to variance 1 after blocks of vit"]|fixed }} and {{
    n["distance to variance 1 after blocks of transformer"]|short(1) }} (pre-norm, post-norm). Feed-forward widths are
    {{ n["feed-forward widths"]["vit-b/16"] }} (ViT-B) and {{ n["feed-forward widths"]["transformer-base"] }} (base).
    Millions of parameters, published in brackets: {% for name in published %}{{ name }} {{ n.millions[name]|fixed(1) }}
    ({{ published[name] }}){{ ", " if not loop.last }}{% endfor %}; ViT-L with patches of 32 has {{
    n.millions["vit-l/32"]|fixed(1) }}. The Transformers are counted with a vocabulary of {{ n.vocabulary|comma }}; with
    the {{ n["preset vocabulary"]|comma }} of `regard.build("transformer-base")` it is {{ n["parameters of the
    preset"]|comma }}.
Budget: 1 second
Source: 000 1.4, 000 1.5, 000 1.5b, 002 1.4, 002 1.5
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.lab.drawing import COLOURS, Figure, make_figure, plot_bars
from regard.lab.measure import count_cross_attention, count_parameters
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.transformer import PRESETS as TRANSFORMERS, Transformer, TransformerConfig
from regard.models.vit import PRESETS as VITS, ViT, ViTConfig

MATHS = (
    r"x_{l+1} = x_l + f(\mathrm{norm}(x_l)) \mathrm{against} x_{l+1} = \mathrm{norm}(x_l + f(x_l)), \quad "
    r"\frac{3072}{768} = \frac{2048}{512} = 4"
)
# millions of parameters, from the papers
PUBLISHED = {"vit-b/16": 86, "vit-l/16": 307, "vit-h/14": 632, "transformer-base": 65, "transformer-big": 213}

# of the models that were counted
CLASSES, VOCABULARY = 1000, 37_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of a small Vision Transformer and of a small encoder-decoder Transformer.

    width   width of both models
    heads   number of heads
    depth   number of blocks
    patch   side of a patch in pixels
    side    side of the image in patches
    length  number of tokens of a source and of a target
    """

    width: int = 24
    heads: int = 3
    depth: int = 2
    patch: int = 4
    side: int = 3
    length: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, length=2)
        if self.width % 2:
            raise setting_error(self, "width must be even, for the sinusoidal positions", "width")


SMOKE = Setup()


def run(setup: Setup, vit: Callable[[ViTConfig], Any] = ViT, transformer: Callable[..., Any] = Transformer) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    vit, transformer  build the models: vit(config), transformer(config)
    """
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
        | _count_published(vit, transformer)
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
        "change of the first by the last token in vit": float((moved - tokens)[:, 0].abs().max()),
        "distance to variance 1 after blocks of vit": given,
        "activation at -1 of vit": _activation_at_minus_one(model.blocks[0]),
        "position parameters of vit": _position_parameters(model),
        "blocks with cross attention of vit": count_cross_attention(model),
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
            "change of the first by the last token in transformer": float(
                (model(source, later) - logits)[:, 0].abs().max()
            ),
            "change of the first by the source in transformer": float(
                (model(elsewhere, target) - logits)[:, 0].abs().max()
            ),
            "distance to variance 1 after blocks of transformer": given,
            "activation at -1 of transformer": _activation_at_minus_one(model.encoder.blocks[0]),
            "position parameters of transformer": _position_parameters(model),
            "blocks with cross attention of transformer": count_cross_attention(model),
        }


def _output_variance_error(blocks: Any, call: Callable[[], Tensor]) -> float:
    """Return the largest deviation from 1 of the variance of an output token, over all blocks.

    The outputs are recorded by forward hooks.

    call  runs the model that has the blocks
    """
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


def _count_published(vit: Callable[..., Any], transformer: Callable[..., Any]) -> Numbers:
    configs: dict[str, ViTConfig | TransformerConfig] = {}
    for name in PUBLISHED:
        if name in VITS:
            configs[name] = replace(VITS[name], classes=CLASSES)
        else:
            configs[name] = replace(TRANSFORMERS[name], vocab=VOCABULARY)
    configs["vit-l/32"] = replace(VITS["vit-l/16"], classes=CLASSES, patch=32)
    millions, widths, hidden = {}, {}, {}
    for name, config in configs.items():
        with torch.device("meta"):  # on the meta device: the largest would need 2.5 GB
            model = vit(config) if isinstance(config, ViTConfig) else transformer(config)
        block = (model.blocks if isinstance(config, ViTConfig) else model.encoder.blocks)[0]
        millions[name] = count_parameters(model) / 1e6
        hidden[name], widths[name] = block.feedforward.up.weight.shape
    with torch.device("meta"):
        preset = count_parameters(transformer(TRANSFORMERS["transformer-base"]))
    return {
        "millions": millions,
        "widths": widths,
        "feed-forward widths": hidden,
        "vocabulary": VOCABULARY,
        "preset vocabulary": TRANSFORMERS["transformer-base"].vocab,
        "parameters of the preset": preset,
    }


def verdict(numbers: Numbers) -> Decision:
    millions, hidden = numbers["millions"], numbers["feed-forward widths"]

    def both(name: str) -> list[float]:
        return [numbers[f"{name} {kind}"] for kind in ("vit", "transformer")]

    crossed, first = both("blocks with cross attention of"), both("change of the first by the last token in")
    variance, active = both("distance to variance 1 after blocks of"), both("activation at -1 of")
    alone = crossed[0] == 0 < crossed[1] and numbers["change of the first by the source in transformer"] > 1e-6
    seen = first[0] > 1e-9 and first[1] == 0
    order = variance[0] > 0.1 and variance[1] < 0.01
    gelu = abs(active[0] + 0.158655) < 1e-5 and active[1] == 0
    extras = both("tokens added by") == [1, 0] and both("position parameters of")[0] > 0
    extras &= numbers["position parameters of transformer"] == 0
    ratio = all(hidden[name] == 4 * width for name, width in numbers["widths"].items())
    near = all(abs(millions[name] / published - 1) < 0.03 for name, published in PUBLISHED.items())
    return decide(alone and seen and order and gelu and extras and ratio and near, published=PUBLISHED)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.6)
    names = {name: name.replace("transformer-", "transformer\n") for name in PUBLISHED}
    plot_bars(left, {shown: numbers["millions"][name] for name, shown in names.items()}, fmt="%.0f")
    look: dict[str, Any] = {"s": 60, "facecolors": "none", "edgecolors": COLOURS[1], "linewidths": 2, "zorder": 3}
    left.scatter(list(names.values()), list(PUBLISHED.values()), **look, label="published")
    left.legend(frameon=False)
    left.set(ylabel="million parameters", title="Parameters, counted")
    plot_bars(right, {shown: numbers["feed-forward widths"][name] for name, shown in names.items()}, fmt="%d")
    right.set(ylabel="width of the feed-forward part", title="Four times the width of the tokens")
    return figure
