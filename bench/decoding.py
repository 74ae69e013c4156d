"""The benchmark of text generation: `model.generate` compared with a compiled step of a plain GPT in a CUDA graph.

    python -m bench.decoding [--quick] [--only TEXT] [--json]

The model is GPT-2 with random weights, in bfloat16 on a GPU. The plain path is `model.generate` without a CUDA graph.
Before anything is timed, two checks must pass: in float32, captured decoding generates the same texts as the plain
path; in bfloat16, its log-probabilities are as exact as those of the plain path. All times include reading the prompt.
Sampling and beam search are compared with the plain path.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.plain_decoding import PlainDecoder
from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import peak_bytes, time_alternating
from regard.core.positions import Rotary
from regard.models.captured_decoding import release_captured
from regard.models.gpt import GPT, DotProductAttention, GPTConfig
from regard.models.transformer import RelativeBuckets, Transformer, TransformerConfig

Model = Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases, in a full or a quick run.

    gpt, llama, t5  configurations of the models
    prompt, new     number of tokens of a prompt, and of new tokens
    batches         batch sizes
    rounds          number of rounds of the timing
    seconds         minimum time for each function in a round
    """

    gpt: GPTConfig
    llama: GPTConfig
    t5: TransformerConfig
    prompt: int
    new: int
    batches: tuple[int, ...]
    rounds: int
    seconds: float


LLAMA = GPTConfig(
    vocab=32000, width=768, depth=12, heads=12, ff_width=2048, positions=Rotary(), norm="rms", bias=False,
    activation="gated-silu", tied=False, mixer=DotProductAttention(kv_heads=4),
)  # fmt: skip
T5 = TransformerConfig(
    vocab=32128, width=512, heads=8, ff_width=1024, order="pre", norm="rms", eps=1e-6, bias=False, beta=1.0,
    positions=RelativeBuckets(), scale_embedding=False, activation="gated-gelu-tanh", output_scale=512**-0.5,
)  # fmt: skip
FULL = Sizes(GPTConfig(vocab=50257), LLAMA, T5, 32, 256, (1, 64), 5, 0.5)
SMALL: dict[str, Any] = {"vocab": 1000, "width": 64, "depth": 2, "heads": 4}
QUICK = Sizes(
    GPTConfig(**SMALL, context=64),
    GPTConfig(**SMALL, context=64, positions=Rotary(), mixer=DotProductAttention(kv_heads=2)),
    TransformerConfig(**SMALL, context=64, positions=RelativeBuckets()),
    8, 12, (1, 3), 3, 0.02,
)  # fmt: skip


def measure(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the time of greedy decoding compared with a compiled plain GPT, and of other cases with the plain path."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = QUICK if quick else FULL
    for batch in sizes.batches:
        if only in (name := "GPT-2, greedy"):
            yield measure_greedy(name, sizes, batch, device)
    others: dict[str, tuple[Any, dict[str, Any]]] = {
        "GPT-2, temperature": (sizes.gpt, {"temperature": 0.8}),
        "GPT-2, top-k": (sizes.gpt, {"temperature": 0.8, "top_k": 50}),
        "GPT-2, top-p": (sizes.gpt, {"top_p": 0.9}),
        "GPT-2, 4 beams": (sizes.gpt, {"num_beams": 4}),
        "Llama-style, greedy": (sizes.llama, {}),
        "T5-style, greedy": (sizes.t5, {}),
    }
    for name, (config, options) in others.items():
        for batch in sizes.batches if only in name else ():
            yield measure_option(name, sizes, config, options, batch, device)


def measure_greedy(name: str, sizes: Sizes, batch: int, device: str) -> BenchmarkResult:
    """Compare greedy decoding with a plain GPT whose decoding step is compiled."""
    check_texts(name, sizes.gpt, sizes, {}, batch, device)
    model = build(sizes.gpt, device)
    check_exactness(name, model, sizes, batch, device)
    prompt = make_prompts(model, sizes.prompt, batch, device)
    run = generator(model, prompt, sizes.new, {})
    report_start(f"{name}, batch {batch}", model, run, prompt, sizes.new)
    peers = {
        each: PlainDecoder(model, prompt, sizes.new, compiled=device == "cuda", backend=backend)
        for each, backend in {"compiled step": None, "compiled step, math": SDPBackend.MATH}.items()
    }
    for each, peer in peers.items():
        begin = time.perf_counter()
        peer()
        print(f"{name}, batch {batch}: {each} starts in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    timings = time_alternating({"regard": run, **peers}, rounds=sizes.rounds, min_seconds=sizes.seconds, device=device)
    fastest = timings.fastest_peer()
    memory = {}
    if device == "cuda":
        memory = {"megabytes": peak_bytes(run) / 1e6, "peer_megabytes": peak_bytes(peers[fastest]) / 1e6}
    report_speed(name, batch, sizes.new, timings)
    shape = f"{batch} x {sizes.prompt} + {sizes.new}"
    return make_result(timings, name, shape, "captured", fastest, 1.0, **memory)


def measure_option(
    name: str, sizes: Sizes, config: Any, options: dict[str, Any], batch: int, device: str
) -> BenchmarkResult:
    """Compare a decoding strategy, or greedy decoding of another model, with the plain path of `model.generate`."""
    check_texts(name, config, sizes, options, batch, device)
    model = build(config, device)
    prompt = make_prompts(model, sizes.prompt, batch, device)
    functions = {
        "regard": generator(model, prompt, sizes.new, options),
        "plain path": generator(model, prompt, sizes.new // 4, {**options, "capture": False}),
    }
    timings = time_alternating(functions, rounds=sizes.rounds, min_seconds=sizes.seconds, device=device)
    # the plain path is slow: it writes a quarter of the text, and its time is multiplied
    plain = timings.seconds["plain path"]
    timings.seconds["plain path"] = [seconds * sizes.new / (sizes.new // 4) for seconds in plain]
    report_speed(name, batch, sizes.new, timings)
    release_captured(model)
    return make_result(timings, name, f"{batch} x {sizes.prompt} + {sizes.new}", "captured", "plain path", 0.0)


def build(config: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Return a model with random weights, which are large enough that generated texts do not repeat one token."""
    return copy.deepcopy(_draw_model(config)).to(device, dtype if device == "cuda" else torch.float32)


@lru_cache
def _draw_model(config: Any) -> Model:
    model = (GPT if isinstance(config, GPTConfig) else Transformer)(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.02)
    return model


def make_prompts(model: Model, length: int, batch: int, device: str) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab, (batch, length), generator=draws).to(device)


def generator(model: Model, prompt: Tensor, new: int, options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that calls `model.generate` on the prompts (the sources of an encoder-decoder).

    new  number of new tokens
    """
    start = {} if isinstance(model, GPT) else {"start_token": 0}
    return lambda: model.generate(prompt, max_new_tokens=new, **start, **options)


def check_texts(name: str, config: Any, sizes: Sizes, options: dict[str, Any], batch: int, device: str) -> None:
    """Check that captured decoding generates the same texts as the plain path in float32.

    One text of 32 may differ, because two tokens can be equally likely. One of 8 sampled texts may differ, because a
    random number can fall on the border between two of 50,257 tokens, and rounding moves the border. Raises
    CorrectnessError otherwise.
    """
    model = build(config, device, torch.float32)
    prompt = make_prompts(model, sizes.prompt, batch, device)
    new = min(sizes.new, 64)
    found, truth = (generator(model, prompt, new, {**options, "capture": each})() for each in (None, False))
    different = [(a, b) for a, b in zip(found, truth, strict=True) if a.tokens != b.tokens]
    if len(different) > batch / (8 if {"temperature", "top_p"} & options.keys() else 32):
        raise CorrectnessError(f"{name}: {len(different)} of {batch} texts differ from those of the plain path")
    release_captured(model)


def check_exactness(name: str, model: Model, sizes: Sizes, batch: int, device: str) -> None:
    """Check that log-probabilities of generated tokens are as close to float64 as those of one plain forward pass.

    The dtype is the one that is timed. Raises CorrectnessError otherwise.
    """
    prompt = make_prompts(model, sizes.prompt, batch, device)
    texts = generator(model, prompt, min(sizes.new, 64), {})()[:4]
    tokens = torch.tensor([text.prompt + text.tokens for text in texts], device=device)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        plain, truth = (
            net(tokens)[:, sizes.prompt - 1 : -1].double().log_softmax(-1).gather(-1, tokens[:, sizes.prompt :, None])
            for net in (model, exact)
        )
    ours = torch.tensor([text.log_probabilities for text in texts], dtype=torch.float64, device=device)
    error, usual = ((x - truth[..., 0]).square().mean().sqrt().item() for x in (ours, plain[..., 0]))
    print(f"{name}: root mean square error of log-probabilities {error:.1e}, plain pass {usual:.1e}", file=sys.stderr)
    if not error < 1.5 * usual + 1e-5:
        raise CorrectnessError(f"{name}: log-probabilities are wrong by {error:.1e}, those of a plain pass {usual:.1e}")


def report_start(name: str, model: Model, run: Callable[[], Any], prompt: Tensor, new: int) -> None:
    """Print the time of a call that captures a graph, and the time to the first token of a later call."""
    from regard.models.generation import stream_tokens

    release_captured(model)
    begin = time.perf_counter()
    run()
    start = time.perf_counter() - begin
    run()
    begin = time.perf_counter()
    stream = stream_tokens(model, prompt, max_new_tokens=new)  # as many as before, so that the graph is kept
    next(stream)
    first = time.perf_counter() - begin
    list(stream)
    print(f"{name}: a call that captures takes {start:.2f} s, the first token {first * 1e3:.1f} ms", file=sys.stderr)


def report_speed(name: str, batch: int, new: int, timings: Any) -> None:
    speeds = ", ".join(f"{each} {batch * new / timings.median(each):,.0f}" for each in timings.seconds)
    print(f"{name}, batch {batch}, tokens/s: {speeds}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Run the benchmark of decoding. Returns the exit code: 0 if every target was reached, else 1."""
    options = make_parser("bench.decoding", __doc__).parse_args(argv)
    return print_report(
        measure(options.quick, options.only), "cuda" if torch.cuda.is_available() else "cpu", options.json
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
