"""Decoding strategies: greedy decoding, and sampling with temperature, top-k and top-p (nucleus).

Each strategy is a frozen dataclass; beam search is in beam_search.py. Of tokens with equal logits, the one with the
lower id comes first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import LARGEST_FLOAT, check_integer, check_number


class Strategy:
    """Base class of decoding strategies: how the next tokens are chosen."""

    name: ClassVar[str]

    def check(self, vocab: int) -> None:
        """Check that no setting asks for more tokens than the vocabulary has, else raise ConfigError."""


class StepwiseStrategy(Strategy, ABC):
    """Base class of strategies that choose one token at a time for each sequence."""

    seed: int = 0
    stream: int = 0

    @abstractmethod
    def choose(self, logits: Float[Tensor, "b w"], uniform: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        """Return the next token of each sequence.

        uniform  one random number in [0, 1) for each sequence, for sampling
        """


@dataclass(frozen=True, slots=True)
class Greedy(StepwiseStrategy):
    """Greedy decoding: always choose the most likely token."""

    name: ClassVar[str] = "greedy"

    def choose(self, logits: Float[Tensor, "b w"], uniform: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        return logits.argmax(-1)  # torch returns the first of equal ones


@dataclass(frozen=True, slots=True)
class KthLargest(StepwiseStrategy):
    """Always choose the k-th most likely token. KthLargest(1) is greedy decoding."""

    name: ClassVar[str] = "kth"
    k: int

    def __post_init__(self) -> None:
        check_integer("k", self.k, 1)

    def check(self, vocab: int) -> None:
        _check_vocab("k", self.k, vocab)

    def choose(self, logits: Float[Tensor, "b w"], uniform: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        return top_tokens(logits, self.k)[:, -1]


@dataclass(frozen=True, slots=True)
class Sample(StepwiseStrategy):
    """Sampling: draw each next token at random, with its probability under the model.

    The random numbers of the prompts in a batch are independent.

    temperature  divides the logits: below 1 likely tokens become more likely, above 1 less
    top_k        draw from the k most likely tokens only. Fan et al. 2018, arXiv:1805.04833
    top_p        nucleus sampling: draw from the fewest most likely tokens whose probabilities sum to top_p or
                 more. Holtzman et al. 2019, arXiv:1904.09751
    stream       index of the random number stream of the first prompt; prompt r uses stream + r
    """

    name: ClassVar[str] = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < check_number("temperature", self.temperature) <= LARGEST_FLOAT:
            raise ConfigError(
                f"temperature divides the logits, so it must be above 0 and finite, not {self.temperature}; "
                "for the most likely token at every step leave it out (greedy decoding)"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, "tokens")
        if self.top_p is not None and not 0.0 < check_number("top_p", self.top_p) <= 1.0:
            raise ConfigError(f"top_p is a probability, above 0 and at most 1, not {self.top_p}")
        check_integer("seed", self.seed, 0)
        check_integer("stream", self.stream, 0)

    def check(self, vocab: int) -> None:
        if self.top_k is not None:
            _check_vocab("top_k", self.top_k, vocab)

    def probabilities(self, logits: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        """Return the distribution that is sampled: softmax(logits / temperature) after top_k and then top_p."""
        tokens, probabilities = self.candidates(logits)
        if tokens is None:
            return probabilities
        return probabilities.new_zeros(logits.shape).scatter(-1, tokens, probabilities)

    def choose(self, logits: Float[Tensor, "b w"], uniform: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        tokens, probabilities = self.candidates(logits)
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1:]
        # the product may round up to the total, which no token would exceed
        target = torch.minimum(uniform.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        index = torch.searchsorted(cumulative, target, right=True)
        return (index if tokens is None else tokens.gather(-1, index))[:, 0]

    def candidates(self, logits: Float[Tensor, "b w"]) -> tuple[Int[Tensor, "b k"] | None, Float[Tensor, "b k"]]:
        """Return the ids of the tokens that can be drawn, in ascending order, and their probabilities.

        None in place of the ids means all tokens.
        """
        tokens = None
        if self.top_k is not None:
            tokens = top_tokens(logits, self.top_k).sort(-1).values
            logits = logits.gather(-1, tokens)
        # in double precision; the largest becomes 0 first, because a tiny temperature would make it infinite
        exact = logits.double()
        probabilities = (exact - exact.amax(-1, keepdim=True)).div_(self.temperature).softmax(-1)
        if self.top_p is not None and self.top_p < 1.0:
            probabilities.mul_(nucleus_mask(logits, probabilities, self.top_p))
        return tokens, probabilities.div_(probabilities.sum(-1, keepdim=True))


def rank_tokens(logits: Float[Tensor, "*b w"]) -> Int[Tensor, "*b w"]:
    """Return the token ids from the most to the least likely."""
    return logits.sort(stable=True, dim=-1, descending=True).indices


def top_tokens(logits: Float[Tensor, "*b w"], k: int) -> Int[Tensor, "*b k"]:
    """Return the k most likely token ids, the most likely first, without sorting all others."""
    if 4 * k >= logits.shape[-1]:
        return rank_tokens(logits)[..., :k]
    if logits.device.type == "cuda":
        return top_tokens_by_keys(logits, k)
    values, tokens = logits.topk(k + 1)
    border = values[..., k - 1 : k]
    if (border == values[..., k:]).any():
        # several tokens equal the k-th, and some of them have to go: those with the highest ids
        above, level = logits > border, logits == border
        room = k - above.sum(-1, keepdim=True)
        tokens = (above | (level & (level.cumsum(-1) <= room))).nonzero()[:, -1].view(*logits.shape[:-1], k)
    else:
        tokens = tokens[..., :k].sort(-1).values
    return tokens.gather(-1, rank_tokens(logits.gather(-1, tokens)))


def top_tokens_by_keys(logits: Float[Tensor, "*b w"], k: int) -> Int[Tensor, "*b k"]:
    """Return the k most likely token ids as `top_tokens` does, with operations that a CUDA graph can capture.

    Which operations run does not depend on the values of the tensor. Each logit and its token id are packed into one
    integer. These integers are all different, so that one top-k operation gives the order of `top_tokens`.
    """
    if logits.dtype == torch.float64:  # it needs all bits of an integer
        return rank_tokens(logits)[..., :k]
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[-1] - 1
    ids = torch.arange(last, -1, -1, device=logits.device)
    return last - ((ordered << 32) | ids).topk(k).values.bitwise_and(0xFFFFFFFF)


def nucleus_mask(
    logits: Float[Tensor, "b w"], probabilities: Float[Tensor, "b w"], top_p: float
) -> Bool[Tensor, "b w"]:
    """Return a boolean mask of the nucleus of top-p sampling.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to at least top_p.
    """
    vocab = logits.shape[-1]
    k = vocab if logits.device.type == "cuda" else 256  # a second round would wait for the GPU
    while True:
        tokens = top_tokens(logits, min(k, vocab))
        mass = probabilities.gather(-1, tokens)
        cumulative = mass.cumsum(-1)
        if k >= vocab or bool((cumulative[:, -1] >= top_p).all()):
            break
        k *= 4
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, tokens, cumulative - mass < top_p)


def _check_vocab(name: str, k: int, vocab: int) -> None:
    if k > vocab:
        raise ConfigError(f"{name} is {k}, but the vocabulary has only {vocab} tokens")
