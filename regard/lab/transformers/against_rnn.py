"""How does a Transformer differ from a recurrent network, and what do they have in common?

Claim: Both map a sequence of any length to a sequence, with weights shared by all positions, and both can be an encoder
    and a decoder. They differ in the length of the path between two tokens: with attention, the number of operations
    between the last output and the first token is the same for every length; in a recurrent layer it grows with every
    token in between, and the steps run one after the other. So a recurrent network forgets distant tokens: an
    encoder-decoder without attention learns to predict the first token only while it is near, a Transformer at every
    distance tried. A recurrent layer knows the order of its tokens, attention only from positional encodings; it keeps
    a state of fixed size, attention all keys and values. Having an encoder and a decoder is not the difference.
    Attention is not the difference either: a recurrent decoder with attention to the source bridges the distance too.
Measures: The shortest and the longest path from the last output to the first token in the autograd graph of real
    layers. How much the last output changes if earlier tokens are permuted; how many numbers are kept for the next
    token; the input matrices of recurrent layers. Multiply-adds and seconds by length; the seconds are reported but do
    not decide. Three encoder-decoders with about the same number of parameters, trained over seeds to predict the first
    token of a source that is followed by more and more noise.
Finding: On the shortest path from the first token to the last output there are {{ n["shortest path"]["attention"][0] }}
    operations in attention for {{ n.lengths[0] }} tokens and {{ n["shortest path"]["attention"][-1] }} for {{
    n.lengths[-1] }}. In a recurrent layer (an LSTM) there are {{ n["shortest path"]["recurrent"][0] }} for {{
    n.lengths[0] }} tokens and {{ n["shortest path"]["recurrent"][-1] }} for {{ n.lengths[-1] }}. On the longest path
    there are {{ n["longest path"]["attention"][0] }} and {{ n["longest path"]["attention"][-1] }} in attention, and {{
    n["longest path"]["recurrent"][0] }} and {{ n["longest path"]["recurrent"][-1] }} in the LSTM. If earlier tokens are
    permuted, the last output changes by at most {{ n["change by permuting earlier tokens"]["attention"]|at_most }} with
    attention without positions and by {{ n["change by permuting earlier tokens"]["recurrent"]|fixed }} in a recurrent
    layer. For the next token attention keeps {{ n["numbers kept"]["attention"][0]|comma }} and {{ n["numbers
    kept"]["attention"][-1]|comma }} numbers, the recurrent layer {{ n["numbers kept"]["recurrent"]|join_numbers }}. At
    width {{ n["layer width"] }} one pass over each of the lengths {{ n.lengths|join_numbers }} takes {{
    milliseconds["attention"]|fixed }} ms in all with attention and {{ milliseconds["recurrent"]|fixed }} ms in a
    recurrent layer. Three small encoder-decoders were trained to write the first token of a source that is followed by
    noise tokens. Accuracy after {{ n.distances[0] }} and {{ n.distances[-1] }} noise tokens (chance {{ n.chance|percent
    }}; {{ n.repeats }} seeds, in brackets the 95 % confidence interval): {% for kind in accuracy %}{{ kind }} {{
    accuracy[kind][0] }} and {{ accuracy[kind][-1] }}{{ "; " if not loop.last else "." }}{% endfor %}
Budget: 75 seconds
Source: 000 1.4a, 002 1.4a, 004 1a, 004 1b
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, mark_level, plot_intervals, plot_lines
from regard.lab.fitting import fit_cross_entropy
from regard.lab.measure import count_multiply_adds, count_parameters, largest_difference, measure_seconds
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import check_at_least, check_growing, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.models.rnn import LSTM, RNN, RNNConfig, RNNState
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Attention as AttentionLayer, merge_heads, split_heads
from regard.nn.init import fan_in, init_parameters, normal
from regard.see.watch import watch

MATHS = (
    r"\mathrm{attention}: y_n = \sum_j a_{nj} v_j, \quad "
    r"\mathrm{recurrent}: h_n = f(x_n, f(x_{n-1}, \dots f(x_1, h_0)))"
)

LAYERS = ("attention", "recurrent")
KINDS = ("recurrent", "recurrent with attention", "transformer")


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: an attention layer and an LSTM to measure, and a task to train encoder-decoders on.

    The task is to predict the first token of a source in which only noise tokens follow.

    lengths    measured layers: increasing numbers of tokens; at most `layer`, where attention needs fewer
               multiply-adds than the LSTM
    layer      measured layers: their width
    distances  task: increasing numbers of noise tokens after the first token
    values     task: number of different first tokens
    noise      task: number of different noise tokens
    width      encoder-decoders: their width
    batch      encoder-decoders: number of sources per training step
    steps      encoder-decoders: number of training steps
    rate       encoder-decoders: learning rate
    trials     encoder-decoders: number of test sources
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
    trials: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, lengths=2, distances=2)
        check_growing(self, "lengths", "distances")
        if self.lengths[-1] > self.layer:
            raise setting_error(self, "lengths must not exceed the width of the layers", "lengths", "layer")

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
    """Run this lab claim's experiment and return the measured numbers by name.

    attention         the attention function to test
    rnn, transformer  build the encoder-decoders: rnn(config), transformer(config)
    """
    paths = {kind: [_path_lengths(setup, kind, n, attention) for n in setup.lengths] for kind in LAYERS}
    costs = {kind: [_measure_layer(setup, kind, n, attention) for n in setup.lengths] for kind in LAYERS}
    right: dict[str, list[list[float]]] = {kind: [[] for _ in setup.distances] for kind in KINDS}
    looked: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    exchanged: dict[str, float] = {}
    parameters: dict[str, int] = {}
    for seed in setup.seeds:
        for kind in KINDS:
            for at, distance in enumerate(setup.distances):
                model = _train(_build_model(setup, kind, distance, seed, rnn, transformer), setup, distance, seed)
                right[kind][at].append(_evaluate(model, setup, distance, seed + 500))
            looked[kind].append(_record_attention(model, setup, setup.distances[-1], seed + 500))
            exchanged[kind] = max(_exchange_encodings(model, setup, seed + 500), exchanged.get(kind, 0.0))
            parameters[kind] = count_parameters(model)
    return {
        "lengths": list(setup.lengths),
        "layer width": setup.layer,
        "distances": list(setup.distances),
        "repeats": setup.repeats,
        "chance": 1 / setup.values,
        "shortest path": {kind: [path[0] for path in paths[kind]] for kind in LAYERS},
        "longest path": {kind: [path[1] for path in paths[kind]] for kind in LAYERS},
        "smallest gradient of the first token": {kind: min(path[2] for path in paths[kind]) for kind in LAYERS},
        "multiply-adds": {kind: [cost[0] for cost in costs[kind]] for kind in LAYERS},
        "seconds": {kind: [cost[1] for cost in costs[kind]] for kind in LAYERS},
        "change by permuting earlier tokens": {kind: _permutation_change(setup, kind, attention) for kind in LAYERS},
        # keys and values of all tokens; the hidden and the cell state
        "numbers kept": {
            "attention": [2 * n * setup.layer for n in setup.lengths],
            "recurrent": [2 * setup.layer for _ in setup.lengths],
        },
        "input matrices": {kind.__name__: kind(7, 5).weight_ih_l0.shape[0] // 5 for kind in (nn.RNN, nn.GRU, nn.LSTM)},  # type: ignore[index]
        "parameters": parameters,
        **mean_and_interval("accuracy", right),
        "attention calls": {kind: min(calls for calls, _ in several) for kind, several in looked.items()},
        "weight of the first token": {kind: fmean(weight for _, weight in several) for kind, several in looked.items()},
        "difference after exchanging encodings": exchanged,
    }


def _build_layers(setup: Setup) -> tuple[AttentionLayer, LSTM]:
    made = AttentionLayer(setup.layer, 1), LSTM(setup.layer)
    for layer in made:
        init_parameters(layer, {"*.bias": normal(0.1), "*": fan_in()}, setup.seed)
    return made


def _path_lengths(setup: Setup, kind: str, n: int, attention: Attention) -> tuple[int, int, float]:
    """Measure the paths in the autograd graph from a layer's last output back to the first of `n` tokens.

    Returns the fewest and the most operations on a path, and the norm of the gradient at the first token.

    kind  "attention" or "recurrent"
    """
    draws = make_generator(setup.seed)
    tokens = [torch.randn(1, 1, setup.layer, generator=draws).requires_grad_() for _ in range(n)]
    # every token is projected by itself, so that only attention or recurrence connects two tokens
    out = _apply_layer(_build_layers(setup), kind, tokens, attention)[:, -1:]
    shortest, longest = _count_operations(out, tokens[0])
    (gradient,) = torch.autograd.grad(out.sum(), tokens[0], allow_unused=True)
    return shortest, longest, 0.0 if gradient is None else float(gradient.norm())


def _apply_layer(
    layers: tuple[AttentionLayer, LSTM],
    kind: str,
    tokens: Sequence[Tensor],
    attention: Attention,
    fused: bool = False,
) -> Tensor:
    """Apply the attention layer or the LSTM to a sequence and return the output for the last tensor of `tokens`.

    layers  the attention layer and the LSTM
    kind    which layer to apply: "attention" or "recurrent"
    tokens  the sequence, either one tensor per token or one tensor of all tokens
    fused   whether the LSTM uses torch's fused kernel; otherwise it computes one token after another
    """
    layer, cell = layers
    if kind == "attention":
        heads = [split_heads(layer.query_key_value(token), 3).chunk(3, 1) for token in tokens]
        q, k, v = (torch.cat([each[part] for each in heads], 2) for part in range(3))
        # one query, so that the path to the first token does not pass through other outputs
        last = q if len(tokens) == 1 else q[:, :, -1:]
        out: Tensor = layer.out(merge_heads(attention(last, k, v)))
        return out
    state = RNNState(torch.zeros_like(tokens[0][:, 0]), torch.zeros_like(tokens[0][:, 0]))
    for token in tokens:
        out, state = cell(token, state) if fused else cell.step_by_step(token, state)
    return out


@torch.no_grad()
def _permutation_change(setup: Setup, kind: str, attention: Attention) -> float:
    """Return the largest change of a layer's last output when the order of the earlier tokens is reversed.

    kind  "attention" or "recurrent"
    """
    tokens = list(torch.randn(1, setup.lengths[0], setup.layer, generator=make_generator(setup.seed)).split(1, 1))
    first, second = ([*order, tokens[-1]] for order in (tokens[:-1], tokens[-2::-1]))
    layers = _build_layers(setup)
    return largest_difference(*(_apply_layer(layers, kind, order, attention)[:, -1] for order in (first, second)))


def _count_operations(out: Tensor, leaf: Tensor) -> tuple[int, int]:
    """Return the fewest and the most operations on a path of the autograd graph from `out` to `leaf`.

    Both are 0 if there is no path.
    """
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


def _measure_layer(setup: Setup, kind: str, n: int, attention: Attention) -> tuple[int, float]:
    """Return the number of multiply-adds and the median duration in seconds of a layer on `n` tokens.

    kind  "attention" or "recurrent"
    """
    x = [torch.randn(1, n, setup.layer, generator=make_generator(setup.seed))]
    layers = _build_layers(setup)
    # the counter does not see inside the fused recurrent kernel, which is faster
    counted = count_multiply_adds(lambda: _apply_layer(layers, kind, x, attention))
    with torch.no_grad():
        return counted, measure_seconds(lambda: _apply_layer(layers, kind, x, attention, fused=True), 20)


def _build_model(
    setup: Setup, kind: str, distance: int, seed: int, rnn: Callable[..., Any], transformer: Callable[..., Any]
) -> Any:
    if kind == "transformer":
        sizes = {"context": distance + 1, "heads": 1, "ff_width": 2 * setup.width, "order": "pre"}
        config = TransformerConfig(vocab=setup.vocab, width=setup.width, depth=1, dropout=0.0, **sizes)  # type: ignore[arg-type]  # the config checks
        model = transformer(config)
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
    """Sample sources, decoder inputs and targets.

    A source is the token to predict, followed by `distance` noise tokens. The decoder input is the start token.
    """
    wanted = torch.randint(setup.values, (batch, 1), generator=draws)
    noise = setup.values + torch.randint(setup.noise, (batch, distance), generator=draws)
    return torch.cat([wanted, noise], 1), torch.full((batch, 1), setup.vocab - 1), wanted[:, 0]


def _train(model: Any, setup: Setup, distance: int, seed: int) -> Any:
    draws = make_generator(seed)

    def sample() -> tuple[tuple[Tensor, Tensor], Tensor]:
        source, target, wanted = _sample_batch(setup, distance, setup.batch, draws)
        return (source, target), wanted

    fit_cross_entropy(model, sample, steps=setup.steps, rate=setup.rate)
    return model


@torch.no_grad()
def _evaluate(model: Any, setup: Setup, distance: int, seed: int) -> float:
    source, target, wanted = _sample_batch(setup, distance, setup.trials, make_generator(seed))
    return float((model(source, target)[:, 0].argmax(-1) == wanted).double().mean())


@torch.no_grad()
def _record_attention(model: Any, setup: Setup, distance: int, seed: int) -> tuple[int, float]:
    """Return the number of attention calls of a model, and the mean weight of the first token in the last call."""
    source, target, _ = _sample_batch(setup, distance, setup.trials, make_generator(seed))
    with watch(model) as seen:
        model(source, target)
    if not len(seen):
        return 0, 0.0
    weights: Float[Tensor, "b h i j"] = seen.records[-1].weights()
    return len(seen), float(weights[..., 0].mean())


@torch.no_grad()
def _exchange_encodings(model: Any, setup: Setup, seed: int) -> float:
    """Return how much the logits for a source change because the model has read another source before.

    The result is 0 if the model keeps no state. The model first reads one source. Then the logits decoded from
    the encoding of another source are compared with the logits of a full pass on that other source.
    """
    draws = make_generator(seed)
    source, target, _ = _sample_batch(setup, setup.distances[-1], setup.trials, draws)
    other, other_target, _ = _sample_batch(setup, setup.distances[-1], setup.trials, draws)
    model(source, target)  # the model must not keep anything of the earlier source
    decoded = model.decode(target, model.encode(other))
    logits = decoded if isinstance(decoded, Tensor) else decoded[0]
    return float((logits - model(other, other_target)).abs().max())


def verdict(numbers: Numbers) -> Decision:
    lengths, d = numbers["lengths"], numbers["layer width"]
    paths = numbers["shortest path"], numbers["longest path"]
    same = all(len(set(path["attention"])) == 1 and path["attention"][0] > 0 for path in paths)
    # at least one operation per token in between
    grows = all(
        path["recurrent"][at + 1] - path["recurrent"][at] >= lengths[at + 1] - lengths[at]
        for path in paths
        for at in range(len(lengths) - 1)
    )
    reached = numbers["smallest gradient of the first token"]["attention"] > 1e-4
    order = numbers["change by permuting earlier tokens"]
    ordered = order["attention"] < 1e-5 and order["recurrent"] > 1e-3
    counts = numbers["multiply-adds"]
    costs = counts["attention"] == [4 * n * d * d + 2 * n * n * d for n in lengths]
    costs &= counts["recurrent"] == [8 * n * d * d for n in lengths]
    alike = max(numbers["parameters"].values()) < 1.25 * min(numbers["parameters"].values())
    accuracy = estimates(numbers, "accuracy")
    near, far = ({kind: several[at] for kind, several in accuracy.items()} for at in (0, -1))
    learned = [share - 0.8 for share in (*near.values(), far["transformer"])]
    forgot = numbers["chance"] + 0.2 - far["recurrent"]
    bridged = far["recurrent with attention"] - far["recurrent"] - 0.2
    return decide(
        same and grows and reached and ordered and costs and alike,
        [*learned, forgot, bridged],
        accuracy=accuracy,
        milliseconds={kind: 1e3 * sum(several) for kind, several in numbers["seconds"].items()},
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, middle, right) = make_figure(3)
    for axes, name in ((left, "shortest path"), (middle, "seconds")):
        plot_lines(axes, numbers["lengths"], numbers[name])
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=name, title=f"{name.capitalize()} of one layer")
    plot_intervals(right, numbers["distances"], numbers["accuracy"], numbers["interval of accuracy"])
    mark_level(right, numbers["chance"], "chance")
    right.set(xscale="log", ylim=(0, 1.05), xlabel="noise tokens", ylabel="accuracy", title="A distant token")
    right.set_xticks(numbers["distances"], [str(distance) for distance in numbers["distances"]])
    right.minorticks_off()
    return figure
