"""A streaming speech encoder for CTC, from spectrogram frames to logits of tokens. Graves et al. 2006.

Two convolutions turn every 4 frames into one row, a time step of the output. Blocks with chunked attention follow (Chen
et al. 2021, arXiv:2010.11395): a row sees its own chunk of rows, `look_back` chunks before it in every block, and
`look_ahead` chunks after it in the first block. Streaming inference computes the same rows as one pass over the whole
input.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import CacheError, ShapeError
from regard.base.validation import check_integer
from regard.core.masks import chunks, padding
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.models.model import Config, Model
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import check_floats, check_integers
from regard.nn.feedforward import FeedForward
from regard.nn.init import Initializers, constant, fan_in, normal
from regard.nn.norms import norm

STEP = 4  # frames per row


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechConfig(Config):
    """Settings of a streaming speech encoder.

    vocab       number of tokens, including token 0, the blank of CTC
    mels        number of mel bands of a frame
    chunk       number of output rows in a chunk; all rows of a chunk see each other. A row is made of 4 frames
    look_back   number of earlier chunks that a row sees, in every block; None is all, and then the memory of a stream
                grows with its length
    look_ahead  number of later chunks that a row sees, in the first block only: over several blocks they would
                add up
    ff_width    width of the hidden layer of the feed-forward network; None is 4 * width
    """

    vocab: int
    mels: int = 80
    width: int = 256
    depth: int = 8
    heads: int = 4
    ff_width: int | None = None
    chunk: int = 16
    look_back: int | None = 4
    look_ahead: int = 0
    eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check(zero=("look_ahead", "look_back"))
        check_heads(self.width, self.heads)
        Rotary().frequencies(self.width // self.heads, torch.device("meta"))  # raises for heads of an odd width

    @property
    def latency(self) -> int:
        """The maximum delay between a frame and the output of the row that contains it, in frames.

        Chunk n is output when the last frame of chunk n + look_ahead has arrived. The first frame of chunk n waits
        longest: for the rest of its chunk and for `look_ahead` chunks of 4 * chunk frames. Depth adds no delay, because
        only the first block looks ahead.
        """
        return STEP * self.chunk * (self.look_ahead + 1) - 1


class CausalConvolution(nn.Module):
    """A causal convolution of width 3 and stride 2, followed by GELU, for streaming.

    Each output is computed from two input rows and the row before them.
    """

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, out, 3, stride=2)

    def forward(self, x: Float[Tensor, "b n d"], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs that can be computed so far, and the state for the next call.

        state  state that the previous call returned: the one or two inputs that later outputs need. None at the start
        """
        x = torch.cat([x.new_zeros(x.shape[0], 1, x.shape[2]) if state is None else state, x], 1)
        ready = (x.shape[1] - 1) // 2
        if not ready:
            return x.new_zeros(x.shape[0], 0, self.convolution.out_channels), x
        return functional.gelu(self.convolution(x.transpose(1, 2)).transpose(1, 2)), x[:, 2 * ready :]


class ConvSubsampling(nn.Module):
    """Two causal convolutions that turn every 4 frames into one row, which also depends on the 3 frames before."""

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.first = CausalConvolution(mels, width)
        self.second = CausalConvolution(width, width)

    def forward(
        self, frames: Float[Tensor, "b n mels"], state: tuple[Tensor, ...] | None = None
    ) -> tuple[Float[Tensor, "b m d"], tuple[Tensor, ...]]:
        """Return the rows that can be computed from the frames so far, and the state for the next call.

        state  the state that the previous call returned; None at the start
        """
        before, between = (None, None) if state is None else state
        half, before = self.first(frames, before)
        rows, between = self.second(half, between)
        return rows, (before, between)


class Speech(Model):
    """A streaming speech encoder. Maps mel frames to CTC logits of tokens, one row for every 4 frames."""

    Config = SpeechConfig
    config: SpeechConfig

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__(config)
        self.front = ConvSubsampling(config.mels, config.width)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.norm = norm("layer", config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocab)
        self.init_weights()

    @property
    def masks(self) -> list[Mask]:
        """The attention mask of each block. Only the first block looks ahead."""
        config = self.config
        ahead = [config.look_ahead, *[0] * (config.depth - 1)]
        return [chunks(config.chunk, before=config.look_back, after=after) for after in ahead]

    def forward(
        self, frames: Float[Tensor, "b n mels"], *, lengths: Int[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b m w"]:
        """Return the logits of tokens: n // 4 rows for n frames.

        lengths  number of real frames of each sequence. Its first lengths // 4 rows are valid, the others are undefined
        """
        check_floats("frames", frames, "b n mels", 2, self.config.mels)
        if frames.shape[1] < STEP:
            raise ShapeError(f"frames has {frames.shape[1]} frames, but a row of logits is made of {STEP}")
        masks = self.masks
        if lengths is not None:
            check_lengths(lengths, frames)
            real = padding(lengths // STEP)
            masks = [mask & real for mask in masks]
        rows, _ = self.front(frames)
        x = functional.dropout(rows, self.config.dropout, self.training)
        for block, mask in zip(self.blocks, masks, strict=True):
            x = run_blocks([block], x, recompute=self.gradient_checkpointing, mask=mask)
        return self.unembed(x)

    def unembed(self, hidden: Float[Tensor, "b m d"]) -> Float[Tensor, "b m w"]:
        """Convert the output of the last block to logits of tokens."""
        return self.head(self.norm(hidden))

    def stream(self, batch: int = 1) -> "SpeechStream":
        """Return a new `SpeechStream`, which computes the logits while frames arrive.

        batch  number of sequences
        """
        return SpeechStream(self, batch)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        return (torch.zeros(batch, 1000 if length is None else length, self.config.mels),)

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        stream = self.stream(batch)
        stream.push(*self.example_inputs(batch, length))
        return stream.nbytes

    def initializers(self) -> Initializers:
        into_residual = normal(0.02 / math.sqrt(2 * self.config.depth))
        return {
            "front.*.weight": fan_in(math.sqrt(2.0)),
            "*norm.weight": constant(1.0),
            "*.bias": constant(0.0),
            "*.out.weight": into_residual,
            "*.down.weight": into_residual,
            "blocks.*.weight": normal(0.02),
            "head.weight": normal(0.02),
        }


class SpeechStream:
    """Streaming inference of a speech encoder, without gradients. Frames come in chunks of any size.

    Only what later rows can see is stored. Positions are relative, so a stream has no maximum length. Rotary
    phases are float32: after 2^17 rows, an hour and a half of 10 ms frames, they are exact to 0.01 radians.
    """

    def __init__(self, model: Speech, batch: int = 1) -> None:
        self.model, self.batch = model, check_integer("batch", batch, 1)
        self.received = 0  # frames
        self.emitted = 0  # rows
        blocks = zip(model.blocks, model.masks, strict=True)
        self._blocks = [cast(Block, block).stream(mask) for block, mask in blocks]
        self._state: tuple[Tensor, ...] | None = None  # of the convolutions
        self._finished = False

    @torch.no_grad()
    def push(self, frames: Float[Tensor, "b n mels"]) -> Float[Tensor, "b r w"]:
        """Read n frames and return the logits of the rows that later frames cannot change. There may be none yet."""
        check_floats("frames", frames, "b n mels", 2, self.model.config.mels)
        if frames.shape[0] != self.batch:
            raise CacheError(f"frames is {tuple(frames.shape)}, but this stream has batch={self.batch}")
        if self._finished:
            raise CacheError("this stream is finished; start another with model.stream()")
        x, self._state = self.model.front(frames, self._state)
        self.received += frames.shape[1]
        for block in self._blocks:
            x = block.push(x)
        return self._emit(x)

    @torch.no_grad()
    def finish(self) -> Float[Tensor, "b r w"]:
        """End the stream and return the logits of the remaining rows.

        If the number of frames is not a multiple of 4, the last 1 to 3 frames are dropped.
        """
        if self._state is None:
            raise CacheError("nothing was pushed into this stream, so there is nothing to finish")
        if self._finished:
            raise CacheError("this stream is finished; start another with model.stream()")
        self._finished = True
        x = self._blocks[0].finish()
        for block in self._blocks[1:]:
            x = torch.cat([block.push(x), block.finish()], 1)
        return self._emit(x)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the stream stores."""
        return (*(self._state or ()), *(tensor for block in self._blocks for tensor in block.tensors()))

    @property
    def nbytes(self) -> int:
        """The size of the stored tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def _emit(self, hidden: Tensor) -> Tensor:
        self.emitted += hidden.shape[1]
        return self.model.unembed(hidden)


def check_lengths(lengths: Tensor, frames: Tensor) -> None:
    """Check that `lengths` has one number of real frames for each sequence of `frames`, else raise an error."""
    check_integers("lengths", lengths, "b", frames.shape[1] + 1, f"frames has {frames.shape[1]} frames")
    if len(lengths) != len(frames):
        raise ShapeError(
            f"lengths is {tuple(lengths.shape)}, but frames has b={len(frames)}: give one for each sequence"
        )


def _block(config: SpeechConfig) -> Block:
    attention = Attention(config.width, config.heads, rotary=Rotary(), dropout=config.attention_dropout)
    feedforward = FeedForward(config.width, config.ff_width)
    return Block(config.width, attention, feedforward, eps=config.eps, dropout=config.dropout)


PRESETS = {
    # blank, 26 letters, space and apostrophe; with frames of 10 ms a chunk is 0.64 s
    "speech-stream": SpeechConfig(vocab=29, depth=12),
}
