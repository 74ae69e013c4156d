"""What does attention need for speech in real time?

Claim: A bounded look-ahead. With chunks a row waits for its chunk and the look-ahead, for any number of layers. With a
    sliding window the look-ahead adds up over the layers. Without a bound there is no output before the end. Streamed
    rows equal the rows of one pass over the whole input.
Measures: Stacks of 1, 2, ... blocks fed token by token: how many tokens, including its own, have arrived when a row is
    returned; how far ahead the gradient of a row in one pass reaches; the difference between streamed rows and one pass
    in float64; the size of the caches after short and long inputs.
Finding: At depth {{ n.depths|join_numbers }} the longest wait of a frame, its own included, is {{ n["tokens waited
    for"]["chunks"]|join_numbers }} frames with chunks of {{ n.chunk }}; {{ n["tokens waited for"]["chunks with
    look-ahead"]|join_numbers }} with a look-ahead of {{ n["look-ahead"] }} in the first layer as well; {{ n["tokens
    waited for"]["sliding look-ahead"]|join_numbers }} with a sliding window that looks {{ n["look-ahead"] }} ahead in
    every layer; and all {{ n["tokens waited for"]["everything"]|join_numbers }} of {{ n.length }} without a mask.
    Streamed outputs equal one pass with the same mask up to {{ n.error|at_most }}, and the caches hold {{ n["cache size
    at the end"]|comma }} numbers for any length of the input.
Budget: 20 seconds
Source: 002 1.3e
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.masks import chunks, full, window
from regard.core.masks.algebra import Mask
from regard.lab.drawing import Figure, line_figure
from regard.lab.measure import largest_difference
from regard.lab.settings import check_at_least
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.blocks import Block, BlockStream
from regard.nn.feedforward import FeedForward
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = r"\mathrm{chunks}: C + L, \quad \mathrm{sliding}: 1 + \mathrm{depth} \cdot L"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the Transformer blocks, their masks and the input.

    width       width of the blocks
    heads       number of heads
    chunk       C, the number of tokens per chunk
    look_back   number of earlier chunks that a chunk sees
    look_ahead  L, the number of later tokens that a chunk sees, a multiple of C
    depths      numbers of blocks to compare
    length      number of tokens of the input
    """

    width: int = 24
    heads: int = 3
    chunk: int = 4
    look_back: int = 2
    look_ahead: int = 4
    depths: tuple[int, ...] = (1, 2, 3, 4)
    length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if check_integer("look_ahead", self.look_ahead, 0) % check_integer("chunk", self.chunk, 1):
            raise ConfigError(
                f"look_ahead must be a multiple of chunk: look_ahead={self.look_ahead}, chunk={self.chunk}; try "
                f"look_ahead={self.look_ahead // self.chunk * self.chunk}"
            )
        # the caches must be full after half of the input
        check_at_least(self, length=2 * (self.chunk * (self.look_back + 1) + self.look_ahead))


SMOKE = Setup(width=8, heads=2, depths=(1, 3), length=32)


def run(setup: Setup, layer: Callable[[int, int], AttentionLayer] = AttentionLayer) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    layer  builds the attention of a block: layer(width, heads)
    """
    x = torch.randn(1, setup.length, setup.width, generator=make_generator(setup.seed), dtype=torch.float64)
    waits: dict[str, list[int]] = {}
    reaches: dict[str, list[int]] = {}
    errors: list[float] = []
    for depth in setup.depths:
        blocks = _build_blocks(setup, depth, layer)
        for name, masks in _masks(setup, depth).items():
            given, waited = _stream(blocks, masks, x)
            errors.append(largest_difference(given, _one_pass(blocks, masks, x).detach()))
            waits.setdefault(name, []).append(waited)
            reaches.setdefault(name, []).append(_reach(blocks, masks, x))
    blocks, masks = _build_blocks(setup, setup.depths[-1], layer), _masks(setup, setup.depths[-1])["chunks"]
    return {
        "chunk": setup.chunk,
        "look-ahead": setup.look_ahead,
        "length": setup.length,
        "depths": list(setup.depths),
        "tokens waited for": waits,
        "tokens looked ahead": reaches,
        "error": max(errors),
        "cache size after half": _cache_size(blocks, masks, x[:, : setup.length // 2 // setup.chunk * setup.chunk]),
        "cache size at the end": _cache_size(blocks, masks, x[:, : setup.length // setup.chunk * setup.chunk]),
    }


def _masks(setup: Setup, depth: int) -> dict[str, list[Mask]]:
    """Return the masks to compare: for each named pattern, one mask for each of the `depth` blocks."""
    own = chunks(setup.chunk, before=setup.look_back)
    ahead = chunks(setup.chunk, before=setup.look_back, after=setup.look_ahead // setup.chunk)
    sliding = window(before=setup.look_back * setup.chunk, after=setup.look_ahead)
    return {
        "chunks": [own] * depth,
        "chunks with look-ahead": [ahead, *[own] * (depth - 1)],  # later blocks see no more than the first
        "sliding look-ahead": [sliding] * depth,
        "everything": [full()] * depth,
    }


def _build_blocks(setup: Setup, depth: int, layer: Callable[[int, int], AttentionLayer]) -> list[Block]:
    made = []
    for number in range(depth):
        feedforward = FeedForward(setup.width, 2 * setup.width)
        block = Block(setup.width, layer(setup.width, setup.heads), feedforward).double().eval()
        initial = {"*norm.weight": constant(1.0), "*.weight": fan_in(), "*.bias": normal(0.1)}
        init_parameters(block, initial, 1000 * setup.seed + number)
        made.append(block)
    return made


def _one_pass(blocks: list[Block], masks: list[Mask], x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    for block, mask in zip(blocks, masks, strict=True):
        x = block(x, mask=mask)
    return x


@torch.no_grad()
def _stream(blocks: list[Block], masks: list[Mask], x: Float[Tensor, "b n d"]) -> tuple[Tensor, int]:
    """Stream tokens one by one through Transformer blocks. Return all output rows and the longest wait for a row.

    The wait for row i is the number of tokens fed from token i on until row i comes out, token i included.
    """
    streams = [block.stream(mask) for block, mask in zip(blocks, masks, strict=True)]
    rows, given, longest = [], 0, 0
    for received in range(1, x.shape[1] + 1):
        out = x[:, received - 1 : received]
        for stream in streams:
            out = stream.push(out)
        if out.shape[1]:
            longest = max(longest, received - given)
            given += out.shape[1]
            rows.append(out)
    last = streams[0].finish()
    for stream in streams[1:]:
        last = torch.cat([stream.push(last), stream.finish()], 1)
    # a row released at the end has waited for all later tokens
    return torch.cat([*rows, last], 1), max(longest, x.shape[1] - given)


def _reach(blocks: list[Block], masks: list[Mask], x: Float[Tensor, "b n d"]) -> int:
    """Return the largest number of later tokens that an output row depends on.

    A row depends on a token if its gradient at the token is nonzero. Only the first half of the rows is tested.
    """
    farthest = 0
    for row in range(x.shape[1] // 2):
        start = x.clone().requires_grad_()
        _one_pass(blocks, masks, start)[0, row].square().sum().backward()
        if start.grad is not None:
            felt = start.grad[0].abs().amax(-1).nonzero()[:, 0]
            farthest = max(farthest, int(felt.max()) - row)
    return farthest


@torch.no_grad()
def _cache_size(blocks: list[Block], masks: list[Mask], x: Float[Tensor, "b n d"]) -> int:
    """Stream the tokens x through the blocks and return the number of elements in all their caches."""
    streams: list[BlockStream] = [block.stream(mask) for block, mask in zip(blocks, masks, strict=True)]
    for stream in streams:
        x = stream.push(x)
    return sum(tensor.numel() for stream in streams for tensor in stream.tensors())


def verdict(numbers: Numbers) -> Decision:
    chunk, ahead, depths = (numbers[name] for name in ("chunk", "look-ahead", "depths"))
    waits, reached = numbers["tokens waited for"], numbers["tokens looked ahead"]
    expected = {
        "chunks": [chunk for _ in depths],
        "chunks with look-ahead": [chunk + ahead for _ in depths],
        "sliding look-ahead": [1 + depth * ahead for depth in depths],
        "everything": [numbers["length"] for _ in depths],
    }
    # a returned row has seen all it depends on and has waited for nothing else
    needed = all([wait - 1 for wait in waits[name]] == reached[name] for name in waits if name != "everything")
    bounded = numbers["cache size after half"] == numbers["cache size at the end"]
    return decide(
        waits == expected and needed and bounded and numbers["error"] < 1e-12,
        missing="" if len(set(depths)) > 1 and ahead else "two depths and a look-ahead are needed, which can add up",
    )


def draw(numbers: Numbers) -> Figure:
    bounded = {name: waits for name, waits in numbers["tokens waited for"].items() if name != "everything"}
    labels = {"xlabel": "layers", "ylabel": "tokens a row waits for", "title": "Only a sliding look-ahead adds up"}
    return line_figure(numbers["depths"], bounded, ylim=(0, None), xticks=numbers["depths"], **labels)
