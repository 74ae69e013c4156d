"""BERT: a bidirectional encoder of text. Devlin et al. 2018, arXiv:1810.04805.

Its pretraining has two objectives: masked language modelling and next-sentence prediction.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ShapeError
from regard.core.masks.algebra import Mask
from regard.models.model import Config, Model
from regard.models.padding_positions import first_tokens, token_positions
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import LearnedPositions, TokenEmbedding, check_context, check_integers
from regard.nn.feedforward import ACTIVATIONS, FeedForward
from regard.nn.init import Initializers, constant, normal
from regard.nn.norms import norm

HEADS = ("pretraining", "masked", "classes", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class BERTConfig(Config):
    """Settings of BERT, a bidirectional encoder.

    vocab     number of tokens
    context   maximum number of tokens of an input
    width     model width
    depth     number of blocks
    ff_width  width of the hidden layer of the feed-forward network; None is 4 * width
    segments  number of segment (token type) embeddings: one for the first and one for the second sentence
    head      what the model computes logits of. "masked": masked tokens. "pretraining": masked tokens and
              next-sentence prediction. "classes": classes of the whole text. "none": nothing; the outputs are hidden
              states and the pooled vector
    classes   number of classes for head="classes"
    """

    vocab: int = 30522
    context: int = 512
    width: int = 768
    depth: int = 12
    heads: int = 12
    ff_width: int | None = None
    segments: int = 2
    activation: str = "gelu"
    eps: float = 1e-12
    head: str = "pretraining"
    classes: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check()
        self.check_choice("head", HEADS)
        check_heads(self.width, self.heads)

    @property
    def predicts_words(self) -> bool:
        """Whether the head predicts masked tokens (masked language modelling)."""
        return self.head in ("pretraining", "masked")

    @property
    def pools(self) -> bool:
        """Whether the model has a pooler, which computes one vector for the whole text."""
        return self.head != "masked"


class BERTOutput(NamedTuple):
    """The outputs of BERT. Those that the model's head does not compute are None.

    logits       logits of the vocabulary for each token; with head="classes", logits of the classes for each text
    pair_logits  next-sentence prediction: two logits, of "the second sentence follows the first" and of "it does not"
    hidden       hidden states of the last block
    pooled       one vector for the whole text, computed from the first token
    """

    logits: Float[Tensor, "b n w"] | Float[Tensor, "b classes"] | None  # logits of words, or of classes
    pair_logits: Float[Tensor, "b 2"] | None  # next-sentence prediction: follows, does not follow
    hidden: Float[Tensor, "b n d"]  # hidden states of the last block
    pooled: Float[Tensor, "b d"] | None  # pooled from the first token


class BERT(Model):
    """BERT, a bidirectional encoder. Maps the token ids of one or two sentences to a `BERTOutput`.

    >>> model = regard.build("bert-base", depth=1)
    >>> model(torch.tensor([[101, 2054, 102]])).logits.shape
    torch.Size([1, 3, 30522])
    """

    Config = BERTConfig
    config: BERTConfig

    def __init__(self, config: BERTConfig) -> None:
        super().__init__(config)
        width = config.width
        self.tokens = TokenEmbedding(config.vocab, width)
        self.positions = LearnedPositions(config.context, width)
        self.segments = nn.Embedding(config.segments, width)
        self.embedding_norm = norm("layer", width, config.eps)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.words = MaskedLMHead(config) if config.predicts_words else None
        self.pooler = nn.Linear(width, width) if config.pools else None
        self.pair = nn.Linear(width, 2) if config.head == "pretraining" else None
        self.classifier = nn.Linear(width, config.classes) if config.head == "classes" else None
        self.init_weights()

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        segments: Int[Tensor, "b n"] | None = None,
        padding: Mask | None = None,
    ) -> BERTOutput:
        """Return the outputs of the model as a `BERTOutput`.

        segments  0 for tokens of the first sentence, 1 for the second (token_type_ids); None is 0 for all
        padding   mask of the padding: `padding(lengths)` if it is on the right,
                  `padding(lengths, side="left", width=n)` if it is on the left
        """
        hidden = self.hidden(tokens, segments=segments, padding=padding)
        pooled = None if self.pooler is None else self.pooler(first_tokens(hidden, padding)).tanh()
        pair_logits = None if self.pair is None else self.pair(pooled)
        logits = None
        if self.words is not None:
            logits = self.tokens.unembed(self.words(hidden)) + self.words.bias
        elif self.classifier is not None and pooled is not None:
            logits = self.classifier(functional.dropout(pooled, self.config.dropout, self.training))
        return BERTOutput(logits, pair_logits, hidden, pooled)

    def hidden(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        segments: Int[Tensor, "b n"] | None = None,
        padding: Mask | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states of the last block. The arguments are those of `forward`."""
        x = self.tokens(tokens)
        n = tokens.shape[1]
        check_context(n, self.config.context)
        if segments is None:
            x = x + self.segments.weight[0]
        else:
            kinds = self.config.segments
            check_integers("segments", segments, "b n", kinds, f"there are segments 0 to {kinds - 1}")
            if segments.shape != tokens.shape:
                raise ShapeError(f"segments is {tuple(segments.shape)}, but tokens is {tuple(tokens.shape)}")
            x = x + self.segments(segments.long())
        x = self.embedding_norm(x + self.positions(token_positions(padding, 0, n, tokens.device)))
        x = functional.dropout(x, self.config.dropout, self.training)
        return run_blocks(self.blocks, x, recompute=self.gradient_checkpointing, mask=padding)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        return (torch.zeros(batch, self.config.context if length is None else length, dtype=torch.long),)

    def initializers(self) -> Initializers:
        return {
            "*norm.weight": constant(1.0),
            "*.bias": constant(0.0),
            "*norm.bias": constant(0.0),
            "*.weight": normal(0.02, cut=2.0),
        }


class MaskedLMHead(nn.Module):
    """The masked language modelling head (MLM head): a dense layer, an activation and a norm.

    To get logits, the model multiplies the result by the token embeddings and adds `bias`, which has one number for
    each token of the vocabulary.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = norm("layer", config.width, config.eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab))

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return self.norm(self.activation(self.dense(x)))


def _block(config: BERTConfig) -> Block:
    return Block(
        config.width,
        Attention(config.width, config.heads, dropout=config.attention_dropout),
        FeedForward(config.width, config.ff_width, activation=config.activation),
        eps=config.eps,
        order="post",
        dropout=config.dropout,
    )


PRESETS = {
    "bert-base": BERTConfig(),  # 110 M in the paper
    "bert-large": BERTConfig(width=1024, depth=24, heads=16),  # 340 M in the paper; this is 336 M
}
