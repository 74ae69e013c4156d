"""The benchmark of training on a GPU: whole steps in bfloat16, compared with compiled models of other libraries.

    python -m bench.training [--quick] [--only TEXT] [--json]

The steps of `regard.train` are compiled and captured as CUDA graphs, with gradient clipping and AdamW. They are
compared with compiled models of other libraries in a plain training loop with the same weights, data, optimizer and
clipping. The losses of the first steps must agree before anything is timed. The small models of the recipes are
compared with the same steps without CUDA graphs. Memory is the peak that torch allocates in the first steps. `--quick`
runs tiny models, on a CPU too.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.plain_gpt import PlainGPT, copy_weights
from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import Function, time_alternating
from regard.base.config import override
from regard.data.digit_strings import DigitStrings
from regard.data.images import Images
from regard.data.spoken_digits import Recordings
from regard.integrations.torchvision import let_torchvision_load
from regard.models.convert.timm import from_timm
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build_from_config
from regard.recipes import birthplaces, speech, translation, vision
from regard.recipes.recipe import RunLocation
from regard.train.linear_cross_entropy import linear_cross_entropy
from regard.train.loop import Trainer
from regard.train.optimizers import AdamW
from regard.train.plan import TrainingPlan
from regard.train.prefetch import Prefetcher
from regard.train.process_group import single_process
from regard.train.rng_state import seed_generators
from regard.train.schedule import Constant
from regard.train.task import Loss, Task

CHECKED_STEPS = 20
TOLERANCE = 0.01  # of the loss, in the checked steps; rounding of bfloat16 grows from step to step
BATCHES = 4  # different ones, in turn
RECIPES = ("birthplaces", "vision", "translation", "speech")  # the last two run without graphs
RECIPE_WARM_STEPS = 30
RECIPE_TOLERANCE = 1e-3  # of the loss, which atomic sums make different from run to run
GPT_TARGET, VIT_TARGET, GRAPH_TARGET = 1.2, 1.15, 1.0
LR, DECAY, BETAS, MAX_NORM = 3e-4, 0.1, (0.9, 0.95), 1.0
VIT_LR = 1e-4  # at 3e-4 the losses of random labels jump, and rounding decides where


@dataclass(frozen=True)
class Sizes:
    """Sizes of the compared models and their inputs, and the number of rounds of the timing.

    b, n          number and length of the token sequences in a batch
    images, side  number of images in a batch, and their side in pixels
    seconds       minimum time for each function in a round
    steps         number of first steps whose losses are compared
    """

    b: int = 32
    n: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    images: int = 256
    side: int = 224
    rounds: int = 9
    seconds: float = 0.5
    steps: int = CHECKED_STEPS


QUICK = Sizes(b=2, n=16, width=32, depth=1, heads=2, images=2, side=32, rounds=3, seconds=0.01, steps=5)


class NextTokens:
    """Training task: next-token prediction on random tokens, with the loss of `linear_cross_entropy`."""

    def __init__(self, vocab: int, sizes: Sizes, device: torch.device) -> None:
        draws = torch.Generator().manual_seed(0)
        # few different tokens, so that there is something to learn
        tokens = torch.randint(0, min(vocab, 1000), (BATCHES, sizes.b, sizes.n + 1), generator=draws).to(device)
        self.batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        return self.batches[step % BATCHES]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, targets = batch
        return Loss(model(tokens, head=partial(linear_cross_entropy, targets=targets)), targets.numel())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class RandomImages:
    """Training task: classification of random images."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        draws = torch.Generator().manual_seed(0)
        shape = BATCHES, sizes.images, 3, sizes.side, sizes.side
        pixels, labels = torch.randn(shape, generator=draws), torch.randint(0, 1000, shape[:2], generator=draws)
        self.batches = list(zip(pixels.to(device), labels.to(device), strict=True))

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        return self.batches[step % BATCHES]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        total = functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")
        return Loss(total, len(batch[1]))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def training_plan(batch_size: int, lr: float = LR) -> TrainingPlan:
    optimizer = AdamW(lr=lr, weight_decay=DECAY, betas=BETAS)
    return TrainingPlan(
        steps=1 << 30, batch_size=batch_size, optimizer=optimizer, schedule=Constant(), max_grad_norm=MAX_NORM,
        precision="bfloat16", compile=True,
    )  # fmt: skip


class OurSteps:
    """Training steps of `regard.train`. Calling the object does one step and returns the loss."""

    def __init__(self, model: nn.Module, task: Task, plan: TrainingPlan, device: torch.device) -> None:
        group = single_process(device.type)
        self.trainer = Trainer(model, task, plan, group=group, on_message=partial(print, file=sys.stderr))
        self.trainer.model.train()
        self.step = 0

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.trainer.graphs is None else self.trainer.graphs.stream()

    def __call__(self) -> Tensor:
        total, count = self.trainer.train_step(self.trainer.load_batch(self.step), 1.0)
        self.step += 1
        return total / count


class PeerSteps:
    """Training steps of a compiled model in a plain loop. Calling the object does one step and returns the loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        task: Task,
        device: torch.device,
        lr: float = LR,
    ) -> None:
        self.model, self.task, self.device = model.to(device).train(), task, device
        self.loss = torch.compile(partial(loss, self.model))
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, DECAY), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
        self.step = 0

    def __call__(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.task.batch(self.step, 0, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()


def compare(
    name: str, shape: str, make_ours: Callable[[], OurSteps], peer: str, make_peer: Callable[[], PeerSteps],
    sizes: Sizes, target: float, device: torch.device,
) -> BenchmarkResult:  # fmt: skip
    """Compare the training steps of regard with those of a peer: first the losses, then times and peak memory.

    make_ours, make_peer  functions that build the training steps
    """
    ours, losses, megabytes = _first_steps(make_ours, sizes.steps, device)
    theirs, others, peer_megabytes = _first_steps(make_peer, sizes.steps, device)
    worst = max(abs(a - b) / b for a, b in zip(losses, others, strict=True))
    print(
        f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}, {peer} {others[-1]:.4f}; at most {worst:.1e} apart",
        file=sys.stderr,
    )
    if not worst < TOLERANCE or not losses[-1] < losses[0]:
        raise CorrectnessError(f"{name}: losses differ from those of {peer}, {losses} and {others}")
    functions: dict[str, Function] = {"regard": ours, peer: theirs}
    with ours.stream():
        timings = time_alternating(functions, rounds=sizes.rounds, min_seconds=sizes.seconds, device=device.type)
    memory = {"megabytes": megabytes, "peer_megabytes": peer_megabytes} if device.type == "cuda" else {}
    return make_result(timings, name, shape, "compiled", peer, target, **memory)


def _first_steps(make: Callable[[], Any], steps: int, device: torch.device) -> tuple[Any, list[float], float]:
    """Build training steps and run the first ones. Returns the training steps, the losses and the peak memory in MB."""
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = make()
    with step.stream() if isinstance(step, OurSteps) else nullcontext():
        losses = [step().item() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return step, losses, peak / 2**20


def measure_gpt(name: str, bias: bool, vocab: int, sizes: Sizes, device: torch.device) -> BenchmarkResult:
    config = GPTConfig(
        vocab=vocab, context=sizes.n, width=sizes.width, depth=sizes.depth, heads=sizes.heads, bias=bias, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    task = NextTokens(vocab, sizes, device)
    model, plain = GPT(config), PlainGPT(vocab, sizes.n, sizes.width, sizes.depth, sizes.heads, bias)
    copy_weights(model, plain)
    return compare(
        name, f"{sizes.b} x {sizes.n}", lambda: OurSteps(model, task, training_plan(sizes.b), device), "plain GPT",
        lambda: PeerSteps(plain, lambda peer, batch: peer(*batch), task, device), sizes, GPT_TARGET, device,
    )  # fmt: skip


def measure_vit(name: str, sizes: Sizes, device: torch.device) -> BenchmarkResult:
    let_torchvision_load()
    from timm.models.vision_transformer import VisionTransformer

    task = RandomImages(sizes, device)
    peer = VisionTransformer(
        img_size=sizes.side, patch_size=16, num_classes=1000, embed_dim=sizes.width, depth=sizes.depth,
        num_heads=sizes.heads,
    )  # fmt: skip
    model = from_timm(peer.state_dict(), "vit", heads=sizes.heads)

    def peer_loss(net: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(net(batch[0]).float(), batch[1])

    return compare(
        name, f"{sizes.images} x 3 x {sizes.side} x {sizes.side}",
        lambda: OurSteps(model, task, training_plan(sizes.images, VIT_LR), device), "timm",
        lambda: PeerSteps(peer, peer_loss, task, device, VIT_LR), sizes, VIT_TARGET, device,
    )  # fmt: skip


def make_recipe(name: str, quick: bool) -> tuple[nn.Module, Task, TrainingPlan]:
    """Return the model, the task and the training plan of a recipe.

    The settings are those for real data, but the task has built-in or random data.
    """
    recipe = {"birthplaces": birthplaces, "translation": translation, "vision": vision, "speech": speech}[name]
    settings: Any = recipe.real()
    if quick:
        plan = "pretraining" if name == "birthplaces" else "plan"
        small = {"batch_size": 8, "compile": False, "precision": "float32"}
        settings = override(settings, {f"{plan}.{key}": value for key, value in small.items()})
    draws = torch.Generator().manual_seed(0)
    if name == "vision":
        pixels = torch.randint(0, 256, (5000, 3, 32, 32), dtype=torch.uint8, generator=draws)
        images = Images(pixels, torch.arange(5000) % 100, tuple(map(str, range(100))))
        model = build_from_config(vision.adapt_config(settings.model, images), seed=0)
        return model, vision.ImageClassificationTask(images, images, settings), settings.plan
    if name == "speech":
        lengths = torch.randint(2000, 5000, (600,), generator=draws).tolist()
        sounds = tuple(0.1 * torch.randn(length, generator=draws) for length in lengths)
        speakers = tuple("abcdef"[number % 6] for number in range(600))
        recordings = Recordings(sounds, torch.arange(600) % 10, speakers, settings.log_mel.sample_rate)
        unused = DigitStrings((), (), recordings.sample_rate)
        splits = speech.SpeechSplits(speech.DigitStringSampler(recordings, settings), unused, unused)
        return build_from_config(settings.model, seed=0), speech.DigitRecognitionTask(splits, settings), settings.plan
    if name == "birthplaces":
        settings = override(settings, {"validation": 25, "people": 100 if quick else 600})
    setup = recipe.prepare(settings, RunLocation())
    return setup.model, setup.phases[0].task, setup.phases[0].plan


class RecipeSteps:
    """Training steps of a recipe, with batches that a background thread loads. Calling the object does one step.

    graphs  whether the steps are captured as CUDA graphs
    """

    def __init__(self, name: str, quick: bool, device: torch.device, graphs: bool) -> None:
        model, task, plan = make_recipe(name, quick)
        plan = replace(plan, steps=1 << 30, cuda_graphs=graphs)
        self.trainer = Trainer(
            model, task, plan, group=single_process(device.type), on_message=partial(print, file=sys.stderr)
        )
        self.trainer.model.train()
        self.batches = Prefetcher(self.trainer.load_batch, 0, plan.steps)
        self.shape = f"batch of {plan.batch_size}"

    def __call__(self) -> Tensor:
        total, count = self.trainer.train_step(self.batches.next(), 1.0)
        return total / count


def measure_recipe(name: str, quick: bool, sizes: Sizes, device: torch.device) -> BenchmarkResult:
    """Compare the training steps of a recipe with and without CUDA graphs, after a check that the losses agree."""
    warm = 10 if quick else RECIPE_WARM_STEPS
    ours, others = (RecipeSteps(name, quick, device, graphs) for graphs in (True, False))
    with ours.batches, others.batches, nullcontext() if ours.trainer.graphs is None else ours.trainer.graphs.stream():
        losses = []
        for steps in (ours, others):  # each run seeds dropout at its beginning
            seed_generators(0)
            losses.append([steps().item() for _ in range(warm)])
        worst = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
        print(f"{name}: losses {losses[0][0]:.4f} to {losses[0][-1]:.4f}, at most {worst:.1e} apart", file=sys.stderr)
        if not worst < RECIPE_TOLERANCE:
            raise CorrectnessError(f"{name}: losses differ from those without CUDA graphs by {worst:.1e}")
        timings = time_alternating(
            {"regard": ours, "no graphs": others}, rounds=sizes.rounds, min_seconds=sizes.seconds, device=device.type
        )
    return make_result(timings, name, ours.shape, "compiled", "no graphs", GRAPH_TARGET)


def measure(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the time of training steps of GPT-2, ViT-B/16 and the small models of the recipes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK if quick else Sizes()
    vocab = (101, 97) if quick else (50304, 50257)
    cases: dict[str, Callable[[str], BenchmarkResult]] = {
        "GPT-2 124M, no biases, vocabulary padded": lambda name: measure_gpt(name, False, vocab[0], sizes, device),
        "GPT-2 124M as published": lambda name: measure_gpt(name, True, vocab[1], sizes, device),
        "ViT-B/16": lambda name: measure_vit(name, sizes, device),
        **{name: lambda name: measure_recipe(name, quick, sizes, device) for name in RECIPES},
    }
    for name, run in cases.items():
        if only.lower() not in name.lower():
            continue
        try:
            yield run(name)
        except ImportError as error:
            print(f"{name}: the peer is skipped: {error}", file=sys.stderr)
        torch._dynamo.reset()


def main(argv: list[str]) -> int:
    """Run the benchmark of training. Returns 0 if every target was reached, 1 if not, and 2 without a GPU."""
    options = make_parser("bench.training", __doc__, "cases").parse_args(argv)
    if not torch.cuda.is_available() and not options.quick:
        print("the benchmark of training needs a GPU; --quick runs tiny models on a CPU", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return print_report(measure(options.quick, options.only), device, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
