"""How does a Transformer differ from a recurrent network?

Claim: In the length of the path between two tokens. With attention, the number of operations between the last output
    and the first token is the same for every length. In a recurrent layer it grows with every token in between, and
    the steps run one after the other. So a recurrent network forgets distant tokens: an encoder-decoder without
    attention learns to predict the first token only while it is near, a Transformer at every distance tried. Having
    an encoder and a decoder is not the difference. Attention is not the difference either: a recurrent decoder with
    attention to the source bridges the distance too.
Measures: The shortest and the longest path from the last output to the first token in the autograd graph of real
    layers. Multiply-adds and seconds by length; the seconds are reported but do not decide. Three encoder-decoders
    with about the same number of parameters, trained over seeds to predict the first token of a source that is
    followed by more and more noise.
Budget: 75 seconds
Source: 000 1.4a, 002 1.4a, 004 1a-b
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.counting import count_flops
from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import COLOURS, MARKERS, Figure, make_figure, plot_lines
from regard.lab.fitting import fit
from regard.lab.seeds_interval import Estimate, interval_half_width
from regard.models.rnn import LSTM, RNN, RNNConfig, RNNState
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Attention as AttentionLayer, merge_heads, split_heads
from regard.nn.init import fan_in, init_parameters, normal
from regard.see.watch import watch

MATHS = (
    r"\mathrm{attention}: y_n = \sum_j a_{nj} v_j, \quad "
    r"\mathrm{recurrent}: h_n = f(x_n, f(x_{n-1}, \dots f(x_1, h_0)))"
)

KINDS = ("recurrent", "recurrent with attention", "transformer")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The layers to measure, and the task: predict the first token of a source followed by noise.

    lengths    numbers of tokens for the layers, at most their width
    layer      the width of those layers
    distances  numbers of noise tokens after the first token
    values     different first tokens
    noise      different noise tokens
    """

    lengths: tuple[int, ...] = (8, 32, 128)
    layer: int = 128
    distances: tuple[int, ...] = (2, 8, 40)
    values: int = 8
    noise: int = 4
    width: int = 32
    batch: int = 32
    steps: int = 200
    rate: float = 0.01
    repeats: int = 4
    trials: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        for name in ("lengths", "distances"):
            several = getattr(self, name)
            if len(several) < 2 or list(several) != sorted(set(several)) or several[0] < 1:
                raise ConfigError(f"{name} must be two or more growing numbers of tokens: {name}={several}")
        if self.lengths[-1] > self.layer:
            raise ConfigError(
                f"lengths must not exceed the width of the layers: lengths={self.lengths}, layer={self.layer}"
            )

    @property
    def vocab(self) -> int:
        return self.values + self.noise + 1  # and the start token


SMOKE = Setup(lengths=(8, 64), distances=(1, 10), values=6, batch=16, steps=50, rate=0.03, repeats=3)


def run(
    setup: Setup,
    attention: Attention = attend,
    rnn: Callable[[RNNConfig], Any] = RNN,
    transformer: Callable[[TransformerConfig], Any] = Transformer,
) -> Numbers:
    """rnn, transformer  build the encoder-decoders: rnn(config), transformer(config)"""
    ways = {
        kind: [_path_lengths(setup, kind, n, attention) for n in setup.lengths] for kind in ("attention", "recurrent")
    }
    layers: dict[str, Any] = {kind: [_measure_layer(setup, kind, n, attention) for n in setup.lengths] for kind in ways}
    right: dict[str, list[list[float]]] = {kind: [[] for _ in setup.distances] for kind in KINDS}
    looked: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    exchanged: dict[str, float] = {}
    parameters: dict[str, int] = {}
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        for kind in KINDS:
            for at, distance in enumerate(setup.distances):
                model = _train(setup, kind, distance, seed, rnn, transformer)
                right[kind][at].append(_evaluate(model, setup, distance, seed + 500))
            looked[kind].append(_record_attention(model, setup, setup.distances[-1], seed + 500))
            exchanged[kind] = max(_exchange_encodings(model, setup, seed + 500), exchanged.get(kind, 0.0))
            parameters[kind] = sum(each.numel() for each in model.parameters())
    return {
        "lengths": list(setup.lengths),
        "layer": setup.layer,
        "distances": list(setup.distances),
        "repeats": setup.repeats,
        "chance": 1 / setup.values,
        "shortest way": {kind: [way[0] for way in several] for kind, several in ways.items()},
        "longest way": {kind: [way[1] for way in several] for kind, several in ways.items()},
        "smallest gradient of the first token": {
            kind: min(way[2] for way in several) for kind, several in ways.items()
        },
        "multiply-adds": {kind: [each[0] for each in several] for kind, several in layers.items()},
        "seconds": {kind: [each[1] for each in several] for kind, several in layers.items()},
        "parameters": parameters,
        "right": {kind: [fmean(shares) for shares in right[kind]] for kind in KINDS},
        "interval": {kind: [interval_half_width(shares) for shares in right[kind]] for kind in KINDS},
        "attention calls": {kind: min(calls for calls, _ in several) for kind, several in looked.items()},
        "weight of the token to tell": {
            kind: fmean(weight for _, weight in several) for kind, several in looked.items()
        },
        "difference once encodings are exchanged": exchanged,
    }


def _build_layers(setup: Setup) -> tuple[AttentionLayer, LSTM]:
    made = AttentionLayer(setup.layer, 1), LSTM(setup.layer)
    for layer in made:
        init_parameters(layer, {"*.bias": normal(0.1), "*": fan_in()}, setup.seed)
    return made


def _path_lengths(setup: Setup, kind: str, n: int, attention: Attention) -> tuple[int, int, float]:
    """Return the shortest and longest path from the last output to the first of n tokens, and the gradient."""
    layer, cell = _build_layers(setup)
    draws = make_generator(setup.seed)
    tokens = [torch.randn(1, 1, setup.layer, generator=draws).requires_grad_() for _ in range(n)]
    if kind == "attention":
        # every token is projected by itself, so that only attention connects two tokens
        heads = [split_heads(layer.query_key_value(token), 3).chunk(3, 1) for token in tokens]
        k, v = (torch.cat([each[part] for each in heads], 2) for part in (1, 2))
        out = layer.out(merge_heads(attention(heads[-1][0], k, v)))
    else:
        state = RNNState(torch.zeros(1, setup.layer), torch.zeros(1, setup.layer))
        for token in tokens:
            out, state = cell.step_by_step(token, state)
    shortest, longest = _count_operations(out, tokens[0])
    (gradient,) = torch.autograd.grad(out.sum(), tokens[0], allow_unused=True)
    return shortest, longest, 0.0 if gradient is None else float(gradient.norm())


def _count_operations(out: Tensor, leaf: Tensor) -> tuple[int, int]:
    """Return the fewest and the most operations between an output and an input; 0 if there is no path."""
    below: dict[Any, list[Any]] = {}
    order: list[Any] = []  # the inputs of an operation come before it
    waiting: list[tuple[Any, bool]] = [(out.grad_fn, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in below:
            below[node] = [each for each, _ in node.next_functions if each is not None]
            waiting += [(node, True), *((each, False) for each in below[node])]
    steps: dict[Any, tuple[int, int]] = {}
    for node in order:
        reached = [steps[each] for each in below[node] if each in steps]
        if getattr(node, "variable", None) is leaf:
            steps[node] = 0, 0
        elif reached:
            steps[node] = 1 + min(few for few, _ in reached), 1 + max(many for _, many in reached)
    return steps.get(out.grad_fn, (0, 0))


@torch.no_grad()
def _measure_layer(setup: Setup, kind: str, n: int, attention: Attention) -> tuple[int, float]:
    """Measure the multiply-adds and the seconds of a layer over n tokens."""
    layer, cell = _build_layers(setup)
    x = torch.randn(1, n, setup.layer, generator=make_generator(setup.seed))
    state = RNNState(torch.zeros(1, setup.layer), torch.zeros(1, setup.layer))

    def attended() -> Tensor:
        q, k, v = split_heads(layer.query_key_value(x), 3).chunk(3, 1)
        out: Tensor = layer.out(merge_heads(attention(q, k, v)))
        return out

    with count_flops() as flops:
        attended() if kind == "attention" else cell.step_by_step(
            x, state
        )  # the counter does not see inside the fused kernel
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        attended() if kind == "attention" else cell(x, state)
        taken.append(time.perf_counter() - start)
    return int(flops.get_total_flops()) // 2, min(taken)


def _build_models(
    setup: Setup,
    kind: str,
    distance: int,
    seed: int,
    rnn: Callable[[RNNConfig], Any],
    transformer: Callable[[TransformerConfig], Any],
) -> Any:
    if kind == "transformer":
        model = transformer(
            TransformerConfig(
                vocab=setup.vocab,
                context=distance + 1,
                width=setup.width,
                depth=1,
                heads=1,
                ff_width=2 * setup.width,
                order="pre",
                dropout=0.0,
            )
        )
        model.init_weights(seed)
        return model
    looking = "dot" if kind == "recurrent with attention" else None
    model = rnn(RNNConfig(vocab=setup.vocab, width=setup.width, depth=1, attention=looking, dropout=0.0))
    # embeddings of the same size as those of the Transformer
    init_parameters(model, {"source.weight": normal(1.0), "target.weight": normal(1.0), **model.initializers()}, seed)
    return model


def _sample_batch(
    setup: Setup, distance: int, batch: int, draws: torch.Generator
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b 1"], Int[Tensor, "b"]]:
    """Sample sources, targets that hold the start token, and the tokens to predict."""
    wanted = torch.randint(setup.values, (batch, 1), generator=draws)
    noise = setup.values + torch.randint(setup.noise, (batch, distance), generator=draws)
    return torch.cat([wanted, noise], 1), torch.full((batch, 1), setup.vocab - 1), wanted[:, 0]


def _train(
    setup: Setup,
    kind: str,
    distance: int,
    seed: int,
    rnn: Callable[[RNNConfig], Any],
    transformer: Callable[[TransformerConfig], Any],
) -> Any:
    model, draws = _build_models(setup, kind, distance, seed, rnn, transformer), make_generator(seed)

    def loss() -> Tensor:
        source, target, wanted = _sample_batch(setup, distance, setup.batch, draws)
        return functional.cross_entropy(model(source, target)[:, 0], wanted)

    fit(model.parameters(), loss, steps=setup.steps, rate=setup.rate)
    return model.eval()


@torch.no_grad()
def _evaluate(model: Any, setup: Setup, distance: int, seed: int) -> float:
    source, target, wanted = _sample_batch(setup, distance, setup.trials, make_generator(seed))
    return float((model(source, target)[:, 0].argmax(-1) == wanted).double().mean())


@torch.no_grad()
def _record_attention(model: Any, setup: Setup, distance: int, seed: int) -> tuple[int, float]:
    """Count the attention calls of the model, and return the weight of the first token in the last call."""
    source, target, _ = _sample_batch(setup, distance, setup.trials, make_generator(seed))
    with watch(model) as seen:
        model(source, target)
    if not len(seen):
        return 0, 0.0
    weights: Float[Tensor, "b h i j"] = seen.records[-1].weights()
    return len(seen), float(weights[..., 0].mean())


@torch.no_grad()
def _exchange_encodings(model: Any, setup: Setup, seed: int) -> float:
    """Return the difference between logits from an exchanged encoding and from its own source."""
    draws = make_generator(seed)
    source, target, _ = _sample_batch(setup, setup.distances[-1], setup.trials, draws)
    other, other_target, _ = _sample_batch(setup, setup.distances[-1], setup.trials, draws)
    model(source, target)  # the model must not keep anything of the earlier source
    decoded = model.decode(target, model.encode(other))
    logits = decoded if isinstance(decoded, Tensor) else decoded[0]
    return float((logits - model(other, other_target)).abs().max())


def _accuracy(numbers: Numbers, kind: str, at: int) -> Estimate:
    return Estimate(numbers["right"][kind][at], numbers["interval"][kind][at])


def verdict(numbers: Numbers) -> Verdict:
    lengths, distances = numbers["lengths"], numbers["distances"]
    short, long = numbers["shortest way"], numbers["longest way"]
    same = all(len(set(ways["attention"])) == 1 and ways["attention"][0] > 0 for ways in (short, long))
    # at least one operation per token in between
    grows = all(
        ways["recurrent"][at + 1] - ways["recurrent"][at] >= lengths[at + 1] - lengths[at]
        for ways in (short, long)
        for at in range(len(lengths) - 1)
    )
    reached = numbers["smallest gradient of the first token"]["attention"] > 1e-4
    taken, d = {kind: sum(several) for kind, several in numbers["seconds"].items()}, numbers["layer"]
    counts = numbers["multiply-adds"]
    costs = counts["attention"] == [4 * n * d * d + 2 * n * n * d for n in lengths] and counts["recurrent"] == [
        8 * n * d * d for n in lengths
    ]
    alike = max(numbers["parameters"].values()) < 1.25 * min(numbers["parameters"].values())
    near, far = ({kind: _accuracy(numbers, kind, at) for kind in KINDS} for at in (0, -1))
    chance = numbers["chance"]
    learned = [share - 0.8 for share in (*near.values(), far["transformer"])]
    forgot = chance + 0.2 - far["recurrent"]
    bridged = far["recurrent with attention"] - far["recurrent"] - 0.2
    accuracies = "; ".join(f"{kind} {near[kind].percent()} and {far[kind].percent()}" for kind in KINDS)
    ways = {kind: f"{several[0]} and {several[-1]}" for kind, several in short.items()}
    return decide(
        same and grows and reached and costs and alike,
        f"For {lengths[0]} and {lengths[-1]} tokens the path from the last output to the first token has "
        f"{ways['attention']} operations with attention and {ways['recurrent']} in a recurrent layer. At width {d} "
        f"they take {taken['attention'] * 1e3:.2f} and {taken['recurrent'] * 1e3:.2f} ms for all lengths. Accuracy "
        f"for the first token after {distances[0]} and {distances[-1]} noise tokens (chance {chance:.0%}, "
        f"{numbers['repeats']} seeds): {accuracies}.",
        [*learned, forgot, bridged],
    )


@wrong_answer(
    "000 1.4a",
    says="The Transformer differs by having an encoder and a decoder.",
    right="Recurrent networks had both before; the new idea is attention instead of recurrence within each.",
)
def _new_with_transformers(numbers: Numbers) -> Verdict:
    near, gap = _accuracy(numbers, "recurrent", 0), numbers["difference once encodings are exchanged"]["recurrent"]
    sentence = (
        f"A recurrent encoder-decoder predicts {near.percent()} correctly with noise of length "
        f"{numbers['distances'][0]}, and its decoder depends on the encoding only: with the encoding of another "
        f"source its logits differ by {gap:g} from those for that source."
    )
    return decide(True, sentence) if gap > 1e-6 else decide(True, sentence, [numbers["chance"] + 0.2 - near])


@wrong_answer(
    "004 1b",
    says="Recurrent networks have no attention.",
    right="Attention was introduced for recurrent decoders in 2014; the Transformer drops the recurrence.",
)
def _without_attention(numbers: Numbers) -> Verdict:
    kind = "recurrent with attention"
    calls, weight = numbers["attention calls"][kind], numbers["weight of the token to tell"][kind]
    with_it, without = (_accuracy(numbers, each, -1) for each in (kind, "recurrent"))
    count = "once" if calls == 1 else f"{calls} times"
    sentence = (
        f"A recurrent decoder that attends {count} per generated token gives the first token a weight of {weight:.2f} "
        f"and predicts {with_it.percent()} correctly after {numbers['distances'][-1]} noise tokens; without attention "
        f"it is {without.percent()}."
    )
    return decide(True, sentence) if calls == 0 else decide(True, sentence, [without + 0.1 - with_it])


def draw(numbers: Numbers) -> Figure:
    figure, (left, middle, right) = make_figure(3)
    plot_lines(left, numbers["lengths"], numbers["shortest way"])
    left.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="operations", title="Path from last output to first token"
    )
    plot_lines(middle, numbers["lengths"], numbers["seconds"])
    middle.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds", title="Seconds of one layer")
    for number, kind in enumerate(KINDS):
        right.errorbar(
            numbers["distances"],
            numbers["right"][kind],
            numbers["interval"][kind],
            label=kind,
            color=COLOURS[number],
            marker=MARKERS[number],
            capsize=3,
        )
    right.axhline(numbers["chance"], color="grey", linestyle=":")
    right.legend(frameon=False, fontsize="small")
    right.set(xscale="log", ylim=(0, 1.05), xlabel="noise tokens", ylabel="accuracy", title="A distant token")
    right.set_xticks(numbers["distances"], [str(distance) for distance in numbers["distances"]])
    right.minorticks_off()
    return figure
