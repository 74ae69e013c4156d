"""A recurrent encoder-decoder (LSTM), with or without attention: a baseline for the Transformer.

Long short-term memory: Hochreiter and Schmidhuber 1997. Encoder and decoder: Sutskever et al. 2014, arXiv:1409.3215.
Attention: Luong et al. 2015, arXiv:1508.04025, after Bahdanau et al. 2014, arXiv:1409.0473.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.tracing import is_meta_or_fake
from regard.core.attend import attend
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.models.model import Config, Model
from regard.nn.embeddings import TokenEmbedding
from regard.nn.init import Initializers, constant, normal, uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class RNNConfig(Config):
    """Settings of a recurrent (LSTM) encoder-decoder.

    vocab      number of tokens; source and target share the vocabulary
    attention  "dot": the decoder attends to the source by dot products; None: the decoder gets only the
               encoder's last state
    """

    vocab: int
    width: int = 512
    depth: int = 2
    attention: str | None = "dot"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check()
        if self.attention is not None:
            self.check_choice("attention", ("dot",))


class RNNState(NamedTuple):
    """The hidden state h and cell state c of one LSTM layer."""

    h: Float[Tensor, "b d"]
    c: Float[Tensor, "b d"]


class EncodedSource(NamedTuple):
    """The encoded source sentences, and the current states of the decoder.

    rows     output of the encoder for each source token
    states   current state of each decoder layer
    padding  which source tokens are real; None is all
    """

    rows: Float[Tensor, "b j d"]
    states: tuple[RNNState, ...]
    padding: Mask | None


class LSTM(nn.Module):
    """One LSTM layer. The gates are in torch's order: input, forget, cell, output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.input = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Float[Tensor, "b n d"], state: RNNState) -> tuple[Float[Tensor, "b n d"], RNNState]:
        """Run the LSTM layer: return the output at each time step, and the state after the last one."""
        if torch.compiler.is_compiling() or is_meta_or_fake(x):
            return self.step_by_step(x, state)  # the fused one cannot be compiled, and counters do not see inside it
        weights = [self.input.weight, self.hidden.weight, self.input.bias, torch.zeros_like(self.input.bias)]
        with warnings.catch_warnings():
            # cuDNN copies weights that are not in one piece of memory
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            begin = (state.h[None].contiguous(), state.c[None].contiguous())
            training = torch.is_grad_enabled()  # whether cuDNN saves what the backward pass needs
            rows, h, c = torch.lstm(x, begin, weights, True, 1, 0.0, training, False, True)
        return rows, RNNState(h[0], c[0])

    def step_by_step(self, x: Float[Tensor, "b n d"], state: RNNState) -> tuple[Float[Tensor, "b n d"], RNNState]:
        """Compute the result of `forward` with a Python loop over time steps instead of torch's fused LSTM."""
        h, c = state
        rows = []
        for step in self.input(x).unbind(1):
            enter, forget, cell, leave = (step + self.hidden(h)).chunk(4, -1)
            c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
            h = leave.sigmoid() * c.tanh()
            rows.append(h)
        return torch.stack(rows, 1), RNNState(h, c)


class RNN(Model):
    """A recurrent (LSTM) encoder-decoder. Maps source and target token ids to logits of each next target token."""

    Config = RNNConfig
    config: RNNConfig

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        self.source = TokenEmbedding(config.vocab, config.width)
        self.target = TokenEmbedding(config.vocab, config.width)
        self.encoder = nn.ModuleList(LSTM(config.width) for _ in range(config.depth))
        self.bridge = nn.ModuleList(nn.Linear(config.width, 2 * config.width) for _ in range(config.depth))
        self.decoder = nn.ModuleList(LSTM(config.width) for _ in range(config.depth))
        self.combine = None if config.attention is None else nn.Linear(2 * config.width, config.width)
        self.head = nn.Linear(config.width, config.vocab)
        self.init_weights()

    def forward(
        self, source: Int[Tensor, "b j"], target: Int[Tensor, "b i"], *, source_padding: Mask | None = None
    ) -> Float[Tensor, "b i w"]:
        """Return the logits of the token after each target token.

        source_padding  mask of the padding of the source, which must be on the right: `padding(lengths)`
        """
        logits, _ = self.decode(target, self.encode(source, source_padding=source_padding))
        return logits

    def encode(self, source: Int[Tensor, "b j"], *, source_padding: Mask | None = None) -> EncodedSource:
        """Return the outputs of the encoder, and the initial states of the decoder."""
        last = _last_indices(source, source_padding)
        x = self._dropout(self.source(source, "source"))
        zeros = RNNState(x.new_zeros(x.shape[0], self.config.width), x.new_zeros(x.shape[0], self.config.width))
        states = []
        for layer, bridge in zip(self.encoder, self.bridge, strict=True):
            rows, _ = layer(x, zeros)
            end = rows[:, -1] if last is None else _select_rows(rows, last)
            states.append(RNNState(*bridge(end).tanh().chunk(2, -1)))
            x = self._dropout(rows)
        return EncodedSource(x, tuple(states), source_padding)

    def decode(
        self, target: Int[Tensor, "b i"], encoded: EncodedSource
    ) -> tuple[Float[Tensor, "b i w"], EncodedSource]:
        """Return the logits of the token after each target token, and `encoded` with the new states of the decoder.

        To continue the target, pass the returned `EncodedSource` to the next call.
        """
        x = self._dropout(self.target(target, "target"))
        if x.shape[0] != encoded.rows.shape[0]:
            raise ShapeError(f"target has b={x.shape[0]} sequences, but the source has b={encoded.rows.shape[0]}")
        states = []
        for layer, state in zip(self.decoder, encoded.states, strict=True):
            rows, after = layer(x, state)
            states.append(after)
            x = self._dropout(rows)
        if self.combine is not None:
            source = encoded.rows[:, None]
            context = attend(x[:, None], source, source, mask=encoded.padding, beta=1.0)[:, 0]
            x = self.combine(torch.cat([context, x], -1)).tanh()
        return self.head(x), encoded._replace(states=tuple(states))

    def _dropout(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.dropout, self.training)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        text = torch.zeros(batch, 32 if length is None else length, dtype=torch.long)
        return text, text

    def initializers(self) -> Initializers:
        gates = uniform(1.0 / math.sqrt(self.config.width))
        return {"source.weight": normal(0.1), "target.weight": normal(0.1), "*.bias": constant(0.0), "*": gates}


def _last_indices(source: Tensor, padding: Mask | None) -> Tensor | None:
    """Return the index of the last real token of each sequence, -1 for an empty sequence. None without padding."""
    if padding is None:
        return None
    if not isinstance(padding, PaddingMask) or padding.side != "right":
        raise ConfigError(f"source_padding takes padding(lengths), with padding on the right: {padding!r}")
    if len(padding.data) != len(source):
        raise ShapeError(f"source_padding has {len(padding.data)} lengths, but source has b={len(source)} sequences")
    return padding.data.to(source.device).clamp(max=source.shape[1]) - 1


def _select_rows(rows: Float[Tensor, "b n d"], last: Int[Tensor, "b"]) -> Float[Tensor, "b d"]:
    """Return rows[b, last[b]] for each sequence b, or zeros if last[b] is -1."""
    found = rows.gather(1, last.clamp(min=0)[:, None, None].expand(-1, 1, rows.shape[2]))[:, 0]
    return found * (last >= 0)[:, None]


_WITHOUT_ATTENTION = RNNConfig(vocab=8192, attention=None)

PRESETS = {
    "rnn": _WITHOUT_ATTENTION,
    "rnn-attention": replace(_WITHOUT_ATTENTION, attention="dot"),
}
