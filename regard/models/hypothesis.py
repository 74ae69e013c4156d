"""`Hypothesis`, a sequence during generation, and `GeneratedToken`, one of its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "context"]


class GeneratedToken(NamedTuple):
    """One new token of a generated text, as `stream_tokens` yields it.

    prompt_index     index of the prompt that the text continues
    log_probability  log-probability under the model, before temperature, top_k or top_p
    finish_reason    why the text ended, on its last token; None on the others
    """

    prompt_index: int
    token: int
    log_probability: float  # log-probability under the model, before temperature, top_k or top_p
    finish_reason: FinishReason | None  # set on the last token of a text


@dataclass(slots=True)
class Hypothesis:
    """A sequence during generation, such as one of the beams of beam search."""

    prompt_index: int
    tokens: list[int]  # the prompt and the new tokens
    log_probabilities: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """The number of new tokens."""
        return len(self.log_probabilities)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.tokens) - self.length :]

    @property
    def log_probability(self) -> float:
        """The log-probability of all new tokens together."""
        return sum(self.log_probabilities)

    def generated(self) -> Iterator[GeneratedToken]:
        """Yield the new tokens as `GeneratedToken`s. The last one has the finish_reason."""
        reasons = [None] * (self.length - 1) + [self.finish_reason]
        for each in zip(self.new_tokens, self.log_probabilities, reasons, strict=True):
            yield GeneratedToken(self.prompt_index, *each)

    def with_token(self, token: int, log_probability: float) -> "Hypothesis":
        """Return a copy of this hypothesis with one more token and the log-probability of that token."""
        return Hypothesis(self.prompt_index, [*self.tokens, token], [*self.log_probabilities, log_probability])
