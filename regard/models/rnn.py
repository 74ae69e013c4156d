"""A recurrent encoder and decoder, what Transformers are compared with: alone, or with attention to the source.

Long short-term memory: Hochreiter and Schmidhuber 1997. Encoder and decoder: Sutskever et al. 2014, arXiv:1409.3215.
Attention: Luong et al. 2015, arXiv:1508.04025, after Bahdanau et al. 2014, arXiv:1409.0473.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from regard.base.errors import ConfigError, ShapeError
from regard.base.tracing import is_meta_or_fake
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.models.model import Config, Model
from regard.nn.embeddings import TokenEmbedding
from regard.nn.init import Initializer, constant, normal, uniform

ATTENTION = ("dot", "general")


@dataclass(frozen=True, kw_only=True, slots=True)
class RNNConfig(Config):
    """Settings of a recurrent encoder and decoder.

    vocab         tokens of the source
    target_vocab  tokens of the target; None is as many
    attention     how a decoder state is compared with the source: "dot", "general" (keys are projected first), or None
                  for a decoder that knows the source by the encoder's last state alone
    """

    vocab: int
    target_vocab: int | None = None
    width: int = 512
    depth: int = 2
    attention: str | None = "dot"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check_types()
        self.check_counts("vocab", "target_vocab", "depth")
        check_integer("width", self.width, 1)
        self.check_shares("dropout")
        if self.attention is not None:
            self.check_choice("attention", ATTENTION)


class RNNState(NamedTuple):
    """What one layer remembers."""

    h: Float[Tensor, "b d"]
    c: Float[Tensor, "b d"]


class Encoded(NamedTuple):
    """The source as the decoder sees it, and where the decoder stands."""

    rows: Float[Tensor, "b j d"]
    states: tuple[RNNState, ...]
    padding: Mask | None


class LSTM(nn.Module):
    """One layer of long short-term memory; gates in the order of torch: input, forget, cell, output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.input = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Float[Tensor, "b n d"], state: RNNState) -> tuple[Float[Tensor, "b n d"], RNNState]:
        """The row after each step, and the state after the last."""
        if torch.compiler.is_compiling() or is_meta_or_fake(x):
            return self.unrolled(x, state)  # the compiler has no form of the fused one, and counters do not see into it
        weights = [self.input.weight, self.hidden.weight, self.input.bias, torch.zeros_like(self.input.bias)]
        with warnings.catch_warnings():
            # cuDNN would have all weights in one piece of memory, and copies them there
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            begin = (state.h[None].contiguous(), state.c[None].contiguous())
            graded = torch.is_grad_enabled()  # cuDNN keeps what a backward pass needs only if told to
            rows, h, c = torch.lstm(x, begin, weights, True, 1, 0.0, graded, False, True)
        return rows, RNNState(h[0], c[0])

    def unrolled(self, x: Float[Tensor, "b n d"], state: RNNState) -> tuple[Float[Tensor, "b n d"], RNNState]:
        """The same step by step."""
        h, c = state
        rows = []
        for step in self.input(x).unbind(1):
            enter, forget, cell, leave = (step + self.hidden(h)).chunk(4, -1)
            c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
            h = leave.sigmoid() * c.tanh()
            rows.append(h)
        return torch.stack(rows, 1), RNNState(h, c)


class RNN(Model):
    """Source and target tokens to logits of each next target token."""

    Config = RNNConfig
    config: RNNConfig

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        targets = config.vocab if config.target_vocab is None else config.target_vocab
        self.source = TokenEmbedding(config.vocab, config.width)
        self.target = TokenEmbedding(targets, config.width)
        self.encoder = nn.ModuleList(LSTM(config.width) for _ in range(config.depth))
        self.bridge = nn.ModuleList(nn.Linear(config.width, 2 * config.width) for _ in range(config.depth))
        self.decoder = nn.ModuleList(LSTM(config.width) for _ in range(config.depth))
        self.key = nn.Linear(config.width, config.width, bias=False) if config.attention == "general" else None
        self.combine = None if config.attention is None else nn.Linear(2 * config.width, config.width)
        self.head = nn.Linear(config.width, targets)
        self.initialise()

    def forward(
        self, source: Int[Tensor, "b j"], target: Int[Tensor, "b i"], *, source_padding: Mask | None = None
    ) -> Float[Tensor, "b i w"]:
        """Logits of the token after each one of the target.

        source_padding  which tokens of the source are real: `padding(lengths)`
        """
        logits, _ = self.decode(target, self.encode(source, source_padding=source_padding))
        return logits

    def encode(self, source: Int[Tensor, "b j"], *, source_padding: Mask | None = None) -> Encoded:
        """The source, read from first to last, and the states that the decoder begins with."""
        last = _last_rows(source, source_padding)
        x = self._dropped(self.source(source, "source"))
        nothing = RNNState(x.new_zeros(x.shape[0], self.config.width), x.new_zeros(x.shape[0], self.config.width))
        states = []
        for layer, bridge in zip(self.encoder, self.bridge, strict=True):
            rows, _ = self._through(layer, x, nothing)
            end = rows[:, -1] if last is None else _at(rows, last)
            states.append(RNNState(*bridge(end).tanh().chunk(2, -1)))
            x = self._dropped(rows)
        return Encoded(x, tuple(states), source_padding)

    def decode(self, target: Int[Tensor, "b i"], encoded: Encoded) -> tuple[Float[Tensor, "b i w"], Encoded]:
        """Logits of the token after each one of the target, and what the next tokens go on from."""
        x = self._dropped(self.target(target, "target"))
        if x.shape[0] != encoded.rows.shape[0]:
            raise ShapeError(f"target has b={x.shape[0]} sequences, but the source has b={encoded.rows.shape[0]}")
        states = []
        for layer, state in zip(self.decoder, encoded.states, strict=True):
            rows, after = self._through(layer, x, state)
            states.append(after)
            x = self._dropped(rows)
        if self.combine is not None:
            x = self.combine(torch.cat([self._looked_up(x, encoded), x], -1)).tanh()
        return self.head(x), encoded._replace(states=tuple(states))

    def _looked_up(self, x: Float[Tensor, "b i d"], encoded: Encoded) -> Float[Tensor, "b i d"]:
        """The mean of the source rows, weighted by how well each decoder state fits them."""
        rows = encoded.rows
        keys = rows if self.key is None else self.key(rows)
        return attend(x[:, None], keys[:, None], rows[:, None], mask=encoded.padding, beta=1.0)[:, 0]

    def _through(self, layer: nn.Module, x: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, x, state, use_reentrant=False)
        return layer(x, state)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.dropout, self.training)

    def example(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        text = torch.zeros(batch, 32 if length is None else length, dtype=torch.long)
        return text, text

    def initial(self) -> Mapping[str, Initializer]:
        gates = uniform(1.0 / math.sqrt(self.config.width))
        return {
            "source.weight": normal(0.1),
            "target.weight": normal(0.1),
            "*.bias": constant(0.0),
            "*": gates,
        }


def _last_rows(source: Tensor, padding: Mask | None) -> Tensor | None:
    """The number of each sequence's last real token, -1 where there is none; None where all are full."""
    if padding is None:
        return None
    if not isinstance(padding, PaddingMask) or padding.side != "right":
        raise ConfigError(f"source_padding takes padding(lengths), with sequences filled up at their ends: {padding!r}")
    if len(padding.data) != len(source):
        raise ShapeError(f"source_padding has {len(padding.data)} lengths, but source has b={len(source)} sequences")
    return padding.data.to(source.device).clamp(max=source.shape[1]) - 1


def _at(rows: Float[Tensor, "b n d"], last: Int[Tensor, "b"]) -> Float[Tensor, "b d"]:
    """One row of each sequence, zeros for number -1."""
    found = rows.gather(1, last.clamp(min=0)[:, None, None].expand(-1, 1, rows.shape[2]))[:, 0]
    return found * (last >= 0)[:, None]


_ALONE = RNNConfig(vocab=8192, attention=None)

PRESETS = {
    "rnn": _ALONE,
    "rnn-attention": replace(_ALONE, attention="dot"),
}
