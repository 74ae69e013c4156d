"""The keywords and the results of text generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from regard.models.hypothesis import FinishReason
from regard.models.sampling import Strategy

TokenIds = Sequence[int] | Tensor
Prompts = Sequence[TokenIds] | Tensor


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, where they are documented."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    num_beams: int
    length_penalty: float | None
    early_stopping: bool | str | None
    seed: int | None
    strategy: Strategy | str | None
    stop: Sequence[int | TokenIds]
    use_cache: bool
    capture: bool | None


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The continuation of one prompt.

    tokens             the new tokens, including the stop sequence if one ended the text
    log_probabilities  log-probability of each new token by the model, before temperature, top_k or top_p
    finish_reason      "stop": a stop sequence was generated; "length": max_new_tokens was reached; "context": the
                       model's context is full
    stop               the stop sequence that ended the text, empty if there was none
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    finish_reason: FinishReason
    stop: tuple[int, ...] = ()

    @property
    def body(self) -> tuple[int, ...]:
        """The new tokens without the stop sequence."""
        return self.tokens[: len(self.tokens) - len(self.stop)]

    @property
    def log_probability(self) -> float:
        """The log-probability of all new tokens together."""
        return sum(self.log_probabilities)
