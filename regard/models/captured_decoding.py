"""Text generation on a GPU: one decoding step is captured as a CUDA graph and replayed for each token.

The model's forward pass reads the prompts. Then each replay of the graph generates one token of every text: it runs
`decoding_step`, chooses the next token and computes its log-probability, all on the GPU. The CPU does not wait for the
GPU after each token: it launches several replays, reads their tokens later and drops the tokens after the end of a
text. Texts that have ended stay in the batch.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regard.base.extras import has_triton
from regard.core.absolute_positions import Positions, whole_grid
from regard.core.kernels import is_observed
from regard.models.beam_search import BeamSearch
from regard.models.caches import Caches
from regard.models.decoding_ops import StepState, rotation_table
from regard.models.decoding_step import decoder_blocks, decoding_step, step_refusals
from regard.models.device_strategies import DeviceBeamSearch, DeviceSampling, make_device_strategy, strategy_key
from regard.models.generation_adapters import (
    DecoderAdapter,
    EncoderDecoderAdapter,
    GenerationAdapter,
    make_adapter,
)
from regard.models.gpt import GPT
from regard.models.padding_positions import is_left_padded
from regard.models.sampling import Greedy, KthLargest, Sample, StepwiseStrategy, Strategy
from regard.models.transformer import DecoderState, Transformer
from regard.nn.attention import KeysValues

ROUND = 64  # capacities are multiples of it, so that prompts of similar lengths share a graph
STEPS = 16  # maximum number of steps between two looks at the tokens
KEPT = 2  # graphs kept for each model, with their caches


def capture_refusals(model: GPT | GenerationAdapter, strategy: Strategy | None = None) -> list[str]:
    """Return every reason why decoding cannot run as a CUDA graph. The list is empty if it can.

    strategy  how the next tokens are chosen; default greedy decoding

    For a GPT on the CPU:

    >>> capture_refusals(model)
    ['it needs a model on a GPU, not on cpu']
    """
    adapter, strategy, reasons = make_adapter(model), strategy or Greedy(), []
    device = next(adapter.module.parameters()).device
    if device.type != "cuda":
        reasons.append(f"it needs a model on a GPU, not on {device.type}")
    elif not has_triton():
        reasons.append("triton is not installed")
    if type(strategy) not in (Greedy, KthLargest, Sample, BeamSearch):
        reasons.append(f"it knows greedy decoding, sampling and beam search, not {strategy!r}")
    if type(adapter) not in (DecoderAdapter, EncoderDecoderAdapter):
        return [*reasons, f"it knows GPT and Transformer, not a {type(adapter).__name__}"]
    if is_left_padded(getattr(adapter, "source_padding", None)):
        reasons.append("the source is padded on the left")
    if next(adapter.module.parameters()).dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append("it computes in float32, bfloat16 and float16")
    if torch.is_autocast_enabled(device.type):
        reasons.append("autocast is active")
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    if is_observed() or any(not isinstance(mode, DeviceContext) for mode in modes):
        reasons.append("attention calls are recorded or changed, by `watch` or `intervene` for example")
    return reasons + step_refusals(adapter.module)


class StepLoop:
    """A decoding loop: its buffers, and one decoding step as a function or a CUDA graph.

    The loop has no reference to the model, so that a cached loop does not keep the model in memory.

    choice    the `DeviceStrategy` that chooses the next tokens
    rows      number of sequences
    capacity  maximum number of positions in the KV cache of a sequence
    sources   maximum number of source tokens of an encoder-decoder
    graph     whether the step is captured as a CUDA graph; False runs the step eagerly, on any device
    key       key under which `keep_loop` caches the loop
    """

    def __init__(
        self,
        model: GPT | Transformer,
        choice: DeviceSampling | DeviceBeamSearch,
        rows: int,
        capacity: int,
        sources: int,
        graph: bool,
        key: Any = None,
    ) -> None:
        parameter = next(model.parameters())
        device = parameter.device
        blocks = decoder_blocks(model)
        self.choice, self.key = choice, key
        layer = blocks[0].attention
        cross = [block.cross for block in blocks if block.cross is not None]

        def zeros(count: int, length: int) -> Tensor:
            shape = (count, rows, layer.kv_heads, length, layer.head_width)
            return torch.zeros(shape, dtype=parameter.dtype, device=device)

        memory = zeros(2 * len(cross), sources)
        self.state = StepState(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            zeros(2 * len(blocks), capacity),
            memory=[KeysValues(*memory[2 * number : 2 * number + 2]) for number in range(len(cross))],
            lengths=torch.full((rows,), sources, dtype=torch.int64, device=device) if cross else None,
            triton=device.type == "cuda",
        )
        if layer.rotary is not None:
            self.state.rotations[layer.rotary] = rotation_table(layer.rotary, layer.head_width, capacity, parameter)
        self._compute_biases(model)
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self._capture(model)

    def load(
        self,
        model: GPT | Transformer,
        caches: Caches,
        source: DecoderState | None,
        tokens: Int[Tensor, "r"],
        positions: Int[Tensor, "r"],
    ) -> None:
        """Copy the state after the prompts into the buffers: KV caches, source, next tokens and their positions.

        In beam search each prompt has several rows, one per beam, and its caches are copied into all of them.

        caches     KV caches that hold the prompts
        source     decoding state of an encoder-decoder, with the keys, values and lengths of the source; else None
        tokens     the first new token of each sequence
        positions  the position of that token
        """
        state, repeats = self.state, self.choice.rows_per_prompt

        def copy(buffer: Tensor, held: Tensor) -> None:
            held = held if repeats == 1 else held.repeat_interleave(repeats, 0)
            buffer[:, :, : held.shape[2]].copy_(held)

        for number, cache in enumerate(caches):
            for buffer, held in zip(state.keys_values(number), cache.tensors(), strict=True):
                copy(buffer, held)
        if source is not None and state.lengths is not None:
            for pair, given in zip(state.memory, source.memory, strict=True):
                for buffer, held in zip(pair, given, strict=True):
                    copy(buffer, held)
            length, padding = source.memory[0].k.shape[2], source.source_padding
            if padding is None:
                state.lengths.fill_(length)
            else:
                state.lengths.copy_(padding.data.clamp(max=length).repeat_interleave(repeats))
        self._compute_biases(model)
        state.tokens.copy_(tokens)
        state.positions.copy_(positions)

    def run(self, model: GPT | Transformer) -> None:
        """Decode one token of each sequence: replay the CUDA graph, or run the step eagerly if there is no graph."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.choice.choose(self.state, decoding_step(model, self.state))

    def _compute_biases(self, model: GPT | Transformer) -> None:
        """Compute the table of relative position biases (T5) from the current parameters, if the model has biases."""
        for block in decoder_blocks(model):
            layer = block.attention
            if layer.scores is None:
                continue
            capacity = self.state.capacity
            q = self.state.caches.new_zeros(1, layer.heads, 1, layer.head_width)
            grid = whole_grid(Positions(capacity - 1), 1, layer.heads, 1, capacity, q.device)
            scores = q.new_zeros(1, layer.heads, 1, capacity)
            bias = layer.term().bind(q, 1.0)(scores, grid)[0, :, 0].flip(-1).float().contiguous()
            if layer.scores in self.state.biases:
                self.state.biases[layer.scores].copy_(bias)
            else:
                self.state.biases[layer.scores] = bias
            return  # all blocks share the term

    def _capture(self, model: GPT | Transformer) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(model)  # compiles the kernels and allocates what they share
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.run(model)
        self.graph = graph


Step = tuple[Any, ...]  # the row of each record, as lists


def launch_steps(loop: StepLoop, model: GPT | Transformer, first: int, number: int) -> Callable[[], Iterator[Step]]:
    """Start `number` decoding steps and an asynchronous copy of their results to the host.

    Returns a function that waits for the copy and iterates over the results of the steps. The result of a step is its
    row of each tensor in `loop.choice.records`, as lists: for example the chosen tokens and their log-probabilities.

    first  index of the first of these steps
    """
    for _ in range(number):
        loop.run(model)
    held = [record[first : first + number] for record in loop.choice.records]
    arrived = None
    if held[0].device.type == "cuda":
        held = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in held]
        arrived = torch.cuda.Event()
        arrived.record()

    def wait() -> Iterator[Step]:
        if arrived is not None:
            arrived.synchronize()
        return zip(*(x.tolist() for x in held), strict=True)

    return wait


def look_ahead(loop: StepLoop, model: GPT | Transformer, steps: int) -> Iterator[Step]:
    """Yield the results of each decoding step (see `launch_steps`), while the GPU already runs later steps.

    The caller stops iterating when all texts have ended; the results of later steps are discarded.

    steps  maximum number of decoding steps
    """
    first, number = 0, 1
    flying: list[Callable[[], Iterator[Step]]] = []
    while first < steps or flying:
        while first < steps and len(flying) < 2:
            # the last ones are few, because nothing runs while the host reads them
            number = min(number, (steps - first + 1) // 2)
            with torch.no_grad(), on_device(loop.state.tokens.device):
                flying.append(launch_steps(loop, model, first, number))
            first, number = first + number, min(2 * number, STEPS)
        yield from flying.pop(0)()


def read_prompts(
    adapter: GenerationAdapter, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Float[Tensor, "r w"], Caches, DecoderState | None]:
    """Run the model on all prompts in one pass, and return the logits after each prompt and the decoding state.

    Shorter prompts are padded on the right. The causal mask hides the padding from their tokens, and new tokens
    overwrite the padding in the KV caches.

    Returns the logits, the KV caches, and the `DecoderState` of an encoder-decoder (None for a GPT).
    """
    length = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    state: Any = adapter.start(length)
    if isinstance(state, DecoderState):
        return adapter.module.step(tokens, state)[rows, last], state.caches, state
    hidden = adapter.module.hidden(tokens, cache=state)[rows, last]
    return adapter.module.unembed(hidden[:, None])[:, 0], state, None


def draw_uniform(strategy: StepwiseStrategy, rows: int, steps: int) -> Float[Tensor, "n r"]:
    """Return uniform random numbers in [0, 1) for sampling, one for each decoding step and sequence.

    Each sequence has its own random stream. The shape is (steps rows). For strategies other than `Sample`, which need
    no random numbers, it is (0 rows).

    rows   number of sequences
    steps  number of decoding steps
    """
    if not isinstance(strategy, Sample):
        return torch.zeros(0, rows, dtype=torch.float64)
    streams = [np.random.default_rng((strategy.seed, strategy.stream + row)).random(steps) for row in range(rows)]
    return torch.from_numpy(np.stack(streams, 1))


_lock = Lock()
_kept: "weakref.WeakKeyDictionary[nn.Module, OrderedDict[Any, StepLoop]]" = weakref.WeakKeyDictionary()


def take_loop(
    model: Any,
    strategy: Strategy,
    stop: Sequence[tuple[int, ...]],
    prompts: int,
    capacity: int,
    sources: int,
    graph: bool,
) -> StepLoop:
    """Return a `StepLoop` for these arguments: a cached one of an earlier call, or a new one.

    Cached loops that were captured with other parameters or settings of the model are freed.

    stop     the stop sequences
    prompts  number of prompts
    capacity, sources, graph
             as in `StepLoop`
    """
    fixed = _fingerprint(model)
    key = (strategy_key(strategy, stop), prompts, capacity, sources, graph, fixed)
    with _lock:
        loops = _kept.get(model, OrderedDict())
        for other in [each for each in loops if each[-1] != fixed]:
            del loops[other]
        kept = loops.pop(key, None)
        while kept is None and len(loops) >= KEPT:
            loops.popitem(last=False)
    if kept is not None:
        return kept
    # tensors made in inference mode could not be changed outside of it
    with torch.inference_mode(False), torch.no_grad():
        choice = make_device_strategy(strategy, stop, prompts, capacity, next(model.parameters()).device)
        return StepLoop(model, choice, prompts * choice.rows_per_prompt, capacity, sources, graph, key)


def keep_loop(model: Any, loop: StepLoop) -> None:
    """Cache a loop for later calls of `take_loop`.

    At most `KEPT` loops are cached for each model. They are freed with the model.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # steps of a text that was not read to its end may still run
    with _lock:
        loops = _kept.setdefault(model, OrderedDict())
        loops[loop.key] = loop
        while len(loops) > KEPT:
            loops.popitem(last=False)


def release_captured(model: nn.Module) -> None:
    """Free the CUDA graphs and KV caches that generation has cached for a model."""
    with _lock:
        _kept.pop(model, None)


def _fingerprint(model: nn.Module) -> Any:
    """Return a key that identifies all properties of a model on which a captured CUDA graph depends.

    Replacing or moving a parameter changes the key. Changing a weight in place does not, because the graph reads the
    same memory.
    """
    tensors = tuple((x.data_ptr(), x.dtype, x.shape) for x in chain(model.parameters(), model.buffers()))
    settings = tuple(
        (id(module), *((name, value) for name, value in vars(module).items() if _is_setting(name, value)))
        for module in model.modules()
    )
    return tensors, settings


def _is_setting(name: str, value: object) -> bool:
    return name != "training" and (isinstance(value, int | float | str | None) or callable(value))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
